"""Grid size of a launch: evaluate the operands of program_id on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..dtypes import DType, to_numpy
from ..errors import InternalError
from ..ir import Kernel, Op, Value, needed
from ..ir.special import erf, sigmoid
from .fold import EVALUATE

UFUNCS: dict[str, Callable[..., Any]] = {
    "exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2, "tanh": np.tanh, "sigmoid": sigmoid, "erf": erf,
    "sin": np.sin, "cos": np.cos, "sqrt": np.sqrt,
}  # fmt: skip


class Grid:
    """The ops that compute the grid's sizes from the launch words (lengths, strides) and the scalars."""

    def __init__(self, kernel: Kernel, together: int = 0) -> None:
        """`together` consecutive programs of the last grid dimension are launched as one."""
        self.together = together or 1
        body = kernel.body.ops
        at = next((n for n, op in enumerate(body) if op.kind == "program_id"), None)
        self.sizes: tuple[Value, ...] = () if at is None else body[at].operands
        self.ops = needed(body[: at or 0], self.sizes)
        self.scalar_at = {name: n for n, (name, _) in enumerate(kernel.scalars)}
        self.dim_at, words = [], 0
        for tensor in kernel.tensors:
            self.dim_at.append(words + 1)
            words += 1 + 2 * tensor.rank
        self.needs_scalars = any(op.kind == "param" for op in self.ops)

    def programs(self, words: Sequence[int], scalars: Sequence[Any]) -> int:
        """Return the number of programs; 0 if any size is below 1."""
        values: dict[Value, Any] = {}
        with np.errstate(all="ignore"):
            for op in self.ops:
                values[op.result] = self._value(op, values, words, scalars)
        sizes = [max(0, int(values[v])) for v in self.sizes]
        return math.prod(sizes[:-1]) * -(-sizes[-1] // self.together) if sizes else 1

    def _value(self, op: Op, values: dict[Value, Any], words: Sequence[int], scalars: Sequence[Any]) -> Any:
        kind, dtype = op.kind, op.result.dtype
        operands = [values[v] for v in op.operands]
        if kind == "const":
            return to_numpy(dtype).type(op.attrs["value"])
        if kind == "dim":
            return np.int32(words[self.dim_at[op.attrs["tensor"].index] + op.attrs["axis"]])
        if kind == "param":
            return to_numpy(dtype).type(scalars[self.scalar_at[op.attrs["name"]]])
        if kind == "cast":
            return _cast(operands[0], op.operands[0].dtype, dtype)
        function = EVALUATE.get(kind) or UFUNCS.get(kind)
        if function is None:
            raise InternalError(f"the size of the grid needs {kind!r}, which the host does not compute")
        return to_numpy(dtype).type(function(*operands))


def _cast(value: Any, source: DType, target: DType) -> Any:
    if target.is_int and source.is_float:
        low, high = target.limits
        number = float(value)
        saturated = 0 if number != number else max(low, min(high, int(max(-1e30, min(1e30, number)))))
        return to_numpy(target).type(saturated)
    return np.asarray(value).astype(to_numpy(target))[()]
