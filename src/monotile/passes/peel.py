"""Loop splitting by position predicates: `skip` drops hidden blocks, `peel` splits loops where predicates are constant.

A *guard* is a predicate `form < 0` over a whole tile, where `form` is linear in the loop counter, in scalars the loop
does not change, and in positions within the tile: a comparison of positions, or a bounds check of a load or store. In
one iteration a guard is True for the whole tile if it holds at the tile's worst position, and False for the whole tile
if it fails at its best position. Both are bounds on the counter, so they are computed before the loop:

    for j in low .. high       ->   for j in low .. a      all predicates kept
                                    for j in a .. b        no guards
                                    for j in b .. high     only guards that are upper bounds on j, or all
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..dtypes import bool_, int32, int64
from ..ir import Block, Kernel, Op, Type, Value, clone, starts, uses, view_of, walk
from ..ir import replace as replace_values
from ..ir.affine import Linear, linear, linear_or_mod, to_scalar
from ..ir.builder import Builder
from ..ir.intervals import Loops, interval, nonnegative
from .facts import loop_of


@dataclass(frozen=True)
class Guard:
    """`factor * counter + rest < 0` for every rest from `low` to `high`, which have scalars and a constant."""

    factor: int
    low: Linear
    high: Linear


# ---- guards ----------------------------------------------------------------------------------------------------------


def _guard(
    form: Linear, shape: tuple[int, ...], body: Block, inside: set[Value], invariant: bool = False
) -> Guard | None:
    """Return `form < 0` as a guard of the loop with this body; None when the counter does not decide it. With
    `invariant`, also when it is the same for all iterations."""
    terms = dict(form.terms)
    factor = terms.pop(body.params[0], 0)
    if factor == 0 and not invariant:
        return None
    (least, greatest), (low, high) = replace(form, terms=terms).scalar_range(), form.offset_range(shape or (1, 1))
    # The sums are computed in int64, which an int64 term could overflow.
    if any(v in inside or v.dtype.bits == 64 for v in (*least.terms, *greatest.terms)):
        return None
    return Guard(factor, least + Linear(low), greatest + Linear(high))


def below(op: Op) -> Linear | None:
    """Return the linear form that is negative exactly where an integer comparison holds."""
    left, right = (linear_or_mod(v, _is_position) for v in op.operands)
    if op.kind not in ("lt", "le") or left is None or right is None:
        return None
    return left - right - Linear(1 if op.kind == "le" else 0)


def _is_position(value: Value) -> bool:
    """Return True for the remainders of a scalar that is known to be positive: 0 to one less than it."""
    op = value.op
    if op is None or op.kind != "mod":
        return False
    divisor = linear(op.operands[1])
    return divisor is not None and not divisor.iotas and interval(op.operands[1])[0] > 0


def conjuncts(value: Value) -> Iterator[tuple[Op, tuple[int, ...]]]:
    """Yield the comparisons that a bool value is a conjunction of. Others are dropped, which only weakens it."""
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


def _defined_in(body: Block) -> set[Value]:
    """Return every value defined in a block or in blocks nested in it."""
    inside = set(body.params)
    for op in walk(body):
        inside.update(op.results)
        for block in op.blocks:
            inside.update(block.params)
    return inside


def _counter_limits(b: Builder, guards: list[Guard], *, best: bool) -> tuple[Value | None, Value | None]:
    """Emit the first and one past the last counter for which all guards hold at the tile's best (or worst) position.

    They are int64: a scalar may be the greatest int32 ("no limit"), and what is added to it must not wrap.
    factor > 0:  counter < ceil(-(rest + offset) / factor)
    factor < 0:  counter > floor((rest + offset) / -factor)
    """
    low: Value | None = None
    high: Value | None = None
    for g in guards:
        rest = g.low if best else g.high
        scalars, offset = replace(rest, const=0), rest.const
        if g.factor == 0:  # all iterations or none
            most = b.const(int32.limits[1], int64)
            bound = b.where(b.binary("lt", _wide(b, scalars, offset), 0), most, b.const(int32.limits[0], int64))
            high = bound if high is None else b.binary("min", high, bound)
        elif g.factor > 0:
            bound = _wide(b, scalars.times(-1), g.factor - 1 - offset)
            bound = b.binary("floordiv", bound, g.factor) if g.factor > 1 else bound
            high = bound if high is None else b.binary("min", high, bound)
        else:
            bound = _wide(b, scalars, offset)
            bound = b.binary("floordiv", bound, -g.factor) if g.factor < -1 else bound
            bound = b.binary("add", bound, 1)
            low = bound if low is None else b.binary("max", low, bound)
    return low, high


def _wide(b: Builder, rest: Linear, offset: int) -> Value:
    """Emit a sum of scalars and a constant in int64."""
    return b.binary("add", b.cast(to_scalar(b, rest, int64), int64), offset)


def _narrow(b: Builder, value: Value) -> Value:
    """Saturate an int64 to int32, the type of loop counters."""
    low, high = int32.limits
    return b.cast(b.binary("min", b.binary("max", value, low), high), int32)


def _until(b: Builder, end: Value, bound: Value) -> Value:
    """Emit the lesser of the loop's end and an int64 bound."""
    return _narrow(b, b.binary("min", b.cast(end, int64), bound))


