"""Tensors of which two stores may write the same element from different threads: a fence orders them."""

from __future__ import annotations

from typing import Any

from ...ir import WRITES, Block, Kernel, Op, starts, walk
from ...ir.affine import linear
from ...passes.facts import loop_of


def overwritten(kernel: Kernel) -> set[int]:
    """Return the tensors that are written at several places, or at places that overlap from iteration to iteration.
    The copies of a store that `peel` makes write different elements: their places have one form."""
    loops, found = loop_of(kernel), set[int]()
    forms: dict[int, list[Any]] = {}
    for block in [kernel.body, *(inner for op in walk(kernel.body) for inner in op.blocks)]:
        for op in block.ops:
            if op.kind in WRITES:
                index, form = op.attrs["tensor"].index, _form(op, loops)
                if form is None or not all(form == other or _disjoint(form, other) for other in forms.get(index, [])):
                    found.add(index)
                forms.setdefault(index, []).append(form)
    return found


def _disjoint(a: Any, b: Any) -> bool:
    """True if two places, whose starts differ by constants, have no element in common."""
    if a is None or b is None or len(a) == 1 or len(b) == 1 or a[1] != b[1]:
        return False
    pairs = zip(a[2:], b[2:], a[0], b[0], strict=True)
    return any(s[1] == t[1] and abs(s[0] - t[0]) >= max(m or 1, n or 1) for s, t, m, n in pairs)


def _form(op: Op, loops: dict[Block, Op]) -> Any:
    """Return the place of a store with steps in place of counters; None if it may meet itself in an iteration."""
    if op.kind == "scatter":
        return (op,)
    if not op.operands[0].shape:
        return ("written by the first thread",)
    form: list[Any] = [op.attrs["extents"], op.operands[1 + op.attrs["tensor"].rank :]]
    counters, separate = set[Any](), set[Any]()
    for start, extent in zip(starts(op), op.attrs["extents"], strict=True):
        place = linear(start)
        if place is None:
            return (op,)
        terms = []
        for term, factor in place.terms.items():
            loop = loops.get(term.owner) if isinstance(term.owner, Block) else None
            if loop is None:
                terms.append((term, factor))
                continue
            counters.add(term)
            step = abs(factor) * loop.attrs["step"]
            terms.append((step, factor))
            if step >= (extent or 1):
                separate.add(term)
        form.append((place.const, frozenset(terms)))
    return tuple(form) if counters == separate else None
