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
    forms: dict[int, Any] = {}
    for block in [kernel.body, *(inner for op in walk(kernel.body) for inner in op.blocks)]:
        for op in block.ops:
            if op.kind in WRITES:
                index, form = op.attrs["tensor"].index, _form(op, loops)
                if form is None or forms.setdefault(index, form) != form:
                    found.add(index)
    return found


def _form(op: Op, loops: dict[Block, Op]) -> Any:
    """Return the place of a store with steps in place of counters; None if it may meet itself in an iteration."""
    if op.kind == "scatter":
        return (op,)
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
