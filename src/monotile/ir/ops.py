"""The intermediate representation: typed SSA over scalars and tiles, with structured loops and branches.

A `Value` is a scalar (shape `()`) or a tile of static shape and rank 1 or 2. Every value is made by exactly one `Op`
or is a parameter of a `Block`. An op may own blocks (`for` has one, `if` has two); each of those ends in a `yield`.
Tensors are not values: an op that accesses memory names its `Tensor` in an attribute. docs/internals/ir.md lists every
op with its meaning; the interpreter defines them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..dtypes import DType
from ..errors import Loc

# Elementwise ops. Operands are scalars or tiles of the result's rank whose sides are 1 or the result's (broadcast).
FLOAT_UNARY = frozenset({"exp", "exp2", "log", "log2", "tanh", "sigmoid", "erf", "sin", "cos", "sqrt", "reciprocal"})
UNARY = FLOAT_UNARY | {"neg", "abs", "not"}
BITWISE = frozenset({"bitand", "bitor", "bitxor", "shl", "shr"})
ARITHMETIC = frozenset({"add", "sub", "mul", "div", "floordiv", "mod", "max", "min", "and", "or", *BITWISE})
COMPARE = frozenset({"lt", "le", "eq", "ne"})
ELEMENTWISE = UNARY | ARITHMETIC | COMPARE | {"where", "fma", "cast", "lookup"}
# Ops that only remap coordinates: free on every backend.
SHAPE_ONLY = frozenset({"expand", "trans", "broadcast"})
# Ops whose elements come from other positions of their operand.
MOVES = frozenset({"reshape", "scan"})
NULLARY = frozenset({"const", "dim", "param", "arange"})
WRITES = frozenset({"store", "scatter"})
MEMORY = WRITES | {"load", "gather"}
CONTROL = frozenset({"for", "if", "yield"})
KINDS = (
    ELEMENTWISE | SHAPE_ONLY | MOVES | NULLARY | MEMORY | CONTROL | {"program_id", "reduce", "dot", "visible", "print"}
)
# Ops that can be removed when nothing reads their results.
PURE = KINDS - WRITES - {"for", "if", "yield", "visible", "program_id", "print"}


MAX_TABLE = 256  # entries of a lookup table
# Of a tensor along one dimension. Positions are int32; the margin keeps `start + tile side` from wrapping.
MAX_LENGTH = 2**31 - 2**16


@dataclass(frozen=True)
class Type:
    dtype: DType
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]" if self.shape else self.dtype.name


@dataclass(frozen=True)
class Tensor:
    """A tensor parameter. Rank and element type are known at compile time; of lengths and strides only those given."""

    name: str
    index: int
    dtype: DType
    dims: tuple[str | int, ...]  # a symbol for a run-time length, an int for a compile-time one
    unit: int | None = None  # the dimension known to have stride 1, if any
    strides: tuple[int | None, ...] = ()  # strides (in elements) known at compile time

    @property
    def rank(self) -> int:
        return len(self.dims)


class Value:
    """One SSA value. `owner` is the op or block that defines it; `hint` is its name in printed IR."""

    __slots__ = ("hint", "owner", "type")

    def __init__(self, type: Type, owner: Op | Block, hint: str = "") -> None:
        self.type, self.owner, self.hint = type, owner, hint

    @property
    def op(self) -> Op | None:
        return self.owner if isinstance(self.owner, Op) else None

    @property
    def kind(self) -> str:
        """The kind of the op that defines this value, or `parameter`."""
        return self.owner.kind if isinstance(self.owner, Op) else "parameter"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self) -> DType:
        return self.type.dtype


class Op:
    __slots__ = ("attrs", "blocks", "kind", "loc", "operands", "results")

    def __init__(
        self,
        kind: str,
        operands: tuple[Value, ...] = (),
        attrs: Mapping[str, Any] | None = None,
        types: tuple[Type, ...] = (),
        blocks: tuple[Block, ...] = (),
        loc: Loc | None = None,
    ) -> None:
        self.kind, self.operands, self.attrs = kind, tuple(operands), dict(attrs or {})
        self.blocks, self.loc = blocks, loc
        self.results = tuple(Value(t, self) for t in types)

    @property
    def result(self) -> Value:
        (value,) = self.results
        return value


class Block:
    __slots__ = ("ops", "params")

    def __init__(self, types: tuple[Type, ...] = ()) -> None:
        self.params = tuple(Value(t, self) for t in types)
        self.ops: list[Op] = []

    @property
    def terminator(self) -> Op:
        return self.ops[-1]


@dataclass
class Kernel:
    """A kernel specialised for its constants and for the element types and layouts of its tensors."""

    name: str
    tensors: tuple[Tensor, ...]
    scalars: tuple[tuple[str, DType], ...]
    body: Block = field(default_factory=Block)
    consts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def written(self) -> frozenset[int]:
        """Indices of the tensors some op stores to."""
        return frozenset(op.attrs["tensor"].index for op in walk(self.body) if op.kind in WRITES)


def walk(block: Block) -> Iterator[Op]:
    """Yield every op in program order, an op before the ops of its blocks."""
    for op in block.ops:
        yield op
        for inner in op.blocks:
            yield from walk(inner)


def uses(block: Block) -> dict[Value, list[Op]]:
    """Return the ops that read each value."""
    table: dict[Value, list[Op]] = {}
    for op in walk(block):
        for value in op.operands:
            table.setdefault(value, []).append(op)
    return table


def starts(op: Op) -> tuple[Value, ...]:
    """Return the positions of an access, one per dimension of its tensor."""
    first = int(op.kind in WRITES)
    return op.operands[first : first + op.attrs["tensor"].rank]


def view_of(op: Op, axis: int) -> tuple[Value, Value] | None:
    """Return origin and length of the view in which an access counts along an axis; None for the whole tensor."""
    axes: tuple[int, ...] = op.attrs.get("view", ())
    if axis not in axes:
        return None
    at = len(op.operands) - 2 * (len(axes) - axes.index(axis))
    return op.operands[at], op.operands[at + 1]


def needed(ops: list[Op], values: Iterable[Value]) -> list[Op]:
    """Return the ops that the values depend on, in order."""
    wanted, found = set(values), []
    for op in reversed(ops):
        if wanted.intersection(op.results):
            found.append(op)
            wanted.update(op.operands)
    return found[::-1]


def replace(block: Block, mapping: Mapping[Value, Value]) -> None:
    """Replace every use of a key by its value."""

    def final(value: Value) -> Value:
        while value in mapping:
            value = mapping[value]
        return value

    if mapping:
        for op in walk(block):
            op.operands = tuple(final(v) for v in op.operands)


def clone(op: Op, mapping: dict[Value, Value]) -> Op:
    """Copy an op and its blocks, replacing operands by `mapping`, which gains the copies of what the op defines."""
    copy = Op(op.kind, tuple(mapping.get(v, v) for v in op.operands), op.attrs, loc=op.loc)
    blocks = []
    for block in op.blocks:
        fresh = Block(tuple(p.type for p in block.params))
        mapping.update(zip(block.params, fresh.params, strict=True))
        for old, new in zip(block.params, fresh.params, strict=True):
            new.hint = old.hint
        fresh.ops = [clone(inner, mapping) for inner in block.ops]
        blocks.append(fresh)
    copy.blocks = tuple(blocks)
    copy.results = tuple(Value(r.type, copy, r.hint) for r in op.results)
    mapping.update(zip(op.results, copy.results, strict=True))
    return copy


def copy(kernel: Kernel) -> Kernel:
    """Return a deep copy of the kernel."""
    fresh = Kernel(kernel.name, kernel.tensors, kernel.scalars, consts=kernel.consts)
    mapping: dict[Value, Value] = {}
    fresh.body.ops = [clone(op, mapping) for op in kernel.body.ops]
    return fresh


def constant(value: Value) -> int | float | bool | None:
    """Return the number that a constant or broadcast constant is, else None."""
    op = value.op
    if op is not None and op.kind == "broadcast":
        return constant(op.operands[0])
    return op.attrs["value"] if op is not None and op.kind == "const" else None
