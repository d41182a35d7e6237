"""Kernels whose output is one of their inputs: `rope(q, cos, sin, q)`.

Such a call is safe if a program reads an element of the input only where it later writes that element of the output:
then no program reads what another one writes, and none reads what it has written. The loads are redirected to the
output's tensor, so that every pass and backend knows of the dependence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..ir import MEMORY, WRITES, Block, Kernel, Op, Tensor, Value, starts, walk
from ..ir.affine import Linear, linear
from .cse import cse, dce
from .facts import loop_of
from .fold import fold
from .motion import motion

Place = tuple[Op, int, tuple[Op, ...]]  # an access, its number in program order, and the loops around it


def prepared(kernel: Kernel) -> Kernel:
    """Merge equal loads, so that each element is loaded as early as it can be; in place."""
    for each in (fold, cse, motion, dce):
        each(kernel)
    return kernel


def why_not(kernel: Kernel, source: Tensor, target: Tensor) -> str | None:
    """Say why `source`, which the kernel reads, cannot be the memory of `target`, which it writes. None if it can."""
    accesses = list(_accesses(kernel.body, (), [0]))
    reads = [a for a in accesses if a[0].attrs["tensor"] is source]
    loops = loop_of(kernel)
    writes = [a for a in accesses if a[0].attrs["tensor"] is target and a[0].kind in WRITES]
    if any(op.kind in WRITES for op, _, _ in reads):
        return "both are written"
    for read in reads:
        if not any(_same_place(read[0], write[0], loops) for write in writes):
            return f"a program reads elements of it that it does not write{_line(read[0])}"
        for write in writes:
            if write[1] < read[1] or not all(_apart(read[0], write[0], loop) for loop in _common(read, write)):
                return f"elements may be read after they are written{_line(read[0])}"
    return None


def redirect(kernel: Kernel, source: Tensor, target: Tensor) -> None:
    """Let loads and gathers read the tensor that is written."""
    for op in walk(kernel.body):
        if op.kind in MEMORY and op.attrs["tensor"] is source:
            op.attrs["tensor"] = target


def _accesses(block: Block, loops: tuple[Op, ...], count: list[int]) -> Iterator[Place]:
    for op in block.ops:
        if op.kind in MEMORY:
            count[0] += 1
            yield op, count[0], loops
        for inner in op.blocks:
            yield from _accesses(inner, (*loops, op) if op.kind == "for" else loops, count)


def _common(a: Place, b: Place) -> Sequence[Op]:
    return [loop for loop in a[2] if loop in b[2]]


def _same_place(read: Op, write: Op, loops: Mapping[Block, Op]) -> bool:
    """True if both access the same elements, one for one: as slices, or at the same tiles of positions. Counters of
    two loops over the same range count as equal: a program runs through both."""
    if (read.kind == "load") != (write.kind == "store") or read.attrs.get("view") != write.attrs.get("view"):
        return False
    pairs = zip(read.operands, write.operands[1:], strict=True)
    same = all(a is b or (_key(a, loops) is not None and _key(a, loops) == _key(b, loops)) for a, b in pairs)
    return same and read.attrs.get("extents") == write.attrs.get("extents")


def _key(value: Value, loops: Mapping[Block, Op]) -> tuple[int, frozenset[Any]] | None:
    """Return a linear form with the range of each counter in place of the counter."""
    form = linear(value)
    if form is None or form.iotas or form.remainders:
        return None
    terms = []
    for term, factor in form.terms.items():
        loop = loops.get(term.owner) if isinstance(term.owner, Block) and term is term.owner.params[0] else None
        terms.append((term if loop is None else (*loop.operands[:2], loop.attrs["step"]), factor))
    return form.const, frozenset(terms)


def _equal(a: Linear | None, b: Linear | None) -> bool:
    return a is not None and b is not None and (a - b).is_const and (a - b).const == 0


def _apart(read: Op, write: Op, loop: Op) -> bool:
    """True if two slices have no element in common in different iterations of a loop."""
    if read.kind != "load" or write.kind != "store":
        return False
    (body,) = loop.blocks
    changing: set[Value] = {v for op in walk(body) for v in op.results} | set(body.params)
    for a, b, extent, other in zip(
        starts(read), starts(write), read.attrs["extents"], write.attrs["extents"], strict=True
    ):
        form = linear(a)
        if form is None or not _equal(form, linear(b)):
            continue
        terms = dict(form.terms)
        factor = terms.pop(body.params[0], 0)
        if abs(factor) * loop.attrs["step"] >= max(extent or 1, other or 1) and not changing.intersection(terms):
            return not changing.intersection(read.operands[len(starts(read)) :])  # and no view moves
    return False


def _line(op: Op) -> str:
    return f" (line {op.loc.line}: {op.loc.text.strip()})" if op.loc is not None else ""
