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
        from monotile.backends.metal.backend import MetalBackend

        found |= {f"metal {order}": partial(_launched, MetalBackend(order=order)) for order in metal.ORDERS}
    if "nvidia" in names:
        from monotile.backends.nvidia.backend import BACKEND

        found["nvidia in Triton's interpreter"] = partial(_launched, BACKEND)
    if "gpu" in names:
        found["nvidia on a GPU"] = _on_gpu
    return found


def _on_cpu(each: Any, program: Program, bases: list[Array]) -> None:
    compiled(program, each, bases)


def _launched(backend: Backend, program: Program, bases: list[Array]) -> None:
    views = [argument.view(base) for argument, base in zip(program.arguments, bases, strict=True)]
    _launch(backend, program, views, [view.ctypes.data for view in views], "cpu")


def _on_gpu(program: Program, bases: list[Array]) -> None:
    """Copy the arrays to a GPU with all that is around them, launch, and copy them back."""
    import torch

    from monotile.backends.nvidia.backend import BACKEND

    there = [torch.from_numpy(base.view("uint8")).cuda() for base in bases]
    views = [argument.view(base) for argument, base in zip(program.arguments, bases, strict=True)]
    offsets = [view.ctypes.data - base.ctypes.data for view, base in zip(views, bases, strict=True)]
    addresses = [copy.data_ptr() + offset for copy, offset in zip(there, offsets, strict=True)]
    _launch(BACKEND, program, views, addresses, "cuda")
    for base, copy in zip(bases, there, strict=True):
        base.view("uint8")[:] = copy.cpu().numpy()


def _launch(backend: Backend, program: Program, views: list[Array], addresses: list[int], device: str) -> None:
    made = backend.compile(ir.copy(program.kernel))
    words: list[int] = []
    for view in views:
        words += [0, *view.shape, *(s // view.itemsize for s in view.strides)]
    bound = made.bind(words + [0] * len(program.scalars), device)
    typed = zip(program.kernel.scalars, program.scalars, strict=True)
    scalars = [read_scalar(name, value, dtype) for (name, dtype), value in typed]
    made.launch(bound, views, addresses, scalars, None)
