"""Which dots of panels multiply bfloat16 without converting it: by AMX, or by pair products (AVX512-BF16)."""

from __future__ import annotations

from collections.abc import Iterable

from ...ir import Op
from .amx import BFLOAT16
from .axes import Axes
from .fuse import unviewed
from .target import Target


def tiled_dots(dots: Iterable[Op], axes: Axes, target: Target) -> set[Op]:
    """Return the dots that use AMX: their contraction fills at least half a tile."""
    return {dot for dot in dots if target.amx and _narrow(dot) and 2 * _depth(dot, axes) >= BFLOAT16.steps}


def paired_dots(dots: Iterable[Op], axes: Axes, target: Target) -> set[Op]:
    """Return the dots that use pair products: their contraction has whole vectors."""
    found = {dot for dot in dots if _narrow(dot) and _depth(dot, axes) > 1 and _depth(dot, axes) % target.lanes == 0}
    return found if target.bfloat16_pairs else set()


def _narrow(dot: Op) -> bool:
    return all(v.dtype.name == "bfloat16" for operand in dot.operands for v in (operand, unviewed(operand)))


def _depth(dot: Op, axes: Axes) -> int:
    _, k, _ = axes.dots[dot]
    return 1 if k is None else k.extent
