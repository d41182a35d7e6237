"""Functions that a kernel may call besides plain ones: `functools.partial`, bound methods and callable objects, and the
attributes of the objects they belong to."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import ir
from ..dtypes import DType

ABSENT = object()
# Where torch.nn.Module keeps what its __getattr__ finds.
MODULE_FIELDS = ("_buffers", "_parameters", "_modules")
PLAIN = frozenset([bool, int, float, str, tuple, type(None)])
NOT_OBJECTS = (
    type, types.ModuleType, types.FunctionType, types.MethodType, functools.partial, DType, tuple, np.generic,
    np.ndarray, ir.Value, ir.Tensor,
)  # fmt: skip


def is_fixed_table(value: Any) -> bool:
    """True for a NumPy array that is a constant of a kernel, as a tuple is: of one dimension and read-only, and not a
    view of an array that may be written."""
    if type(value) is not np.ndarray or value.ndim != 1 or value.dtype.kind not in "iuf" or value.dtype.itemsize > 8:
        return False
    memory: Any = value
    while type(memory) is np.ndarray and not memory.flags.writeable:
        memory = memory.base
    return memory is None or type(memory) is bytes


def is_function(value: Any) -> bool:
    """True for a plain function, a partial, a bound method and an object whose class defines `__call__`."""
    kind = type(value)
    if kind in PLAIN:
        return False
    if kind is types.FunctionType or kind is functools.partial:
        return True
    if kind is types.MethodType:
        return isinstance(value.__func__, types.FunctionType) and not isinstance(value.__self__, tuple)
    return is_object(value) and call_of(value) is not None


def is_object(value: Any) -> bool:
    """True for an instance of a class written in Python, whose attributes a kernel may read."""
    if (
        type(value) in PLAIN
        or isinstance(value, NOT_OBJECTS)
        or type(value).__module__.startswith(("monotile.", "builtins", "numpy"))
    ):
        return False
    if callable(value) and call_of(value) is None:  # compiled code behind a Python object, such as jax.numpy.exp
        return False
    return hasattr(value, "__dict__") and not hasattr(value, "__array__") and not hasattr(value, "__dlpack__")


def call_of(value: Any) -> types.FunctionType | None:
    """Return the function that calling an object runs: `forward` of a torch module, else `__call__`."""
    named = "forward" if isinstance(getattr(value, "_modules", None), dict) else "__call__"
    found = inspect.getattr_static(type(value), named, None)
    return found if isinstance(found, types.FunctionType) else None


def attribute(owner: Any, name: str) -> Any:
    """Return an attribute of an object without running code of its class; ABSENT for a property or for none."""
    fields = vars(owner)
    if name in fields:
        return fields[name]
    for part in MODULE_FIELDS:
        if name in (fields.get(part) or ()):
            return fields[part][name]
    found = inspect.getattr_static(type(owner), name, ABSENT)
    if isinstance(found, types.FunctionType):
        return types.MethodType(found, owner)
    if isinstance(found, staticmethod):
        return found.__func__
    return ABSENT if hasattr(type(found), "__get__") else found


def code_of(function: Any) -> types.CodeType | None:
    """Return the code that calling a function runs in the end."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, types.MethodType):
        function = function.__func__
    elif is_object(function):
        function = call_of(function)
    return getattr(function, "__code__", None)


def name_of(function: Any) -> str:
    """Return the name of a function as a message shows it."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def unwrapped(
    function: Any, args: tuple[Any, ...], named: dict[str, Any], argument: Callable[[Any, Any], Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the call that a call of a partial, a bound method or an object stands for. `argument` gives the value that
    stands for what a partial holds."""
    if isinstance(function, functools.partial):
        held = [argument(value, (id(function), n)) for n, value in enumerate(function.args)]
        by_name = {name: argument(value, (id(function), name)) for name, value in function.keywords.items()}
        return function.func, (*held, *args), by_name | named
    if isinstance(function, types.MethodType):
        return function.__func__, (function.__self__, *args), named
    return call_of(function), (function, *args), named
