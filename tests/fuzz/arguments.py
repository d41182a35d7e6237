"""Tensors of random kernels, and random loads and stores."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from monotile import dtypes
from monotile.dtypes import FP8, DType, bfloat16, bool_, float16, float32, int8, int32, int64, uint8, uint32
from monotile.ir import Kernel, Tensor, Type, Value

Array = npt.NDArray[Any]

SIDES = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 48, 64, 65)
STEPS = (1, 2, 4, 8, 16, 32)
EXACT = 1 << 22  # whole numbers up to here are added exactly in float32
CARRIED = 1 << 14  # the bound of what a loop carries
HELD = 50  # the bound of what is stored
MARGIN = 70  # elements around a view, along each dimension


@dataclass
class Argument:
    """A tensor of the program and the array passed for it."""

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


@dataclass
class Arguments:
    rng: random.Random
    arguments: list[Argument] = field(default_factory=list)
    bound: dict[Value, int] = field(default_factory=dict)
    scope: list[list[Value]] = field(default_factory=list)  # values by block
    rough: list[list[Value]] = field(default_factory=list)  # values an exponential touched
    pid: Value | None = None
    depth: int = 0
    budget: int = 0
    iterations: int = 1  # greatest number of times the current block runs
    quiet: bool = False  # no stores here
    infinite: bool = False  # the program makes infinities itself

    # ---- choices -----------------------------------------------------------------------------------------------------

    def chance(self, part: float) -> bool:
        return self.rng.random() < part

    def pick(self, items: Sequence[Any]) -> Any:
        return items[self.rng.randrange(len(items))]

    def values(self, wanted: Callable[[Value], bool] = lambda v: True) -> list[Value]:
        return [v for values in self.scope for v in values if wanted(v)]

    def value(self, wanted: Callable[[Value], bool] = lambda v: True) -> Value | None:
        """Pick a value in scope, preferring recent ones."""
        found = self.values(wanted)
        if not found:
            return None
        return self.pick(found[-4:]) if self.chance(0.5) else self.pick(found)

    def keep(self, value: Value, bound: int) -> Value:
        self.bound[value] = max(1, bound)
        self.scope[-1].append(value)
        return value

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
        dtype = pick((float32,) * 8 + (float16, bfloat16, *FP8, int32, int32, int64, uint32, int8, uint8, bool_))
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
        if dtype in (float32, float16):
            base[:] = 30011.0
        seed = np.random.default_rng(self.rng.randrange(1 << 30))
        inside = view(base)
        assert list(inside.shape) == lengths and (inside.size == 0 or np.shares_memory(inside, base))
        low, high = (0, 1) if dtype is bool_ else (0, 5) if dtype in (uint8, uint32) else (-4, 4)
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
        """Make a position: often in or near the tensor, sometimes far away; it may depend on any value."""
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
        """Make starts and extents of a slice. In a grid, programs write disjoint parts of an output."""
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

    def view(self, argument: Argument) -> tuple[dict[str, Any], tuple[Value, ...]]:
        """Make, sometimes, views along some dimensions: the attribute of an access in them, and their spans."""
        b, axes, spans = self.b, [], []
        for axis, length in enumerate(argument.view(argument.base).shape):
            if axis == argument.owned or not self.chance(0.08):
                continue
            most = b.value(b.dim(argument.tensor, axis), int32)
            first, end = (
                b.cast(b.binary("min", b.binary("max", self.start(length), 0), most), int32) for _ in range(2)
            )
            axes.append(axis)
            spans += [first, b.binary("max", b.binary("sub", end, first), 0)]
        return ({"view": tuple(axes)} if axes else {}), tuple(spans)

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
        view, spans = self.view(argument)
        checked = (True,) * tensor.rank
        op = self.b.emit("load", (*starts, *spans), type_, tensor=tensor, extents=extents, checked=checked, **view)
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
        view, spans = self.view(argument)
        checked = (True,) * tensor.rank
        self.b.emit("store", (value, *starts, *spans), tensor=tensor, extents=extents, checked=checked, **view)

    def scatter(self) -> None:
        """Store a tile at positions that are no two alike: strided, backwards, masked; maybe transposed."""
        argument = self.pick([a for a in self.arguments if a.output])
        tensor, lengths = argument.tensor, argument.view(argument.base).shape
        value = self.value(lambda v: 0 < len(v.shape) <= tensor.rank and self.fits(argument, v.shape))
        if value is None or argument.approximate:
            return
        value, b = self.converted(self.held(value), tensor.dtype), self.b
        axes = self.rng.sample(range(tensor.rank), len(value.shape))
        indices, beside = [], list[int]()
        for d in range(tensor.rank):
            start = self.start(lengths[d])
            if d == argument.owned:
                assert self.pid is not None
                start = b.binary("mul", self.pid, argument.share)
            if d not in axes:
                indices.append(start)
                continue
            along = axes.index(d)
            side = value.shape[along]
            room = argument.share // side if d == argument.owned else 9
            step = self.pick([step for step in (1, 2, 2, 3, 4, -1, -2) if abs(step) <= room])
            index = b.binary("add", b.binary("mul", b.arange(side), step), (side - 1) * -step if step < 0 else 0)
            index = b.binary("add", b.expand(index, 1 - along) if len(value.shape) == 2 else index, start)
            masked = self.chance(0.3)
            if abs(step) > 1 and not masked:
                beside.append(d)
            indices.append(b.where(self.test(value.shape), index, -1) if masked else index)
        view, spans = self.view(argument)
        b.emit("scatter", (value, *indices, *spans), tensor=tensor, **view)
        if beside and self.chance(0.6):  # the positions between them, perhaps by another value
            other = self.value(lambda v: v.shape == value.shape) or value
            other = self.converted(self.held(other), tensor.dtype)
            indices[beside[0]] = b.binary("add", indices[beside[0]], 1)
            b.emit("scatter", (other, *indices, *spans), tensor=tensor, **view)

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
                index = self.b.binary("mul", index, self.pick((1, 2, 2, -1, 3, 4, -2)))
                index = self.b.binary("add", index, self.pick((0, 1, -1, 5, self.start(9))))
                indices.append(self.b.expand(index, 1 - along) if len(shape) == 2 else index)
        indices = [self.b.cast(i, int32) if i.dtype.is_narrow else i for i in indices]
        found = self.b.broadcast_shape(tuple(indices))
        view, spans = self.view(argument)
        kind = Type(argument.tensor.dtype, found)
        op = self.b.emit("gather", (*indices, *spans), kind, tensor=argument.tensor, **view)
        self.keep(op.result, HELD)


def facts(name: str, index: int, dtype: DType, dims: list[str | int], lengths: list[int], strides: list[int]) -> Tensor:
    """Describe a tensor to the compiler as a launch does."""
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
