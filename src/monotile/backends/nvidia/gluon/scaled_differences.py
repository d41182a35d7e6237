"""`exp2((x - y) * c)`, for a tile, a number for each row and one factor, with one FMA for each argument of exp2.

It is x * c - y * c with one rounding, the product y * c being rounded before. That product is the same for a whole row,
so that all of the row is off by the same amount: half a unit in the last place of y * c, which for |y * c| < FAR is
2^-13 at most. Rows with a greater product are subtracted first, exactly: their x becomes x - y, and their y becomes 0.
Such rows are rare, and warps without one branch past the subtractions.

A thread holds elements of two rows: of every four registers, two belong to the first row and two to the second."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

from ....dtypes import float32
from ....ir import Op, Value

Uses = Mapping[Value, list[Op]]
FAR = 4096.0
FAR_BITS = f"0f{struct.unpack('<I', struct.pack('<f', FAR))[0]:08X}"  # as PTX has it


def scaling_of(difference: Op, uses: Uses) -> Op | None:
    """Return the product by which a difference of a tile and a number for each row is scaled, if nothing else reads the
    difference and only exponentials read the product: elsewhere a small error of a small difference may matter."""
    readers = uses.get(difference.result, []) if difference.kind == "sub" else []
    if len(readers) != 1 or readers[0].kind != "mul" or len(difference.result.shape) != 2:
        return None
    tile, rows = difference.operands
    factors = [v for v in readers[0].operands if v is not difference.result]
    whole = tile.shape == difference.result.shape and difference.result.dtype is float32
    exponents = all(op.kind == "exp2" for op in uses.get(readers[0].result, []))
    fits = whole and exponents and _per_row(rows) and len(factors) == 1 and not factors[0].shape
    return readers[0] if fits else None


class ScaledDifference(NamedTuple):
    difference: Op
    tile: Value
    rows: Value  # a vector with a number for each row
    factor: Value


def match(product: Op, uses: Uses) -> ScaledDifference | None:
    """Return the parts of such a product; None where it is another one."""
    if product.kind != "mul":
        return None
    for one, factor in (product.operands, product.operands[::-1]):
        if one.op is not None and scaling_of(one.op, uses) is product:
            tile, rows = one.op.operands
            assert rows.op is not None
            return ScaledDifference(one.op, tile, rows.op.operands[0], factor)
    return None


def _per_row(value: Value) -> bool:
    return value.op is not None and value.op.kind == "expand" and value.op.attrs["position"] == 1


def function(count: int) -> str:
    """Name the function for tiles of which each thread holds `count` elements."""
    return f"scaled_difference_{count}"


def source(count: int) -> str:
    """Write that function."""
    x, y, top = count, 2 * count, 3 * count
    lines = [
        "{ .reg .pred p, q, far; .reg .f32 t;",
        f"abs.f32 t, ${top}; setp.ge.f32 p, t, {FAR_BITS}; abs.f32 t, ${top + 2}; setp.ge.f32 q, t, {FAR_BITS};",
        "or.pred far, p, q; vote.sync.any.pred far, far, 0xffffffff; @far bra FAR;",
        *(f"mov.f32 ${i}, ${x + i};" for i in range(count)),
        "bra DONE; FAR:",
        *(
            f"sub.rn.f32 t, ${x + i}, ${y + i}; selp.f32 ${i}, t, ${x + i}, {'q' if i & 2 else 'p'};"
            for i in range(count)
        ),
        "DONE: }",
    ]
    asm = "\n".join(f'        "{line} "' for line in lines)
    places = ",".join(["=&f"] * count + ["f"] * (3 * count))
    return f'''\
@gluon.jit
def {function(count)}(x, y, by):
    """(x - y) * by, with a y for each row: fused, where that does not round much away."""
    top = y * by
    asm: gl.constexpr = (
{asm}
    )
    places: gl.constexpr = "{places}"
    x = gl.inline_asm_elementwise(asm, places, [x, y[:, None], top[:, None]], gl.float32, is_pure=True, pack={count})
    return gl.fma(x, by, gl.where(gl.abs(top) >= {FAR}, 0.0, -top)[:, None])
'''
