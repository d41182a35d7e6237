"""Position tests and loops: `skip` leaves out blocks nothing sees, `peel` cuts a loop where its tests become known.

A *guard* is something of the form `form < 0` over a whole tile, where `form` is linear in the loop counter, in
scalars the loop does not change, and in positions within the tile: a comparison of positions, or the bounds of a load
or store. For a block of a loop a guard is known true when it holds at the tile's worst position, and known false when
it fails at its best. Both are bounds on the counter, so they are computed before the loop:

    for j in low .. high       ->   for j in low .. a      every test kept
                                    for j in a .. b        the guards are gone
                                    for j in b .. high     guards that begin to hold at a are gone
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..dtypes import bool_, int32, int64
from ..ir import Block, Kernel, Op, Tensor, Type, Value, clone, replace, uses, walk
from ..ir.affine import Linear, linear, to_scalar
from ..ir.builder import Builder
from .facts import loop_starts, nonnegative


@dataclass(frozen=True)
class Guard:
    """`factor * counter + rest + offset < 0` for every offset from `low` to `high`."""

    factor: int
    rest: Linear
    low: int
    high: int


# ---- guards ----------------------------------------------------------------------------------------------------------


def _guard(
    form: Linear, shape: tuple[int, ...], body: Block, inside: set[Value], unchanging: bool = False
) -> Guard | None:
    """`form < 0` as a guard of the loop with this body; None when the counter does not decide it. With `unchanging` it
    may also be decided before the loop."""
    terms = dict(form.terms)
    factor = terms.pop(body.params[0], 0)
    if (factor == 0 and not unchanging) or any(
        v in inside or v.dtype.bits == 64 for v in terms
    ):  # an int64 may be too great to add to
        return None
    low, high = form.offset_range(shape or (1, 1))
    return Guard(factor, Linear(0, terms), low, high)


def below(op: Op) -> Linear | None:
    """The form that is negative exactly where an integer comparison holds."""
    left, right = (linear(v) for v in op.operands)
    if op.kind not in ("lt", "le") or left is None or right is None:
        return None
    return left - right - Linear(1 if op.kind == "le" else 0)


def conjuncts(value: Value) -> Iterator[tuple[Op, tuple[int, ...]]]:
    """The comparisons whose conjunction a bool value is; others are left out, which only makes it truer."""
    op = value.op
    if op is None:
        return
    if op.kind == "and":
        for operand in op.operands:
            yield from conjuncts(operand)
    elif op.kind in ("lt", "le"):
        yield op, op.result.shape
    elif op.kind in ("broadcast", "expand", "trans"):
        yield from conjuncts(op.operands[0])


def _made_inside(body: Block) -> set[Value]:
    inside = set(body.params)
    for op in walk(body):
        inside.update(op.results)
        for block in op.blocks:
            inside.update(block.params)
    return inside


def _limits(b: Builder, guards: list[Guard], best: bool) -> tuple[Value | None, Value | None]:
    """Bounds on the counter between which all guards hold at the tile's best (or worst) position: first, one past the
    last.
    They are int64: a scalar may be as great as an int32 can be ("no limit"), and what is added to it must not wrap.

    factor > 0:  counter < ceil(-(rest + offset) / factor);   factor < 0:  counter > floor((rest + offset) /
    -factor)."""
    low: Value | None = None
    high: Value | None = None
    for g in guards:
        offset = g.low if best else g.high
        if g.factor == 0:  # everything or nothing
            most = b.const(int32.limits[1], int64)
            bound = b.where(b.binary("lt", _wide(b, g.rest, offset), 0), most, b.const(int32.limits[0], int64))
            high = bound if high is None else b.binary("min", high, bound)
        elif g.factor > 0:
            bound = _wide(b, g.rest.times(-1), g.factor - 1 - offset)
            bound = b.binary("floordiv", bound, g.factor) if g.factor > 1 else bound
            high = bound if high is None else b.binary("min", high, bound)
        else:
            bound = _wide(b, g.rest, offset)
            bound = b.binary("floordiv", bound, -g.factor) if g.factor < -1 else bound
            bound = b.binary("add", bound, 1)
            low = bound if low is None else b.binary("max", low, bound)
    return low, high


def _wide(b: Builder, rest: Linear, offset: int) -> Value:
    """A sum of scalars and a number, computed in int64."""
    return b.binary("add", b.cast(to_scalar(b, rest, int64), int64), offset)


def _narrow(b: Builder, value: Value) -> Value:
    """An int64 as the nearest int32: a loop's counter never gets beyond."""
    least, most = int32.limits
    return b.cast(b.binary("min", b.binary("max", value, least), most), int32)


