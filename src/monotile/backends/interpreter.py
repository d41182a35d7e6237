"""The definition of the language: every op of the IR in NumPy, one program of the grid after another.

It reads like a specification and is slow. The results of other backends must agree with it: exactly where arithmetic is
exact, within rounding where the order of a sum or the last bit of an exponential is free. It accepts IR before and
after any pass, and raises InternalError where a pass has wrongly marked an access as in bounds.

In float64 mode every floating value is a float64 and nothing is rounded to a narrower type before a store: the same IR
then computes the reference against which rounding errors are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import dtypes, ir
from ..dtypes import DType, float32
from ..errors import InternalError, RaceBetweenPrograms
from ..ir import Block, Op, Value
from ..ir.fused import fma
from ..ir.special import erf, sigmoid
from ..runtime.tensors import memory_as_array
from .base import Backend, Program
from .races import Races

Array = npt.NDArray[Any]


def evaluate(
    kernel: ir.Kernel,
    arrays: Sequence[Array],
    scalars: Sequence[Any],
    *,
    float64: bool = False,
    skip_hidden: bool = True,
) -> None:
    """Run a kernel's IR on NumPy arrays, one per tensor. A floating tensor accepts an array of any floating type."""
    Run(kernel, arrays, scalars, float64, skip_hidden).run_grid()


@dataclass(frozen=True)
class Interpreter(Backend):
    """The interpreter backend. `skip_hidden=False` also runs blocks whose `visible` is False everywhere; a
    correct kernel gives the same results."""

    float64: bool = False
    skip_hidden: bool = True
    name = "interpreter"

    def why_not(self) -> str | None:
        return None

    def accepts(self, device: str) -> bool:
        return device == "cpu"

    def compile(self, kernel: ir.Kernel) -> Program:
        return Interpreted(kernel, self)

    def stages(
        self, kernel: ir.Kernel, schedule: Any = None, device: str | None = None
    ) -> dict[str, Callable[[], str]]:
        return {"ir": lambda: ir.show(kernel)}


@dataclass(frozen=True)
class Interpreted(Program):
    kernel: ir.Kernel
    options: Interpreter

    def bind(self, words: Sequence[int], device: str = "cpu") -> list[tuple[Sequence[int], Sequence[int]]]:
        """Return the lengths and strides of each tensor."""
        found, at = [], 1
        for tensor in self.kernel.tensors:
            middle, end = at + tensor.rank, at + 2 * tensor.rank
            found.append((words[at:middle], words[middle:end]))
            at = end + 1
        return found

    def launch(
        self,
        bound: Any,
        arrays: Sequence[Any],
        addresses: Sequence[int],
        scalars: Sequence[Any],
        threads: int | None,
    ) -> None:
        views = [memory_as_array(a, t.dtype, *b) for a, t, b in zip(addresses, self.kernel.tensors, bound, strict=True)]
        options = self.options
        evaluate(self.kernel, views, scalars, float64=options.float64, skip_hidden=options.skip_hidden)


BACKEND = Interpreter()


# ---- conversions -----------------------------------------------------------------------------------------------------


def convert(value: Array, target: np.dtype[Any]) -> Array:
    """Cast. To a float: round to nearest even, overflow to inf. To bool: not zero. Float to integer: truncate and
    saturate, NaN to 0. Integer to integer: keep the low bits."""
    source = value.dtype
    if source == target:
        return value
    if target.kind == "b":
        return np.asarray(value != 0)
    if not _is_float(source):
        # An integer is cast to a narrow float through float32, so that every machine rounds alike.
        return value.astype(np.float32).astype(target) if _is_narrow_float(target) else value.astype(target)
    if _is_float(target):
        return value.astype(target)
    limits = np.iinfo(target)
    whole = np.trunc(value.astype(np.float64))
    # The greatest int64 is not a float64, but no float64 lies between it and the one it rounds to.
    inside = (whole > float(limits.min)) & (whole < float(limits.max))
    saturated = np.where(whole <= float(limits.min), limits.min, limits.max).astype(target)
    saturated = np.where(np.isnan(whole), np.zeros((), target), saturated)
    return np.where(inside, np.where(inside, whole, 0.0).astype(target), saturated)


def _is_float(dtype: np.dtype[Any]) -> bool:
    found = dtypes.from_numpy(dtype)
    return dtype == np.float64 if found is None else found.is_float


def _is_narrow_float(dtype: np.dtype[Any]) -> bool:
    return _is_float(dtype) and dtype.itemsize <= 2


