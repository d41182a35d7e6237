"""Attention, forward: o = softmax(q k^T * scale) v with every option, and the logsumexp of each row."""

from monotile.language import Const, Tensor, arange, blocks, cdiv, dot, inf, kernel, program_id, where

from . import softmax
from .scores import Place, in_reach, live, scaled, visible
from .softmax import LOG2E


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

    def add(state, cols, masked, unseen=True):
        at = Place(b, h, rows[:, None], cols[None, :], rows[:, None] < Nq)
        m = mask[b, h, rows, cols] if masked else None
        S = scaled(options, dot(Q, k[b, g, cols].T), scale, at, m)
        seen = visible(options, at, m, Nq, Nk)
        # A key that no row sees must not reach a sum, not even as 0 * NaN.
        some = (masked and unseen) or options.mask_mod is not None
        keys = seen.max(axis=0) if some else live(options, cols, Nq, Nk)
        V = where(keys[:, None], v[b, g, cols], 0.0)
        return softmax.step(state, where(seen, S, -inf), V)

    state = softmax.empty(BQ, Dv)
    for j in blocks(Nk, BK, lambda cols: in_reach(options, rows[:, None], cols[None, :], Nq, Nk)):
        cols = j + arange(BK)
        if kinds is None:
            state = add(state, cols, mask is not None)
        else:  # a block of the mask is hidden (0), mixed (1, or 3: but no key is unseen) or changes nothing (2)
            kind = kinds[b, h, i, j // BK]
            if kind == 1:
                state = add(state, cols, True)
            elif kind == 2:
                state = add(state, cols, False)
            elif options.fine and kind == 3:
                state = add(state, cols, True, False)
    if sinks is not None:
        state = softmax.sink(state, sinks[h] * LOG2E)
    o[b, h, rows], L = softmax.finish(state)
    if lse is not None:
        lse[b, h, rows] = L
