"""What the options of attention mean: which keys a query sees, and what happens to a score before the softmax."""

from typing import Any, NamedTuple

from monotile.language import bool_, exp2, float32, inf, maximum, minimum, reciprocal, tanh

from .softmax import IN_LOG2, LOG2E, NATURAL

LEAST_SCALE = 1e-30  # what 0 becomes: known to be positive, a scale can follow the maximum instead of every score
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


def scaled(options, products, scale, at, mask, rough=False):
    """Scores in the unit of `unit`, from the products of queries and keys: scale, score_mod, softcap, additive mask.
    Factors meet each other before they meet a score. `rough`: scores may be off by 2^-16, and lack `left_out`."""
    additive = mask is not None and mask.dtype != bool_
    in_unit = LOG2E / unit(options)
    S = -products if options.negative else products
    factor = maximum(abs(scale), LEAST_SCALE)
    if options.score_mod is not None:
        S = options.score_mod(S * factor, at.b, at.h, at.i, at.j)
        factor = 1.0
    if options.softcap is None:
        S = S * (factor * in_unit)
    elif capped_shortly(options, rough):  # softcap * tanh(x / softcap) = softcap - 2 softcap / (1 + e^(2 x / softcap))
        factor = minimum(factor * (2.0 * LOG2E / options.softcap), GREATEST)
        S = reciprocal(-1.0 - exp2(S * factor)) * (2.0 * LOG2E * options.softcap)
    else:
        S = tanh(S * minimum(factor * (1.0 / options.softcap), GREATEST)) * (LOG2E * options.softcap)
    # Scaled by itself: a large bias that all keys share is then rounded alike for all of them, and matters less.
    return S + mask.astype(float32) * in_unit if additive else S


def unit(options):
    """Natural where a score_mod can make scores large: scaled, they would be rounded once more."""
    return NATURAL if options.score_mod is not None and options.softcap is None else IN_LOG2


def capped_shortly(options, rough):
    """Whether softcap has its short form, which is off by up to softcap * 2^-22 however small the score is."""
    return rough and options.softcap is not None and options.softcap <= SHORT_SOFTCAP


def left_out(options, rough):
    """What rough scores lack, all of them alike: it is softcap where that has its short form."""
    return LOG2E * options.softcap if capped_shortly(options, rough) else 0.0


def visible(options, at, mask, Nq, Nk):
    """Whether each key is seen: by position, mask (an additive one hides with -inf) and mask_mod."""
    seen = in_reach(options, at.i, at.j, Nq, Nk)
    additive = mask is not None and mask.dtype != bool_
    if mask is not None:
        seen = seen & (mask.astype(float32) != -inf if additive else mask)
    if options.mask_mod is not None:
        seen = seen & options.mask_mod(at.b, at.h, at.i, at.j)
    return seen


def seen_by_some(options, seen, at, mask):
    """Which keys some row sees. A bool mask hides all from rows past the last one; what else they see must not
    matter."""
    hides = mask is None or mask.dtype == bool_
    there = seen if hides and options.mask_mod is None else seen & at.there
    return there.max(axis=0)
