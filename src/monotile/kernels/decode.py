"""Split decode: few query rows against many keys. Each split of the keys has a softmax state of its own."""

from monotile.language import Const, Tensor, arange, blocks, cdiv, dot, kernel, maximum, minimum, program_id

from . import scores, softmax
from .visibility import FULL, PARTIAL, Place, by_position, is_additive, visible, visible_keys


@kernel
def decode(
    q: Tensor["B Hkv G Nq D"], k: Tensor["B Hkv Nk D"], v: Tensor["B Hkv Nk Dv"], mask: Tensor["B Hkv G Nq Nk"],
    o: Tensor["B Hkv R S Dv"], m: Tensor["B Hkv R S"], l: Tensor["B Hkv R S"], sinks: Tensor["Hq"],
    out: Tensor["B Hkv R Dv"], lse: Tensor["B Hkv R"], scale: float, per_split: int,
    *, options: Const, D: Const, Dv: Const, BR: Const, BK: Const,
):  # fmt: skip
    """Each program owns `per_split` keys of one KV head and BR of the rows that read it: Nq rows of each of G query
    heads. It writes the state of its split. Where `out` is given and there are no splits to fill (S is 0), all keys are
    one split and its program writes the output itself."""
    G, Nq, Nk, R = q.shape[2], q.shape[3], k.shape[2], o.shape[2]
    b, g, s, n = program_id(k.shape[0], k.shape[1], maximum(o.shape[3], 1), cdiv(R, BR))
    # Never negative, which the compiler cannot know of `per_split`: no loop over keys before the first.
    low, high = maximum(minimum(s * per_split, Nk), 0), minimum(s * per_split + per_split, Nk)
    row = (n * BR + arange(BR))[:, None]
    head, i = row // Nq, row % Nq
    Q = q[b, g, head, i, arange(D)[None, :]]
    rule = scores.Rule(options, scale, is_additive(mask))
    score_scale = scores.score_scale(rule)

    def at(keys):
        return Place(b, g * G + head, i, keys, Nq, Nk, inside=row < R, end=high)

    state = softmax.empty(BR, Dv)
    for j in blocks(high - low, BK, lambda cols: by_position(options, at(low + cols))):
        place = at(low + j + arange(BK))
        M = mask[b, g, head, i, place.keys[None, :]] if mask is not None else None
        S = scores.score(rule, dot(Q, k[b, g, place.keys].T), place, M)
        seen = visible(options, place, M)
        keys = visible_keys(options, place, M, seen, FULL if mask is None else PARTIAL)
        state = softmax.step(state, S, v[b, g, place.keys], seen, keys, score_scale)

    rows = n * BR + arange(BR)
    state = softmax.in_natural_units(state, score_scale)
    if o.shape[3] > 0:
        m[b, g, rows, s], l[b, g, rows, s], o[b, g, rows, s] = state
    elif out is not None:  # by the arithmetic of a merge, so that a cache which outgrows one split changes no bit
        if sinks is not None:
            state = softmax.sink(state, sinks[g * G + rows // Nq])
        out[b, g, rows], L = softmax.finish(state)
        if lse is not None:
            lse[b, g, rows] = L
