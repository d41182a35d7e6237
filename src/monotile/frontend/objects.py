"""Compile-time objects that a kernel's names may hold besides numbers and IR values, and their names in messages."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import ir
from ..dtypes import DType
from ..ir import Value
from ..ir.builder import ValueOrNumber
from .source import FunctionNode


@dataclass
class RuntimeRange:
    """The iterable of a `for` whose bounds are known only at run time."""

    low: Value
    high: Value
    step: int
    visible: Any = None


class Span(NamedTuple):
    """What a view shows of a dimension: `length` positions from `origin` (None: all of them), or of these only `at`."""

    origin: ValueOrNumber | None
    length: ValueOrNumber | None
    at: Value | None = None


@dataclass(frozen=True)
class TensorView(ir.Tensor):
    """A part of a tensor with an edge of its own: `t[start : end]`, where a length is known only at run time."""

    base: ir.Tensor | None = None
    spans: tuple[Span, ...] = ()  # of each dimension of the base


@dataclass(eq=False)
class Closure:
    """A function or lambda defined inside a kernel. Defaults are evaluated where it is defined."""

    node: FunctionNode
    enclosing: Any  # the FunctionBuilder of the function it is defined in
    defaults: tuple[Any, ...]
    keyword_defaults: dict[str, Any]


@dataclass
class Method:
    """A method of a tile before its call: `x.sum`, `x.astype`."""

    name: str
    owner: Value


@dataclass(eq=False)
class TransformedFunction:
    """A function that `grad`, `value_and_grad` or `elementwise` makes of another one, before its call."""

    function: Any
    name: str

    @property
    def with_value(self) -> bool:
        return self.name == "value_and_grad"


def describe(item: Any) -> str:
    """Describe an object for a message."""
    if isinstance(item, Value):
        return f"a {'tile' if item.shape else 'scalar'} {item.type}"
    if isinstance(item, TensorView):
        return f"a view of the tensor {item.name!r}"
    if isinstance(item, ir.Tensor):
        return f"the tensor {item.name!r}"
    if isinstance(item, Method):
        return f"the method .{item.name} without its call"
    if isinstance(item, RuntimeRange):
        return "a run-time range"
    if item is None or isinstance(item, bool | float | DType):
        return str(item)
    if isinstance(item, int | str):
        return repr(item) if isinstance(item, str) and len(item) < 60 else f"the {type(item).__name__}"
    if isinstance(item, Closure | TransformedFunction | types.FunctionType | types.BuiltinFunctionType):
        return "a function"
    if isinstance(item, types.ModuleType):
        return f"the module {item.__name__}"
    if isinstance(item, tuple):
        return f"a tuple of {len(item)}"
    return f"an object of type {type(item).__name__}"
