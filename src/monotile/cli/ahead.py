"""`monotile compile`: compile calls of the library for NVIDIA GPUs that need not be here, and show what they need."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rich.console import Console

from .. import dtypes
from ..backends.nvidia import build
from ..backends.nvidia.backend import BACKEND
from ..backends.nvidia.device import DESCRIBED, gpu
from ..backends.nvidia.schedule import count
from ..bench.suite import matches
from ..errors import MonotileError
from ..library import dry_run
from ..library.inputs import AttentionOptions
from ..runtime.tensors import View, dense
from .request import BadRequest

HEAD_SIZES = (1, 16, 17, 33, 64, 72, 80, 96, 112, 128, 160, 192, 256, 320, 512, 576)
DTYPES = ("bfloat16", "float16", "float32")
LENGTHS = {
    "decode": (8, 1, 1, 1000),
    "few queries": (8, 2, 17, 1000),
    "prefill": (16, 8, 4096, 4096),
}  # Hq, Hkv, Nq, Nk


def _alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + 0.1 * (kv_idx - q_idx)


def _even(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx - q_idx) % 2 == 0


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window, softcap": {"causal": True, "window": (100, 3), "softcap": 20.0},
    "bool mask": {"mask": "bool"},
    "bool mask, window, sinks, lse": {"mask": "bool", "window": (100, 3), "sinks": True, "return_lse": True},
    "additive mask, upper left": {"mask": "float32", "causal": "upper_left"},
    "score_mod, mask_mod": {"score_mod": _alibi, "mask_mod": _even},
}


class AheadCall(NamedTuple):
    """A call of attention to compile for a GPU."""

    device: str
    dtype: str
    D: int
    lengths: str
    options: str

    def __str__(self) -> str:
        return f"{self.device} {self.dtype} D {self.D} {self.lengths}, {self.options}"


class AheadKernel(NamedTuple):
    """One kernel of a call: how it runs, and what it needs of the GPU; or why it does not compile."""

    call: AheadCall
    kernel: str
    how: str = ""
    shared: int = 0
    registers: int = 0
    spilled: int = 0
    problem: str = ""


def calls(devices: Sequence[str], only: str = "", sample: int = 0, seed: int = 0) -> list[AheadCall]:
    """The calls of the matrix whose names have words that begin as those of `only`; a random `sample` of them."""
    found = [AheadCall(*words) for words in itertools.product(devices, DTYPES, HEAD_SIZES, LENGTHS, OPTIONS)]
    found = [call for call in found if matches(str(call), only)]
    return random.Random(seed).sample(found, sample) if 0 < sample < len(found) else found


def launches(call: AheadCall) -> list[dry_run.DryLaunch]:
    """What the call launches on its GPU."""
    Hq, Hkv, Nq, Nk = LENGTHS[call.lengths]
    options = dict(OPTIONS[call.options])

    def view(dtype: str, *shape: int) -> View:
        return View(dtypes.BY_NAME[dtype], shape, dense(shape), call.device)

    shapes = {"q": (2, Hq, Nq, call.D), "k": (2, Hkv, Nk, call.D), "v": (2, Hkv, Nk, call.D)}
    views = {name: view(call.dtype, *shape) for name, shape in shapes.items()}
    mask = options.pop("mask", None)
    views |= {"mask": view(mask, 1, Hq, Nq, Nk)} if mask else {}
    views |= {"sinks": view("float32", Hq)} if options.pop("sinks", False) else {}
    usual = AttentionOptions(False, None, None, None, None, False, False, False, "nvidia", None)
    return dry_run.launches("attention", views, usual._replace(**options))


def compiled(call: AheadCall) -> list[AheadKernel]:
    """Compile the kernels of a call; a Gluon module, and the plain one that unaligned tensors get."""
    found, capability = [], build.capability(call.device)
    for kernel, form, choice in launches(call):
        try:
            lowered, path = BACKEND._select(form, choice.schedule, call.device)
            every = [path] if path.pipeline is None else [path, BACKEND._select(form, None, call.device)[1]]
            for one in every:
                made, fitting = build.compile_fitting(lowered, one, capability)
                used = build.resources(made)
                blocks = " x ".join(str(choice.blocks[name]) for name in ("BR", "BK") if name in choice.blocks)
                how = f"{one.name} {blocks}, {count(made.metadata.num_warps, 'warp')}, "
                how += count(fitting.schedule.num_stages, "stage")
                found.append(AheadKernel(call, kernel.name, how, made.metadata.shared, used["REG"], used["STACK"]))
        except MonotileError as error:
            found.append(AheadKernel(call, kernel.name, problem=f"{type(error).__name__}: {error}"))
    return found


def _compile_all(wanted: list[AheadCall], processes: int) -> Iterator[list[AheadKernel]]:
    if processes == 1:
        yield from map(compiled, wanted)
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(compiled, wanted)


def run(
    console: Console, devices: Sequence[str], *, only: str = "", sample: int = 0, seed: int = 0, processes: int = 1
) -> bool:
    """Show a line for each kernel and a summary for each GPU; return True if all compile."""
    for device in devices:
        if device not in DESCRIBED:
            raise BadRequest(f"there is no described GPU {device!r}; known are {', '.join(DESCRIBED)}")
    wanted = calls(devices, only, sample, seed)
    if not wanted:
        raise BadRequest(f"no call has words that begin as those of {only!r}; names are like: {calls(devices)[0]}")
    found: list[AheadKernel] = []
    for kernels in _compile_all(wanted, processes):
        found += kernels
        for one in kernels:
            needs = f"{one.shared} bytes shared, {one.registers} registers, {one.spilled} bytes spilled"
            text = f"{one.call}: {one.kernel} {one.problem or f'{one.how}: {needs}'}"
            console.print(text, style="red" if one.problem else "", markup=False, highlight=False, soft_wrap=True)
    for device in devices:
        mine = [one for one in found if one.call.device == device]
        if mine:
            failed, most = sum(bool(one.problem) for one in mine), max(one.shared for one in mine)
            text = f"{device}: {len(mine) - failed} of {len(mine)} kernels of {len({one.call for one in mine})} calls "
            text += f"compile; at most {most} of {gpu(device).shared_bytes} bytes of shared memory, "
            text += f"{max(one.spilled for one in mine)} bytes spilled"
            console.print(text, highlight=False, soft_wrap=True)
    return not any(one.problem for one in found)
