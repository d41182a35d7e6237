"""FlashAttention's options as those of `monotile.attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentShape, BadOption

Window = tuple[int, int]


class Wanted(NamedTuple):
    """The options that FlashAttention's functions share."""

    softmax_scale: float | None
    causal: bool
    window_size: Window
    softcap: float
    alibi_slopes: Tensor | None

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """How far a query sees to its left and right, None for all keys; -1 is FlashAttention's word for that."""
        pair = isinstance(self.window_size, tuple | list) and len(self.window_size) == 2
        if not pair or any(not isinstance(n, int) for n in self.window_size):
            raise BadOption(f"window_size is a pair (left, right), -1 for no limit; found {self.window_size!r}")
        left, right = (None if n < 0 else n for n in self.window_size)
        return left, 0 if self.causal else right


def refuse_dropout(dropout_p: float) -> None:
    if dropout_p:
        raise BadOption(f"dropout_p is {dropout_p}; monotile has no dropout: pass dropout_p=0.0, as in evaluation")


def visible_options(wanted: Wanted) -> dict[str, Any]:
    """The options for keys, where the last query stands at the last key."""
    left, right = wanted.sides
    right = None if wanted.causal else right
    window = None if left is None is right else (left, right)
    return {"causal": bool(wanted.causal), "window": window}


def score_options(wanted: Wanted, batch: int, heads: int, diagonal: Tensor | None) -> dict[str, Any]:
    """The options for scores: scale and softcap, or with alibi a score_mod in its place, since FlashAttention caps a
    score before alibi's bias is added. `diagonal` (batch or 1, queries) is the key that each query stands at, which
    only alibi needs."""
    options: dict[str, Any] = {"scale": wanted.softmax_scale}
    if wanted.alibi_slopes is None:
        return {**options, "softcap": wanted.softcap}
    assert diagonal is not None
    slopes = wanted.alibi_slopes.detach()
    shapes = (heads,), (1, heads), (batch, heads)
    if tuple(slopes.shape) not in shapes or slopes.dtype != torch.float32:
        found = f"{tuple(slopes.shape)} {slopes.dtype}"
        raise ArgumentShape(
            f"alibi_slopes is float32, ({heads},) or (batch, {heads}) = ({batch}, {heads}); found {found}"
        )
    slopes = slopes[None] if slopes.dim() == 1 else slopes
    return {**options, "score_mod": _alibi(slopes, diagonal.int(), float(wanted.softcap))}


def _alibi(slopes: Tensor, diagonal: Tensor, cap: float) -> Callable[..., Any]:
    """A score_mod with slopes (batch or 1, heads)."""
    by_batch, own_diagonal = slopes.shape[0] > 1, diagonal.shape[0] > 1

    def alibi(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        slope = slopes[b if by_batch else 0, h]
        at = diagonal[b if own_diagonal else 0, i]
        if cap:
            score = cap * torch.tanh(score / cap)
        return score - slope * torch.abs(at - j)

    return alibi


def interval_mod(first: Tensor, last: Tensor) -> Callable[..., Any]:
    """A mask_mod by which query i of batch b sees keys first[b, i] <= j <= last[b, i]."""
    by_batch = first.shape[0] > 1

    def interval(b: Any, h: Any, i: Any, j: Any) -> Any:
        row = b if by_batch else 0
        return (j >= first[row, i]) & (j <= last[row, i])

    return interval


def intervals(diagonal: Tensor, start: Tensor, stop: Tensor, wanted: Wanted) -> tuple[Tensor, Tensor]:
    """The first and last key that each query sees, of keys start <= j < stop, with `diagonal` the key it stands at."""
    left, right = wanted.sides
    first, last = start.expand_as(diagonal), (stop - 1).expand_as(diagonal)
    if left is not None:
        first = torch.maximum(first, diagonal - left)
    if right is not None:
        last = torch.minimum(last, diagonal + right)
    return first.int().contiguous(), last.int().contiguous()