def _next_counter(b: Builder, start: Value, bound: Value, step: int) -> Value:
    """Emit the first of start, start + step, ... that is at least `bound`."""
    wide = b.cast(start, int64)
    distance = b.binary("max", b.binary("sub", b.cast(bound, int64), wide), 0)
    found = b.binary("add", wide, b.binary("mul", b.cdiv(distance, step), step))
    return b.binary("max", start, _narrow(b, found))  # keeps a start provably nonnegative


# ---- skip ------------------------------------------------------------------------------------------------------------


def skip(kernel: Kernel) -> None:
    """Restrict loops with a `visible` mark to the blocks in which it may hold."""
    _each_loop(kernel.body, _skip)


def unmark(kernel: Kernel) -> None:
    """Remove the `visible` marks."""
    for op in walk(kernel.body):
        for block in op.blocks:
            block.ops = [inner for inner in block.ops if inner.kind != "visible"]


def _skip(block: Block, loop: Op) -> None:
    (body,) = loop.blocks
    marks = [op for op in body.ops if op.kind == "visible"]
    inside = _defined_in(body)
    guards = []
    for mark in marks:
        for test, shape in conjuncts(mark.operands[0]):
            form = below(test)
            guard = _guard(form, shape, body, inside) if form is not None else None
            if guard is not None:
                guards.append(guard)
    b = Builder(block)
    b.loc = loop.loc
    low, high = _counter_limits(b, guards, best=True)
    start, end, *inits = loop.operands
    if low is not None:
        start = _next_counter(b, start, low, loop.attrs["step"])
    if high is not None:
        end = _until(b, end, high)
        end.hint = "seen_end"
    loop.operands = (start, end, *inits)
    block.ops.append(loop)


# ---- peel ------------------------------------------------------------------------------------------------------------


def peel(kernel: Kernel) -> None:
    """Split loops where their position comparisons become constant. The first and the last loop are alike: a backend
    may compile their parts once."""
    _peel(kernel, bounds=False, alike=True)


def peel_with_bounds(kernel: Kernel) -> None:
    """Split loops for their comparisons and for bounds checks."""
    _peel(kernel, bounds=True)


def peel_all_bounds(kernel: Kernel) -> None:
    """Split also for bounds checks that the loop does not change, which hold in all iterations or in none."""
    _peel(kernel, bounds=True, invariant=True)


def _peel(kernel: Kernel, *, bounds: bool, invariant: bool = False, alike: bool = False) -> None:
    loops = loop_of(kernel)
    renamed: dict[Value, Value] = {}

    def visit(block: Block, loop: Op) -> None:
        b = Builder(block)
        b.loc = loop.loc
        nested = any(op.kind == "for" for op in walk(loop.blocks[0]))
        found = Guards({}, {}) if nested else _GuardFinder(b, loop, loops, invariant).find(bounds)
        renamed.update(_peel_loop(b, loop, found, alike))

    _each_loop(kernel.body, visit)
    replace_values(kernel.body, renamed)


@dataclass(frozen=True)
class Guards:
    """The guards of one loop: of comparisons, and of the bounds of loads and stores along an axis."""

    comparisons: dict[Op, Guard]
    accesses: dict[Op, list[tuple[int, list[Guard]]]]

    def distinct(self) -> list[Guard]:
        bounds = (g for found in self.accesses.values() for _, pair in found for g in pair)
        every = [*self.comparisons.values(), *bounds]
        return [g for n, g in enumerate(every) if g not in every[:n]]


def _peel_loop(b: Builder, loop: Op, found: Guards, alike: bool) -> dict[Value, Value]:
    """Append the loops that replace `loop` and return the values that replace its results. The first and the last are
    `alike` if both keep all predicates."""
    guards = found.distinct()
    if not any(g.factor for g in guards):
        b.block.ops.append(loop)
        return {}
    start, end, *inits = loop.operands
    step = loop.attrs["step"]
    low, high = _counter_limits(b, guards, best=False)
    first = start if low is None else _next_counter(b, start, low, step)
    last = end if high is None else _until(b, end, high)
    if high is not None:
        last.hint = "whole_end"  # of the iterations without tests
    carried = tuple(inits)
    if low is not None:
        carried = _copy_loop(b, loop, (start, b.binary("min", first, end)), carried, Guards({}, {}), edge=True)
    carried = _copy_loop(b, loop, (first, last), carried, found, edge=False)
    if high is not None:
        rest = _next_counter(b, first, last, step)
        rest.hint = "rest_start"
        known = {} if alike else {op: g for op, g in found.comparisons.items() if g.factor < 0}
        carried = _copy_loop(b, loop, (rest, end), carried, Guards(known, {}), edge=True)
    return dict(zip(loop.results, carried, strict=True))


