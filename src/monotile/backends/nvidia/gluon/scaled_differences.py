"""`exp2((x - y) * c)`, for a tile, a number for each row and one factor, with one instruction for each argument.

It is x * c - y * c with one rounding, the product y * c being rounded before. That product is the same for a whole row,
so that all of the row is off alike: by half a unit in the last place of y * c. For y * c below FAR that is 2^-13 at
most. Rows with greater ones are subtracted first, exactly: their elements become x - y, and what is taken off 0. Such
rows are rare, and the warps that have none branch past the subtractions.

A thread holds elements of two rows: of every four in a row of registers, two of the first and two of the second."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from typing import NamedTuple

from ....dtypes import float32
from ....ir import Op, Value

Uses = Mapping[Value, list[Op]]
FAR = 4096.0
FAR_BITS = f"0f{struct.unpack('<I', struct.pack('<f', FAR))[0]:08X}"  # as PTX has it


def product_of(difference: Op, uses: Uses) -> Op | None:
    """The product that a difference of a tile and a row's number is for, if it is for nothing else, and an exponential
    alone reads the product: to others a small error of a small difference may matter."""
    readers = uses.get(difference.result, []) if difference.kind == "sub" else []
    if len(readers) != 1 or readers[0].kind != "mul" or len(difference.result.shape) != 2:
        return None
    tile, number = difference.operands
    factors = [v for v in readers[0].operands if v is not difference.result]
    whole = tile.shape == difference.result.shape and difference.result.dtype is float32
    raised = all(op.kind == "exp2" for op in uses.get(readers[0].result, []))
    fits = whole and raised and _of_rows(number) and len(factors) == 1 and not factors[0].shape
    return readers[0] if fits else None


class Parts(NamedTuple):
    difference: Op
    tile: Value
    numbers: Value  # one for each row
    factor: Value


def parts_of(product: Op, uses: Uses) -> Parts | None:
    """What such a product is made of; None where it is another one."""
    if product.kind != "mul":
        return None
    for one, factor in (product.operands, product.operands[::-1]):
        if one.op is not None and product_of(one.op, uses) is product:
            tile, number = one.op.operands
            assert number.op is not None
            return Parts(one.op, tile, number.op.operands[0], factor)
    return None


def _of_rows(value: Value) -> bool:
    return value.op is not None and value.op.kind == "expand" and value.op.attrs["position"] == 1


def function(count: int) -> str:
    """The name of the function for tiles of which each thread holds so many elements."""
    return f"scaled_difference_{count}"


def helpers(text: str) -> list[str]:
    """The functions that a text calls."""
    return [_source(int(count)) for count in sorted(set(re.findall(r"\bscaled_difference_(\d+)\(", text)), key=int)]


def _source(count: int) -> str:
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
@triton.jit
def {function(count)}(x, y, by):
    """(x - y) * by, with a y for each row: fused, where that does not round much away."""
    top = y * by
    asm: tl.constexpr = (
{asm}
    )
    places: tl.constexpr = "{places}"
    x = tl.inline_asm_elementwise(asm, places, [x, y[:, None], top[:, None]], tl.float32, is_pure=True, pack={count})
    return tl.fma(x, by, tl.where(tl.abs(top) >= {FAR}, 0.0, -top)[:, None])
'''
