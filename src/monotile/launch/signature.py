"""Kernel signatures, and the constants and scalars that a call may give."""

from __future__ import annotations

import ast
import inspect
import math
import types
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..dtypes import DType, bool_, float32, int32, int64
from ..errors import ArgumentKind, BadSignature, BadThreadCount, ConstError, NoSource, ScalarDoesNotFit
from ..frontend.functions import is_function
from ..frontend.source import function_node, place
from ..frontend.vocabulary import Const, Tensor
from ..ir import Loc
from ..ir.builder import LARGEST
from .captures import const_key

RESERVED = ("backend", "threads")
SCALARS: dict[Any, DType] = {
    float: float32, int: int32, bool: bool_, float32: float32, int32: int32, int64: int64, bool_: bool_,
}  # fmt: skip
NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)
CURE = "parameters are tensors, Tensor['M K'], float, int, int64 or bool; constants come last, annotated Const"


@dataclass(frozen=True)
class Parameter:
    """A positional parameter: a tensor or a run-time scalar."""

    name: str
    dims: tuple[str | int, ...] | None = None  # of an annotated tensor
    dtype: DType | None = None  # of an annotated scalar


@dataclass(frozen=True)
class Signature:
    """A kernel's parameter list."""

    name: str
    parameters: tuple[Parameter, ...]
    const_names: tuple[str, ...]
    defaults: dict[str, Any]  # of the Const parameters

    def parameter(self, position: int) -> Parameter:
        """Return the parameter at a position; captured arrays and numbers follow the author's own parameters."""
        count = len(self.parameters)
        return self.parameters[position] if position < count else Parameter(f"captured{position - count}")


def read_signature(function: types.FunctionType) -> Signature:
    """Read a function's parameters and annotations; raise BadSignature where they are not a kernel's."""
    if function.__code__.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        raise BadSignature("a kernel is not async", "write a plain def", _place_of(function, None))
    try:
        found = inspect.signature(function, follow_wrapped=False, eval_str=True).parameters
    except Exception as error:
        cure = "import Const and Tensor at the top of the file; " + CURE
        raise BadSignature(f"an annotation cannot be read: {error}", cure, _place_of(function, None)) from None
    parameters, const_names, defaults = [], [], {}
    for name, p in found.items():
        problem = _problem(name, p)
        if problem is not None:
            raise BadSignature(problem, CURE, _place_of(function, name))
        if p.annotation is Const or p.kind is p.KEYWORD_ONLY:
            const_names.append(name)
            if p.default is not p.empty:
                defaults[name] = plain_const(p.default)
        elif isinstance(p.annotation, Tensor):
            parameters.append(Parameter(name, dims=p.annotation.dims))
        else:
            parameters.append(Parameter(name, dtype=None if p.annotation is p.empty else SCALARS[p.annotation]))
    return Signature(function.__name__, tuple(parameters), tuple(const_names), defaults)


def _problem(name: str, p: inspect.Parameter) -> str | None:
    """Say why a parameter cannot be one of a kernel's, or return None."""
    if name in RESERVED:
        return f"{name!r} is a keyword of every call"
    if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
        return f"*{name} in a kernel's parameters"
    if p.annotation is Const or p.kind is p.KEYWORD_ONLY:
        if p.default is p.empty:
            return None
        try:
            check_const(name, plain_const(p.default))
        except ConstError as error:
            return f"a default cannot be compiled: {error}"
        return None
    if p.default is not p.empty:
        return f"{name!r} has a default, but is not a Const"
    known = p.annotation is p.empty or isinstance(p.annotation, Tensor)
    if not known and not any(p.annotation is scalar for scalar in SCALARS):
        shown = getattr(p.annotation, "__name__", None) or type(p.annotation).__name__
        return f"the annotation of {name!r} is {shown}"
    return None


def _place_of(function: types.FunctionType, name: str | None) -> Loc | None:
    """Return the source location of the kernel or of one of its parameters; None when the source cannot be read."""
    try:
        node: ast.AST = function_node(function)
    except NoSource:
        return None
    for part in ast.walk(node):
        if isinstance(part, ast.arg) and part.arg == name:
            node = part
            break
    return place(node, function.__code__.co_filename)


# ---- constants -------------------------------------------------------------------------------------------------------


def plain_const(value: Any) -> Any:
    """Convert a NumPy number to Python's."""
    return value.item() if isinstance(value, np.bool_ | np.integer | np.floating) else value


def check_const(name: str, value: Any) -> None:
    """Raise ConstError for what cannot be a compile-time constant."""
    if isinstance(value, tuple):
        for item in value:
            check_const(name, item)
    elif not isinstance(value, int | float | str | DType | type(None)) and not is_function(value):
        kinds = "an int, float, bool, None, dtype, tuple or function"
        raise ConstError(f"the Const {name!r} must be {kinds}, found {type(value).__name__}")
    elif isinstance(value, float) and math.isnan(value):
        raise ConstError(f"the Const {name!r} is NaN; pass a number")
    elif is_function(value):
        try:
            hash(const_key(value))
        except TypeError as error:
            cure = "let it capture numbers, tuples, dtypes, functions and arrays only"
            raise ConstError(f"the Const {name!r} is a function that captures an {error}; {cure}") from None


# ---- scalars ---------------------------------------------------------------------------------------------------------


def scalar_dtype(parameter: Parameter, value: Any) -> DType:
    """Return the declared type of a scalar, or the one that a Python number has by itself."""
    if parameter.dtype is not None:
        return parameter.dtype
    if isinstance(value, bool | np.bool_):
        return bool_
    return int32 if isinstance(value, int | np.integer) else float32


def read_scalar(name: str, value: Any, dtype: DType) -> int | float:
    """Check a run-time scalar and convert it to a Python number its type can hold."""
    if dtype is float32:
        if isinstance(value, bool | np.bool_):
            raise ArgumentKind(f"{name!r} must be a number, found {value!r}; pass 1.0 or 0.0")
        try:
            number = float(value)
        except OverflowError:  # an int beyond float64
            number = LARGEST
        if abs(number) >= LARGEST and not math.isinf(number):
            raise ScalarDoesNotFit(f"{name!r} does not fit {dtype}; pass a smaller number, or inf")
        return number
    if dtype is bool_:
        if not isinstance(value, bool | np.bool_):
            raise ArgumentKind(f"{name!r} must be True or False, found {type(value).__name__}; pass a bool")
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ArgumentKind(f"{name!r} must be a whole number, found {type(value).__name__}; pass an int")
    low, high = dtype.limits
    if not low <= value <= high:
        cure = "annotate the parameter int64" if dtype is int32 else "pass a smaller number"
        raise ScalarDoesNotFit(f"{name!r} does not fit {dtype} ({low} to {high}); {cure}")
    return int(value)


def read_threads(threads: Any) -> int:
    if isinstance(threads, bool) or not isinstance(threads, int | np.integer) or threads < 1:
        raise BadThreadCount(f"threads must be a positive whole number, found {threads!r}")
    return int(threads)
