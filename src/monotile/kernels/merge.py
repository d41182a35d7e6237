"""Merge softmax states of different keys into the attention over all of them."""

from monotile.language import Const, Tensor, arange, cdiv, float32, inf, kernel, program_id, where

from . import softmax


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
