"""What users call: attention and its parts. Checks and views here, all arithmetic in kernels/.

Each function has a `_plan` beside it, which checks a call and lists its launches; calls.py keeps what it made for the
next call alike, so that nothing in a plan may depend on addresses or contents."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from .. import backends
from ..backends.nvidia import choices
from ..backends.nvidia.choices import Choice
from ..dtypes import DType, bool_, float32, uint8
from ..errors import MixedDTypes
from ..kernels.attention import attention as attention_kernel
from ..kernels.decode import decode as decode_kernel
from ..kernels.mask_blocks import mask_blocks as mask_blocks_kernel
from ..kernels.merge import merge as merge_kernel
from ..kernels.merge import merge_lse as merge_lse_kernel
from ..kernels.scores import by_place
from ..launch.signature import check_threads
from ..runtime import arrays
from . import blocks as schedule
from .blocks import recommended_splits as recommended_splits
from .calls import SCALE, Draft, Op, Operand
from .inputs import (
    Call,
    check_count,
    check_parts,
    options_of,
    read_call,
    read_dtype,
    read_mask,
    read_scale,
    stack_parts,
)

Array = Any
Window = tuple[int | None, int | None] | None
Parts = tuple[Operand, Operand, Operand]  # o, m and l
Finish = Callable[[list[Array]], Any]  # what the caller gets of the list of results

_only: Finish = itemgetter(0)


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
    """softmax(q k^T * scale) v, for q (B, Hq, Nq, D), k (B, Hkv, Nk, D), v (B, Hkv, Nk, Dv). See
    docs/guide/attention.md."""
    scale = scale if scale is None else read_scale(scale)
    options = causal, window, softcap, score_mod, mask_mod, _negative(scale), return_lse, backend, threads
    return _ATTENTION((q, k, v, mask, sinks), options, scale)


def _negative(scale: float | None) -> bool:
    """Whether products change their sign: kernels take a scale's size as positive."""
    return scale is not None and scale < 0.0


def _plan_attention(
    draft: Draft, causal: Any, window: Any, softcap: Any, score_mod: Any, mask_mod: Any, negative: bool,
    return_lse: Any, backend: str | None, threads: int | None,
) -> Finish:  # fmt: skip
    options = options_of(causal, window, softcap, score_mod, mask_mod, negative)
    call = read_call(draft)
    run = _run(backend, threads, call.flops, call.bytes)
    out = call.result(draft, call.out_shape, call.dtype)
    lse = call.result(draft, call.out_shape[:3], float32) if return_lse else None
    if 0 not in call.out_shape:
        if call.out_shape[2] > schedule.FEW_ROWS:
            _forward(draft, call, options, out, lse, run)
        else:
            per = _keys_per_split(call, backend)
            splits = max(1, _cdiv(call.keys, per))
            parts = _parts(draft.temporary, call, splits if splits > 1 else 0)
            _decode(draft, call, options, per, parts, call.sinks, out, lse, run)
            if splits > 1:
                gpu = _machine(call.q, backend) == "gpu"
                behind = choices.merge_after_decode(call.q.view.device) if gpu else None
                run = {"backend": backend, "threads": threads, "schedule": behind}
                _merge(draft, parts, call.sinks, out, lse, run)
    return tuple if return_lse else _only


def _run(backend: str | None, threads: int | None, flops: int, bytes_: int) -> dict[str, Any]:
    """Where and on how many threads to run."""
    if threads is None:
        threads = schedule.enough_threads(flops, bytes_)
    else:
        check_threads(threads)
    return {"backend": backend, "threads": threads}


