"""What a name of a kernel can hold besides numbers and IR values, and how messages call it."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

from .. import ir
from ..dtypes import DType
from ..ir import Value
from .source import FunctionNode


@dataclass
class Loop:
    """What a `for` runs over when its bounds are known only at run time."""

    low: Value
    high: Value
    step: int
    visible: Any = None


@dataclass(eq=False)
class Closure:
    """A function or lambda written inside a kernel. Its defaults are what they were where it was written."""

    node: FunctionNode
    scope: Any  # the front end of the function it was written in
    defaults: tuple[Any, ...]
    keyword_defaults: dict[str, Any]


@dataclass
class Method:
    """A word reached through a dot: `x.sum`, `x.astype`."""

    name: str
    owner: Value


def describe(item: Any) -> str:
    """What something is, for a message."""
    if isinstance(item, Value):
        return f"a {'tile' if item.shape else 'scalar'} {item.type}"
    if isinstance(item, ir.Tensor):
        return f"the tensor {item.name!r}"
    if isinstance(item, Method):
        return f"the method .{item.name} without its call"
    if isinstance(item, Loop):
        return "a run-time range"
    if item is None or isinstance(item, bool | float | DType):
        return str(item)
    if isinstance(item, int | str):
        return repr(item) if isinstance(item, str) and len(item) < 60 else f"the {type(item).__name__}"
    if isinstance(item, Closure | types.FunctionType | types.BuiltinFunctionType):
        return "a function"
    if isinstance(item, types.ModuleType):
        return f"the module {item.__name__}"
    if isinstance(item, tuple):
        return f"a tuple of {len(item)}"
    return f"an object of type {type(item).__name__}"
