"""What users call: attention and its parts. Checks and views here, all arithmetic in kernels/."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from . import arrays, schedule
from .arrays import Library
from .dtypes import DType, float32, uint8
from .errors import MixedDTypes
from .inputs import Call, check_count, check_parts, options_of, read_call, read_dtype, read_mask, stack_parts
from .kernels.attention import attention as attention_kernel
from .kernels.decode import decode as decode_kernel
from .kernels.mask_blocks import mask_blocks as mask_blocks_kernel
from .kernels.merge import merge as merge_kernel
from .kernels.merge import merge_lse as merge_lse_kernel
from .schedule import recommended_splits as recommended_splits

Array = Any
Window = tuple[int | None, int | None] | None
MERGE_BLOCK = 64


class Partials(NamedTuple):
    """Softmax states of S splits of the keys: o (B, Hq, Nq, S, Dv) unnormalised, m and l (B, Hq, Nq, S), float32."""

    o: Array
    m: Array
    l: Array


def attention(
    q: Array, k: Array, v: Array, *, causal: bool | str = False, scale: float | None = None, mask: Array | None = None,
    window: Window = None, softcap: float | None = None, sinks: Array | None = None,
    score_mod: Callable[..., Any] | None = None, mask_mod: Callable[..., Any] | None = None, return_lse: bool = False,
    backend: str | None = None, threads: int | None = None,
) -> Any:  # fmt: skip
    """softmax(q k^T * scale) v, for q (B, Hq, Nq, D), k (B, Hkv, Nk, D), v (B, Hkv, Nk, Dv). docs/attention.md says
    all."""
    options = options_of(causal, window, softcap, score_mod, mask_mod)
    call = read_call(q, k, v, scale, mask, sinks)
    enough = schedule.enough_threads(call.flops, call.bytes) if threads is None else threads
    run = {"backend": backend, "threads": enough}
    B, Hq, Nq, _ = call.out_shape
    if 0 in call.out_shape:
        out, lse = call.new(call.out_shape), call.new(call.out_shape[:3], float32)
    elif Nq <= schedule.FEW_ROWS:
        parts = _partials(call, options, recommended_splits(call.keys, Nq, "cpu"), schedule.KEYS_PER_SPLIT, run)
        per_row = None
        if call.sinks is not None:
            per_row = call.lib.contiguous(call.lib.broadcast(call.sinks[None, :, None], (B, Hq, Nq))).reshape(
                B * Hq * Nq
            )
        out, lse = _merge(call.lib, parts, per_row, call.dtype, {"backend": backend, "threads": threads})
    else:
        out, lse = _forward(call, options, return_lse, run)
    return (call.finish(out), call.finish(lse)) if return_lse else call.finish(out)


def _forward(call: Call, options: Any, return_lse: bool, run: dict[str, Any]) -> tuple[Array, Array]:
    out = call.new(call.out_shape)
    lse = call.new(call.out_shape[:3], float32) if return_lse else None
    machine = _machine(call.q, run["backend"])
    size = max(call.q.shape[3], call.v.shape[3])
    BQ, BK = schedule.attention_blocks(call.out_shape[2], size, call.dtype.bytes, machine)
    mask, kinds = call.broadcast_mask(), None
    if mask is not None and call.mask is not None and call.keys > 0:
        kinds = _kinds(call.lib, call.mask, BQ, BK, run)
        blocks = tuple(-(-n // b) for n, b in zip(mask.shape[2:], (BQ, BK), strict=True))
        kinds = call.lib.broadcast(kinds, (*mask.shape[:2], *blocks))
    blocks_ = {"options": options, "BQ": BQ, "BK": BK}
    attention_kernel(call.q, call.k, call.v, mask, kinds, call.sinks, out, lse, call.scale, **blocks_, **run)
    return out, lse


def _machine(array: Array, backend: str | None) -> str:
    """For what kind of machine block sizes are chosen: "cpu", "metal" or "gpu"."""
    if backend == "metal":
        return "metal"
    at_home = str(getattr(array, "device", "cpu")).startswith("cpu")
    return "cpu" if at_home and backend in (None, "cpu", "interpreter") else "gpu"


# ---- split decode ----------------------------------------------------------------------------------------------------


def decode_partials(
    q: Array, k: Array, v: Array, *, splits: int | None = None, causal: bool | str = False, scale: float | None = None,
    mask: Array | None = None, window: Window = None, softcap: float | None = None,
    score_mod: Callable[..., Any] | None = None, mask_mod: Callable[..., Any] | None = None,
    backend: str | None = None, threads: int | None = None,
) -> Partials:  # fmt: skip
    """The softmax state of each of `splits` runs of keys; `merge` makes attention of them. docs/decode_partials.md."""
    options = options_of(causal, window, softcap, score_mod, mask_mod)
    call = read_call(q, k, v, scale, mask, None)
    per = schedule.KEYS_PER_SPLIT
    if splits is None:
        splits = recommended_splits(call.keys, call.out_shape[2], "cpu")
    else:
        check_count("splits", splits)
        block = schedule.decode_block(
            max(call.q.shape[3], call.v.shape[3]), call.dtype.bytes, _machine(call.q, backend)
        )
        per = _cdiv(_cdiv(call.keys, splits), block) * block
    threads = schedule.enough_threads(call.flops, call.bytes) if threads is None else threads
    parts = _partials(call, options, splits, per, {"backend": backend, "threads": threads})
    return Partials(*(call.finish(p) for p in parts))


def _partials(call: Call, options: Any, splits: int, per: int, run: dict[str, Any]) -> Partials:
    B, Hq, Nq, Dv = call.out_shape
    Hkv, D = call.k.shape[1], call.q.shape[3]
    G = Hq // Hkv if Hkv else 0
    rows = G * Nq
    o = call.new((B, Hkv, rows, splits, Dv), float32)
    m, l = call.new((B, Hkv, rows, splits), float32), call.new((B, Hkv, rows, splits), float32)
    if 0 not in m.shape:
        mask = call.broadcast_mask()
        mask = mask.reshape(B, Hkv, G, Nq, call.keys) if mask is not None else None
        blocks = {
            "options": options,
            "BR": schedule.row_block(rows, max(D, Dv), _machine(call.q, run["backend"])),
            "BK": schedule.decode_block(max(D, Dv), call.dtype.bytes, _machine(call.q, run["backend"])),
        }
        decode_kernel(call.q.reshape(B, Hkv, G, Nq, D), call.k, call.v, mask, o, m, l, call.scale, per, **blocks, **run)
    return Partials(o.reshape(B, Hq, Nq, splits, Dv), m.reshape(B, Hq, Nq, splits), l.reshape(B, Hq, Nq, splits))


# ---- merging ---------------------------------------------------------------------------------------------------------


def merge(
    o: Array, m: Array, l: Array, *, dtype: Any = float32, backend: str | None = None, threads: int | None = None
) -> tuple[Array, Array]:
    """Joins S softmax states: o (..., S, Dv), m and l (..., S), float32. Gives output (..., Dv) and natural lse
    (...)."""
    lib = arrays.library("o", o)
    parts = Partials(*(lib.adopt(n, a) for n, a in (("o", o), ("m", m), ("l", l))))
    if arrays.dtype_of("o", parts.o) is not float32:
        raise MixedDTypes(f"'o' must be float32, found {arrays.dtype_of('o', parts.o)}: narrower partials overflow")
    check_parts(parts.o, ("m", parts.m), ("l", parts.l))
    out, lse = _merge(lib, parts, None, read_dtype(dtype), {"backend": backend, "threads": threads})
    return lib.give_back(out), lib.give_back(lse)


def _merge(
    lib: Library, parts: Partials, sinks: Array | None, dtype: DType, run: dict[str, Any]
) -> tuple[Array, Array]:
    *lead, S, Dv = parts.o.shape
    rows = _product(lead)
    if run["threads"] is None:
        run = {**run, "threads": schedule.enough_threads(0, 4 * rows * S * Dv)}
    out, lse = lib.empty((rows, Dv), dtype, parts.o), lib.empty((rows,), float32, parts.o)
    if rows:
        flat = parts.o.reshape(rows, S, Dv), parts.m.reshape(rows, S), parts.l.reshape(rows, S)
        merge_kernel(*flat, sinks, out, lse, BS=MERGE_BLOCK, **run)
    return out.reshape(*lead, Dv), lse.reshape(tuple(lead))


def merge_lse(
    outs: Array | Sequence[Array],
    lses: Array | Sequence[Array],
    *,
    backend: str | None = None,
    threads: int | None = None,
) -> tuple[Array, Array]:
    """Joins finished parts: outputs (..., S, Dv) with their natural lse (..., S), or sequences of S arrays (..., Dv)
    and (...)."""
    first = outs[0] if isinstance(outs, list | tuple) and outs else outs
    lib = arrays.library("outs", first)
    outs, lses = (
        stack_parts(lib, name, a, axis) if isinstance(a, list | tuple) else lib.adopt(name, a)
        for name, a, axis in (("outs", outs, -2), ("lses", lses, -1))
    )
    check_parts(outs, ("lses", lses))
    *lead, S, Dv = outs.shape
    rows = _product(lead)
    out = lib.empty((rows, Dv), arrays.dtype_of("outs", outs), outs)
    total = lib.empty((rows,), float32, outs)
    if rows:
        flat = outs.reshape(rows, S, Dv), lses.reshape(rows, S)
        merge_lse_kernel(*flat, out, total, BS=MERGE_BLOCK, backend=backend, threads=threads)
    return lib.give_back(out.reshape(*lead, Dv)), lib.give_back(total.reshape(tuple(lead)))


# ---- masks -----------------------------------------------------------------------------------------------------------


def mask_blocks(
    mask: Array, block_q: int, block_k: int, *, backend: str | None = None, threads: int | None = None
) -> Array:
    """uint8 (..., ceil(Nq / block_q), ceil(Nk / block_k)): 0 hidden, 1 mixed, 2 all visible (an additive mask: all
    zero)."""
    lib = arrays.library("mask", mask)
    mask = lib.adopt("mask", mask)
    for name, block in (("block_q", block_q), ("block_k", block_k)):
        check_count(name, block)
    flat, lead = read_mask(mask)
    kinds = _kinds(lib, flat, block_q, block_k, {"backend": backend, "threads": threads})
    return lib.give_back(kinds.reshape(*lead, *kinds.shape[2:]))


def _kinds(lib: Library, mask: Array, BQ: int, BK: int, run: dict[str, Any]) -> Array:
    blocks = tuple(-(-n // b) for n, b in zip(mask.shape[2:], (BQ, BK), strict=True))
    kinds = lib.empty((*mask.shape[:2], *blocks), uint8, mask)
    if 0 not in kinds.shape:
        strip = schedule.mask_strip(BQ, _machine(mask, run["backend"]))
        mask_blocks_kernel(mask, kinds, BQ=BQ, BK=BK, STRIP=strip, **run)
    return kinds


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
