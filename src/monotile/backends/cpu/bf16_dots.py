"""Which dots of panels multiply narrow numbers without converting them: by AMX, or by pair products (AVX512-BF16)."""

from __future__ import annotations

from collections.abc import Iterable

from ...ir import Op, Value
from .amx import BFLOAT16, BYTE_PRODUCTS, Product
from .axes import Axes, Axis
from .fuse import unviewed
from .target import Target

MOST_BYTES = 2**31 // 2**16  # products of bytes whose sum is an int32


def tiled_dots(dots: Iterable[Op], axes: Axes, target: Target, panel_axis: Axis | None) -> dict[Op, Product]:
    """Return the dots that use AMX, with their products: their contraction fills at least half a tile."""
    if not target.amx:
        return {}
    found = {dot: _product(dot, axes, target, panel_axis) for dot in dots if _narrow(dot)}
    return {dot: product for dot, product in found.items() if 2 * _depth(dot, axes) >= product.steps}


def _product(dot: Op, axes: Axes, target: Target, panel_axis: Axis | None) -> Product:
    """Return the product of bytes if both operands are numbers of int8 or uint8 in bfloat16, as an integer dot has
    them: its sums are exact either way."""
    types = [_bytes_of(operand) for operand in dot.operands]
    if axes.dots[dot][2] is not panel_axis:  # the operand with the lanes is the first
        types.reverse()
    a, b = types
    whole = a is not None and b is not None and BYTE_PRODUCTS[a, b].steps <= 2 * _depth(dot, axes) < 2 * MOST_BYTES
    return BYTE_PRODUCTS[str(a), str(b)] if whole and target.amx_bytes else BFLOAT16


def _bytes_of(operand: Value) -> str | None:
    """Return the type of the bytes that an operand was cast from."""
    op = unviewed(operand).op
    name = op.operands[0].dtype.name if op is not None and op.kind == "cast" else ""
    return name if name in ("int8", "uint8") else None


def paired_dots(dots: Iterable[Op], axes: Axes, target: Target) -> set[Op]:
    """Return the dots that use pair products: their contraction has whole vectors."""
    found = {dot for dot in dots if _narrow(dot) and _depth(dot, axes) > 1 and _depth(dot, axes) % target.lanes == 0}
    return found if target.bfloat16_pairs else set()


def _narrow(dot: Op) -> bool:
    return all(v.dtype.name == "bfloat16" for operand in dot.operands for v in (operand, unviewed(operand)))


def _depth(dot: Op, axes: Axes) -> int:
    _, k, _ = axes.dots[dot]
    return 1 if k is None else k.extent
