"""Kernel arguments and scalar arithmetic."""

from __future__ import annotations

from ...ir import Kernel, Op, Value, starts
from .axes import Axes
from .emit import Emitter, Index, Reg
from .evaluate import Evaluator
from .point import Point
from .scratch import Scratch
from .strided import Positions
from .target import Target
from .tiles import Tensors
from .vectors import register_type


class Scalars:
    """The part that both emitted functions need: arguments and scalar arithmetic."""

    def __init__(self, kernel: Kernel, target: Target) -> None:
        self.kernel, self.target = kernel, target
        self.e = Emitter(target.lanes, has_scalef=target.has_scalef, has_half=target.has_half)
        self.axes = Axes(kernel)
        self.scratch = Scratch(self.e)
        self.tensors = Tensors(self.e, self.axes, kernel)
        self.ev = Evaluator(self.e, self.axes, self.tensors, self.scratch)

    def scalar(self, op: Op) -> None:
        """Emit a scalar op."""
        e = self.e
        operands = [self.ev.scalars[v] for v in op.operands]
        if op.kind == "const":
            reg = e.number(op.attrs["value"], register_type(op.result.dtype))
        elif op.kind == "dim":
            length = self.tensors.lengths[op.attrs["tensor"].index][op.attrs["axis"]]
            reg = Reg(str(length), "i32") if isinstance(length, int) else Reg(e.op(f"trunc i64 {length} to i32"), "i32")
        elif op.kind == "param":
            reg = self._parameter(op)
        elif op.kind == "gather":
            places = starts(op)
            positions = Positions(operands[: len(places)], list(places), None)
            reg = self.tensors.read_gather(op, positions, self.tensors.spans(op, self.index), Point({}))
        else:
            reg = self.ev.elementwise(op, operands)
        self.ev.scalars[op.result] = reg

    def _parameter(self, op: Op) -> Reg:
        names = [name for name, _ in self.kernel.scalars]
        word = self.tensors.argument(self.tensors.scalar_word + names.index(op.attrs["name"]))
        type_ = register_type(op.result.dtype)
        if type_ == "i64":
            return Reg(word, type_)
        if type_ == "float":
            return Reg(self.e.op(f"bitcast i32 {self.e.op(f'trunc i64 {word} to i32')} to float"), type_)
        return Reg(self.e.op(f"trunc i64 {word} to {type_}"), type_)

    def index(self, value: Value) -> Index:
        """Return a scalar as an i64 index."""
        return self.ev.index(value)
