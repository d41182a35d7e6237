"""The order of programs. A launch ends when its last program does, so long programs should start first.

If the lengths of loops depend on the last position of the grid (row blocks of causal attention), programs of one length
are made neighbours: the last position runs slowest. Authors put the longest first in it. Positions before it are taken
in bands, so that few heads' keys and values are in the caches at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...ir import Kernel, Value, walk
from .emit import Emitter, Index, Reg

BAND = 32


def comes_longest_first(kernel: Kernel) -> bool:
    """True if the bounds of loops depend on the last position of the grid and on no other."""
    positions: dict[Value, frozenset[int]] = {}  # that each value depends on
    bounds: set[int] = set()
    last = 0
    for op in walk(kernel.body):
        if op.kind == "program_id":
            last = len(op.results) - 1
            positions |= {result: frozenset([n]) for n, result in enumerate(op.results)}
            continue
        found = frozenset().union(*(positions.get(v, frozenset()) for v in op.operands))
        positions |= dict.fromkeys(op.results, found)
        if op.kind == "for":
            bounds |= positions.get(op.operands[0], frozenset()) | positions.get(op.operands[1], frozenset())
    return last > 0 and bounds == {last}


def emit_positions(e: Emitter, sizes: Iterable[Index], program: Index = "%program") -> list[Reg]:
    """Emit the positions of a program in a grid, whose sizes are given the last one first. It runs fastest."""
    positions: list[Reg] = []
    for size in sizes:
        positions.insert(0, _position(e, e.op(f"urem i64 {program}, {size}")))
        program = e.op(f"udiv i64 {program}, {size}")
    return positions


def emit_longest_first(e: Emitter, sizes: Iterable[Index]) -> list[Reg]:
    """Emit the positions of a program in a grid, whose sizes are given the last one first. It runs slowest within bands
    of the others, which have like sizes."""
    last, *others = sizes
    groups: Index = 1
    for size in others:
        groups = e.mul(groups, size)
    width = _rounded_up(e, groups, _rounded_up(e, groups, BAND))
    band_size = e.mul(width, last)
    first = e.mul(e.op(f"udiv i64 %program, {band_size}"), width)
    inside = e.op(f"urem i64 %program, {band_size}")
    here = e.call("i64", "llvm.smin.i64", ("i64", str(width)), ("i64", str(e.sub(groups, first))))
    group = e.add(first, e.op(f"urem i64 {inside}, {here}"))
    return [*emit_positions(e, others, group), _position(e, e.op(f"udiv i64 {inside}, {here}"))]


def _position(e: Emitter, index: str) -> Reg:
    return Reg(e.op(f"trunc i64 {index} to i32"), "i32")


def _rounded_up(e: Emitter, a: Index, b: Index) -> Index:
    if isinstance(a, int) and isinstance(b, int):
        return -(-a // b)
    return e.op(f"udiv i64 {e.sub(e.add(a, b), 1)}, {b}")
