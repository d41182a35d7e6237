"""The one softmax: a running maximum, a running sum, and the output before it is divided by the sum.

`(m, l, acc)` is a monoid. `step` adds a block of keys, `combine` adds states of other keys, `finish` gives the output
and the logsumexp; everything that computes a softmax calls these. exp2 is the only exponential. Scores and m may have
any positive scale: only differences are scaled, so that large scores keep their digits. A row that has seen no key is
m = -inf, l = 0, acc = 0, and nothing here makes a NaN of it.
"""

from typing import Any, NamedTuple

from monotile.language import dot, exp2, fma, full, inf, log2, maximum, minimum, where, zeros

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
NATURAL_SCALE = 1.0
LARGEST = 3.4028234663852886e38  # the largest float32


class State(NamedTuple):
    m: Any  # (rows,) greatest score so far
    l: Any  # (rows,) sum of exp(score - m)
    acc: Any  # (rows, width) sum of exp(score - m) * value


def empty(rows, width):
    """The state of rows that have seen no key."""
    return State(full(rows, -inf), zeros(rows), zeros((rows, width)))


def shift_of(m):
    """The number subtracted from scores: their maximum, or 0 where there is none yet (-inf minus -inf is NaN)."""
    return where(m == -inf, 0.0, m)


def exp(x, scale):
    """e^(x * scale) by exp2."""
    return exp2(x * (scale * LOG2E))


def step(state, S, V, seen, keys, score_scale, factor=None):
    """Add a block of keys: scores (rows, keys), values (keys, width), which scores count, and which values may be read.
    A hidden key has weight zero, and the value of a key that no row sees never reaches a sum. `factor` (keys,) is what
    values are to be multiplied by; their weights are."""
    V = where(keys[:, None], V, 0.0)
    S = where(seen, S, -inf)
    m = maximum(state.m, S.max(axis=1))
    shift = shift_of(m)
    alpha = exp(state.m - shift, score_scale)
    P = exp(S - shift[:, None], score_scale)
    l = fma(state.l, alpha, P.sum(axis=1))
    if factor is not None:
        P = P * where(keys, factor, 0.0)[None, :]
    acc = state.acc * alpha[:, None] + dot(P.astype(V.dtype), V)
    return State(m, l, acc)


def combine(state, m, l, O):
    """Add the states of other keys for one row: natural maxima and sums (1, parts), outputs (parts, width). A part with
    l == 0 has seen no key and is skipped, whatever else it holds."""
    there = l != 0.0
    top = maximum(state.m, where(there, m, -inf).max(axis=1))
    shift = shift_of(top)
    alpha = exp(state.m - shift, NATURAL_SCALE)
    w = where(there, exp(m - shift[:, None], NATURAL_SCALE), 0.0)
    total = where(there, w * l, 0.0).sum(axis=1)
    seen = there.max(axis=0)[:, None]
    return State(top, state.l * alpha + total, state.acc * alpha[:, None] + dot(w, where(seen, O, 0.0)))


def in_natural_units(state, score_scale):
    """The state with its maximum in natural units, which is -inf where a row has seen no key, and nowhere else."""
    m = minimum(maximum(state.m * score_scale, -LARGEST), LARGEST)
    return State(where(state.m == -inf, -inf, m), state.l, state.acc)


def sink(state, logit):
    """Add one logit to each row's denominator; state and logit are natural."""
    m = maximum(state.m, logit)
    shift = shift_of(m)
    alpha = exp(state.m - shift, NATURAL_SCALE)
    return State(m, state.l * alpha + exp(logit - shift, NATURAL_SCALE), state.acc * alpha[:, None])


def weights(S, lse, score_scale):
    """The weights of scores (rows, keys), given the natural logsumexp of each row. Differences alone are rounded."""
    return exp2(fma(S, score_scale, -shift_of(lse)[:, None]) * LOG2E)


def finish(state):
    """Output and logsumexp of a natural state; a row that has seen nothing gives 0 and -inf."""
    scale = where(state.l == 0.0, 0.0, 1.0 / state.l)
    return state.acc * scale[:, None], state.m + log2(state.l) * LN2
