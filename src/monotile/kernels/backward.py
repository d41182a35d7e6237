"""The gradients of q, k and v, from the output of attention, its logsumexp and the gradient of the output.

docs/internals/backward.md has the formulas. Weights are recomputed from scores and logsumexp, tile by tile, so that
nothing of the size of the scores is stored. `backward_queries` owns rows and sums over keys. `backward_keys` owns keys
and sums over the rows of all query heads that read them; given a workspace, it also adds up the gradients of these
rows. Every sum belongs to one program and has one order."""

from typing import Any, NamedTuple

from monotile.language import Const, Tensor, arange, blocks, cdiv, dot, float32, kernel, program_id, where, zeros

from . import key_sources, programs, scores, sequences, softmax
from .row_groups import RowBlock
from .visibility import (
    CASES,
    FULL,
    block_case,
    by_block_case,
    by_position,
    case_by_mod,
    has_positions,
    is_additive,
    place_of,
    visible,
    visible_keys,
)


class RowSources(NamedTuple):
    """The tensors that gradients read rows of."""

    do: Any
    q: Any
    lse: Any
    delta: Any


class RowTerms(NamedTuple):
    """What the gradients need of some rows."""

    Q: Any  # (rows, D)
    dO: Any  # (rows, Dv)
    lse: Any  # (rows,) natural
    delta: Any  # (rows,)


class KeySums(NamedTuple):
    """Gradients of some keys and values so far; None of what is not asked for."""

    dK: Any  # (keys, D), to be multiplied by the scale
    dV: Any  # (keys, Dv)


def visible_rows(options, at, seen, case, hides, all_sighted):
    """Rows that see some key of the tile, (rows, 1); where nothing but position `hides` keys, those that see some key
    of their head, or all where it is known that they do (`all_sighted`). `seen` leaves out rows past the last one."""
    if all_sighted:
        return True
    if case != FULL or (hides and has_positions(options)):
        return seen.max(axis=1)[:, None]
    return sees_some_key(options, at.i, at.Nq, at.Nk)


def sees_some_key(options: Any, i: Any, Nq: Any, Nk: Any) -> Any:
    """True for rows that see some key by position. Those past the last one are zero as they are loaded."""
    shift = Nk - Nq
    sees = True
    if options.causal == "lower_right":
        sees = sees & (i + shift >= 0)
    if options.left is not None:
        sees = sees & (i + (shift - options.left) < Nk)
        if options.causal == "upper_left":
            sees = sees & (shift <= options.left)
    if options.right is not None:
        sees = sees & (i + (shift + options.right) >= 0)
    return sees


def counts(options, at, as_it_is):
    """True for pairs of a row and a key that are there and visible by position. That the row then sees some key is part
    of it where this is a question: what `blocks` is told of a whole block, it takes as known in it."""
    found = by_position(options, at) & at.inside
    return found if as_it_is else found & sees_some_key(options, at.i, at.Nq, at.Nk)


@kernel
def row_deltas(
    do: Tensor["B H Nq Dv"], o: Tensor["B H Nq Dv"], dlse: Tensor["B H Nq"], delta: Tensor["B H Nq"],
    *, Dv: Const, BR: Const = 16,
):  # fmt: skip
    """The sum of do * o along each row, less the gradient of its logsumexp. do of a row whose output is zero, as where
    it sees no key, may hold anything."""
    b, h, n = program_id(do.shape[0], do.shape[1], cdiv(do.shape[2], BR))
    rows = n * BR + arange(BR)
    O = o[b, h, rows].astype(float32)
    total = where((O != 0.0).max(axis=1), (do[b, h, rows].astype(float32) * O).sum(axis=1), 0.0)
    delta[b, h, rows] = total if dlse is None else total - dlse[b, h, rows]


def terms_of_rows(of, b, h, rows):
    return RowTerms(of.q[b, h, rows], of.do[b, h, rows], of.lse[b, h, rows], of.delta[b, h, rows])


def rows_between(of, start, end):
    """The rows of one sequence."""
    span = of.q[:, :, start:end]
    return RowSources(of.do[:, :, start:end], span, of.lse[:, :, start:end], of.delta[:, :, start:end])


def keys_between(x, start, end):
    """The keys of one sequence; None of a tensor that is left out."""
    return x[:, :, start:end] if x is not None else None


class KeyPart(NamedTuple):
    """What a program of `backward_keys` owns, and the tensors of its sequence."""

    b: Any  # of the tensors
    sequence: Any
    head: Any  # KV head
    index: Any  # of its block of keys; 0 where it owns all
    rows_end: Any  # of the rows that it sums over
    rows: Any  # RowSources
    k: Any
    v: Any
    dk: Any
    dv: Any
    dq: Any
    sum_dq: Any


