"""Attention, forward: o = softmax(q k^T * scale) v with every option, and the logsumexp of each row."""

from monotile.language import Const, Tensor, arange, blocks, cdiv, dot, float32, inf, kernel, program_id, where

from . import softmax
from .mask_blocks import DENSE, MIXED, UNCHANGED
from .scores import Place, by_place, in_reach, is_additive, left_out, live, scaled, seen_by_some, unit, visible


@kernel
def attention(
    q: Tensor["B Hq Nq D"], k: Tensor["B Hkv Nk D"], v: Tensor["B Hkv Nk Dv"], mask: Tensor["B Hq Nq Nk"],
    kinds: Tensor["B Hq MQ MK"], sinks: Tensor["Hq"], o: Tensor["B Hq Nq Dv"], lse: Tensor["B Hq Nq"], scale: float,
    *, options: Const, D: Const, Dv: Const, BQ: Const, BK: Const,
):  # fmt: skip
    """Each program owns BQ query rows of one head. The last rows come first: under causality they see the most keys."""
    Nq, Nk = q.shape[2], k.shape[2]
    b, h, n = program_id(q.shape[0], q.shape[1], cdiv(Nq, BQ))
    i = cdiv(Nq, BQ) - 1 - n
    g = h // (q.shape[1] // k.shape[1])
    rows = i * BQ + arange(BQ)
    Q = q[b, h, rows]
    rough = v.dtype != float32 and lse is None  # all that becomes of scores are weights, rounded to 16 bits
    natural = is_additive(mask)
    each = unit(options, scale, natural, rough)

    def add(state, cols, kind):
        at = Place(b, h, rows[:, None], cols[None, :], rows[:, None] < Nq)
        m = mask[b, h, rows, cols] if kind != UNCHANGED else None
        S = scaled(options, dot(Q, k[b, g, cols].T), scale, at, m, natural, rough)
        seen = visible(options, at, m, Nq, Nk)
        # A key that no row sees must not reach a sum, not even as 0 * NaN.
        if kind == MIXED or options.mask_mod is not None:
            keys = seen_by_some(options, seen, at, m)
        elif kind == DENSE and by_place(options):
            keys = seen_by_some(options, seen, at, m) | in_reach(options, at.i, at.j, Nq, Nk).min(axis=0)
        else:
            keys = live(options, cols, Nq, Nk)
        V = where(keys[:, None], v[b, g, cols], 0.0)
        return softmax.step(state, where(seen, S, -inf), V, each)

    state = softmax.empty(BQ, Dv)
    for j in blocks(Nk, BK, lambda cols: in_reach(options, rows[:, None], cols[None, :], Nq, Nk)):
        cols = j + arange(BK)
        if kinds is None:
            state = add(state, cols, UNCHANGED if mask is None else MIXED)
        else:
            kind = kinds[b, h, i, j // BK]
            if kind == MIXED:
                state = add(state, cols, MIXED)
            elif kind == UNCHANGED:
                state = add(state, cols, UNCHANGED)
            elif options.fine and kind == DENSE:
                state = add(state, cols, DENSE)
    state = softmax.natural(state, each)
    if sinks is not None:
        state = softmax.sink(state, sinks[h] - left_out(options, rough))
    o[b, h, rows], L = softmax.finish(state)
    if lse is not None:
        lse[b, h, rows] = L
