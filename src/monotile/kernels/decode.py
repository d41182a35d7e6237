"""Split decode: few query rows against many keys. The keys are cut into splits, each of which gives a softmax state
of its own."""

from monotile.language import (
    Const,
    Tensor,
    arange,
    blocks,
    cdiv,
    dot,
    inf,
    kernel,
    maximum,
    minimum,
    program_id,
    where,
)  # fmt: skip

from . import softmax
from .scores import Place, in_reach, is_additive, live, scaled, seen_by_some, unit, visible


@kernel
def decode(
    q: Tensor["B Hkv G Nq D"], k: Tensor["B Hkv Nk D"], v: Tensor["B Hkv Nk Dv"], mask: Tensor["B Hkv G Nq Nk"],
    o: Tensor["B Hkv R S Dv"], m: Tensor["B Hkv R S"], l: Tensor["B Hkv R S"], sinks: Tensor["Hq"],
    out: Tensor["B Hkv R Dv"], lse: Tensor["B Hkv R"], scale: float, per: int,
    *, options: Const, D: Const, Dv: Const, BR: Const, BK: Const,
):  # fmt: skip
    """Each program owns `per` keys of one KV head and BR of the rows that read it: Nq rows of each of G query heads.
    It gives the state of its split. Where `out` is given and there are no splits to fill (S is 0), all keys are one
    split and its program gives the output itself."""
    G, Nq, Nk, R = q.shape[2], q.shape[3], k.shape[2], o.shape[2]
    b, g, s, n = program_id(k.shape[0], k.shape[1], maximum(o.shape[3], 1), cdiv(R, BR))
    # Never negative, which the compiler cannot know of `per`: there is no loop over keys before the first.
    low, high = maximum(minimum(s * per, Nk), 0), minimum(s * per + per, Nk)
    row = (n * BR + arange(BR))[:, None]
    head, i = row // Nq, row % Nq
    Q = q[b, g, head, i, arange(D)[None, :]]

    natural = is_additive(mask)
    each = unit(options, scale, natural)
    state = softmax.empty(BR, Dv)
    for j in blocks(high - low, BK, lambda cols: in_reach(options, i, low + cols[None, :], Nq, Nk)):
        cols = low + j + arange(BK)
        at = Place(b, g * G + head, i, cols[None, :], row < R)
        M = mask[b, g, head, i, cols[None, :]] if mask is not None else None
        S = scaled(options, dot(Q, k[b, g, cols].T), scale, at, M, natural)
        seen = visible(options, at, M, Nq, Nk) & (cols[None, :] < high)
        whole = mask is not None or options.mask_mod is not None
        keys = seen_by_some(options, seen, at, M) if whole else live(options, cols, Nq, Nk) & (cols < high)
        V = where(keys[:, None], v[b, g, cols], 0.0)
        state = softmax.step(state, where(seen, S, -inf), V, each)
    rows = n * BR + arange(BR)
    state = softmax.natural(state, each)
    if o.shape[3] > 0:
        m[b, g, rows, s], l[b, g, rows, s], o[b, g, rows, s] = state
    elif out is not None:  # by the arithmetic of a merge, so that a cache which outgrows one split changes no bit
        if sinks is not None:
            state = softmax.sink(state, sinks[g * G + rows // Nq])
        out[b, g, rows], L = softmax.finish(state)
        if lse is not None:
            lse[b, g, rows] = L
