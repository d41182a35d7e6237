"""The operators of kernels, on run-time and on compile-time values."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

# The operators: the op they build on run-time values, and the function they are on compile-time values.
BINARY: dict[type[ast.operator], tuple[str | None, Callable[[Any, Any], Any]]] = {
    ast.Add: ("add", operator.add), ast.Sub: ("sub", operator.sub), ast.Mult: ("mul", operator.mul),
    ast.Div: ("div", operator.truediv), ast.FloorDiv: ("floordiv", operator.floordiv), ast.Mod: ("mod", operator.mod),
    ast.BitAnd: ("and", operator.and_), ast.BitOr: ("or", operator.or_), ast.BitXor: ("xor", operator.xor),
    ast.Pow: (None, operator.pow), ast.LShift: ("shl", operator.lshift), ast.RShift: ("shr", operator.rshift),
    ast.MatMult: (None, operator.matmul),
}  # fmt: skip
COMPARE: dict[type[ast.cmpop], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Lt: ("lt", operator.lt), ast.LtE: ("le", operator.le), ast.Gt: ("gt", operator.gt),
    ast.GtE: ("ge", operator.ge), ast.Eq: ("eq", operator.eq), ast.NotEq: ("ne", operator.ne),
}  # fmt: skip
MAX_BITS = 4096  # of a compile-time int, so that 10**10**10 fails at once
MAX_ITEMS = 2**16  # of a compile-time tuple or string made with *


def is_too_large(function: Callable[[Any, Any], Any], left: Any, right: Any) -> bool:
    """Return True if an operator on compile-time values would make an enormous int, tuple or string."""
    bits = items = 0
    if isinstance(left, int) and isinstance(right, int):
        if function is operator.pow:
            bits = left.bit_length() * max(right, 0)
        elif function is operator.lshift:
            bits = left.bit_length() + max(right, 0)
    if function is operator.mul:
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, tuple | str) and isinstance(times, int):
                items = len(sequence) * times
    return bits > MAX_BITS or items > MAX_ITEMS
