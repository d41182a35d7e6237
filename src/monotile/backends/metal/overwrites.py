"""Tensors of which two stores may write the same element from different threads: a fence orders them."""

from __future__ import annotations

from typing import Any

from ...ir import WRITES, Block, Kernel, Op, starts, walk
from ...ir.affine import linear
from ...passes.facts import loop_of


def overwritten(kernel: Kernel) -> set[int]:
    """Return the tensors of which some element may be written by two threads: by two stores, or by one of them in two
    iterations."""
    loops, found = loop_of(kernel), set[int]()
    places: dict[int, list[tuple[Op, Any]]] = {}
    for op in (op for op in walk(kernel.body) if op.kind in WRITES):
        index, form = op.attrs["tensor"].index, _form(op, loops)
        before = places.setdefault(index, [])
        if form is None or not all(_apart(op, form, *other, loops) for other in before):
            found.add(index)
        before.append((op, form))
    return found


def _apart(op: Op, form: Any, other: Op, place: Any, loops: dict[Block, Op]) -> bool:
    """True if two stores write different elements, or the same ones from the same threads."""
    if form != place or not op.operands[0].shape:  # numbers are written by the first thread
        return form == place or _disjoint(form, place)
    counters = [_counters(store, loops) for store in (op, other)]
    if counters[0] == counters[1]:  # the same elements: which lanes hold a tile of one dimension depends on its use
        return len(op.operands[0].shape) != 1
    # The copies of a loop that `peel` makes have different iterations; one of them is no edge.
    different = [(a, b) for a, b in zip(*counters, strict=False) if a is not b]
    return len(counters[0]) == len(counters[1]) and all("edge" in a.attrs or "edge" in b.attrs for a, b in different)


def _counters(op: Op, loops: dict[Block, Op]) -> list[Op]:
    """Return the loops whose counters a store's place depends on."""
    terms = [term for start in starts(op) for term in getattr(linear(start), "terms", ())]
    return list(dict.fromkeys(loops[v.owner] for v in terms if isinstance(v.owner, Block) and v.owner in loops))


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
