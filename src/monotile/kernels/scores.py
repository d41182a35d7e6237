"""What the options of attention mean: which keys a query sees, and what happens to a score."""

from __future__ import annotations

from typing import Any, NamedTuple

from monotile.language import bool_, float32, tanh

from .softmax import LOG2E


class Options(NamedTuple):
    """Compile-time choices; `None` leaves a thing out."""

    causal: str | None = None  # "lower_right" or "upper_left"
    left: int | None = None  # how far before a query's own position keys are seen
    right: int | None = None  # how far after it
    softcap: float | None = None
    score_mod: Any = None
    mask_mod: Any = None


def in_reach(options, i, j, Nq, Nk):
    """Whether positions alone let query i see key j: the part the compiler can decide for whole blocks."""
    seen = j < Nk
    if options.causal == "lower_right":
        seen = seen & (j <= i + (Nk - Nq))
    if options.causal == "upper_left":
        seen = seen & (j <= i)
    if options.left is not None:
        seen = seen & (j >= i + (Nk - Nq - options.left))
    if options.right is not None:
        seen = seen & (j <= i + (Nk - Nq + options.right))
    return seen


def is_natural(options, mask):
    """Whether something must see scores as the user knows them, before the change to units of log2."""
    additive = mask is not None and mask.dtype != bool_
    return options.score_mod is not None or options.softcap is not None or additive


def change(options, S, b, h, i, j):
    """score_mod and softcap, on scaled scores."""
    if options.score_mod is not None:
        S = options.score_mod(S, b, h, i, j)
    if options.softcap is not None:
        S = tanh(S * (1.0 / options.softcap)) * options.softcap
    return S


def look(options, mask_tile, seen, S, b, h, i, j):
    """The score in units of log2 and the keys that are seen, after masks."""
    S = change(options, S, b, h, i, j)
    if mask_tile is not None:
        if mask_tile.dtype == bool_:
            seen = seen & mask_tile
        else:
            S = S + mask_tile.astype(float32)
    if options.mask_mod is not None:
        seen = seen & options.mask_mod(b, h, i, j)
    return S * LOG2E if options.natural else S, seen
