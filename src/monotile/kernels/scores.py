"""What the options of attention mean: which keys a query sees, and what happens to a score before the softmax."""

from typing import Any, NamedTuple

from monotile.language import bool_, exp2, float32, fma, inf, maximum, minimum, reciprocal, tanh

from .softmax import LOG2E, NATURAL

LEAST_SCALE = 1e-30  # what 0 becomes: a unit has to be positive
GREATEST = 3e38  # what a factor too large becomes: infinity times a product of 0 would be NaN
SHORT_SOFTCAP = 64.0  # the greatest one with the short form: scores are off by less than 2^-16


class Options(NamedTuple):
    """Compile-time choices of attention; None leaves a thing out."""

    causal: str | None = None  # "lower_right" or "upper_left"
    left: int | None = None  # how far before a query's own position keys are seen
    right: int | None = None  # how far after it
    softcap: float | None = None
    score_mod: Any = None
    mask_mod: Any = None
    fine: bool = False  # the mask's map tells mixed blocks apart
    negative: bool = False  # the scale is below zero: products change their sign, and its size is what counts


class Place(NamedTuple):
    """Which scores a tile holds: batch, query head, positions of queries (rows, 1) and of keys (1, columns), and
    which of
    the rows there are: a tile may go past the last one."""

    b: Any
    h: Any
    i: Any
    j: Any
    there: Any


def is_additive(mask):
    return mask is not None and mask.dtype != bool_


def by_place(options: Options) -> bool:
    """Whether what a query sees depends on its position."""
    return not (options.causal is options.left is options.right is None)


def in_reach(options, i, j, Nq, Nk):
    """Whether query i may see key j by position. The compiler decides this for whole blocks of keys."""
    seen = j < Nk
    if options.causal == "lower_right":
        seen = seen & (j <= i + (Nk - Nq))
    if options.causal == "upper_left":
        seen = seen & (j <= i) & (j < Nq)  # beyond Nq only rows past the last one would see
    if options.left is not None:
        seen = seen & (j >= i + (Nk - Nq - options.left))
    if options.right is not None:
        seen = seen & (j <= i + (Nk - Nq + options.right))
    return seen


def live(options, j, Nq, Nk):
    """Whether some query may see key j by position. What lies in memory for other keys may be anything."""
    seen = j < Nk
    if options.causal == "upper_left":
        seen = seen & (j < Nq)
    if options.left is not None:
        seen = seen & (j >= Nk - Nq - options.left)
        if options.causal == "upper_left":  # a window that begins after a query's own position holds nothing
            seen = seen & (Nk - Nq <= options.left)
    return seen


def scaled(options, products, scale, at, mask, natural, rough=False):
    """Scores in the unit of `unit`, from the products of queries and keys: scale, score_mod, softcap, additive mask.
    Factors meet each other before they meet a score. `rough`: scores may be off by 2^-16, and lack `left_out`."""
    S = -products if options.negative else products
    size = size_of(scale)
    if options.score_mod is not None:
        S, size = options.score_mod(S * size, at.b, at.h, at.i, at.j) * NATURAL, NATURAL  # whole numbers become floats
    if capped_shortly(options, rough):  # softcap * tanh(x / softcap) = softcap - 2 softcap / (1 + e^(2 x / softcap))
        S = reciprocal(-1.0 - exp2(S * minimum(size * (2.0 * LOG2E / options.softcap), GREATEST)))
    elif options.softcap is not None:
        S = tanh(S * minimum(size * (1.0 / options.softcap), GREATEST))
    if not natural:
        return S
    each = unit(options, scale, False, rough)
    return fma(S, each, mask.astype(float32)) if is_additive(mask) else S * each


def unit(options, scale, natural, rough=False):
    """How much one of a score's units is. Scores are `natural` where an additive mask joins them."""
    if natural or (options.score_mod is not None and options.softcap is None):
        return NATURAL
    if options.softcap is not None:
        return 2.0 * options.softcap if capped_shortly(options, rough) else options.softcap
    return size_of(scale)


def size_of(scale):
    return maximum(abs(scale), LEAST_SCALE)


def capped_shortly(options, rough):
    """Whether softcap has its short form, which is off by up to softcap * 2^-22 however small the score is."""
    return rough and options.softcap is not None and options.softcap <= SHORT_SOFTCAP


def left_out(options, rough):
    """What rough scores lack, all of them alike: it is softcap where that has its short form."""
    return options.softcap if capped_shortly(options, rough) else 0.0


def visible(options, at, mask, Nq, Nk):
    """Whether each key is seen: by position, mask (an additive one hides with -inf) and mask_mod."""
    seen = in_reach(options, at.i, at.j, Nq, Nk)
    if mask is not None:
        seen = seen & (mask.astype(float32) != -inf if is_additive(mask) else mask)
    if options.mask_mod is not None:
        seen = seen & options.mask_mod(at.b, at.h, at.i, at.j)
    return seen


def seen_by_some(options, seen, at, mask):
    """Which keys some row sees. A bool mask hides all from rows past the last one; what else they see must not
    matter."""
    hides = mask is None or mask.dtype == bool_
    there = seen if hides and options.mask_mod is None else seen & at.there
    return there.max(axis=0)
