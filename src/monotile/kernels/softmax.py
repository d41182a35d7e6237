"""The one softmax: a running maximum, a running sum, and the output before it is divided by the sum.

`(m, l, acc)` is a monoid. `step` adds a block of keys, `combine` adds states of other keys, `finish` gives the output
and the logsumexp; everything that computes a softmax calls these. exp2 is the only exponential. Scores and m have any
unit: only differences are scaled, so that large scores keep their digits. `unit` says how much one of theirs is; it is
positive, and 1 where they are natural. A row that has seen no key is m = -inf, l = 0, acc = 0, and nothing here makes a
NaN of it.
"""

from typing import Any, NamedTuple

from monotile.language import dot, exp2, fma, full, inf, log2, maximum, where, zeros

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
NATURAL = 1.0


class State(NamedTuple):
    m: Any  # (rows,) greatest score so far
    l: Any  # (rows,) sum of the powers of score - m
    acc: Any  # (rows, width) sum of the same times value


def empty(rows, width):
    """No key seen yet."""
    return State(full(rows, -inf), zeros(rows), zeros((rows, width)))


def level(m):
    """What is subtracted from scores: their maximum, or 0 where there is none yet (-inf minus -inf would be NaN)."""
    return where(m == -inf, 0.0, m)


def power(x, unit):
    return exp2(x * (unit * LOG2E))


def step(state, S, V, unit):
    """One more block of keys: their scores (rows, keys), -inf where hidden, and their values (keys, width)."""
    m = maximum(state.m, S.max(axis=1))
    shift = level(m)
    alpha = power(state.m - shift, unit)
    P = power(S - shift[:, None], unit)
    l = fma(state.l, alpha, P.sum(axis=1))
    acc = state.acc * alpha[:, None] + dot(P.astype(V.dtype), V)
    return State(m, l, acc)


def combine(state, m, l, O):
    """States of other keys, one row's: maxima and sums (1, parts), outputs (parts, width). A part with l == 0 has seen
    no key and is skipped, whatever else it holds. Maxima are natural, the state's too."""
    there = l != 0.0
    top = maximum(state.m, where(there, m, -inf).max(axis=1))
    shift = level(top)
    alpha = power(state.m - shift, NATURAL)
    w = where(there, power(m - shift[:, None], NATURAL), 0.0)
    total = where(there, w * l, 0.0).sum(axis=1)
    seen = there.max(axis=0)[:, None]
    return State(top, state.l * alpha + total, state.acc * alpha[:, None] + dot(w, where(seen, O, 0.0)))


def natural(state, unit):
    """The state with a natural maximum."""
    return State(state.m * unit, state.l, state.acc)


def sink(state, logit):
    """One more logit for each row, which takes part in the denominator only; natural, as the state is."""
    m = maximum(state.m, logit)
    shift = level(m)
    alpha = power(state.m - shift, NATURAL)
    return State(m, state.l * alpha + power(logit - shift, NATURAL), state.acc * alpha[:, None])


def finish(state):
    """Output and logsumexp of a natural state; a row that has seen nothing gives 0 and -inf."""
    scale = where(state.l == 0.0, 0.0, 1.0 / state.l)
    return state.acc * scale[:, None], state.m + log2(state.l) * LN2