def _until(b: Builder, end: Value, bound: Value) -> Value:
    """The lesser of the loop's end and an int64 bound."""
    return _narrow(b, b.binary("min", b.cast(end, int64), bound))


def _on_grid(b: Builder, start: Value, bound: Value, step: int) -> Value:
    """The first counter value start, start + step, ... that is at least `bound`."""
    wide = b.cast(start, int64)
    distance = b.binary("max", b.binary("sub", b.cast(bound, int64), wide), 0)
    found = b.binary("add", wide, b.binary("mul", b.cdiv(distance, step), step))
    return b.binary("max", start, _narrow(b, found))  # a start that is known not to be negative stays so


# ---- skip ------------------------------------------------------------------------------------------------------------


def skip(kernel: Kernel) -> None:
    """Loops with a `visible` mark run only over the blocks it may hold in."""
    _each_loop(kernel.body, _skip)


def unmark(kernel: Kernel) -> None:
    """Removes the marks, for backends that have no further use for them."""
    for op in walk(kernel.body):
        for block in op.blocks:
            block.ops = [inner for inner in block.ops if inner.kind != "visible"]


def _skip(block: Block, loop: Op) -> None:
    (body,) = loop.blocks
    marks = [op for op in body.ops if op.kind == "visible"]
    inside = _made_inside(body)
    guards = []
    for mark in marks:
        for test, shape in conjuncts(mark.operands[0]):
            form = below(test)
            guard = _guard(form, shape, body, inside) if form is not None else None
            if guard is not None:
                guards.append(guard)
    b = Builder(block)
    b.loc = loop.loc
    low, high = _limits(b, guards, best=True)
    start, end, *inits = loop.operands
    if low is not None:
        start = _on_grid(b, start, low, loop.attrs["step"])
    if high is not None:
        end = _until(b, end, high)
        end.hint = "seen_end"
    loop.operands = (start, end, *inits)
    block.ops.append(loop)


# ---- peel ------------------------------------------------------------------------------------------------------------


def peel(kernel: Kernel) -> None:
    _peel(kernel, bounds=False)


def peel_with_bounds(kernel: Kernel) -> None:
    _peel(kernel, bounds=True)


def peel_all_bounds(kernel: Kernel) -> None:
    """Also bounds that the loop does not change: they hold for all of its blocks or for none."""
    _peel(kernel, bounds=True, unchanging=True)


def _peel(kernel: Kernel, bounds: bool, unchanging: bool = False) -> None:
    starts = loop_starts(kernel)
    renamed: dict[Value, Value] = {}
    _each_loop(kernel.body, lambda block, loop: renamed.update(_peel_loop(block, loop, starts, bounds, unchanging)))
    replace(kernel.body, renamed)


def _peel_loop(
    block: Block, loop: Op, starts: dict[Block, Value], bounds: bool, unchanging: bool
) -> dict[Value, Value]:
    (body,) = loop.blocks
    nested = any(op.kind == "for" for op in walk(body))
    b = Builder(block)
    b.loc = loop.loc

    lengths: dict[str | int, Value] = {}

    def dim(tensor: Tensor, axis: int) -> Value:
        """Lengths of one name are one value."""
        name = tensor.dims[axis]
        if name not in lengths:
            lengths[name] = b.emit("dim", (), Type(int32), tensor=tensor, axis=axis).result
        return lengths[name]

    tests, accesses = ({}, {}) if nested else _find_guards(body, starts, bounds, unchanging, dim)
    every = [*tests.values(), *(g for found in accesses.values() for _, pair in found for g in pair)]
    guards = [g for n, g in enumerate(every) if g not in every[:n]]
    if not any(g.factor for g in guards):
        block.ops.append(loop)
        return {}
    start, end, *inits = loop.operands
    step = loop.attrs["step"]
    low, high = _limits(b, guards, best=False)
    first = start if low is None else _on_grid(b, start, low, step)
    last = end if high is None else _until(b, end, high)
    if high is not None:
        last.hint = "whole_end"  # of the blocks without tests
    carried = tuple(inits)
    if low is not None:
        carried = _copy(block, loop, start, b.binary("min", first, end), carried, {}, {}, edge=True)
    carried = _copy(block, loop, first, last, carried, tests, accesses, edge=False)
    if high is not None:
        rest = _on_grid(b, first, last, step)
        rest.hint = "rest_start"
        begun = {op: g for op, g in tests.items() if g.factor < 0}
        carried = _copy(block, loop, rest, end, carried, begun, {}, edge=True)
    return dict(zip(loop.results, carried, strict=True))


