"""`attention` of a group of ranks, as users call it: what a rank can check before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import (
    ArgumentKind,
    ArgumentRank,
    ArgumentShape,
    BadOption,
    HeadsDoNotDivide,
    LengthsDiffer,
    MixedDTypes,
    MonotileError,
)
from ..frontend.functions import is_function
from ..library import inputs, mod_table, torch_calls
from ..library.block_mask import unwrapped
from . import context_operator, groups
from .groups import Group
from .layouts import check_layout, whole_length
from .schedule import read_documents

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
Window = tuple[int | None, int | None] | None


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: Any = None, method: str = "ring", layout: str = "zigzag",
    length: int | None = None, causal: bool = False, scale: float | None = None, window: Window = None,
    softcap: float | None = None, sinks: Tensor | None = None, documents: Sequence[int] | None = None,
    score_mod: Callable[..., Any] | None = None, mask_mod: Any = None, return_lse: bool = False,
    backend: str | None = None, threads: int | None = None,
) -> Any:  # fmt: skip
    """Attention of a sequence to itself that is divided among the ranks of a group: q (B, Hq, n, D), k (B, Hkv, n, D)
    and v (B, Hkv, n, Dv) are this rank's part, and so is the result. See docs/guide/distributed.md."""
    options = {
        "method": method, "layout": layout, "length": length, "causal": causal, "scale": scale, "window": window,
        "softcap": softcap, "documents": documents, "score_mod": score_mod, "mask_mod": mask_mod,
        "backend": backend, "threads": threads, "return_lse": return_lse,
    }  # fmt: skip
    own = _group_in_graph(group) if torch.compiler.is_compiling() else groups.resolve(group)
    for name, array in (("q", q), ("k", k), ("v", v)):
        if not isinstance(array, Tensor):
            raise ArgumentKind(f"{name!r} must be a torch tensor, found {type(array).__name__}")
    torch_calls.refuse_tangents("attention of a group", q, k, v, sinks)
    q, k, v = torch_calls.in_autocast(q, k, v)
    batched = q.dim() != 3
    if not batched:
        q, k, v = (t[None] if t.dim() == 3 else t for t in (q, k, v))
    try:
        given, mods = _arguments(own, q, k, v, sinks, options)
    except MonotileError:
        if not torch.compiler.is_compiling():
            own.refuse(q)
        raise
    o, lse, *_ = torch.ops.monotile.context_attention(*given)
    del mods  # an entry of the table until here
    o, lse = (o, lse) if batched else (o[0], lse[0])
    return (o, lse) if return_lse else o


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _group_in_graph(group: Any) -> Group:
    return groups.resolve(group)


def _arguments(
    own: Group, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: dict[str, Any]
) -> tuple[tuple[Any, ...], Any]:
    """Check a call and return the arguments of the operator, and the entry of its functions."""
    context_operator.check_method(options["method"])
    check_layout(options["layout"])
    _check_shapes(q, k, v)
    length = whole_length(q.shape[2], own.rank, own.size, options["layout"], options["length"])
    documents = read_documents(options["documents"], length)
    causal = inputs.read_causal(options["causal"]) is not None
    left, right = (None, None) if options["window"] is None else inputs.read_window(options["window"])
    scale = None if options["scale"] is None else inputs.read_scale(options["scale"])
    softcap = None if options["softcap"] is None else inputs.read_softcap(options["softcap"])
    if sinks is not None and tuple(sinks.shape) != (q.shape[1],):
        raise ArgumentShape(f"sinks must have shape ({q.shape[1]},), one per query head; found {tuple(sinks.shape)}")
    mask_mod, blocks = (None, None) if options["mask_mod"] is None else unwrapped(options["mask_mod"])
    if blocks is not None:
        blocks.check((q.shape[0], q.shape[1], length, length))
    for name, function in (("score_mod", options["score_mod"]), ("mask_mod", mask_mod)):
        if function is not None and not is_function(function):
            raise BadOption(f"{name} is a Python function, found {type(function).__name__}")
    number, mods = mod_table.number_of(options["score_mod"], mask_mod)
    listed = None if documents is None else list(documents)
    head = q, k, v, sinks, own.name, options["method"], options["layout"], length, listed, causal, left, right
    tail = options["backend"], options["threads"], options["return_lse"]
    return (*head, scale, softcap, number, *tail), mods


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """What a rank can tell before anything is sent; the rest is checked where attention is computed."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ArgumentRank(f"q, k and v have (batch, heads, length, head size), or the last three; found {shapes}")
    if q.shape[2] != k.shape[2] or k.shape[2] != v.shape[2]:
        raise LengthsDiffer(f"q, k and v are this rank's part of one sequence, found different lengths: {shapes}")
    inputs.check_shapes(tuple(q.shape), tuple(k.shape), tuple(v.shape))
    if not q.dtype == k.dtype == v.dtype or q.dtype not in FLOATS:
        found = f"q {q.dtype}, k {k.dtype}, v {v.dtype}"
        raise MixedDTypes(f"q, k and v must be of one type, float32, float16 or bfloat16; found {found}: cast them")
    if not k.shape[1]:
        raise HeadsDoNotDivide(f"there are no key-value heads ({shapes})")
