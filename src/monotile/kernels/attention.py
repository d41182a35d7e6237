"""Attention, forward: o = softmax(q k^T * scale) v with every option, and the logsumexp of each row."""

from monotile.language import Const, Tensor, arange, blocks, cdiv, dot, float32, kernel, program_id

from . import scores, softmax
from .visibility import FULL, Place, by_block_case, by_position, is_additive, visible, visible_keys


@kernel
def attention(
    q: Tensor["B Hq Nq D"], k: Tensor["B Hkv Nk D"], v: Tensor["B Hkv Nk Dv"], mask: Tensor["B Hq Nq Nk"],
    block_map: Tensor["B Hq MQ MK"], sinks: Tensor["Hq"], o: Tensor["B Hq Nq Dv"], lse: Tensor["B Hq Nq"], scale: float,
    *, options: Const, D: Const, Dv: Const, BQ: Const, BK: Const, covered: Const = False,
):  # fmt: skip
    """Each program owns BQ query rows of one head. The last rows come first: under causality they see the most keys.
    `covered`: the block map tells COVERED blocks from PARTIAL ones."""
    Nq, Nk = q.shape[2], k.shape[2]
    b, h, n = program_id(q.shape[0], q.shape[1], cdiv(Nq, BQ))
    i = cdiv(Nq, BQ) - 1 - n
    g = h // (q.shape[1] // k.shape[1])  # the KV head
    rows = i * BQ + arange(BQ)
    Q = q[b, h, rows]
    rule = scores.Rule(options, scale, is_additive(mask), approximate=v.dtype != float32 and lse is None)
    score_scale = scores.score_scale(rule)

    def at(cols):
        return Place(b, h, rows[:, None], cols, Nq, Nk, inside=rows[:, None] < Nq)

    def step(state, cols, case):
        M = mask[b, h, rows, cols] if case != FULL else None
        S = scores.score(rule, dot(Q, k[b, g, cols].T), at(cols), M)
        seen = visible(options, at(cols), M)
        keys = visible_keys(options, at(cols), M, seen, case)
        return softmax.step(state, S, v[b, g, cols], seen, keys, score_scale)

    state = softmax.empty(BQ, Dv)
    for j in blocks(Nk, BK, lambda cols: by_position(options, at(cols))):
        case = block_map[b, h, i, j // BK] if block_map is not None else None
        state = by_block_case(step, state, j + arange(BK), mask, case, covered)

    state = softmax.in_natural_units(state, score_scale)
    if sinks is not None:
        state = softmax.sink(state, sinks[h] - scores.softcap_offset(rule))
    o[b, h, rows], L = softmax.finish(state)
    if lse is not None:
        lse[b, h, rows] = L