def _forward(draft: Draft, call: Call, options: Any, out: Operand, lse: Operand | None, run: dict[str, Any]) -> None:
    choice = _forward_choice(call, options, run["backend"])
    BQ, BK = choice.blocks["BQ"], choice.blocks["BK"]
    mask, kinds = call.broadcast_mask(), None
    if mask is not None and call.mask is not None and call.keys > 0:
        shape = _map_shape(call.mask.shape, BQ, BK)
        kinds = draft.temporary(shape, uint8)
        if options.mask_mod is None and _tells_apart(call.mask, options, _machine(call.q, run["backend"])):
            options = options._replace(fine=True)
        _map(draft, call.mask, kinds, BQ, BK, run, fine=options.fine)
        kinds = kinds.broadcast((*mask.shape[:2], *_map_shape(mask.shape, BQ, BK)[2:]))
    args = call.q, call.k, call.v, mask, kinds, call.sinks, out, lse, SCALE
    draft.launch(attention_kernel, *args, options=options, BQ=BQ, BK=BK, schedule=choice.schedule, **run)


def _tells_apart(mask: Operand, options: Any, machine: str) -> bool:
    """Whether a mask's map says where each key is seen. A GPU reads whole blocks of the mask anyway; a CPU reads
    strips, and those of an additive mask seldom hide anything: then, where positions hide nothing either, all keys are
    seen."""
    strips = machine == "cpu" and mask.dtype != bool_ and not by_place(options)
    return machine == "gpu" or strips


def _forward_choice(call: Call, options: Any, backend: str | None) -> Choice:
    size, machine = max(call.q.shape[3], call.v.shape[3]), _machine(call.q, backend)
    if machine == "gpu":
        masked, unseen = call.mask is not None, options.left is not None or options.causal == "upper_left"
        device, causal = call.q.view.device, options.causal is not None
        cleans = unseen or masked or options.mask_mod is not None
        kinds = {"causal": causal, "capped": options.softcap is not None, "masked": masked, "cleans": cleans}
        return choices.forward(size, call.dtype, device, keys=call.keys, **kinds)
    rows, keys = schedule.attention_blocks(call.out_shape[2], size, call.dtype.bytes, machine)
    return Choice({"BQ": rows, "BK": keys})


def _machine(array: Operand, backend: str | None) -> str:
    """For what kind of machine block sizes are chosen: "cpu", "metal" or "gpu"."""
    named = backend if backend is not None else backends.home(array.view.device)
    return {"nvidia": "gpu", "metal": "metal"}.get(named, "cpu")


# ---- split decode ----------------------------------------------------------------------------------------------------


def decode_partials(
    q: Array, k: Array, v: Array, *, splits: int | None = None, causal: bool | str = False, scale: float | None = None,
    mask: Array | None = None, window: Window = None, softcap: float | None = None,
    score_mod: Callable[..., Any] | None = None, mask_mod: Callable[..., Any] | None = None,
    backend: str | None = None, threads: int | None = None,
) -> Partials:  # fmt: skip
    """The softmax state of each of `splits` runs of keys; `merge` makes attention of them. See
    docs/guide/decode_partials.md."""
    scale = scale if scale is None else read_scale(scale)
    options = splits, causal, window, softcap, score_mod, mask_mod, _negative(scale), backend, threads
    found: Partials = _PARTIALS((q, k, v, mask), options, scale)
    return found


def _plan_partials(
    draft: Draft, splits: Any, causal: Any, window: Any, softcap: Any, score_mod: Any, mask_mod: Any,
    negative: bool, backend: str | None, threads: int | None,
) -> Finish:  # fmt: skip
    options = options_of(causal, window, softcap, score_mod, mask_mod, negative)
    call = read_call(draft)
    per = schedule.KEYS_PER_SPLIT
    if splits is None:
        splits = recommended_splits(call.keys, call.out_shape[2], "cpu")
    else:
        check_count("splits", splits)
        block = _decode_choice(call, backend, 1).blocks["BK"]  # splits may be short
        per = _cdiv(_cdiv(call.keys, splits), block) * block
    parts = _parts(lambda shape, dtype: call.result(draft, shape, dtype), call, splits)
    if 0 not in call.out_shape:
        _decode(draft, call, options, per, parts, None, None, None, _run(backend, threads, call.flops, call.bytes))
    return Partials._make


