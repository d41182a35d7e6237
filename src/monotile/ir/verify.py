"""The IR verifier: one walk after the front end and one after the passes, or after every pass.

A broken rule is a fault of monotile, so the message is for its developers: the stage, the rule, the op and the author's
line. docs/internals/ir.md lists the rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..dtypes import bool_, float32, int32
from ..errors import InternalError
from . import ops
from .ops import Block, Kernel, Op, Tensor, Type, Value, starts
from .spreads import Spread, spreads

INT32 = Type(int32)
FOLDS = ("sum", "max", "min")
FLOAT_ONLY = ops.FLOAT_UNARY | {"div", "fma"}
INT_ONLY = frozenset({"floordiv", "mod"}) | ops.BITWISE
BOOL_ONLY = frozenset({"and", "or", "not"})
ANY_TYPE = frozenset({"eq", "ne"})


def check(kernel: Kernel, stage: str) -> None:
    """Raise InternalError if the kernel breaks a rule; `stage` names the pass that ran last."""
    _Checker(kernel, stage).kernel_rules()


class _Checker:
    def __init__(self, kernel: Kernel, stage: str) -> None:
        self.kernel, self.stage = kernel, stage
        self.scope: set[Value] = set()  # values the current op may read
        self.defined: set[Value] = set()  # values defined so far, in scope or not
        self.seen_program_id = False
        self.op: Op | None = None
        self.parent: Op | None = None  # the op whose block is being walked

    def need(self, holds: bool, rule: str) -> None:
        if not holds:
            where = _describe(self.op, self.kernel)
            raise InternalError(f"the IR after {self.stage!r} is broken: {rule}\n  in {where}")

    # ---- the walk ----------------------------------------------------------------------------------------------------

    def kernel_rules(self) -> None:
        for n, tensor in enumerate(self.kernel.tensors):
            self.need(tensor.index == n, f"tensor {tensor.name!r} must have index {n}")
            self.need(len(tensor.strides) in (0, tensor.rank), f"tensor {tensor.name!r} needs one stride per dimension")
        self.need(not self.kernel.body.params, "the body of a kernel has no parameters")
        self.block(self.kernel.body, ())

    def block(self, block: Block, yields: tuple[Type, ...]) -> None:
        """Walk one block, which must end in a yield of these types."""
        defined_here: list[Value] = []
        for param in block.params:
            self.need(param.owner is block, "a block parameter must be owned by its block")
            self.define(param, defined_here)
        self.need(bool(block.ops) and block.ops[-1].kind == "yield", "a block must end in a yield")
        for op in block.ops:
            self.op = op
            self.check_op(op, last=op is block.ops[-1], yields=yields)
            for result in op.results:
                self.define(result, defined_here)
        self.scope.difference_update(defined_here)

    def define(self, value: Value, defined_here: list[Value]) -> None:
        self.need(value not in self.defined, "a value is defined twice")
        shape = value.type.shape
        self.need(len(shape) <= 2, "a tile has at most two dimensions")
        self.need(all(side >= 1 for side in shape), "a tile side is at least 1")
        self.defined.add(value)
        self.scope.add(value)
        defined_here.append(value)

    def check_op(self, op: Op, *, last: bool, yields: tuple[Type, ...]) -> None:
        self.need(op.kind in ops.KINDS, f"{op.kind!r} is not a kind of op")
        for value in op.operands:
            if value not in self.scope:
                self.need(value in self.defined, "an operand is read before it is defined")
                self.need(False, "an operand is read outside the block that defines it")
        for result in op.results:
            self.need(result.owner is op, "a result must be owned by its op")
        self.need(last == (op.kind == "yield"), "a yield must be the last op of its block, and nowhere else")
        self.need(len(op.blocks) == {"for": 1, "if": 2}.get(op.kind, 0), "wrong number of blocks")
        if op.kind == "yield":
            self.need(_types(op.operands) == yields, "a yield must have the types its block's op results in")
            self.need(not op.results, "a yield has no result")
        elif op.kind in ops.ELEMENTWISE:
            self.elementwise(op)
        else:
            RULES[op.kind](self, op)

    def inner(self, op: Op, block: Block, yields: tuple[Type, ...]) -> None:
        outer, self.parent = self.parent, op
        self.block(block, yields)
        self.parent, self.op = outer, op

    # ---- rules by kind -----------------------------------------------------------------------------------------------

    def counts(self, op: Op, operands: int, results: int) -> None:
        self.need(len(op.operands) == operands, f"{op.kind} takes {operands} operand(s)")
        self.need(len(op.results) == results, f"{op.kind} has {results} result(s)")

    def elementwise(self, op: Op) -> None:
        kind = op.kind
        self.counts(
            op, 3 if kind in ("where", "fma") else 1 if kind in ops.UNARY or kind in ("cast", "lookup") else 2, 1
        )
        self.broadcasts(op.operands, op.result.type.shape)
        if kind == "cast":
            return
        if kind == "lookup":
            fits = op.operands[0].dtype is int32 and op.result.dtype in (float32, int32)
            self.need(fits, "lookup takes an int32 and gives float32 or int32")
            self.need(0 < len(op.attrs.get("table", ())) <= ops.MAX_TABLE, "a table has 1 to 256 entries")
            return
        if kind == "where":
            self.need(op.operands[0].dtype is bool_, "the condition of where is bool")
        values = op.operands[1:] if kind == "where" else op.operands
        dtype = values[0].dtype
        self.need(all(v.dtype is dtype for v in values), "operands must have one dtype; promotion is an explicit cast")
        self.need(op.result.dtype is (bool_ if kind in ops.COMPARE else dtype), "wrong dtype of the result")
        if kind != "where":
            self.arithmetic(kind, dtype)

    def arithmetic(self, kind: str, dtype: Any) -> None:
        """Check the type an op computes in. Narrow types are storage formats: none computes in them."""
        if kind in FLOAT_ONLY:
            self.need(dtype is float32, f"{kind} is for float32")
        elif kind in INT_ONLY:
            self.need(dtype.is_int, f"{kind} is for integers")
        elif kind in BOOL_ONLY:
            self.need(dtype is bool_, f"{kind} is for bool")
        elif kind not in ANY_TYPE:
            self.need(dtype is not bool_, f"{kind} is not for bool")
        self.need(not dtype.is_narrow, "a narrow type is cast before arithmetic")

    def broadcasts(self, operands: tuple[Value, ...], shape: tuple[int, ...]) -> None:
        for value in operands:
            sides = value.type.shape
            if sides and sides != shape:
                self.need(len(sides) == len(shape), "an operand is a scalar or has the rank of the result")
                fits = all(a in (1, b) for a, b in zip(sides, shape, strict=True))
                self.need(fits, "each side of an operand is 1 or the side of the result")

    def const(self, op: Op) -> None:
        self.counts(op, 0, 1)
        value, dtype = op.attrs.get("value"), op.result.dtype
        wanted = {"float": float, "int": int, "bool": bool}[dtype.kind]
        self.need(type(value) is wanted, f"the value of a {dtype} const is a Python {wanted.__name__}")
        self.need(not op.result.shape, "a const is a scalar")

    def dim(self, op: Op) -> None:
        self.counts(op, 0, 1)
        axis = op.attrs.get("axis")
        self.need(isinstance(axis, int) and 0 <= axis < self.tensor(op).rank, "axis must be a dimension of the tensor")
        self.need(op.result.type == INT32, "a dim is an int32 scalar")

    def param(self, op: Op) -> None:
        self.counts(op, 0, 1)
        declared = dict(self.kernel.scalars).get(op.attrs.get("name", ""))
        self.need(declared is not None, "a param names a scalar of the kernel")
        self.need(op.result.type == Type(declared or int32), "a param is a scalar of its declared dtype")

    def arange(self, op: Op) -> None:
        self.counts(op, 0, 1)
        self.need(op.result.dtype is int32 and len(op.result.shape) == 1, "an arange is an int32 tile of rank 1")

    def expand(self, op: Op) -> None:
        self.counts(op, 1, 1)
        shape, at = op.operands[0].shape, op.attrs.get("position")
        self.need(isinstance(at, int) and 0 <= at <= len(shape), "position must be a place in the operand's shape")
        assert isinstance(at, int)
        wanted = Type(op.operands[0].dtype, (*shape[:at], 1, *shape[at:]))
        self.need(op.result.type == wanted, "expand adds one side of 1")

    def trans(self, op: Op) -> None:
        self.counts(op, 1, 1)
        source = op.operands[0].type
        self.need(len(source.shape) == 2, "trans is for tiles of rank 2")
        self.need(op.result.type == Type(source.dtype, source.shape[::-1]), "trans swaps the two sides")

    def broadcast(self, op: Op) -> None:
        self.counts(op, 1, 1)
        self.broadcasts(op.operands, op.result.shape)
        self.need(op.result.dtype is op.operands[0].dtype, "broadcast keeps the dtype")

    def reduce(self, op: Op) -> None:
        self.counts(op, 1, 1)
        source, axis = op.operands[0].type, op.attrs.get("axis")
        self.need(op.attrs.get("fold") in FOLDS, "fold must be sum, max or min")
        self.need(isinstance(axis, int) and 0 <= axis < len(source.shape), "axis must be a dimension of the operand")
        assert isinstance(axis, int)
        self.need(not source.dtype.is_narrow, "a narrow type is cast before arithmetic")
        self.need(source.dtype is not bool_ or op.attrs["fold"] != "sum", "sum is not for bool")
        rest = source.shape[:axis] + source.shape[axis + 1 :]
        self.need(op.result.type == Type(source.dtype, rest), "reduce removes its axis and keeps the dtype")

    def reshape(self, op: Op) -> None:
        self.counts(op, 1, 1)
        source, result = op.operands[0].type, op.result.type
        same = math.prod(source.shape) == math.prod(result.shape) and bool(source.shape) and bool(result.shape)
        self.need(same and source.dtype is result.dtype, "reshape keeps the elements of a tile")

    def scan(self, op: Op) -> None:
        self.counts(op, 1, 1)
        source, axis = op.operands[0].type, op.attrs.get("axis")
        self.need(isinstance(axis, int) and 0 <= axis < len(source.shape), "axis must be a dimension of the operand")
        fits = op.result.type == source and not source.dtype.is_narrow and source.dtype is not bool_
        self.need(fits, "a scan keeps its type, which arithmetic happens in")

    def dot(self, op: Op) -> None:
        self.counts(op, 2, 1)
        a, b = (v.type for v in op.operands)
        fits = len(a.shape) == len(b.shape) == 2 and a.shape[1] == b.shape[0]
        self.need(fits, "dot takes (m, k) and (k, n)")
        self.need(a.dtype is b.dtype and a.dtype.is_float, "dot takes two operands of one float dtype")
        self.need(op.result.type == Type(float32, (a.shape[0], b.shape[1])), "dot gives float32 (m, n)")

    def program_id(self, op: Op) -> None:
        self.need(self.parent is None, "program_id belongs at the top level")
        self.need(not self.seen_program_id, "program_id occurs at most once")
        self.seen_program_id = True
        self.counts(op, len(op.operands), len(op.operands))
        self.need(bool(op.operands), "program_id needs at least one size")
        self.need(all(v.type == INT32 for v in op.operands + op.results), "sizes and positions are int32 scalars")

    def visible(self, op: Op) -> None:
        self.counts(op, 1, 0)
        in_loop = self.parent is not None and self.parent.kind == "for"
        self.need(in_loop, "visible belongs directly in the block of a for")
        self.need(op.operands[0].dtype is bool_, "visible takes a bool")

    def print(self, op: Op) -> None:
        self.need(not op.results and len(op.operands) == op.attrs["parts"].count(None), "print shows its operands")

    # ---- memory ------------------------------------------------------------------------------------------------------

    def tensor(self, op: Op) -> Tensor:
        tensor = op.attrs.get("tensor")
        tensors = self.kernel.tensors
        known = isinstance(tensor, Tensor) and tensor.index < len(tensors) and tensors[tensor.index] == tensor
        self.need(known, "the tensor must be one of the kernel's")
        assert isinstance(tensor, Tensor)
        return tensor

    def region(self, op: Op, starts: tuple[Value, ...]) -> Type:
        """Return the type of the tile that a load or store accesses."""
        tensor = self.tensor(op)
        extents, checked = op.attrs.get("extents"), op.attrs.get("checked")
        for name, given in (("extent", extents), ("checked", checked)):
            self.need(isinstance(given, tuple) and len(given) == tensor.rank, f"one {name} per dimension of the tensor")
        self.need(len(starts) == tensor.rank, "one start per dimension of the tensor")
        self.view(op, tensor)
        self.need(all(not v.shape and v.dtype.is_int for v in starts), "a start is an integer scalar")
        assert isinstance(extents, tuple)
        self.need(all(e is None or (isinstance(e, int) and e >= 1) for e in extents), "an extent is None or at least 1")
        sides = tuple(self.side(*pair) for pair in zip(extents, spreads(op), strict=True) if pair[0] is not None)
        return Type(tensor.dtype, sides)

    def side(self, extent: int, spread: Spread | None) -> int:
        """Return the extent of a tile along one dimension of a slice."""
        if spread is None:
            return extent
        self.need(min(spread.extent, spread.factor, spread.divisor) >= 1 and spread.offset >= 0, "a spread rises")
        self.need(spread.memory == extent, "a spread repeats the elements of the slice")
        return spread.extent

    def view(self, op: Op, tensor: Tensor) -> None:
        """Check origins and lengths of the view of an access, behind its starts."""
        axes = op.attrs.get("view", ())
        known = list(axes) == sorted(set(axes)) and all(0 <= axis < tensor.rank for axis in axes)
        self.need(known, "`view` holds dimensions of the tensor, in order")
        spans = op.operands[(op.kind in ops.WRITES) + tensor.rank :]
        self.need(len(spans) == 2 * len(axes), "one origin and one length per dimension of `view`")
        self.need(all(v.type == INT32 for v in spans), "origins and lengths of views are int32 scalars")

    def load(self, op: Op) -> None:
        self.counts(op, len(op.operands), 1)
        self.need(op.result.type == self.region(op, starts(op)), "a load gives the tensor's dtype and the extents")

    def store(self, op: Op) -> None:
        self.need(bool(op.operands) and not op.results, "a store takes a value and starts, and has no result")
        type_ = self.region(op, starts(op))
        self.need(op.operands[0].type == type_, "a stored value has the tensor's dtype and the extents' shape")

    def gather(self, op: Op) -> None:
        tensor = self.tensor(op)
        indices = starts(op)
        self.counts(op, len(op.operands), 1)
        self.view(op, tensor)
        self.need(len(indices) == tensor.rank and all(v.dtype.is_int for v in indices), "an index is an integer")
        self.need(op.result.dtype is tensor.dtype, "a gather gives the tensor's dtype")
        self.broadcasts(indices, op.result.shape)
        checked = op.attrs.get("checked")
        self.need(checked is None or len(checked) == tensor.rank, "one `checked` per dimension of the tensor")

    def scatter(self, op: Op) -> None:
        tensor, indices = self.tensor(op), starts(op)
        self.need(bool(op.operands) and not op.results, "a scatter takes a value and indices, and has no result")
        self.view(op, tensor)
        self.need(len(indices) == tensor.rank and all(v.dtype.is_int for v in indices), "an index is an integer")
        value = op.operands[0]
        self.need(
            value.dtype is tensor.dtype and bool(value.shape), "a scattered value is a tile of the tensor's dtype"
        )
        self.broadcasts(indices, value.shape)

    # ---- control -----------------------------------------------------------------------------------------------------

    def loop(self, op: Op) -> None:
        self.need(len(op.operands) >= 2, "for takes low, high and the initial values")
        self.need(all(v.type == INT32 for v in op.operands[:2]), "the bounds of a for are int32 scalars")
        step = op.attrs.get("step")
        self.need(type(step) is int and step > 0, "the step of a for is a positive int")
        carried = _types(op.operands[2:])
        body = op.blocks[0]
        self.need(_types(body.params) == (INT32, *carried), "the block of a for takes an int32 and the carried values")
        self.need(_types(op.results) == carried, "the results of a for have the types of its initial values")
        self.inner(op, body, carried)

    def branch(self, op: Op) -> None:
        self.need(len(op.operands) == 1 and op.operands[0].type == Type(bool_), "if takes one bool scalar")
        for block in op.blocks:
            self.need(not block.params, "the blocks of an if have no parameters")
            self.inner(op, block, _types(op.results))


RULES: dict[str, Callable[[_Checker, Op], None]] = {
    "const": _Checker.const,
    "dim": _Checker.dim,
    "param": _Checker.param,
    "arange": _Checker.arange,
    "expand": _Checker.expand,
    "trans": _Checker.trans,
    "broadcast": _Checker.broadcast,
    "reduce": _Checker.reduce,
    "dot": _Checker.dot,
    "reshape": _Checker.reshape,
    "scan": _Checker.scan,
    "program_id": _Checker.program_id,
    "visible": _Checker.visible,
    "print": _Checker.print,
    "load": _Checker.load,
    "store": _Checker.store,
    "gather": _Checker.gather,
    "scatter": _Checker.scatter,
    "for": _Checker.loop,
    "if": _Checker.branch,
}


def _types(values: tuple[Value, ...]) -> tuple[Type, ...]:
    return tuple([v.type for v in values])


def _describe(op: Op | None, kernel: Kernel) -> str:
    if op is None:
        return f"kernel {kernel.name}"
    left = ", ".join(str(r.type) for r in op.results)
    right = ", ".join(str(v.type) for v in op.operands)
    attrs = ", ".join(f"{k}={v.name if isinstance(v, Tensor) else v}" for k, v in sorted(op.attrs.items()))
    place = f" at {op.loc.file}, line {op.loc.line}: {op.loc.text.strip()}" if op.loc is not None else ""
    return f"{op.kind}({right})[{attrs}] -> ({left}) of kernel {kernel.name}{place}"