# ---- elementwise ops and reductions ----------------------------------------------------------------------------------

ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "neg": np.negative,
    "abs": np.abs,
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "tanh": np.tanh,
    "sigmoid": sigmoid,
    "erf": erf,
    "sin": np.sin,
    "cos": np.cos,
    "sqrt": np.sqrt,
    "reciprocal": np.reciprocal,
    "not": np.logical_not,
    "add": np.add,  # integers wrap
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "floordiv": np.floor_divide,  # integers, rounded down; by 0 it is 0
    "mod": np.remainder,  # the sign of the divisor; by 0 it is 0
    "max": np.fmax,  # where one is NaN, the other
    "min": np.fmin,
    "and": np.logical_and,
    "or": np.logical_or,
    "bitand": np.bitwise_and,
    "bitor": np.bitwise_or,
    "bitxor": np.bitwise_xor,
    "shl": np.left_shift,  # a count that is negative or not below the number of bits moves every bit out
    "shr": np.right_shift,  # copies the sign, if the type has one
    "lt": np.less,
    "le": np.less_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "where": np.where,
    "fma": fma,
}
IN_FLOAT64 = ELEMENTWISE | {"fma": lambda a, b, c: a * b + c}


def fold(kind: str, tile: Array, axis: int) -> Any:
    """Reduce along an axis: sum in the tile's type; max and min ignore NaN, and are any and all for bool."""
    if kind == "sum":
        return np.sum(tile, axis=axis, dtype=tile.dtype)
    if tile.dtype.kind == "b":
        return np.any(tile, axis=axis) if kind == "max" else np.all(tile, axis=axis)
    if tile.dtype.kind == "f":
        low, high = -np.inf, np.inf
    else:
        low, high = np.iinfo(tile.dtype).min, np.iinfo(tile.dtype).max
    if kind == "max":
        return np.fmax.reduce(tile, axis=axis, initial=low)
    return np.fmin.reduce(tile, axis=axis, initial=high)


# ---- memory ----------------------------------------------------------------------------------------------------------


Span = tuple[int, int]  # origin and length of a view; 0 and its length for a whole tensor