def _parts(new: Callable[[tuple[int, ...], DType], Operand], call: Call, splits: int) -> Parts:
    B, Hq, Nq, Dv = call.out_shape
    shape = B, Hq, Nq, splits
    return new((*shape, Dv), float32), new(shape, float32), new(shape, float32)


def _decode(
    draft: Draft, call: Call, options: Any, per: int, parts: Parts, sinks: Operand | None,
    out: Operand | None, lse: Operand | None, run: dict[str, Any],
) -> None:  # fmt: skip
    """The decode kernel, which sees the rows of a group's query heads as rows of their KV head."""
    B, Hq, Nq, Dv = call.out_shape
    Hkv, D = call.k.shape[1], call.q.shape[3]
    G = Hq // Hkv
    mask = call.broadcast_mask()
    mask = mask.reshaped(B, Hkv, G, Nq, call.keys) if mask is not None else None
    choice = _decode_choice(call, run["backend"], per)
    rows = schedule.row_block(G * Nq, max(D, Dv), _machine(call.q, run["backend"]))
    outputs = [x.reshaped(B, Hkv, G * Nq, *x.shape[3:]) if x is not None else None for x in (*parts, out, lse)]
    draft.launch(
        decode_kernel, call.q.reshaped(B, Hkv, G, Nq, D), call.k, call.v, mask, *outputs[:3], sinks, *outputs[3:],
        SCALE, per, options=options, BR=rows, BK=choice.blocks["BK"], schedule=choice.schedule, **run,
    )  # fmt: skip


def _decode_choice(call: Call, backend: str | None, per: int) -> Choice:
    """For splits of so many keys."""
    size, machine = max(call.q.shape[3], call.v.shape[3]), _machine(call.q, backend)
    if machine == "gpu":
        return choices.decode(size, call.dtype, call.q.view.device, whole=per >= call.keys)
    return Choice({"BK": schedule.decode_block(size, call.dtype.bytes, machine, per)})


def _keys_per_split(call: Call, backend: str | None) -> int:
    if _machine(call.q, backend) != "gpu":
        return schedule.KEYS_PER_SPLIT
    block, heads = _decode_choice(call, backend, 1).blocks["BK"], call.k.shape[0] * call.k.shape[1]
    row = max(call.q.shape[3], call.v.shape[3]) * call.dtype.bytes
    return choices.keys_per_split(call.keys, heads, row, block, call.q.view.device)


# ---- merging ---------------------------------------------------------------------------------------------------------


def merge(
    o: Array, m: Array, l: Array, *, dtype: Any = float32, backend: str | None = None, threads: int | None = None
) -> tuple[Array, Array]:
    """Joins S softmax states: o (..., S, Dv), m and l (..., S), float32. Gives output (..., Dv) and natural lse
    (...)."""
    out, lse = _MERGE((o, m, l), (dtype, backend, threads))
    return out, lse


def _plan_merge(draft: Draft, dtype: Any, backend: str | None, threads: int | None) -> Finish:
    o, m, l = parts = draft.input("o"), draft.input("m"), draft.input("l")
    if o.dtype is not float32:
        raise MixedDTypes(f"'o' must be float32, found {o.dtype}: narrower partials overflow")
    check_parts(o, {"m": m, "l": l})
    out, lse = draft.result((*o.shape[:-2], o.shape[-1]), read_dtype(dtype)), draft.result(o.shape[:-2], float32)
    _merge(draft, parts, None, out, lse, {"backend": backend, "threads": threads})
    return tuple


