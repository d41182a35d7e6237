"""Gathers whose columns repeat: `codes[rows[:, None], (arange(n) // 8)[None, :]]` reads every column 8 times in a row.

Packed codes are read so. Written as it stands, that is one load for each element. Here it is a load of the columns that
there are, which is one of vectors and can be pipelined, and the tile is doubled in registers until it is as wide.

Only large tiles: behind a join of 8-bit elements Triton 3.6 gives a thread 8 neighbours along the contracted side of
`mma.sync`, 32 for the four threads of a row, and computes wrong products where that side is 16."""

from __future__ import annotations

from typing import NamedTuple

from ....ir import Op, Value, constant, starts
from ....ir.affine import linear
from .padding import padded

LEAST_SIDE = 64  # of a tile; run on an H200 from there up


class Repeated(NamedTuple):
    """The columns of a gather, and how often each is read."""

    start: Value
    columns: int
    times: int  # a power of two


def repeated_columns(gather: Op) -> Repeated | None:
    """Match a gather of two dimensions whose last position is `arange(n) // times`; n is a power of two."""
    start = starts(gather)[-1]
    shape = gather.result.shape
    value = start
    while value.op is not None and value.op.kind in ("broadcast", "expand") and len(value.shape) > 1:
        if value.op.kind == "expand" and value.op.attrs["position"] != 0:
            return None
        value = value.op.operands[0]
    quotient = value.op
    if len(shape) != 2 or min(shape) < LEAST_SIDE or padded(shape[1]) != shape[1]:
        return None
    if quotient is None or quotient.kind != "floordiv":
        return None
    form, divisor = linear(quotient.operands[0]), constant(quotient.operands[1])
    if form is None or form.const or form.terms or form.remainders or not isinstance(divisor, int):
        return None
    factor = form.iotas.get(0, 0)
    times = divisor // factor if factor > 0 and divisor % factor == 0 else 1
    if times < 2 or times & (times - 1) or shape[1] % times or value.shape != shape[1:]:
        return None
    return Repeated(start, shape[1] // times, times)
