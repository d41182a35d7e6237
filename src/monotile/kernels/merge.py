"""Merge softmax states of different keys into the attention over all of them."""

from monotile.language import Const, Tensor, arange, cdiv, float32, inf, int32, kernel, maximum, program_id, where

from . import softmax, spans
from .balance import FIRST_SLOT, SEQUENCES, SPLITS


def tile_of_program(rows, Dv, SPAN):
    """This program's row, its index among the row's programs, and its columns: SPAN of them, or all."""
    if SPAN is None:
        return program_id(rows), 0, arange(Dv)
    r, c = program_id(rows, cdiv(Dv, SPAN))
    return r, c, c * SPAN + arange(SPAN)


@kernel
def merge(
    o: Tensor["R S Dv"], m: Tensor["R S"], l: Tensor["R S"], sinks: Tensor["H"], out: Tensor["R Dv"], lse: Tensor["R"],
    queries: int, *, Dv: Const, BS: Const, SPAN: Const = None,
):  # fmt: skip
    """Each program owns one row, or SPAN columns of it: its S parts (o unnormalised, m natural, l) become output and
    logsumexp. Where there are sinks, rows are `queries` of each of H heads, once or more."""
    r, c, cols = tile_of_program(o.shape[0], Dv, SPAN)
    row = r + arange(1)
    state = softmax.empty(1, SPAN or Dv)
    for j in range(0, o.shape[1], BS):
        parts = j + arange(BS)
        state = softmax.combine(state, m[row, parts], l[row, parts], o[r, parts, cols])
    if sinks is not None:
        state = softmax.sink(state, sinks[row // queries % sinks.shape[0]])
    out[row, cols], L = softmax.finish(state)
    if lse is not None and c == 0:
        lse[row] = L


@kernel
def merge_slots(
    o: Tensor["G BR W Dv"], m: Tensor["G BR W"], l: Tensor["G BR W"], plan: Tensor["F S"], q_offsets: Tensor["S"],
    sinks: Tensor["H"], out: Tensor["B H N Dv"], lse: Tensor["B H N"],
    *, Dv: Const, BR: Const, BS: Const, packed: Const, SPAN: Const = None,
):  # fmt: skip
    """The same for the slots of balanced splits. Each program owns one row of the output, or SPAN columns of it; the
    states of its block of rows lie in neighbouring slots."""
    r, c, cols = tile_of_program(out.shape[0] * out.shape[1] * out.shape[2], Dv, SPAN)
    N, H = out.shape[2], out.shape[1]
    b, h, i = r // (H * N), r // N % H, r % N
    s, position, Nq = b, i, N
    if q_offsets is not None:
        s = last_at_most(q_offsets, i)
        start, end = spans.sequence_ends(q_offsets, s, out)
        position, Nq = i - start.astype(int32), out[:, :, start:end].shape[2]
    heads = H // o.shape[0]
    row = h % heads * Nq + position if packed else position
    first = plan[FIRST_SLOT, s] + row // BR * plan[SPLITS, s]
    end = first + plan[SPLITS, s]
    o, m, l = o[:, :, first:end], m[:, :, first:end], l[:, :, first:end]
    g, lane = h // heads, row % BR
    state = softmax.empty(1, SPAN or Dv)
    for j in range(0, o.shape[2], BS):
        parts = j + arange(BS)
        state = softmax.combine(
            state, m[g, lane + arange(1), parts], l[g, lane + arange(1), parts], o[g, lane, parts, cols]
        )
    if sinks is not None:
        state = softmax.sink(state, sinks[h + arange(1)])
    out[b, h, i + arange(1), cols], L = softmax.finish(state)
    if lse is not None and c == 0:
        lse[b, h, i + arange(1)] = L


def last_at_most(offsets, place):
    """The last sequence that begins at `place` or before it."""
    begun = 0
    for j in range(0, offsets.shape[0], SEQUENCES):
        places = j + arange(SEQUENCES)
        begun = begun + where((places < offsets.shape[0]) & (offsets[places] <= place), 1, 0).sum()
    return maximum(begun - 1, 0)


@kernel
def merge_lse(
    o: Tensor["R S Dv"], lse: Tensor["R S"], out: Tensor["R Dv"], total: Tensor["R"],
    *, Dv: Const, BS: Const, SPAN: Const = None,
):  # fmt: skip
    """The same for normalised parts: outputs with their logsumexp."""
    r, c, cols = tile_of_program(o.shape[0], Dv, SPAN)
    row = r + arange(1)
    state = softmax.empty(1, SPAN or Dv)
    for j in range(0, o.shape[1], BS):
        parts = j + arange(BS)
        M = where(parts[None, :] < o.shape[1], lse[row, parts], -inf)
        state = softmax.combine(state, M, (-inf != M).astype(float32), o[r, parts, cols])
    out[row, cols], L = softmax.finish(state)
    if c == 0:
        total[row] = L
