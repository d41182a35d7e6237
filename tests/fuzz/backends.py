"""Random programs through a backend's own launch: metal in three orders of threads, nvidia in Triton's interpreter or
on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from monotile import ir
from monotile.backends.base import Backend
from monotile.launch.signature import read_scalar

from .arguments import Program
from .harness import TARGETS, Array, compiled

Runner = Callable[[Program, list[Array]], None]


def runners(names: list[str]) -> dict[str, Runner]:
    """Return what runs a program, by the name that a finding is reported with."""
    found: dict[str, Runner] = {}
    if "cpu" in names:
        found |= {f"cpu {each.name}": partial(_on_cpu, each) for each in TARGETS}
    if "metal" in names:
        from monotile import metal

        compiled_once = _Metal()
        found |= {f"metal {order}": partial(compiled_once.run, order) for order in metal.ORDERS}
    if "nvidia" in names:
        from monotile.backends.nvidia.backend import BACKEND

        found["nvidia in Triton's interpreter"] = partial(_in_interpreter, BACKEND)
    if "gpu" in names:
        found["nvidia on a GPU"] = _on_gpu
    return found


def _on_cpu(each: Any, program: Program, bases: list[Array]) -> None:
    compiled(program, each, bases)


class _Metal:
    """The metal backend: a program is compiled once and run in several orders."""

    def __init__(self) -> None:
        self.program: Program | None = None
        self.made: Any = None

    def run(self, order: str, program: Program, bases: list[Array]) -> None:
        from monotile.backends.metal.backend import MetalBackend

        if self.program is not program:
            self.program, self.made = None, MetalBackend().compile(ir.copy(program.kernel))
            self.program = program
        self.made.order = order
        self.made.launchers.clear()
        _launched(self.made, program, bases)


def _in_interpreter(backend: Backend, program: Program, bases: list[Array]) -> None:
    _launched(backend.compile(ir.copy(program.kernel)), program, bases)


def _launched(made: Any, program: Program, bases: list[Array]) -> None:
    views = [argument.view(base) for argument, base in zip(program.arguments, bases, strict=True)]
    _launch(made, program, views, [view.ctypes.data for view in views], "cpu")


def _on_gpu(program: Program, bases: list[Array]) -> None:
    """Copy the arrays to a GPU with all that is around them, launch, and copy them back."""
    import torch

    from monotile.backends.nvidia.backend import BACKEND

    there = [torch.from_numpy(base.view("uint8")).cuda() for base in bases]
    views = [argument.view(base) for argument, base in zip(program.arguments, bases, strict=True)]
    offsets = [view.ctypes.data - base.ctypes.data for view, base in zip(views, bases, strict=True)]
    addresses = [copy.data_ptr() + offset for copy, offset in zip(there, offsets, strict=True)]
    _launch(BACKEND.compile(ir.copy(program.kernel)), program, views, addresses, "cuda")
    for base, copy in zip(bases, there, strict=True):
        base.view("uint8")[:] = copy.cpu().numpy()


def _launch(made: Any, program: Program, views: list[Array], addresses: list[int], device: str) -> None:
    words: list[int] = []
    for view in views:
        words += [0, *view.shape, *(s // view.itemsize for s in view.strides)]
    bound = made.bind(words + [0] * len(program.scalars), device)
    typed = zip(program.kernel.scalars, program.scalars, strict=True)
    scalars = [read_scalar(name, value, dtype) for (name, dtype), value in typed]
    made.launch(bound, views, addresses, scalars, None)
