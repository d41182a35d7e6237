"""FlashAttention's options as those of `monotile.attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentShape, BadOption
from ..library.mod_table import mod_of_arrays

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


def score_options(wanted: Wanted, batch: int, heads: int, first: Tensor | None) -> dict[str, Any]:
    """The options for scores: scale and softcap, or with alibi a score_mod in its place, since FlashAttention caps a
    score before alibi's bias is added. `first` (batch or 1,) is the key that the first query stands at, which only
    alibi needs."""
    options: dict[str, Any] = {"scale": wanted.softmax_scale}
    if wanted.alibi_slopes is None:
        return {**options, "softcap": wanted.softcap}
    assert first is not None
    slopes = wanted.alibi_slopes.detach()
    shapes = (heads,), (1, heads), (batch, heads)
    if tuple(slopes.shape) not in shapes or slopes.dtype != torch.float32:
        found = f"{tuple(slopes.shape)} {slopes.dtype}"
        raise ArgumentShape(
            f"alibi_slopes is float32, ({heads},) or (batch, {heads}) = ({batch}, {heads}); found {found}"
        )
    slopes = slopes[None] if slopes.dim() == 1 else slopes
    cap = (slopes.new_full((1,), wanted.softcap),) if wanted.softcap else ()
    return {**options, "score_mod": mod_of_arrays(_alibi, slopes, first.int(), *cap)}


def _alibi(slopes: Tensor, first: Tensor, cap: Tensor | None = None) -> Callable[..., Any]:
    """A score_mod with slopes (batch or 1, heads)."""
    by_batch, own_first = slopes.shape[0] > 1, first.shape[0] > 1

    def alibi(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        slope = slopes[b if by_batch else 0, h]
        at = first[b if own_first else 0] + i
        if cap is not None:
            score = cap[0] * torch.tanh(score / cap[0])
        return score - slope * torch.abs(at - j)

    return alibi


def interval_mod(first: Tensor, last: Tensor) -> Callable[..., Any]:
    """A mask_mod by which query i of batch b sees keys first[b, i] <= j <= last[b, i]."""
    by_batch = first.shape[0] > 1

    def interval(b: Any, h: Any, i: Any, j: Any) -> Any:
        row = b if by_batch else 0
        return (j >= first[row, i]) & (j <= last[row, i])

    return interval


def starts_mod(starts: Tensor) -> Callable[..., Any]:
    """A mask_mod by which queries of batch b see keys from starts[b] on."""

    def from_start(b: Any, h: Any, i: Any, j: Any) -> Any:
        return j >= starts[b]

    return from_start


def intervals(diagonal: Tensor, start: Tensor, stop: Tensor, wanted: Wanted) -> tuple[Tensor, Tensor]:
    """The first and last key that each query sees, of keys start <= j < stop, with `diagonal` the key it stands at."""
    left, right = wanted.sides
    first, last = start.expand_as(diagonal), (stop - 1).expand_as(diagonal)
    if left is not None:
        first = torch.maximum(first, diagonal - left)
    if right is not None:
        last = torch.minimum(last, diagonal + right)
    return first.int().contiguous(), last.int().contiguous()
