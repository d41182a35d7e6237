"""Random kernels, built as IR, with arguments that show every wrong access.

Floats are small whole numbers, and a bound is kept for every value, so that sums are exact in any order and backends
must agree to the last bit. What an exponential touched is apart from the rest and compared with a tolerance. Every
array is a view into a larger one whose other elements no kernel may read or change.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from monotile import dtypes, ir, verify
from monotile.builder import Builder
from monotile.dtypes import DType, bfloat16, bool_, float16, float32, int8, int32, int64, uint8
from monotile.ir import Block, Kernel, Op, Tensor, Type, Value

Array = npt.NDArray[Any]

SIDES = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 48, 64, 65)
STEPS = (1, 2, 4, 8, 16, 32)
EXACT = 1 << 22  # whole numbers up to here are added exactly in float32
CARRIED = 1 << 14  # the bound of what a loop carries
HELD = 50  # the bound of what is stored
MARGIN = 70  # elements around a view, along each dimension


@dataclass
class Argument:
    """A tensor of the program: its facts and the array passed for it."""

    tensor: Tensor
    base: Array
    view: Callable[[Array], Array]
    output: bool
    approximate: bool = False
    owned: int | None = None  # the dimension of which each program has a part
    share: int = 0  # how long that part is


@dataclass
class Program:
    kernel: Kernel
    arguments: list[Argument]
    scalars: list[Any]


def program(rng: random.Random) -> Program:
    return Generator(rng).run()


@dataclass
class Generator:
    rng: random.Random
    arguments: list[Argument] = field(default_factory=list)
    bound: dict[Value, int] = field(default_factory=dict)
    scope: list[list[Value]] = field(default_factory=list)  # values by block
    rough: list[list[Value]] = field(default_factory=list)  # values an exponential touched
    pid: Value | None = None
    depth: int = 0
    budget: int = 0
    turns: int = 1  # how often the current block runs at most
    quiet: bool = False  # no stores here

    # ---- choices -----------------------------------------------------------------------------------------------------

    def chance(self, part: float) -> bool:
        return self.rng.random() < part

    def pick(self, items: Sequence[Any]) -> Any:
        return items[self.rng.randrange(len(items))]

    def values(self, wanted: Callable[[Value], bool] = lambda v: True) -> list[Value]:
        return [v for values in self.scope for v in values if wanted(v)]

    def value(self, wanted: Callable[[Value], bool] = lambda v: True) -> Value | None:
        """A value in scope, more often a recent one."""
        found = self.values(wanted)
        if not found:
            return None
        return self.pick(found[-4:]) if self.chance(0.5) else self.pick(found)

    def keep(self, value: Value, bound: int) -> Value:
        self.bound[value] = max(1, bound)
        self.scope[-1].append(value)
        return value

    # ---- the program -------------------------------------------------------------------------------------------------

    def run(self) -> Program:
        pick, chance = self.pick, self.chance
        count = pick((1, 2, 2, 3))
        self.sides = [pick(SIDES) for _ in range(count)]
        self.step = pick((*self.sides, *STEPS))
        self.nan = chance(0.25)
        self.grid = pick((1, 2, 3)) if chance(0.5) else None
        for n in range(pick((1, 2, 3, 3, 4))):
            self.argument(n, output=False)
        for _ in range(pick((1, 1, 2, 3))):
            self.argument(len(self.arguments), output=True)
        self.scalar_types = [("n", int32), ("f", float32), ("flag", bool_), ("wide", int64)]
        scalars = [self.rng.randint(-5, 70), float(self.rng.randint(-4, 4)), chance(0.5), self.rng.randint(-5, 70)]
        kernel = Kernel("fuzz", tuple(a.tensor for a in self.arguments), tuple(self.scalar_types))
        self.b = Builder(kernel.body)
        self.scope, self.rough = [[]], [[]]
        if self.grid is not None:
            sizes = [self.grid, 1] if chance(0.3) else [self.grid]
            self.pid = self.b.program_id(list(sizes))[0]
            self.keep(self.pid, 4)
        for name, dtype in self.scalar_types:
            if chance(0.3):
                self.keep(self.b.emit("param", (), Type(dtype), name=name).result, 70)
        self.budget = pick((4, 8, 12, 16))
        for _ in range(2):
            self.load()
        if chance(0.3):
            self.attention()
            self.budget = pick((0, 0, 2, 4))
        while self.budget > 0:
            self.statement()
        for argument in self.arguments:
            if argument.output:
                self.store(argument)
        self.b.emit("yield", ())
        verify.check(kernel, "fuzz")
        return Program(kernel, self.arguments, scalars)

    def statement(self) -> None:
        self.budget -= 1
        kinds: list[tuple[int, Callable[[], Any]]] = [
            (5, self.load), (6, self.elementwise), (4, self.reduce), (5, self.dot), (3, self.reshape), (3, self.cast),
            (2, self.where), (1, self.arange), (1, self.gather), (1, self.full), (1, self.roughen), (2, self.scalar),
        ]  # fmt: skip
        if not self.quiet:
            kinds.append((2, self.store))
        if self.depth < 3:
            kinds += [(4 if self.depth == 0 else 1, self.loop), (2, self.branch)]
        if self.depth < 2:
            kinds.append((1, self.visible_loop))
        total = self.rng.randrange(sum(w for w, _ in kinds))
        for weight, kind in kinds:
            total -= weight
            if total < 0:
                kind()
                return

    # ---- arguments ---------------------------------------------------------------------------------------------------

    def argument(self, n: int, output: bool) -> None:
        pick, chance = self.pick, self.chance
        rank = pick((1, 2, 2, 2, 2, 3))
        share = pick(self.sides)
        owned = self.rng.randrange(rank) if output and self.grid else None
        lengths = []
        for d in range(rank):
            length = max(0, pick(self.sides) * pick((1, 1, 1, 2)) + pick((0, 0, 0, 1, -1, 3, -2)))
            if rank == 3:
                length = min(length, 9)
            if d == owned:
                length = max(1, share * (self.grid or 1) - pick((0, 0, 1, share // 2)))
            lengths.append(0 if chance(0.02) else length)
        dtype = pick((float32,) * 8 + (float16, bfloat16, int32, int32, int64, int8, uint8, bool_))
        approximate = output and dtype is float32 and chance(0.2)
        steps = [pick((1, 1, 1, 1, 1, 2, -1, -2)) for _ in range(rank)]
        if chance(0.5):
            steps = [1] * rank
        order = list(range(rank))
        if chance(0.35):
            self.rng.shuffle(order)
        margin = [MARGIN if rank < 3 else 4] * rank
        tight = chance(0.15)  # a dense array: nothing around it but before and behind
        shape = [lengths[d] * abs(steps[d]) + (0 if tight else 2 * margin[d]) for d in range(rank)]
        if tight:
            steps = [1] * rank
            shape = list(lengths)

        def view(base: Array) -> Array:
            if tight:
                whole = base[MARGIN : MARGIN + int(np.prod(shape))].reshape([shape[d] for d in order])
            else:
                whole = base.reshape([shape[d] for d in order])
            whole = whole.transpose([order.index(d) for d in range(rank)])
            if not tight:
                cut = tuple(slice(margin[d], margin[d] + lengths[d] * abs(steps[d])) for d in range(rank))
                whole = whole[cut][tuple(slice(None, None, s) for s in steps)]
            return whole

        size = int(np.prod(shape)) + (2 * MARGIN if tight else 0)
        kind = dtypes.to_numpy(dtype)
        base = np.full(size, 99 if dtype is not bool_ else True).astype(kind)
        if dtype.is_float and dtype is not bfloat16:
            base[:] = 30011.0
        seed = np.random.default_rng(self.rng.randrange(1 << 30))
        inside = view(base)
        assert list(inside.shape) == lengths and (inside.size == 0 or np.shares_memory(inside, base))
        low, high = (0, 1) if dtype is bool_ else (0, 5) if dtype is uint8 else (-4, 4)
        inside[...] = seed.integers(low, high, lengths, endpoint=True).astype(kind)
        if self.nan and dtype.is_float:
            inside[seed.random(lengths) < 0.05] = pick((np.nan, np.inf, -np.inf))
        strides = [s // kind.itemsize for s in inside.strides]
        dims: list[str | int] = [lengths[d] if chance(0.3) else f"x{n}.{d}" for d in range(rank)]
        self.arguments.append(
            Argument(facts(f"x{n}", n, dtype, dims, lengths, strides), base, view, output, approximate, owned, share)
        )

    # ---- loads and stores --------------------------------------------------------------------------------------------

    def start(self, length: int) -> Value:
        """A position: often in or near the tensor, sometimes far away; it may depend on anything."""
        roll = self.rng.random()
        near = self.pick((0, 0, 0, 0, 0, 1, -1, 3, -3, max(0, length - 1), length, -length, length - 5, length + 9))
        if roll < 0.4:
            return self.b.const(near, int32)
        scalar = self.value(lambda v: not v.shape and v.dtype in (int32, int64) and self.bound[v] < 1 << 20)
        if scalar is None:
            return self.b.const(near, int32)
        if roll < 0.7:
            scalar = self.b.binary("mul", scalar, self.pick((self.step, *self.sides)))
        return scalar if roll < 0.85 else self.b.binary("add", scalar, near)

    def place(
        self, argument: Argument, shape: tuple[int, ...] | None
    ) -> tuple[tuple[Value, ...], tuple[int | None, ...]]:
        """Starts and extents of a slice. In a grid the part of an output that a program touches is its own."""
        rank = argument.tensor.rank
        lengths = argument.view(argument.base).shape
        if shape is None:
            want = min(rank, self.pick((0, 1, 2, 2, 2)))
            if rank == 3 and want == 0:
                want = 2
            shape = tuple(self.pick(self.sides) for _ in range(want))
        dims = sorted(self.rng.sample(range(rank), len(shape)))
        extents: list[int | None] = [None] * rank
        for d, side in zip(dims, shape, strict=True):
            extents[d] = side
        starts = []
        for d in range(rank):
            if d == argument.owned:
                room = argument.share - (extents[d] or 1)
                assert self.pid is not None
                start = self.b.binary("mul", self.pid, argument.share)
                starts.append(self.b.binary("add", start, self.rng.randint(0, room)) if room > 0 else start)
            else:
                starts.append(self.start(lengths[d]))
        return tuple(starts), tuple(extents)

    def fits(self, argument: Argument, shape: tuple[int, ...]) -> bool:
        return argument.owned is None or all(side <= argument.share for side in shape)

    def load(self) -> None:
        readable = [a for a in self.arguments if not a.approximate]
        argument = self.pick(readable)
        tensor = argument.tensor
        shape = None
        if argument.owned is not None:
            sides = [s for s in self.sides if s <= argument.share]
            shape = tuple(self.pick(sides) for _ in range(min(tensor.rank, self.pick((1, 2)))))
        starts, extents = self.place(argument, shape)
        type_ = Type(tensor.dtype, tuple(e for e in extents if e is not None))
        op = self.b.emit("load", starts, type_, tensor=tensor, extents=extents, checked=(True,) * tensor.rank)
        self.keep(op.result, HELD)

    def store(self, argument: Argument | None = None) -> None:
        outputs = [a for a in self.arguments if a.output]
        argument = argument or self.pick(outputs)
        tensor = argument.tensor
        value: Value | None = None
        if argument.approximate and self.chance(0.8):
            rough = [
                v
                for values in self.rough
                for v in values
                if len(v.shape) <= tensor.rank and self.fits(argument, v.shape)
            ]
            value = self.pick(rough) if rough else None
        if value is None:
            value = self.value(lambda v: len(v.shape) <= min(2, tensor.rank) and self.fits(argument, v.shape))
            value = self.converted(self.held(value), tensor.dtype) if value is not None else None
        if value is None:
            return
        starts, extents = self.place(argument, value.shape)
        self.b.emit("store", (value, *starts), tensor=tensor, extents=extents, checked=(True,) * tensor.rank)

    def gather(self) -> None:
        readable = [a for a in self.arguments if not a.approximate and not (a.output and self.grid)]
        if not readable:
            return
        argument = self.pick(readable)
        rank = argument.tensor.rank
        shape = tuple(self.pick(self.sides) for _ in range(self.pick((1, 1, 2))))
        indices = []
        for _ in range(rank):
            loaded = self.value(
                lambda v: v.dtype in (int32, int64) and v.shape in (shape, ()) and self.bound[v] < 1 << 20
            )
            if loaded is not None and self.chance(0.6):
                indices.append(loaded)
            else:
                along = self.rng.randrange(len(shape))
                index = self.b.arange(shape[along])
                index = self.b.binary("mul", index, self.pick((1, 2, -1, 3)))
                index = self.b.binary("add", index, self.pick((0, 1, -1, 5)))
                indices.append(self.b.expand(index, 1 - along) if len(shape) == 2 else index)
        indices = [self.b.cast(i, int32) if i.dtype.is_narrow else i for i in indices]
        found = self.b.broadcast_shape(tuple(indices))
        op = self.b.emit("gather", tuple(indices), Type(argument.tensor.dtype, found), tensor=argument.tensor)
        self.keep(op.result, HELD)

    # ---- bounds ------------------------------------------------------------------------------------------------------

    def held(self, value: Value, limit: int = HELD) -> Value:
        """The value, clamped when it may be greater than the limit."""
        if value.dtype is bool_ or self.bound[value] <= limit:
            return value
        if value.dtype.is_narrow:
            value = self.b.cast(value, dtypes.computed(value.dtype))
        number = float(limit) if value.dtype.is_float else limit
        value = self.b.binary("min", self.b.binary("max", value, -number), number)
        self.bound[value] = limit
        return value

    def converted(self, value: Value, dtype: DType) -> Value:
        bound = self.bound[value]
        value = self.b.cast(value, dtype)
        self.bound[value] = 1 if dtype is bool_ else 255 if dtype is uint8 else max(1, bound)
        return value

    def plain(self, value: Value) -> Value:
        """In a type that is computed with."""
        return self.converted(value, dtypes.computed(value.dtype))

    # ---- statements --------------------------------------------------------------------------------------------------

    def shape_fits(self, a: tuple[int, ...], b: tuple[int, ...]) -> bool:
        return all(x == y or 1 in (x, y) for x, y in zip(a[::-1], b[::-1], strict=False))

    def partner(self, value: Value) -> Value:
        other = self.value(lambda v: self.shape_fits(v.shape, value.shape))
        assert other is not None
        other = self.plain(other)
        return other if other.dtype.kind == value.dtype.kind else self.converted(other, value.dtype)

    def elementwise(self) -> None:
        b, x = self.b, self.value()
        if x is None:
            return
        x = self.plain(x)
        limit = self.bound[x]
        if x.dtype is bool_:
            y = self.partner(x)
            kind = self.pick(("and", "or", "not", "eq", "ne"))
            self.keep(b.unary("not", x) if kind == "not" else b.binary(kind, x, y), 1)
            return
        roll = self.rng.random()
        if roll < 0.1:
            self.keep(b.unary(self.pick(("neg", "abs")), x), limit)
            return
        if roll < 0.2:
            self.keep(b.binary(self.pick(("add", "sub", "mul")), x, self.pick((0, 1, 2, 3))), 3 * limit + 3)
            return
        y = self.partner(x)
        if roll < 0.3:
            self.keep(b.binary(self.pick(("lt", "le", "eq", "ne")), x, y), 1)
            return
        kind = self.pick(("add", "add", "sub", "mul", "max", "min") + (() if x.dtype.is_float else ("floordiv", "mod")))
        if (limit * self.bound[y] if kind == "mul" else limit + self.bound[y]) > EXACT:
            x, y = self.held(x), self.held(y)
        if kind in ("floordiv", "mod") and ir.constant(y) == 0:
            return
        limit, other = self.bound[x], self.bound[y]
        bound = {"mul": limit * other, "add": limit + other, "sub": limit + other}.get(kind, max(limit, other))
        self.keep(b.binary(kind, x, y), bound)

    def where(self) -> None:
        x = self.value(lambda v: bool(v.shape))
        if x is None:
            return
        x = self.plain(x)
        y = self.partner(x)
        if self.chance(0.5):
            test: Value | None = self.test(self.pick((x.shape, y.shape)))
        else:
            test = self.value(
                lambda v: v.dtype is bool_ and self.shape_fits(v.shape, x.shape) and self.shape_fits(v.shape, y.shape)
            )
        if test is None or not self.shape_fits(x.shape, y.shape):
            return
        number = self.chance(0.3) and x.dtype is not bool_
        bound = max(self.bound[x], self.bound[y])
        self.keep(self.b.where(test, x, 0 if number else y), bound)

    def test(self, shape: tuple[int, ...]) -> Value:
        """A comparison of positions."""
        b = self.b
        if not shape:
            return b.binary("lt", self.start(7), self.start(9))
        along = self.rng.randrange(len(shape))
        positions = b.binary("add", b.arange(shape[along]), self.start(shape[along]))
        if len(shape) == 1:
            return b.binary(self.pick(("lt", "le", "gt", "ge")), positions, self.start(shape[0]))
        left = b.expand(positions, 1 - along)
        right = b.expand(b.binary("add", b.arange(shape[1 - along]), self.pick((0, 1, -2, 5))), along)
        right = right if self.chance(0.6) else self.start(shape[along])
        if isinstance(right, Value) and right.dtype is int64:
            left = b.cast(left, int64)
        return b.binary(self.pick(("lt", "le", "gt", "ge")), left, right)

    def cast(self) -> None:
        x = self.value()
        if x is None:
            return
        dtype = self.pick((float32, float32, float16, bfloat16, int32, int32, int64, int8, uint8, bool_))
        if dtype in (float16, bfloat16):
            x = self.held(x, 1 << 12)
        bound = self.bound[x]
        value = self.converted(x, dtype)
        self.keep(value, 1 if dtype is bool_ else 255 if dtype in (uint8, int8) else 2 * bound)

    def reshape(self) -> None:
        x = self.value(lambda v: bool(v.shape))
        if x is None:
            return
        if len(x.shape) == 2:
            self.keep(self.b.trans(x), self.bound[x])
        elif self.chance(0.3):
            side = self.pick(self.sides)
            self.keep(self.b.broadcast(self.b.expand(x, 0), (side, x.shape[0])), self.bound[x])
        else:
            self.keep(self.b.expand(x, self.pick((0, 1))), self.bound[x])

    def reduce(self) -> None:
        x = self.value(lambda v: bool(v.shape))
        if x is None:
            return
        x = self.plain(x)
        axis = self.rng.randrange(len(x.shape))
        fold = self.pick(("max", "min") if x.dtype is bool_ else ("sum", "sum", "max", "min"))
        if fold == "sum" and self.bound[x] * x.shape[axis] > EXACT:
            x = self.held(x)
        self.keep(self.b.reduce(fold, x, axis), self.bound[x] * (x.shape[axis] if fold == "sum" else 1))

    def dot(self) -> None:
        """Operands from scope, of any float type, perhaps one tile with itself; another tile may be added."""
        b = self.b
        x = self.value(lambda v: len(v.shape) == 2 and v.dtype is not bool_)
        if x is None:
            return
        x = self.held(x)
        if not x.dtype.is_float:
            x = self.converted(x, float32)
        if self.chance(0.4):
            x, original = b.trans(x), x
            self.bound[x] = self.bound[original]
        k = x.shape[1]
        y = self.value(lambda v: len(v.shape) == 2 and k in v.shape and v.dtype is not bool_)
        if y is None or self.chance(0.15):
            y = b.trans(x)
            self.bound[y] = self.bound[x]
        y = self.held(y)
        if not y.dtype.is_float:
            y = self.converted(y, x.dtype)
        if y.shape[0] != k or (y.shape[0] == y.shape[1] and self.chance(0.3)):
            y, original = b.trans(y), y
            self.bound[y] = self.bound[original]
        bound = self.bound[x] * self.bound[y] * k
        result = self.keep(b.dot(x, y), bound)
        if self.chance(0.4):
            other = self.value(
                lambda v: v is not result and v.dtype is float32 and self.shape_fits(v.shape, result.shape)
            )
            if other is not None and self.bound[other] + bound < EXACT:
                sides = (result, other) if self.chance(0.5) else (other, result)
                self.keep(b.binary("add", *sides), self.bound[other] + bound)

    def arange(self) -> None:
        value = self.b.binary("add", self.b.arange(self.pick(self.sides)), self.start(9))
        self.keep(value, 1 << 10)

    def full(self) -> None:
        shape = tuple(self.pick(self.sides) for _ in range(self.pick((1, 2))))
        scalar = self.value(lambda v: not v.shape)
        if scalar is not None and self.chance(0.5):
            self.keep(self.b.full(scalar, shape), self.bound[scalar])
        else:
            self.keep(self.b.full(self.pick((0.0, 1.0, 0, 3, True)), shape), 3)

    def scalar(self) -> None:
        a = self.value(lambda v: not v.shape)
        dimension = self.pick(self.arguments)
        if a is None or self.chance(0.2):
            length = self.b.dim(dimension.tensor, self.rng.randrange(dimension.tensor.rank))
            if isinstance(length, Value):
                self.bound[length] = 200
                self.scope[0].append(length)
            return
        a = self.plain(a)
        c = self.value(lambda v: not v.shape)
        assert c is not None
        c = self.plain(c)
        if a.dtype.kind == c.dtype.kind and a.dtype is not bool_:
            a, c = self.held(a), self.held(c)
            self.keep(self.b.binary(self.pick(("add", "sub", "mul", "min", "max")), a, c), HELD * HELD)

    def roughen(self) -> None:
        x = self.value(lambda v: v.dtype is float32 and len(v.shape) > 0)
        if x is None:
            return
        value = self.b.binary("mul", self.held(x, 8), 0.25)
        value = self.b.unary(self.pick(("exp", "exp2", "tanh")), value)
        if self.chance(0.5) and len(value.shape) == 2:
            top = self.b.reduce(self.pick(("sum", "max")), value, self.rng.randrange(2))
            if self.chance(0.5) or top.shape[0] == value.shape[-1]:
                value = top
        self.rough[-1].append(value)

    # ---- control flow ------------------------------------------------------------------------------------------------

    def block(self, types: tuple[Type, ...], body: Callable[[tuple[Value, ...]], tuple[Value, ...]]) -> Block:
        block, outer = Block(types), self.b.block
        self.b.block = block
        self.scope.append([])
        self.rough.append([])
        self.depth += 1
        ends = body(block.params)
        self.b.emit("yield", ends)
        self.depth -= 1
        self.scope.pop()
        self.rough.pop()
        self.b.block = outer
        return block

    def bounds(self, step: int) -> tuple[Value, Value, int]:
        """Low, high and the greatest number of turns."""
        b, turns = self.b, self.pick((0, 1, 2, 3, 4))
        if self.chance(0.3):
            low = self.value(lambda v: not v.shape and v.dtype is int32 and self.bound[v] <= 4)
            if low is not None:
                return low, b.binary("add", low, turns * step - self.pick((0, 0, step - 1))), turns + 1
        start = self.pick((0, 0, 0, 0, 1, -step))
        argument = self.pick(self.arguments)
        axis = self.rng.randrange(argument.tensor.rank)
        length = b.dim(argument.tensor, axis)
        found = argument.view(argument.base).shape[axis]
        if isinstance(length, Value) and (found - start) // step <= 6 and self.chance(0.7):
            return b.const(start, int32), length, max(1, -(-(found - start) // step))
        return b.const(start, int32), b.const(start + turns * step - self.pick((0, 0, step - 1)), int32), max(1, turns)

    def loop(self) -> None:
        step = self.pick((1, self.step))
        low, high, turns = self.bounds(step)
        inits = []
        for _ in range(self.pick((0, 1, 1, 2, 2, 3))):
            alike = inits[0].type if inits and self.chance(0.6) else None  # those can change places
            value = self.value(
                lambda v, t=alike: v.type == t if t else v.dtype in (float32, int32, bool_) or self.chance(0.1)
            )
            if value is not None and self.chance(0.3):
                value = (
                    self.b.full({"float": 0.0, "int": 0, "bool": False}[value.dtype.kind], value.shape)
                    if value.shape
                    else value
                )
                self.bound.setdefault(value, 4)
            if value is not None:
                inits.append(self.held(value, CARRIED))
        outer_turns = self.turns
        self.turns *= turns

        def body(params: tuple[Value, ...]) -> tuple[Value, ...]:
            self.keep(params[0], 200)
            for p in params[1:]:
                self.keep(p, CARRIED)
            for _ in range(self.pick((1, 2, 3, 5))):
                self.statement()
            return tuple(self.next_value(p, params) for p in params[1:])

        op = self.control("for", (low, high, *inits), {"step": step}, tuple(v.type for v in inits), body)
        self.turns = outer_turns
        for result in op.results:
            self.keep(result, CARRIED)

    def control(
        self, kind: str, operands: tuple[Value, ...], attrs: dict[str, Any], types: tuple[Type, ...], *bodies: Any
    ) -> Op:
        first = (Type(int32), *types) if kind == "for" else ()
        blocks = tuple(self.block(first, body) for body in bodies)
        op = Op(kind, operands, attrs, types, blocks)
        self.b.block.ops.append(op)
        return op

    def next_value(self, param: Value, params: tuple[Value, ...]) -> Value:
        """What a carried value becomes: a sum, another one, its own transpose, a tile of the body, or what it was."""
        b, type_ = self.b, param.type
        same = self.values(lambda v: v.type == type_)
        others = [p for p in params[1:] if p.type == type_ and p is not param]
        fresh = [v for v in self.scope[-1] if v.type == type_ and v not in params]
        roll = self.rng.random()
        if roll < 0.1:
            return param
        if roll < 0.25 and others:
            return self.pick(others)
        if roll < 0.35 and len(type_.shape) == 2 and type_.shape[0] == type_.shape[1]:
            return b.trans(param)
        arithmetic = type_.dtype in (float32, int32, int64)
        if roll < 0.45 and arithmetic and len(type_.shape) == 2 and type_.shape[0] == type_.shape[1]:
            return self.exactly(b.binary("sub", b.trans(param), param), 2 * CARRIED, type_)
        if roll < 0.8 and arithmetic and (fresh or same):
            value = self.pick(fresh or same)
            bound = self.bound[value]
            if (bound + 4) * self.turns < CARRIED and value is not param:
                # The sum may grow past what clamping assumes, but not past what is exact.
                return b.binary("add", param, value) if self.chance(0.6) else b.binary("add", value, param)
            return self.exactly(b.binary("add", param, value), bound + CARRIED, type_)
        if fresh:
            return (
                self.held(self.pick(fresh), CARRIED)
                if type_.dtype is not bool_ and not type_.dtype.is_narrow
                else self.pick(fresh)
            )
        return self.pick(same) if not arithmetic else self.held(self.pick(same), CARRIED)

    def exactly(self, value: Value, bound: int, type_: Type) -> Value:
        self.bound[value] = bound
        return self.held(value, CARRIED)

    def branch(self) -> None:
        condition = self.value(lambda v: not v.shape and v.dtype is bool_)
        if condition is None or self.chance(0.5):
            condition = self.test(())
        chosen = [v for _ in range(self.pick((0, 1, 1, 2))) if (v := self.value()) is not None]
        if self.depth and self.chance(0.5):  # what is carried
            chosen = [v for v in self.values() if isinstance(v.owner, Block) and v.shape][-2:] or chosen
        types = tuple(v.type for v in chosen)
        bounds = [1] * len(types)

        def side(_: tuple[Value, ...]) -> tuple[Value, ...]:
            for _ in range(self.pick((0, 1, 2))):
                self.statement()
            ends = []
            for n, type_ in enumerate(types):
                own = [v for v in self.scope[-1] if v.type == type_]
                end = (
                    self.pick(own)
                    if own and self.chance(0.7)
                    else self.pick(self.values(lambda v, t=type_: v.type == t))
                )
                bounds[n] = max(bounds[n], self.bound[end])
                ends.append(end)
            return tuple(ends)

        op = self.control("if", (condition,), {}, types, side, side)
        for result, bound in zip(op.results, bounds, strict=True):
            self.keep(result, bound)

    def tile(self, shape: tuple[int, int], row: Value, column: Value) -> Value:
        """A float32 tile of some tensor, perhaps loaded the other way round."""
        b = self.b
        readable = [a for a in self.arguments if a.tensor.rank == 2 and a.owned is None and not a.approximate]
        readable = [a for a in readable if a.tensor.dtype.is_float]
        if not readable or self.chance(0.05):
            return b.full(1.0, shape)
        tensor = self.pick(readable).tensor
        turned = self.chance(0.3)
        extents, starts = (shape[::-1], (column, row)) if turned else (shape, (row, column))
        value = b.emit(
            "load", starts, Type(tensor.dtype, extents), tensor=tensor, extents=extents, checked=(True, True)
        ).result
        value = b.trans(value) if turned else value
        self.bound[value] = HELD
        value = value if self.chance(0.5) else b.cast(value, float32)
        self.bound[value] = HELD
        return self.held(value, 8) if self.chance(0.3) else value

    def attention(self) -> None:
        """Two products in a loop, with what carries from block to block: the kernels monotile is made for."""
        b, pick, chance = self.b, self.pick, self.chance
        m, n, d, e = (pick((*self.sides, 16, 32, 48, 64)) for _ in range(4))
        zero = b.const(0, int32)
        first = (
            b.binary("mul", self.pid, m)
            if self.pid is not None and chance(0.7)
            else b.const(pick((0, 0, 3, -2)), int32)
        )
        q = self.tile((m, d), first, zero)
        rows = b.binary("add", b.arange(m), first)
        argument = pick(self.arguments)
        length = b.value(b.dim(argument.tensor, 0), int32)
        found = argument.view(argument.base).shape[0]
        if found // n > 6:
            length = b.const(2 * n, int32)
        causal, hidden, tops = chance(0.5), chance(0.5), chance(0.6)
        inits = [b.full(0.0, (m, e)), b.full(0.0, (m,)), b.full(-8.0, (m,))]
        inits = inits if tops else inits[:2]

        def body(params: tuple[Value, ...]) -> tuple[Value, ...]:
            j, acc, total, *top = params
            s = b.dot(q, b.trans(self.tile((n, d), j, zero)))
            cols = b.binary("add", b.arange(n), j)
            if causal:
                seen = b.binary("le", b.expand(cols, 0), b.expand(rows, 1))
                if chance(0.5):
                    seen = b.binary("and", seen, b.binary("lt", b.expand(cols, 0), length))
                if chance(0.4):
                    low = b.binary("sub", b.expand(rows, 1), pick((1, 9, 40)))
                    seen = b.binary("and", seen, b.binary("lt", low, b.expand(cols, 0)))
                if hidden:
                    b.emit("visible", (seen,))
                s = b.where(seen, s, -8.0)
            s = b.binary("min", b.binary("max", s, -8.0), 8.0)
            new = [b.binary("max", top[0], b.reduce("max", s, 1))] if tops else []
            p = b.binary("sub", s, b.expand(new[0], 1)) if tops and not (causal and hidden) else b.binary("add", s, 8.0)
            p = b.cast(p, float16) if chance(0.3) else p
            v = self.tile((n, e), j, zero)
            if v.dtype is not p.dtype:
                v, p = b.cast(v, float32), b.cast(p, float32)
            self.bound[v] = self.bound.get(v, HELD)
            product = b.dot(p, self.held(v, 8))
            total = b.binary("add", total, b.reduce("sum", b.cast(p, float32), 1))
            if tops and chance(0.5) and not (causal and hidden):  # a factor of 1 or 0 for each row
                factor = b.where(b.binary("eq", new[0], top[0]), 1.0, 0.0)
                acc, total = b.binary("mul", acc, b.expand(factor, 1)), b.binary("mul", total, factor)
            if chance(0.2) and not (causal and hidden):
                self.keep(p, 16)
                self.store()
            return (b.binary("add", acc, product), total, *new)

        op = self.control("for", (zero, length, *inits), {"step": n}, tuple(v.type for v in inits), body)
        self.bound.update({op.results[0]: EXACT, op.results[1]: EXACT})
        acc = op.results[0]
        if chance(0.5):
            acc = b.binary("add", acc, b.expand(op.results[1], 1))
        if chance(0.3):
            self.bound[acc] = EXACT
            acc = b.dot(self.held(acc, 64), self.tile((e, pick(self.sides)), zero, zero)) if chance(0.5) else acc
        self.keep(acc, EXACT)
        self.keep(op.results[1], EXACT)

    def visible_loop(self) -> None:
        """Blocks with a predicate; what it hides changes nothing."""
        b, step = self.b, self.step
        height = self.pick(self.sides)
        argument = self.pick([a for a in self.arguments if not a.approximate])
        if argument.owned is not None or argument.tensor.rank != 2 or argument.tensor.dtype is bool_:
            return
        length = argument.view(argument.base).shape[1]
        if length // step > 6:
            return
        rows = b.binary("add", b.arange(height), b.cast(self.start(height), int32))
        limit = b.dim(argument.tensor, 1)
        start = b.cast(self.start(length), int32)
        two = self.chance(0.5)
        init = b.full(0.0, (height, step) if two else (height,))

        def body(params: tuple[Value, ...]) -> tuple[Value, ...]:
            j, acc = params
            cols = b.binary("add", b.arange(step), j)
            seen = b.binary(self.pick(("le", "lt", "ge", "gt")), b.expand(cols, 0), b.expand(rows, 1))
            if self.chance(0.5):
                low = b.binary("sub", b.expand(rows, 1), self.pick((1, 3, 16)))
                seen = b.binary("and", seen, b.binary(self.pick(("ge", "lt")), b.expand(cols, 0), low))
            if self.chance(0.3):
                seen = b.binary("and", seen, b.expand(b.binary("lt", cols, limit), 0))
            b.emit("visible", (seen,))
            extents = (height, step)
            tile = b.emit(
                "load",
                (start, j),
                Type(argument.tensor.dtype, extents),
                tensor=argument.tensor,
                extents=extents,
                checked=(True, True),
            ).result
            picked = b.where(seen, b.cast(tile, float32), 0.0)
            if two:
                return (b.binary("add", acc, picked),)
            return (b.binary("add", acc, b.reduce("sum", picked, 1)),)

        high = b.value(limit, int32)
        op = self.control("for", (b.const(0, int32), high, init), {"step": step}, (init.type,), body)
        self.keep(op.result, HELD * 65 * 8)


def facts(name: str, index: int, dtype: DType, dims: list[str | int], lengths: list[int], strides: list[int]) -> Tensor:
    """What the launcher tells the compiler of a tensor."""
    last = len(dims) - 1
    units = [a for a, s in enumerate(strides) if s == 1 or (a == last and lengths[a] == 1)]
    unit = units[-1] if units else None
    known: list[int | None] = [None] * len(dims)
    if unit is not None:
        known[unit] = 1
    dense = 1
    for axis in range(last, -1, -1):
        if strides[axis] == dense:
            known[axis] = dense
        length = dims[axis]
        if not isinstance(length, int):
            break
        dense *= length
    return Tensor(name, index, dtype, tuple(dims), unit, tuple(known))