def _merge(
    draft: Draft, parts: Parts, sinks: Operand | None, out: Operand, lse: Operand | None, run: dict[str, Any]
) -> None:
    o, m, l = parts
    *lead, S, Dv = o.shape
    rows = math.prod(lead)
    if rows == 0:
        return
    run = run | _run(run["backend"], run["threads"], 0, 4 * rows * S * Dv)
    flat = draft.reshaped(o, rows, S, Dv), draft.reshaped(m, rows, S), draft.reshaped(l, rows, S)
    total = None if lse is None else lse.reshaped(rows)
    queries = lead[-1] if lead else 1
    draft.launch(
        merge_kernel, *flat, sinks, out.reshaped(rows, Dv), total, queries, **_merge_blocks(o, run["backend"]), **run
    )


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
    out, total = _MERGE_LSE((outs, lses), (backend, threads))
    return lib.give_back(out), lib.give_back(total)


def _plan_merge_lse(draft: Draft, backend: str | None, threads: int | None) -> Finish:
    outs, lses = draft.input("outs"), draft.input("lses")
    check_parts(outs, {"lses": lses})
    *lead, S, Dv = outs.shape
    rows = math.prod(lead)
    out, total = draft.result((*lead, Dv), outs.dtype), draft.result(tuple(lead), float32)
    if rows:
        run = _run(backend, threads, 0, outs.dtype.bytes * rows * S * Dv)
        flat = draft.reshaped(outs, rows, S, Dv), draft.reshaped(lses, rows, S)
        blocks = _merge_blocks(outs, backend)
        draft.launch(merge_lse_kernel, *flat, out.reshaped(rows, Dv), total.reshaped(rows), **blocks, **run)
    return tuple


def _merge_blocks(parts: Operand, backend: str | None) -> dict[str, Any]:
    machine = _machine(parts, backend)
    return {"BS": schedule.merge_block(parts.shape[-2], machine), "SPAN": schedule.merge_span(machine)}


# ---- masks -----------------------------------------------------------------------------------------------------------


def mask_blocks(
    mask: Array, block_q: int, block_k: int, *, backend: str | None = None, threads: int | None = None
) -> Array:
    """uint8 (..., ceil(Nq / block_q), ceil(Nk / block_k)): 0 hidden, 1 mixed, 2 all visible (an additive mask: all
    zero)."""
    return _MASK_BLOCKS((mask,), (block_q, block_k, backend, threads))


def _plan_mask_blocks(draft: Draft, block_q: Any, block_k: Any, backend: str | None, threads: int | None) -> Finish:
    for name, block in (("block_q", block_q), ("block_k", block_k)):
        check_count(name, block)
    if threads is not None:
        check_threads(threads)
    mask, lead = read_mask(draft.input("mask"))
    shape = _map_shape(mask.shape, block_q, block_k)
    kinds = draft.result((*lead, *shape[2:]), uint8)
    if 0 not in shape:
        _map(draft, mask, kinds.reshaped(*shape), block_q, block_k, {"backend": backend, "threads": threads})
    return _only


def _map(
    draft: Draft, mask: Operand, kinds: Operand, BQ: int, BK: int, run: dict[str, Any], *, fine: bool = False
) -> None:
    machine = _machine(mask, run["backend"])
    strip, span = schedule.mask_strip(BQ, machine), schedule.mask_span(BK, machine)
    way = choices.mask_map(mask.view.device) if machine == "gpu" else None
    blocks: dict[str, Any] = {"BQ": BQ, "BK": BK, "STRIP": strip, "SPAN": span}
    draft.launch(mask_blocks_kernel, mask, kinds, **blocks, fine=fine, schedule=way, **run)


def _map_shape(mask: tuple[int, ...], BQ: int, BK: int) -> tuple[int, ...]:
    return *mask[:2], _cdiv(mask[2], BQ), _cdiv(mask[3], BK)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


_ATTENTION = Op(("q", "k", "v", "mask", "sinks"), _plan_attention)
_PARTIALS = Op(("q", "k", "v", "mask"), _plan_partials)
_MERGE = Op(("o", "m", "l"), _plan_merge)
_MERGE_LSE = Op(("outs", "lses"), _plan_merge_lse)
_MASK_BLOCKS = Op(("mask",), _plan_mask_blocks)
