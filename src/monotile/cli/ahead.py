"""`monotile compile`: compile calls of the library for NVIDIA GPUs that need not be here, and show what they need."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from .. import dtypes
from ..backends.nvidia import build
from ..backends.nvidia.backend import BACKEND
from ..backends.nvidia.device import DESCRIBED, gpu
from ..backends.nvidia.schedule import count
from ..bench.suite import matches
from ..errors import MonotileError
from ..library import dry_run
from ..library.backward import BackwardOptions
from ..library.inputs import AttentionOptions
from ..library.quantized import quantize
from ..library.quantized_ops import QuantizedOptions
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


UNMASKED = tuple(name for name in OPTIONS if "mask," not in name and name != "bool mask")
FORMATS = ("int8", "fp8_e4m3", "int4", "aura4")
PAGES = {"paged 16": 16, "paged 64": 64, "paged rows": 16}  # rows: of all sequences, one after the other
# Work: how many queries and keys it has, and which options.
WORKS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "attention": (tuple(LENGTHS), tuple(OPTIONS)),
    "other Dv": (tuple(LENGTHS), ("plain", "causal", "bool mask")),
    "MLA": (tuple(LENGTHS), ("plain", "causal", "bool mask")),
    "gradients": (("few queries", "prefill"), tuple(OPTIONS)),
    "varlen": (tuple(LENGTHS), UNMASKED),
    "varlen gradients": (("prefill",), UNMASKED),
    **dict.fromkeys(PAGES, (tuple(LENGTHS), UNMASKED)),
    **dict.fromkeys(FORMATS, (("decode", "prefill"), ("plain", "causal", "bool mask"))),
}


class AheadCall(NamedTuple):
    """A call of the library to compile for a GPU."""

    device: str
    dtype: str
    D: int
    lengths: str
    options: str
    work: str = "attention"

    def __str__(self) -> str:
        return f"{self.device} {self.work} {self.dtype} D {self.D} {self.lengths}, {self.options}"

    @property
    def Dv(self) -> int:
        """The columns of v: half of those of k, or its first ones, 512 of 576 in MLA."""
        return {"other Dv": (self.D + 1) // 2, "MLA": (8 * self.D + 8) // 9}.get(self.work, self.D)


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
    found = []
    for work, (lengths, options) in WORKS.items():
        sizes = [D for D in HEAD_SIZES if work not in FORMATS or D % 16 == 0]  # codes of a row fill whole words
        found += [AheadCall(*words, work) for words in itertools.product(devices, DTYPES, sizes, lengths, options)]
    found = [call for call in found if matches(str(call), only)]
    return random.Random(seed).sample(found, sample) if 0 < sample < len(found) else found


def launches(call: AheadCall) -> list[dry_run.DryLaunch]:
    """What the call launches on its GPU."""
    options, ragged = dict(OPTIONS[call.options]), call.work.startswith("varlen")
    views = _arrays(call)
    mask, lse = options.pop("mask", None), options.pop("return_lse", False)
    Hq, _, Nq, Nk = LENGTHS[call.lengths]
    views |= {"mask": _view(call, mask, 1, Hq, Nq, Nk)} if mask else {}
    views |= {"sinks": _view(call, "float32", Hq)} if options.pop("sinks", False) else {}
    scoring = {name: options.get(name) for name in ("window", "softcap", "score_mod", "mask_mod")}
    usual = {"causal": False, **options, **scoring, "negative": False, "backend": "nvidia", "threads": None}
    if call.work.endswith("gradients"):
        function = "attention_varlen_backward" if ragged else "attention_backward"
        return dry_run.launches(function, views | _gradients(call, views), BackwardOptions(mask_grad=False, **usual))
    if call.work in FORMATS:
        fields, codec = _quantised(call)
        return dry_run.launches(
            "attention", views | fields, QuantizedOptions(return_lse=lse, codecs=(codec, codec), **usual)
        )
    function = "attention_paged" if call.work in PAGES else "attention_varlen" if ragged else "attention"
    return dry_run.launches(
        function, views, AttentionOptions(values_in_keys=call.work == "MLA", return_lse=lse, **usual)
    )


def _view(call: AheadCall, dtype: str, *shape: int) -> View:
    return View(dtypes.BY_NAME[dtype], shape, dense(shape), call.device)


def _arrays(call: AheadCall) -> dict[str, View]:
    """The arrays of a call, two sequences of them: dense, one after the other, or in pages."""
    Hq, Hkv, Nq, Nk = LENGTHS[call.lengths]
    columns = {"q": (Hq, Nq, call.D), "k": (Hkv, Nk, call.D), "v": (Hkv, Nk, call.Dv)}
    if call.work.startswith("varlen"):
        found = {name: _view(call, call.dtype, 2 * N, H, size) for name, (H, N, size) in columns.items()}
        return found | {name: _view(call, "int32", 3) for name in ("q_offsets", "k_offsets")}
    found = {name: _view(call, call.dtype, 2, *shape) for name, shape in columns.items()}
    if call.work in PAGES:
        page, count = PAGES[call.work], -(-Nk // PAGES[call.work])
        pages = _view(call, call.dtype, 2 * count, page, Hkv, call.D)
        table = {"page_table": _view(call, "int32", 2, count), "lengths": _view(call, "int32", 2)}
        if call.work == "paged rows":
            table["q_offsets"] = _view(call, "int32", 3)
            found["q"] = _view(call, call.dtype, 2 * Nq, Hq, call.D)
        return {"q": found["q"], "k_pages": pages, "v_pages": pages, **table}
    if call.work == "MLA":  # a view of the keys
        found["v"] = found["v"]._replace(strides=found["k"].strides)
    return found


def _gradients(call: AheadCall, arrays: dict[str, View]) -> dict[str, View]:
    """The output, its logsumexp and its gradient."""
    shape = arrays["q"].shape
    out = _view(call, call.dtype, *shape[:-1], call.Dv)
    rows = shape[:-1] if len(shape) == 4 else (shape[1], shape[0])
    return {"do": out, "o": out, "lse": _view(call, "float32", *rows)}


def _quantised(call: AheadCall) -> tuple[dict[str, View], Any]:
    """Codes and scales in place of keys and values, the rotations of aura, and the codec."""
    _, Hkv, _, Nk = LENGTHS[call.lengths]
    row = quantize(np.ones((1, call.D), np.float32), call.work)
    found = {}
    for name in "kv":
        found[name] = _view(call, row.codes.dtype.name, 2, Hkv, Nk, row.codes.shape[1])
        found[f"{name}_scales"] = _view(call, "float32", 2, Hkv, Nk, row.scales.shape[1])
        if row.codec.kind == "aura":
            found[f"{name}_rotation"] = _view(call, "float32", call.D, call.D)
    return found, row.codec


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
