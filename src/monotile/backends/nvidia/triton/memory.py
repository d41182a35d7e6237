"""Loads, stores and gathers: a 64-bit origin, offsets within the tile, and a mask for what may lie outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ....ir import Kernel, Op, Spread, Tensor, Value, constant, spreads, view_of
from ....ir import starts as ir_starts
from ....ir.affine import linear
from ....ir.intervals import interval, nonnegative
from ....passes.facts import loop_of
from .padding import padded
from .text import Dialect, Names, Text

NO_VIEWS: Mapping[int, Text] = {}
INT32_SPAN = 2**31  # elements from which on a tile needs 64-bit offsets


@dataclass(frozen=True)
class FunctionArgument:
    """A parameter of the Triton function. `index` is a tensor's number, a word of the launch, or a scalar's number."""

    kind: str  # pointer, dim, stride, scalar, or tiles_per_cta of a persistent kernel
    name: str
    index: int


class TileOrigin(NamedTuple):
    """The address of a tile's first element: a pointer, and what is added to it."""

    pointer: str
    terms: list[str]

    def __str__(self) -> str:
        return " + ".join([self.pointer, *self.terms])


class Memory:
    """Addresses and masks as text."""

    def __init__(self, kernel: Kernel, names: Names, dialect: Dialect, *, wide: bool, emulate: bool) -> None:
        self.kernel, self.names, self.wide, self.emulate = kernel, names, wide, emulate
        self.tl = dialect.module
        self.loops = loop_of(kernel)
        self.arguments: dict[tuple[str, int | str], FunctionArgument] = {}
        self.aligned: set[str] = set()  # lengths that masks along contiguous memory compare with
        self.iotas: dict[int, str] = {}
        self.spans: list[list[tuple[int, int]]] = []  # of each access: words of its strides, and the last position
        self.word_at, words = [], 0
        for tensor in kernel.tensors:
            self.word_at.append(words)
            words += 1 + 2 * tensor.rank

    # ---- parameters --------------------------------------------------------------------------------------------------

    def _argument(self, kind: str, key: int | str, name: str, index: int) -> str:
        if (kind, key) not in self.arguments:
            self.arguments[kind, key] = FunctionArgument(kind, self.names.fresh(name), index)
        return self.arguments[kind, key].name

    def pointer(self, tensor: Tensor) -> str:
        return self._argument("pointer", tensor.index, f"{tensor.name}_ptr", tensor.index)

    def dim(self, tensor: Tensor, axis: int) -> Text:
        """Return a length; equal symbols are equal lengths and share a parameter."""
        length = tensor.dims[axis]
        if isinstance(length, int):
            return Text(str(length), constant=length)
        return Text(self._argument("dim", length, length, self.word_at[tensor.index] + 1 + axis))

    def scalar(self, name: str) -> str:
        at = [n for n, _ in self.kernel.scalars].index(name)
        return self._argument("scalar", name, name, at)

    def stride(self, tensor: Tensor, axis: int) -> int | str:
        known = tensor.strides[axis] if tensor.strides else None
        if known is not None:
            return known
        if tensor.unit == axis:
            return 1
        word = self.word_at[tensor.index] + 1 + tensor.rank + axis
        return self._argument("stride", word, f"{tensor.name}_s{axis}", word)

    def iota(self, side: int) -> str:
        """Return the positions 0, 1, ... of a padded side, which are made once at the top."""
        if side not in self.iotas:
            self.iotas[side] = self.names.fresh(f"iota_{side}")
        return self.iotas[side]

    # ---- addresses ---------------------------------------------------------------------------------------------------

    def origin(self, tensor: Tensor, starts: list[Text], views: Mapping[int, Text] = NO_VIEWS) -> TileOrigin:
        """Return the address of the tile's first element: the tensor's pointer plus an offset in 64 bits. `views` has
        the origins of views that starts are counted from, by axis."""
        fixed, terms = 0, list[str]()
        every = [*enumerate(starts), *views.items()]
        for axis, start in every:
            stride = self.stride(tensor, axis) if start.constant != 0 else 0
            if stride == 0:
                continue
            if start.constant is not None and isinstance(stride, int):
                fixed += int(start.constant) * stride
            elif start.literal:
                terms.append(f"{self.tl}.full([], {start}, {self.tl}.int64) * {stride}")
            else:
                wide = f"{start}.to({self.tl}.int64)"
                terms.append(wide if stride == 1 else f"{wide} * {stride}")
        if fixed:
            terms.append(str(fixed))
        return TileOrigin(self.pointer(tensor), terms)

    def offsets(
        self,
        tensor: Tensor,
        extents: tuple[int | None, ...],
        sides: tuple[Spread | None, ...],
        parts: int = 0,
    ) -> str:
        """Return the offsets of a tile's elements from its first one; nothing for a single element. `sides` repeat
        elements of memory; with `parts`, the offsets of those elements, or of that many bytes of each."""
        axes = [axis for axis, extent in enumerate(extents) if extent is not None]
        terms, spans = [], []
        for place, axis in enumerate(axes):
            repeated, stride = sides[axis], self.stride(tensor, axis)
            side = padded(repeated.extent if repeated and not parts else extents[axis] or 1)
            if parts and stride == 1:
                side = (extents[axis] or 1) * parts  # a power of two, which needs no padding
            elif parts > 1:
                stride = stride * parts if isinstance(stride, int) else f"({stride} * {parts})"
            iota = self._repeated(repeated) if repeated and not parts else self.iota(side)
            if isinstance(stride, str):
                spans.append((self.word_at[tensor.index] + 1 + tensor.rank + axis, (side - 1) * max(1, parts)))
                far = self.wide
            else:
                far = abs(stride) * (side - 1) >= INT32_SPAN // 2
            wide = f"{iota}.to({self.tl}.int64)" if far else iota
            positions = spread(wide, place, len(axes))
            terms.append(positions if stride == 1 else f"{positions} * {stride}")
        self.spans.append(spans)
        return " + ".join(terms)

    def _repeated(self, side: Spread) -> str:
        """Return the positions in memory of a side's elements."""
        at = self.iota(padded(side.extent))
        at = at if side.factor == 1 else f"{at} * {side.factor}"
        at = at if side.offset == 0 else f"{at} + {side.offset}"
        return f"(({at}) // {side.divisor})"

    # ---- masks -------------------------------------------------------------------------------------------------------

    def length(self, op: Op, axis: int, text: Callable[[Value], Text]) -> Text:
        """Return the length of a tensor or view, which positions of an access are compared with."""
        view = view_of(op, axis)
        return self.dim(op.attrs["tensor"], axis) if view is None else text(view[1])

    def mask(self, op: Op, starts: list[Text], text: Callable[[Value], Text], *, packed: bool = False) -> str:
        """Return the mask of a load or store: inside the tensor and not padding; empty where the whole tile is. The
        elements that a tile repeats are inside; `packed`: the mask of those in memory."""
        sides = spreads(op)
        extents = tuple(s.extent if s else e for s, e in zip(sides, op.attrs["extents"], strict=True))
        rank = sum(extent is not None for extent in extents)
        scalars, tiles, place = [], [], 0
        for axis, extent in enumerate(extents):
            if sides[axis] is not None:
                padding = not packed and padded(extent) != extent
                tests = [f"{self.iota(padded(extent))} < {extent}"] if padding else []
            else:
                tests = self._tests(op, axis, starts[axis], text)
            if extent is None:
                scalars += [f"({t})" for t in tests]
            else:
                tiles += [spread(f"({t})", place, rank) for t in tests]
                place += 1
        return self._all_of(scalars, tiles, extents)

    def _tests(self, op: Op, axis: int, start: Text, text: Callable[[Value], Text]) -> list[str]:
        """Return tests along one dimension, of the positions in the tile."""
        tensor, extent, checked = op.attrs["tensor"], op.attrs["extents"][axis], op.attrs["checked"][axis]
        value = ir_starts(op)[axis]
        length = self.length(op, axis, text) if checked else None
        whole = view_of(op, axis) is None
        if whole and extent is not None and tensor.unit == axis and length is not None and not length.literal:
            self.aligned.add(length.text)
        from_zero = nonnegative(linear(value), self.loops)
        if extent is None:
            if length is None:
                return []
            start = start if not start.literal else Text(f"{self.tl}.full([], {start}, {self.tl}.int32)")
            return ([] if from_zero else [f"{start} >= 0"]) + [f"{start} < {length}"]
        iota, padding = self.iota(padded(extent)), padded(extent) != extent
        if length is None:
            return [f"{iota} < {extent}"] if padding else []
        if from_zero:
            if length.constant is not None and start.constant is not None:
                return [f"{iota} < {min(int(length.constant - start.constant), extent)}"]
            rest = str(length) if start.constant == 0 else f"{length} - {start}"
            return [f"{iota} < {self.tl}.minimum({rest}, {extent})" if padding else f"{iota} < {rest}"]
        bounds = [f"{start} + {iota} >= 0", f"{start} + {iota} < {length}"]
        return bounds + ([f"{iota} < {extent}"] if padding else [])

    def padding_mask(self, shape: tuple[int, ...]) -> list[str]:
        """Return tests that are false in the padding of a tile."""
        sides = [(n, s) for n, s in enumerate(shape) if padded(s) != s]
        return [spread(f"({self.iota(padded(s))} < {s})", n, len(shape)) for n, s in sides]

    # ---- gathers -----------------------------------------------------------------------------------------------------

    def gather(self, op: Op, text: Callable[[Value], Text], value: Value | None = None) -> tuple[str, str]:
        """Return the addresses and the mask of a gather, or of a scatter of a value."""
        shape = (value or op.result).shape
        tensor: Tensor = op.attrs["tensor"]
        checked = op.attrs.get("checked") or (True,) * tensor.rank
        terms: dict[bool, list[str]] = {True: [self.pointer(tensor)], False: []}  # of scalars, of tiles
        tests: dict[bool, list[str]] = {True: [], False: []}
        for axis, value in enumerate(ir_starts(op)):
            index, stride, view = text(value), self.stride(tensor, axis), view_of(op, axis)
            known = constant(value)
            if index.literal:
                index = Text(f"{self.tl}.full([], {index}, {self.tl}.int32)")
            if known != 0 and stride != 0:
                wide = f"{index}.to({self.tl}.int64)"
                terms[not index.shape].append(wide if stride == 1 else f"{wide} * {stride}")
            if view is not None:
                terms[True] += self.origin(tensor, [], {axis: text(view[0])}).terms
            if checked[axis]:
                tests[not index.shape] += self._gather_tests(index, value, self.length(op, axis, text))
        return " + ".join([*terms[True], *terms[False]]), self._all_of(
            tests[True], [*tests[False], *self.padding_mask(shape)], shape
        )

    def _gather_tests(self, index: Text, value: Value, length: Text) -> list[str]:
        """Return the tests of positions that are not known to be inside."""
        least, most = interval(value, self.loops)
        inside = isinstance(length.constant, int) and most < length.constant
        return ([] if least >= 0 else [f"({index} >= 0)"]) + ([] if inside else [f"({index} < {length})"])

    def _all_of(self, scalars: list[str], tiles: list[str], extents: tuple[int | None, ...]) -> str:
        """Join tests to a mask. A bool that is broadcast over a tile becomes an integer in Triton's interpreter, which
        `!= 0` undoes."""
        sides = [padded(e) for e in extents if e is not None]
        if not (self.emulate and scalars and sides):
            return " & ".join([*scalars, *tiles])
        all_of_it = spread(f"({self.iota(sides[0])} >= 0)", 0, len(sides))
        return f"({' & '.join([*scalars, all_of_it, *tiles])}) != 0"


def spread(text: str, place: int, rank: int) -> str:
    """Place positions along one dimension of a tile."""
    if rank < 2:
        return text
    return f"{text}[:, None]" if place == 0 else f"{text}[None, :]"
