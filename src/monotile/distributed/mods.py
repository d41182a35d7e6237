"""The caller's functions in global positions, for calls whose rows and keys are some of the sequence.

Arrays and numbers that a mod captures are arguments of the kernel, so that all pieces of all lengths share programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Mod = Callable[..., Any]


def score_at(score_mod: Mod, queries: Tensor, keys: Tensor, head: int) -> Mod:
    """A score_mod on rows, keys and heads whose positions are `queries`, `keys` and those from `head` on."""

    def score_in_place(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score_mod(score, b, h + head, queries[i], keys[j])

    return score_in_place


def mask_at(mask_mod: Mod, queries: Tensor, keys: Tensor, head: int) -> Mod:
    """The same for a mask_mod."""

    def mask_in_place(b: Any, h: Any, i: Any, j: Any) -> Any:
        return mask_mod(b, h + head, queries[i], keys[j])

    return mask_in_place


def same_document(queries: Tensor, keys: Tensor) -> Mod:
    """A mask_mod: a query sees keys of its own document. The tables have the documents of rows and keys."""

    def in_document(b: Any, h: Any, i: Any, j: Any) -> Any:
        return queries[i] == keys[j]

    return in_document


def within(queries: Tensor, keys: Tensor, left: int, right: int) -> Mod:
    """A mask_mod: a query sees keys from `left` before to `right` behind its position."""

    def in_window(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (keys[j] - queries[i] <= right) & (queries[i] - keys[j] <= left)

    return in_window


def both(first: Mod | None, second: Mod | None) -> Mod | None:
    """A mask_mod that hides what either hides."""
    if first is None or second is None:
        return first or second

    def mask_of_both(b: Any, h: Any, i: Any, j: Any) -> Any:
        return first(b, h, i, j) & second(b, h, i, j)

    return mask_of_both