def overlap(op: Op, spans: Sequence[Span], starts: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the part of a tensor that a load or store accesses, in the tensor's coordinates and in the tile's. A
    dimension indexed at one position has length 1."""
    inside_tensor, inside_tile = [], []
    for n, ((origin, length), start) in enumerate(zip(spans, starts, strict=True)):
        end = start + (op.attrs["extents"][n] or 1)
        _require(op, n, op.attrs["checked"][n] or (start >= 0 and end <= length))
        low = max(start, 0)
        high = max(low, min(end, length))
        inside_tensor.append(slice(origin + low, origin + high))
        inside_tile.append(slice(low - start, high - start))
    return tuple(inside_tensor), tuple(inside_tile)


def _require(op: Op, dimension: int, holds: bool) -> None:
    if not holds:
        tensor, where = op.attrs["tensor"], f" at {op.loc.file}, line {op.loc.line}" if op.loc else ""
        found = f"a {op.kind} of {tensor.name!r}{where} leaves dimension {dimension}, where it is marked as inside"
        raise InternalError(f"{found}: a pass has proved something false")


# ---- one launch ------------------------------------------------------------------------------------------------------


class Run:
    """One launch of a kernel. `values` holds the current content of each SSA value."""

    def __init__(
        self, kernel: ir.Kernel, arrays: Sequence[Array], scalars: Sequence[Any], float64: bool, skip_hidden: bool
    ) -> None:
        self.kernel, self.arrays = kernel, arrays
        self.float64, self.skip_hidden = float64, skip_hidden
        self.elementwise = IN_FLOAT64 if float64 else ELEMENTWISE
        names = [name for name, _ in kernel.scalars]
        self.scalars: dict[str, Any] = dict(zip(names, scalars, strict=True))
        self.position: tuple[int, ...] = ()
        self.values: dict[Value, Array] = {}

    def run_grid(self) -> None:
        with np.errstate(all="ignore"):
            grid = self.grid()
            self.races = Races(self.kernel, self.arrays, grid)
            before = {n: self.arrays[n].copy() for n in self.races.writers}
            try:
                for position in np.ndindex(*grid):
                    self.position = position
                    self.races.program += 1
                    self.values.clear()
                    self.block(self.kernel.body)
            except RaceBetweenPrograms:
                for n, content in before.items():
                    self.arrays[n][...] = content
                raise

    def grid(self) -> tuple[int, ...]:
        """Return the sizes given to program_id, running only ops they depend on; () for a kernel of one program."""
        body = self.kernel.body.ops
        at = next((n for n, op in enumerate(body) if op.kind == "program_id"), None)
        if at is None:
            return ()
        for op in ir.needed(body[:at], body[at].operands):
            self.op(op)
        return tuple(max(0, self.number(v)) for v in body[at].operands)

    # ---- values ------------------------------------------------------------------------------------------------------

    def numpy_type(self, dtype: DType) -> np.dtype[Any]:
        return np.dtype(np.float64) if self.float64 and dtype.is_float else dtypes.to_numpy(dtype)

    def number(self, value: Value) -> int:
        return int(self.values[value])

    def set(self, value: Value, content: Any) -> None:
        """Set the content of a value, converted to its type and broadcast to its shape."""
        array = np.asarray(content, self.numpy_type(value.dtype))
        self.values[value] = array if array.shape == value.shape else np.broadcast_to(array, value.shape)

    # ---- ops ---------------------------------------------------------------------------------------------------------

    def block(self, block: Block) -> list[Array] | None:
        """Run a block and return what it yields, or None if its `visible` mark is False everywhere."""
        for op in block.ops:
            if op.kind == "yield":
                return [self.values[v] for v in op.operands]
            if op.kind == "visible":
                if self.skip_hidden and not self.values[op.operands[0]].any():
                    return None
            else:
                self.op(op)
        raise InternalError("a block without a yield")

    def op(self, op: Op) -> None:
        if op.kind in self.elementwise:
            self.set(op.result, self.elementwise[op.kind](*(self.values[v] for v in op.operands)))
        else:
            HANDLERS[op.kind](self, op)

    def const(self, op: Op) -> None:
        self.set(op.result, op.attrs["value"])

    def dim(self, op: Op) -> None:
        self.set(op.result, self.arrays[op.attrs["tensor"].index].shape[op.attrs["axis"]])

    def param(self, op: Op) -> None:
        self.set(op.result, self.scalars[op.attrs["name"]])

    def arange(self, op: Op) -> None:
        self.set(op.result, np.arange(op.result.shape[0]))

    def program_id(self, op: Op) -> None:
        for result, index in zip(op.results, self.position, strict=True):
            self.set(result, index)

    def cast(self, op: Op) -> None:
        self.set(op.result, convert(self.values[op.operands[0]], self.numpy_type(op.result.dtype)))

    def lookup(self, op: Op) -> None:
        """Look up a table; positions outside of it give zero."""
        table, index = np.array(op.attrs["table"]), self.values[op.operands[0]]
        inside = (index >= 0) & (index < len(table))
        self.set(op.result, np.where(inside, table[np.where(inside, index, 0)], 0))

    def expand(self, op: Op) -> None:
        self.set(op.result, np.expand_dims(self.values[op.operands[0]], op.attrs["position"]))

    def trans(self, op: Op) -> None:
        self.set(op.result, self.values[op.operands[0]].T)

    def broadcast(self, op: Op) -> None:
        self.set(op.result, self.values[op.operands[0]])

    def reduce(self, op: Op) -> None:
        self.set(op.result, fold(op.attrs["fold"], self.values[op.operands[0]], op.attrs["axis"]))

    def print(self, op: Op) -> None:
        """Show values, with the program and the line that print them."""
        values = iter(op.operands)
        shown = [str(self.values[next(values)]) if part is None else part for part in op.attrs["parts"]]
        program = ", ".join(map(str, self.position)) or "0"
        print(f"program {program}{f', line {op.loc.line}' if op.loc else ''}:", *shown)

    def reshape(self, op: Op) -> None:
        self.set(op.result, self.values[op.operands[0]].reshape(op.result.shape))

    def scan(self, op: Op) -> None:
        tile = self.values[op.operands[0]]
        self.set(op.result, np.cumsum(tile, axis=op.attrs["axis"], dtype=tile.dtype))

    def dot(self, op: Op) -> None:
        a, b = (self.values[v].astype(self.numpy_type(float32), copy=False) for v in op.operands)
        self.set(op.result, np.matmul(a, b))

    def spans(self, op: Op) -> list[Span]:
        """Return origin and length of what an access may touch in each dimension."""
        found = []
        for n, length in enumerate(self.arrays[op.attrs["tensor"].index].shape):
            view = ir.view_of(op, n)
            origin, count = (0, length) if view is None else (self.number(view[0]), self.number(view[1]))
            if not (origin >= 0 <= count and origin + count <= length):
                raise InternalError(f"a view of {op.attrs['tensor'].name!r} reaches outside dimension {n}")
            found.append((origin, count))
        return found

    def load(self, op: Op) -> None:
        """Load a tile; positions outside the tensor read as zero."""
        array = self.arrays[op.attrs["tensor"].index]
        inside_tensor, inside_tile = overlap(op, self.spans(op), [self.number(v) for v in ir.starts(op)])
        tile = np.zeros([extent or 1 for extent in op.attrs["extents"]], array.dtype)
        tile[inside_tile] = array[inside_tensor]
        self.races.read(op, inside_tensor)
        for axis, side in enumerate(ir.spreads(op)):
            if side is not None:
                tile = tile.take([side.at(i) for i in range(side.extent)], axis)
        self.set(op.result, tile.reshape(op.result.shape))

    def store(self, op: Op) -> None:
        """Store a tile; positions outside the tensor are not written."""
        array = self.arrays[op.attrs["tensor"].index]
        value = self.values[op.operands[0]]
        inside_tensor, inside_tile = overlap(op, self.spans(op), [self.number(v) for v in ir.starts(op)])
        tile = value.reshape([extent or 1 for extent in op.attrs["extents"]])
        self.races.write(op, inside_tensor)
        array[inside_tensor] = convert(tile[inside_tile], array.dtype)

    def scatter(self, op: Op) -> None:
        """Store an element at each position of the indices; positions outside the tensor are not written."""
        array, value = self.arrays[op.attrs["tensor"].index], self.values[op.operands[0]]
        places, inside = self.places(op, value.shape)
        region = tuple(place[inside] for place in places)
        self.races.write(op, region)
        array[region] = convert(value[inside], array.dtype)

    def gather(self, op: Op) -> None:
        """Load an element for each element of the indices; positions outside the tensor read as zero."""
        array = self.arrays[op.attrs["tensor"].index]
        places, inside = self.places(op, op.result.shape)
        tile = np.zeros(op.result.shape, array.dtype)
        region = tuple(place[inside] for place in places)
        tile[inside] = array[region]
        self.races.read(op, region)
        self.set(op.result, tile)

    def places(self, op: Op, shape: tuple[int, ...]) -> tuple[list[Array], Array]:
        """Return where a gather or scatter finds each element, by dimension of the tensor, and which are inside it."""
        places, inside = [], np.full(shape, True)
        for n, (value, (origin, length)) in enumerate(zip(ir.starts(op), self.spans(op), strict=True)):
            index = np.broadcast_to(self.values[value], shape).astype(np.int64)
            within = (index >= 0) & (index < length)
            _require(op, n, op.attrs.get("checked", (True,) * op.attrs["tensor"].rank)[n] or bool(within.all()))
            places.append(origin + index)
            inside &= within
        return places, inside

    def loop(self, op: Op) -> None:
        """Run low, low + step, ... below high. A hidden iteration leaves the carried values unchanged."""
        low, high, *inits = op.operands
        (body,) = op.blocks
        carried = [self.values[v] for v in inits]
        for index in range(self.number(low), self.number(high), op.attrs["step"]):
            self.set(body.params[0], index)
            self.values.update(zip(body.params[1:], carried, strict=True))
            leaving = self.block(body)
            carried = carried if leaving is None else leaving
        self.values.update(zip(op.results, carried, strict=True))

    def branch(self, op: Op) -> None:
        taken = self.block(op.blocks[0] if self.values[op.operands[0]] else op.blocks[1])
        self.values.update(zip(op.results, taken or [], strict=True))


HANDLERS: dict[str, Callable[[Run, Op], None]] = {
    "const": Run.const,
    "dim": Run.dim,
    "param": Run.param,
    "arange": Run.arange,
    "program_id": Run.program_id,
    "cast": Run.cast,
    "lookup": Run.lookup,
    "expand": Run.expand,
    "trans": Run.trans,
    "broadcast": Run.broadcast,
    "reduce": Run.reduce,
    "dot": Run.dot,
    "print": Run.print,
    "reshape": Run.reshape,
    "scan": Run.scan,
    "load": Run.load,
    "store": Run.store,
    "gather": Run.gather,
    "scatter": Run.scatter,
    "for": Run.loop,
    "if": Run.branch,
}