def part_of_program(rows, k, v, dk, dv, dq, sum_dq, q_offsets, k_offsets, spans, BK, together):
    """Keys of a batch, or of a sequence between others. The first come first: under causality most rows see them."""
    if k_offsets is None:
        b, g, n = program_id(k.shape[0], k.shape[1], cdiv(k.shape[2], BK) if dq is None else 1)
        return KeyPart(b, b, g, n, rows.q.shape[2], rows, k, v, dk, dv, dq, sum_dq)
    block = sequences.ragged_block(k, k_offsets, rows.q, q_offsets, BK, spans, together, whole=dq is not None)
    of = block.sequence
    rows = rows_between(rows, of.other_start, of.other_end)
    if dq is not None:
        dq, sum_dq = dq[:, :, of.other_start : of.other_end], sum_dq[:, :, of.other_start : of.other_end]
    k, v = k[:, :, of.start : of.end], v[:, :, of.start : of.end]
    dk, dv = keys_between(dk, of.start, of.end), keys_between(dv, of.start, of.end)
    index = block.span * together + block.place
    rows_end = where(block.used & (index * BK < k.shape[2]), rows.q.shape[2], 0)
    return KeyPart(0, of.number, block.head, index, rows_end, rows, k, v, dk, dv, dq, sum_dq)


def score_gradients(rule, terms, K, V, at, mask, seen):
    """The weights of a tile, the gradient of its scores, and that of its scaled products; 0 where a key is hidden."""
    products = dot(terms.Q, K.T)
    S = scores.score(rule, products, at, mask)
    P = where(seen, softmax.weights(S, terms.lse, scores.score_scale(rule)), 0.0)
    dS = P * (dot(terms.dO, V.T) - terms.delta[:, None])
    return P, where(seen, dS, 0.0), where(seen, dS * scores.derivative(rule, products, at), 0.0)


@kernel
def backward_queries(
    do: Tensor["B H Nq Dv"], q: Tensor["B H Nq D"], k: Tensor["B Hkv Nk D"], v: Tensor["B Hkv Nk Dv"],
    mask: Tensor["B H Nq Nk"], block_map: Tensor["B H MR MK"], lse: Tensor["B H Nq"], delta: Tensor["B H Nq"],
    q_offsets: Tensor["E"], k_offsets: Tensor["E"], spans: Tensor["SF U"], dq: Tensor["B H Nq D"], scale: float,
    *, options: Const, D: Const, Dv: Const, BR: Const, BK: Const, covered: Const = False, by_mod: Const = None,
    together: Const = 1,
):  # fmt: skip
    """Each program owns BR rows of a query head and sums over its keys. With `q_offsets` the one batch holds sequences
    one after the other, and the rows are those of one of them: `together` programs own those of one of its `spans`.
    `by_mod`: the mask_mod is in place of a block map."""
    of_rows = RowSources(do, q, lse, delta)
    if q_offsets is not None:
        own, of, sees = sequences.ragged_rows(q, q_offsets, k, k_offsets, BR, spans, together)
        of_rows, dq = rows_between(of_rows, of.start, of.end), dq[:, :, of.start : of.end]
        source = key_sources.ragged(k, v, of.other_start, of.other_end)
        b, k, v, Nk = source.b, source.k, source.v, source.count
        high = where(sees, Nk, 0)
    else:
        own, Nk = programs.dense_rows(q, BR), k.shape[2]
        b, high = own.b, Nk
    h, g = own.group, own.group // (q.shape[1] // k.shape[1])
    terms = terms_of_rows(of_rows, b, h, own.rows)
    rule = scores.Rule(options, scale, is_additive(mask))
    hides = mask is not None or options.mask_mod is not None

    def at(cols):
        return place_of(own, cols, Nk, False)

    def step(dQ, cols, case):
        M = mask[b, h, own.rows, cols] if mask is not None and case != FULL else None
        seen = visible(options, at(cols), M, case)
        keys = visible_keys(options, at(cols), M, seen, case, hides)
        K = where(keys[:, None], k[b, g, cols], 0.0)
        _, _, dX = score_gradients(rule, terms, K, v[b, g, cols], at(cols), M, seen)
        return dQ + dot(dX.astype(K.dtype), K)

    dQ = zeros((BR, D))
    for j in blocks(high, BK, lambda cols: by_position(options, at(cols))):
        case = block_case(options, block_map, own, at, j, BK, by_mod)
        dQ = by_block_case(step, dQ, j + arange(BK), case, hides, covered)
    dq[b, h, own.rows] = dQ * scale