class _GuardFinder:
    """Find the guards of a loop: comparisons in its own block that something reads, and bounds of loads and stores."""

    def __init__(self, builder: Builder, loop: Op, loops: Loops, invariant: bool) -> None:
        self._builder, self._loops, self._invariant = builder, loops, invariant
        (self._body,) = loop.blocks
        self._inside = _defined_in(self._body)
        self._lengths: dict[str | int, Value] = {}

    def find(self, bounds: bool) -> Guards:
        found = Guards({}, {})
        used = uses(self._body)
        for op in self._body.ops:
            if op.kind in ("lt", "le") and op.operands[0].dtype.is_int and op.result in used:
                form = below(op)
                guard = _guard(form, op.result.shape, self._body, self._inside) if form is not None else None
                if guard is not None:
                    found.comparisons[op] = guard
        if not bounds and not found.comparisons:  # a loop that is split anyway is split for its bounds too
            return found
        for op in self._body.ops:
            if op.kind in ("load", "store"):
                axes = range(len(op.attrs["checked"]))
                pairs = [(axis, pair) for axis in axes if (pair := self._bounds(op, axis))]
                if pairs:
                    found.accesses[op] = pairs
        return found

    def _bounds(self, op: Op, axis: int) -> list[Guard]:
        """Return guards under which an access stays inside its tensor along one axis; empty when there are none."""
        start = linear(starts(op)[axis]) if op.attrs["checked"][axis] else None
        if start is None:
            return []
        end = start + Linear(op.attrs["extents"][axis] or 1)
        above = self._bounds_guard(end - self._length(op, axis) - Linear(1))
        if above is None:
            return []
        if nonnegative(start, self._loops):
            return [above]
        below_zero = self._bounds_guard(start.times(-1) - Linear(1))
        return [] if below_zero is None else [above, below_zero]

    def _bounds_guard(self, form: Linear) -> Guard | None:
        return _guard(form, (), self._body, self._inside, self._invariant)

    def _length(self, op: Op, axis: int) -> Linear:
        """Return the length of a tensor or view; lengths of one name are one value."""
        view, tensor = view_of(op, axis), op.attrs["tensor"]
        if view is not None:
            return linear(view[1]) or Linear(terms={view[1]: 1})
        name = tensor.dims[axis]
        if isinstance(name, int):
            return Linear(name)
        if name not in self._lengths:
            self._lengths[name] = self._builder.emit("dim", (), Type(int32), tensor=tensor, axis=axis).result
        return Linear(terms={self._lengths[name]: 1})


def _copy_loop(
    b: Builder, loop: Op, span: tuple[Value, Value], inits: tuple[Value, ...], known: Guards, edge: bool
) -> tuple[Value, ...]:
    """Append a copy of the loop over `span`, in which known comparisons are True and known accesses in bounds."""
    mapping: dict[Value, Value] = {}
    copy = clone(loop, mapping)
    copy.operands = (*span, *inits)
    if edge:
        copy.attrs["edge"] = True  # few iterations: a backend may spend less on them
    (body,) = copy.blocks
    true_values = {mapping[op.result] for op in known.comparisons}
    ops, body.ops = body.ops, []
    inner = Builder(body)
    replaced: dict[Value, Value] = {}
    originals = dict(zip(ops, loop.blocks[0].ops, strict=True))
    for op in ops:
        if op.results and op.results[0] in true_values:
            inner.loc = op.loc
            replaced[op.result] = inner.broadcast(inner.const(True, bool_), op.result.shape)
            continue
        for axis, _ in known.accesses.get(originals[op], ()):
            checked = list(op.attrs["checked"])
            checked[axis] = False
            op.attrs["checked"] = tuple(checked)
        body.ops.append(op)
    replace_values(body, replaced)
    b.block.ops.append(copy)
    return copy.results


def _each_loop(block: Block, visit: Callable[[Block, Op], None]) -> None:
    """Call visit(block, loop) for every loop, innermost first; visit appends what takes the loop's place."""
    ops, block.ops = block.ops, []
    for op in ops:
        for inner in op.blocks:
            _each_loop(inner, visit)
        if op.kind == "for":
            visit(block, op)
        else:
            block.ops.append(op)