Accesses = dict[Op, list[tuple[int, list[Guard]]]]


def _find_guards(
    body: Block,
    starts: dict[Block, Value],
    bounds: bool,
    unchanging: bool,
    dim: Callable[[Tensor, int], Value],
) -> tuple[dict[Op, Guard], Accesses]:
    """Comparisons in the loop's own block that something uses, and the bounds of its loads and stores."""
    inside = _made_inside(body)
    tests: dict[Op, Guard] = {}
    accesses: Accesses = {}
    used = uses(body)
    for op in body.ops:
        if op.kind in ("lt", "le") and op.operands[0].dtype.is_int and op.result in used:
            form = below(op)
            guard = _guard(form, op.result.shape, body, inside) if form is not None else None
            if guard is not None:
                tests[op] = guard
    for op in body.ops:
        if (bounds or tests) and op.kind in ("load", "store"):  # a loop that is cut anyway is cut for its bounds too
            found = [
                (axis, pair)
                for axis in range(len(op.attrs["checked"]))
                if (pair := _bounds(op, axis, body, inside, starts, unchanging, dim))
            ]
            if found:
                accesses[op] = found
    return tests, accesses


def _bounds(
    op: Op,
    axis: int,
    body: Block,
    inside: set[Value],
    starts: dict[Block, Value],
    unchanging: bool,
    dim: Callable[[Tensor, int], Value],
) -> list[Guard]:
    """Guards under which an access stays inside its tensor along one dimension; empty when they are not known."""
    if not op.attrs["checked"][axis]:
        return []
    start = linear(op.operands[(op.kind == "store") + axis])
    if start is None:
        return []
    length = op.attrs["tensor"].dims[axis]
    size = Linear(length) if isinstance(length, int) else Linear(terms={dim(op.attrs["tensor"], axis): 1})
    above = _guard(start + Linear(op.attrs["extents"][axis] or 1) - size - Linear(1), (), body, inside, unchanging)
    if above is None:
        return []
    if nonnegative(start, starts):
        return [above]
    below = _guard(start.times(-1) - Linear(1), (), body, inside, unchanging)
    return [] if below is None else [above, below]


def _copy(
    block: Block,
    loop: Op,
    start: Value,
    end: Value,
    inits: tuple[Value, ...],
    tests: dict[Op, Guard],
    accesses: Accesses,
    edge: bool,
) -> tuple[Value, ...]:
    """One of the loops the original becomes. These tests are true in it, and these accesses inside."""
    mapping: dict[Value, Value] = {}
    copy = clone(loop, mapping)
    copy.operands = (start, end, *inits)
    if edge:
        copy.attrs["edge"] = True  # few turns: a backend may spend less on them
    (body,) = copy.blocks
    known = {mapping[op.result] for op in tests}
    ops, body.ops = body.ops, []
    b = Builder(body)
    truths: dict[Value, Value] = {}
    inner = {new: old for old, new in zip(loop.blocks[0].ops, ops, strict=True)}
    for op in ops:
        if op.results and op.results[0] in known:
            b.loc = op.loc
            truths[op.result] = b.broadcast(b.const(True, bool_), op.result.shape)
            continue
        for axis, _ in accesses.get(inner[op], ()):
            checked = list(op.attrs["checked"])
            checked[axis] = False
            op.attrs["checked"] = tuple(checked)
        body.ops.append(op)
    replace(body, truths)
    block.ops.append(copy)
    return copy.results


def _each_loop(block: Block, visit: Callable[[Block, Op], None]) -> None:
    """Calls visit(block, loop) for every loop, innermost first; visit appends what takes the loop's place."""
    ops, block.ops = block.ops, []
    for op in ops:
        for inner in op.blocks:
            _each_loop(inner, visit)
        if op.kind == "for":
            visit(block, op)
        else:
            block.ops.append(op)
