"""The gradients of sinks and of an additive mask."""

from monotile.language import Const, Tensor, arange, blocks, cdiv, float32, kernel, minimum, program_id, where, zeros

from . import scores, softmax
from .backward import RowSources, score_gradients, terms_of_rows
from .row_groups import RowBlock
from .visibility import PARTIAL, by_position, place_of, visible


@kernel
def sink_gradient(
    sinks: Tensor["H"], lse: Tensor["B H Nq"], delta: Tensor["B H Nq"], dsinks: Tensor["H"], *, BR: Const = 128
):
    """Each program owns one head and sums over its rows, batch after batch."""
    h = program_id(sinks.shape[0])
    logit = sinks[h].astype(float32)
    total = zeros(BR)
    for b in range(lse.shape[0]):
        for i in range(0, lse.shape[2], BR):
            rows = i + arange(BR)
            weight = softmax.exp(logit - softmax.shift_of(lse[b, h, rows]), softmax.NATURAL_SCALE)
            total -= where(rows < lse.shape[2], weight * delta[b, h, rows], 0.0)
    dsinks[h] = total.sum(axis=0)


@kernel
def mask_gradient(
    do: Tensor["B H Nq Dv"], q: Tensor["B H Nq D"], k: Tensor["B Hkv Nk D"], v: Tensor["B Hkv Nk Dv"],
    mask: Tensor["B H Nq Nk"], lse: Tensor["B H Nq"], delta: Tensor["B H Nq"], dmask: Tensor["MB MH MQ MK"],
    scale: float, *, options: Const, D: Const, Dv: Const, BR: Const, BK: Const, summed: Const,
):  # fmt: skip
    """Each program owns a tile of the mask's gradient. `summed` says for batch, heads, rows and keys whether the mask
    broadcasts along them: the program then sums over all of them, in order."""
    B, H, Nq, Nk = mask.shape
    MB, MH, MQ, MK = dmask.shape
    mb, mh, mi, mj = program_id(MB, MH, cdiv(MQ, BR), cdiv(MK, BK))
    group, rule = H // k.shape[1], scores.Rule(options, scale, True)
    low, high = part(mj * BK, BK, Nk, summed[3])

    def add_rows(total, b, h, i):
        """Add the scores of some rows."""
        rows = i + arange(BR)
        terms = terms_of_rows(RowSources(do, q, lse, delta), b, h, rows)

        def at(cols):
            return place_of(RowBlock(b, h, i // BR, rows, Nq, h, rows, Nq), cols, Nk, False)

        for j in blocks(high, BK, lambda cols: by_position(options, at(cols)), start=low):
            cols = j + arange(BK)
            M, K, V = mask[b, h, rows, cols], k[b, h // group, cols], v[b, h // group, cols]
            seen = visible(options, at(cols), M, PARTIAL) & at(cols).inside
            _, dS, _ = score_gradients(rule, terms, K, V, at(cols), M, seen)
            total += dS
        return total

    total = zeros((BR, BK))
    first_batch, end_batch = part(mb, 1, B, summed[0])
    first_head, end_head = part(mh, 1, H, summed[1])
    first_row, end_row = part(mi * BR, BR, Nq, summed[2])
    for b in range(first_batch, end_batch):
        for h in range(first_head, end_head):
            for i in range(first_row, end_row, BR):
                total = add_rows(total, b, h, i)
    rows, cols = mi * BR + arange(BR), mj * BK + arange(BK)
    if summed[2] and summed[3]:
        dmask[mb, mh, 0, 0] = total.sum(axis=0).sum(axis=0)
    elif summed[2]:
        dmask[mb, mh, 0, cols] = total.sum(axis=0)
    elif summed[3]:
        dmask[mb, mh, rows, 0] = total.sum(axis=1)
    else:
        dmask[mb, mh, rows, cols] = total


def part(first, length, end, whole):
    """A program's part of a dimension: `length` from `first` on, or all of it."""
    return (0, end) if whole else (first, minimum(first + length, end))