@kernel
def backward_keys(
    do: Tensor["B H Nq Dv"], q: Tensor["B H Nq D"], k: Tensor["B Hkv Nk D"], v: Tensor["B Hkv Nk Dv"],
    mask: Tensor["B H Nq Nk"], block_map: Tensor["B H MR MK"], lse: Tensor["B H Nq"], delta: Tensor["B H Nq"],
    q_offsets: Tensor["E"], k_offsets: Tensor["E"], spans: Tensor["SF U"],
    dk: Tensor["B Hkv Nk D"], dv: Tensor["B Hkv Nk Dv"], dq: Tensor["B H Nq D"], workspace: Tensor["B H Nq D"],
    scale: float, *, options: Const, D: Const, Dv: Const, BR: Const, BK: Const, covered: Const = False,
    by_mod: Const = None, together: Const = 1, all_sighted: Const = False,
):  # fmt: skip
    """Each program owns BK keys of a KV head and sums over the rows of the query heads that read them: dk, dv or both.
    With `dq` it owns all keys of the KV head and adds up dq too, block after block, in float32: in `workspace`, or in
    dq itself. With `k_offsets` the one batch holds sequences in a row. `all_sighted`: every row sees some key."""
    sum_dq, rows = workspace if workspace is not None else dq, RowSources(do, q, lse, delta)
    part = part_of_program(rows, k, v, dk, dv, dq, sum_dq, q_offsets, k_offsets, spans, BK, together)
    b, sequence, g, n, rows_end, of_rows, k, v, dk, dv, dq, sum_dq = part
    Nq, Nk, group = of_rows.q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    rule, hides = scores.Rule(options, scale, is_additive(mask)), mask is not None or options.mask_mod is not None
    ends = hides or dq is not None  # else a key past the last one meets nothing but its own sums, which are not stored

    def add_keys(n):
        """Compute the gradients of block n of the keys, and add to dq."""
        cols = n * BK + arange(BK)
        K, V = k[b, g, cols], v[b, g, cols]

        def add_head(sums, h):
            """Add the rows of a query head."""

            def at(rows):
                return place_of(RowBlock(sequence, h, rows // BR, rows, Nq, h, rows, Nq), cols, Nk, False, ends)

            def step(sums, rows, case):
                M = mask[b, h, rows, cols] if mask is not None and case != FULL else None
                seen = visible(options, at(rows), M, case) & at(rows).inside
                sighted = visible_rows(options, at(rows), seen, case, hides, all_sighted)
                terms = terms_of_rows(of_rows, b, h, rows)
                terms = terms._replace(Q=where(sighted, terms.Q, 0.0), dO=where(sighted, terms.dO, 0.0))
                P, _, dX = score_gradients(rule, terms, K, V, at(rows), M, seen)
                sums = add_rows(sums, terms, P.astype(V.dtype), dX.astype(K.dtype))
                if dq is not None:
                    keys = visible_keys(options, at(rows), M, seen, case, hides)
                    sum_dq[b, h, rows] += dot(dX.astype(K.dtype), where(keys[:, None], K, 0.0))
                return sums

            for i in blocks(rows_end, BR, lambda rows: counts(options, at(rows), hides or all_sighted)):
                case = block_map[b, h, i // BR, n] if block_map is not None else None
                case = case_by_mod(options, at(i + arange(BR))) if by_mod == CASES else case
                sums = by_block_case(step, sums, i + arange(BR), case, hides, covered)
            return sums

        sums = KeySums(zeros((BK, D)) if dk is not None else None, zeros((BK, Dv)) if dv is not None else None)
        for h in range(g * group, g * group + group):
            sums = add_head(sums, h)
        store_sums(sums, dk, dv, b, g, cols, scale)

    if dq is None:
        add_keys(n)
    else:
        clear_rows(sum_dq, b, g * group, group, BR, D)
        for n in range(cdiv(Nk, BK)):
            add_keys(n)
        scale_rows(dq, sum_dq, b, g * group, group, scale, BR)


def add_rows(sums, terms, P, dX):
    """Add what some rows contribute, from their weights and the gradients of their scaled products."""
    dK, dV = sums
    if dV is not None:
        dV = dV + dot(P.T, terms.dO)
    if dK is not None:
        dK = dK + dot(dX.T, terms.Q)
    return KeySums(dK, dV)


def store_sums(sums, dk, dv, b, g, cols, scale):
    if dk is not None:
        dk[b, g, cols] = sums.dK * scale
    if dv is not None:
        dv[b, g, cols] = sums.dV


def clear_rows(sums, b, first, heads, BR, D):
    for h in range(first, first + heads):
        for i in range(0, sums.shape[2], BR):
            sums[b, h, i + arange(BR)] = zeros((BR, D))


def scale_rows(x, sums, b, first, heads, scale, BR):
    """x = sums * scale, for the rows of some heads."""
    for h in range(first, first + heads):
        for i in range(0, x.shape[2], BR):
            rows = i + arange(BR)
            x[b, h, rows] = sums[b, h, rows] * scale
