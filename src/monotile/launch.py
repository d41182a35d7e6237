"""What a decorated kernel is: it checks a call, finds or makes the program for it, and runs it.

Two tables keep a warm call short. `_plans` is keyed by everything about the call but addresses and contents: a hit goes
straight to the backend. `_programs` is keyed by what the compiled code depends on (element types, constants, layout
facts, never lengths): a new sequence length makes a new plan, not a new program.
"""

from __future__ import annotations

import inspect
import math
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import backends, frontend, ir, tensors, verify
from .backends.base import Backend, Program
from .dtypes import DType, bool_, float32, int32, int64
from .errors import (
    ArgumentCount,
    ArgumentDevice,
    ArgumentKind,
    ArgumentRank,
    ArgumentShape,
    BadSignature,
    BadThreadCount,
    ConstError,
    OverlappingOutput,
    ReadOnlyOutput,
)
from .language import Const, Tensor
from .source import function_node, place
from .tensors import View

MAX_LENGTH = 2**31 - 2**16  # positions are int32; the margin keeps `start + tile side` from wrapping
MAX_PLANS = 4096
RESERVED = ("backend", "threads")
SCALARS: dict[Any, DType] = {
    float: float32, int: int32, bool: bool_, "float": float32, "int": int32, "bool": bool_,
    float32: float32, int32: int32, int64: int64,
}  # fmt: skip


@dataclass(frozen=True)
class Parameter:
    name: str
    dims: tuple[str | int, ...] | None = None  # of an annotated tensor
    dtype: DType | None = None  # of an annotated scalar


@dataclass
class Plan:
    """A checked call: only addresses are left to look at."""

    program: Program
    bound: Any
    array_at: tuple[int, ...]
    scalar_at: tuple[int, ...]
    scalar_dtypes: tuple[DType, ...]
    spans: tuple[tuple[int, int], ...]
    outputs: tuple[int, ...]


class Kernel:
    """A kernel of the tile language. Call it with arrays and scalars in order and constants by name."""

    def __init__(self, function: Callable[..., None]) -> None:
        if not isinstance(function, types.FunctionType):
            raise BadSignature(f"@kernel needs a plain function, found {function!r}", "decorate a def")
        self.function = function
        self.name = function.__name__
        self.__doc__, self.__name__, self.__wrapped__ = function.__doc__, function.__name__, function
        self.parameters, self.const_names, self.defaults = _signature(function)
        self._plans: dict[Any, Plan] = {}
        self._programs: dict[Any, tuple[ir.Kernel, Program]] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<monotile kernel {self.name}>"

    def __call__(self, *args: Any, backend: str | None = None, threads: int | None = None, **consts: Any) -> None:
        try:
            key = (backend, tuple(map(_argument_key, args)), tuple([(n, _const_key(v)) for n, v in consts.items()]))
            plan = self._plans.get(key)
        except TypeError:  # something unhashable: the full check will say what
            key = plan = None
        if plan is None:
            plan = self._plan(args, consts, backend)
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise BadThreadCount(f"threads must be a positive whole number, found {threads!r}")
        arrays = [args[n] for n in plan.array_at]
        if plan.outputs:
            _check_overlap(plan, arrays, self.parameters)
        scalars = [_scalar(self.parameters[n].name, args[n], d) for n, d in zip(plan.scalar_at, plan.scalar_dtypes, strict=True)]
        plan.program.launch(plan.bound, arrays, scalars, threads)

    # ---- a first call with given shapes --------------------------------------------------------------------------------

    def _plan(self, args: Sequence[Any], consts: Mapping[str, Any], backend: str | None) -> Plan:
        views = self._views(args)
        bound_consts = self._bind(views, consts)
        chosen = self._backend(views, backend)
        key = self._program_key(args, views, bound_consts, chosen)
        with self._lock:
            found = self._programs.get(key)
            if found is None:
                kernel = self._build(args, views, bound_consts)
                found = self._programs[key] = (kernel, chosen.compile(kernel))
        kernel, program = found
        self._check_outputs(kernel, views)
        words: list[int] = []
        for view in views.values():
            words += [0, *view.shape, *view.strides]
        array_at = tuple(n for n in range(len(args)) if n in views)
        scalar_at = tuple(n for n in range(len(args)) if n not in views)
        words += [0] * len(scalar_at)
        outputs = tuple(sorted(kernel.written))
        spans = tuple(tensors.span(v) for v in views.values())
        dtypes = tuple(d for _, d in kernel.scalars)
        return Plan(program, program.bind(words), array_at, scalar_at, dtypes, spans, outputs)

    def ir(self, *args: Any, **consts: Any) -> ir.Kernel:
        """The IR this call would compile."""
        views = self._views(args)
        return self._build(args, views, self._bind(views, consts))

    def _views(self, args: Sequence[Any]) -> dict[int, View]:
        """The array arguments by position; everything that is not an array must be a scalar."""
        if len(args) != len(self.parameters):
            names = ", ".join(p.name for p in self.parameters)
            raise ArgumentCount(f"{self.name}({names}) takes {len(self.parameters)} arrays and scalars, found {len(args)}")
        views = {}
        for n, (parameter, arg) in enumerate(zip(self.parameters, args, strict=True)):
            plain = isinstance(arg, bool | int | float | np.generic)
            if parameter.dtype is not None or (parameter.dims is None and plain):
                if not plain:
                    raise ArgumentKind(f"{parameter.name!r} must be a {parameter.dtype} scalar, found {type(arg).__name__}")
                continue
            view = views[n] = tensors.describe(parameter.name, arg)
            if parameter.dims is not None and len(view.shape) != len(parameter.dims):
                found = f"{parameter.name!r} must have shape ({' '.join(map(str, parameter.dims))}), found {view.shape}"
                raise ArgumentRank(found)
            if max(view.shape, default=0) > MAX_LENGTH:
                raise ArgumentShape(f"{parameter.name!r} has a side of {max(view.shape)}; at most {MAX_LENGTH} is supported")
        return views

    def _bind(self, views: Mapping[int, View], given: Mapping[str, Any]) -> dict[str, Any]:
        """The constants of this call: given, bound by a tensor's length, or default; and every named length agrees."""
        for name, value in given.items():
            if name not in self.const_names:
                raise ConstError(f"{self.name} has no Const {name!r}; it has {', '.join(self.const_names) or 'none'}")
            _check_const(name, value)
        lengths: dict[str, tuple[int, str]] = {}
        consts = {n: given.get(n, self.defaults.get(n, inspect.Parameter.empty)) for n in self.const_names}
        for n, view in views.items():
            parameter = self.parameters[n]
            for axis, (dim, length) in enumerate(zip(parameter.dims or (), view.shape, strict=False)):
                title = f"{parameter.name}.shape[{axis}]"
                if isinstance(dim, int):
                    expected, source = dim, "the signature"
                elif dim == "_":
                    continue
                elif dim in given:
                    expected, source = given[dim], f"{dim}={given[dim]!r}"
                else:
                    expected, source = lengths.setdefault(dim, (length, title))
                if expected != length:
                    raise ArgumentShape(f"{title} is {length}, but {dim!r} is {expected} (from {source})")
                if dim in consts and dim not in given:
                    consts[dim] = length
        missing = [n for n, v in consts.items() if v is inspect.Parameter.empty]
        if missing:
            raise ConstError(f"{self.name} needs the Const {', '.join(missing)}; pass it by name: {missing[0]}=...")
        return consts

    def _backend(self, views: Mapping[int, View], name: str | None) -> Backend:
        devices = {v.device for v in views.values()}
        if len(devices) > 1:
            listing = ", ".join(f"{self.parameters[n].name} on {v.device}" for n, v in views.items())
            raise ArgumentDevice(f"the arrays lie on different devices: {listing}; move them to one")
        device = next(iter(devices), "cpu")
        chosen = backends.usable(name if name is not None else "cpu")
        if not chosen.accepts(device):
            raise ArgumentDevice(f"backend {chosen.name!r} cannot use arrays on {device!r}; move them with .cpu()")
        return chosen

    def _program_key(self, args: Sequence[Any], views: Mapping[int, View], consts: Mapping[str, Any], backend: Backend) -> Any:
        facts = [self._tensor(n, i, v, consts) for i, (n, v) in enumerate(views.items())]
        scalars = [(n, self._scalar_dtype(n, a)) for n, a in enumerate(args) if n not in views]
        return backend.name, tuple(facts), tuple(scalars), tuple((n, _const_key(v)) for n, v in consts.items())

    def _tensor(self, n: int, index: int, view: View, consts: Mapping[str, Any]) -> ir.Tensor:
        """What the compiler may know of a tensor: no lengths, but which stride is 1 and which are fixed by constants."""
        parameter = self.parameters[n]
        symbols = parameter.dims or tuple("_" for _ in view.shape)
        dims = tuple(
            consts[d] if d in consts else d if d != "_" else f"{parameter.name}{axis}" for axis, d in enumerate(symbols)
        )
        last = len(dims) - 1
        units = [a for a, s in enumerate(view.strides) if s == 1 or (a == last and view.shape[a] == 1)]
        unit = units[-1] if units else None
        strides: list[int | None] = [None] * len(dims)
        if unit is not None:
            strides[unit] = 1
        dense = 1
        for axis in range(last, -1, -1):
            if view.strides[axis] == dense:
                strides[axis] = dense
            length = dims[axis]
            if not isinstance(length, int):
                break
            dense *= length
        return ir.Tensor(parameter.name, index, view.dtype, dims, unit, tuple(strides))

    def _scalar_dtype(self, n: int, arg: Any) -> DType:
        declared = self.parameters[n].dtype
        if declared is not None:
            return declared
        if isinstance(arg, bool | np.bool_):
            return bool_
        return int32 if isinstance(arg, int | np.integer) else float32

    def _build(self, args: Sequence[Any], views: Mapping[int, View], consts: Mapping[str, Any]) -> ir.Kernel:
        facts = tuple(self._tensor(n, i, v, consts) for i, (n, v) in enumerate(views.items()))
        scalars = tuple((self.parameters[n].name, self._scalar_dtype(n, a)) for n, a in enumerate(args) if n not in views)
        kernel = frontend.build(self.function, facts, scalars, consts)
        verify.check(kernel, "frontend")
        return kernel

    def _check_outputs(self, kernel: ir.Kernel, views: Mapping[int, View]) -> None:
        ordered = list(views.items())
        for index in kernel.written:
            n, view = ordered[index]
            name = self.parameters[n].name
            if not view.writable:
                raise ReadOnlyOutput(f"{name!r} is written by {self.name} but is read-only; pass a writable array")
            if tensors.overlaps_itself(view):
                raise OverlappingOutput(f"{name!r} is written by {self.name}, but its elements share memory; pass a copy")


# ---- signatures and keys -----------------------------------------------------------------------------------------------


def _signature(function: types.FunctionType) -> tuple[tuple[Parameter, ...], tuple[str, ...], dict[str, Any]]:
    """Positional parameters, names of the constants, and their defaults."""
    parameters, const_names, defaults = [], [], {}
    for name, p in inspect.signature(function, eval_str=True).parameters.items():
        found = None
        if name in RESERVED:
            found = f"{name!r} is a keyword of every call"
        elif p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            found = f"*{name} in a kernel's parameters"
        elif p.annotation is Const or p.kind is p.KEYWORD_ONLY:
            const_names.append(name)
            if p.default is not p.empty:
                defaults[name] = p.default
        elif p.default is not p.empty:
            found = f"{name!r} has a default"
        elif isinstance(p.annotation, Tensor):
            parameters.append(Parameter(name, dims=p.annotation.dims))
        elif p.annotation is p.empty:
            parameters.append(Parameter(name))
        elif p.annotation in SCALARS:
            parameters.append(Parameter(name, dtype=SCALARS[p.annotation]))
        else:
            found = f"the annotation of {name!r} is {p.annotation!r}"
        if found is not None:
            cure = "parameters are tensors, Tensor['M K'], float, int, int64 or bool; constants come last, annotated Const"
            raise BadSignature(found, cure, place(function_node(function), function.__code__.co_filename))
    return tuple(parameters), tuple(const_names), defaults


def _argument_key(arg: Any) -> Any:
    return tensors.signature(arg) if hasattr(arg, "shape") and hasattr(arg, "dtype") and tensors.is_array(arg) else type(arg)


def _const_key(value: Any) -> Any:
    """Equal for constants that compile alike: a lambda made anew for every call has the key of the last one."""
    if isinstance(value, types.FunctionType):
        cells = tuple(_const_key(c.cell_contents) for c in value.__closure__ or ())
        return value.__code__, cells, _const_key(value.__defaults__), tuple((value.__kwdefaults__ or {}).items())
    if isinstance(value, tuple):
        return type(value), tuple(_const_key(v) for v in value)
    return type(value), math.copysign(1.0, value) if value == 0 and isinstance(value, float) else value


def _check_const(name: str, value: Any) -> None:
    if isinstance(value, tuple):
        for item in value:
            _check_const(name, item)
    elif not isinstance(value, int | float | str | DType | types.FunctionType | type(None)):
        kinds = "an int, float, bool, None, dtype, tuple or function"
        raise ConstError(f"the Const {name!r} must be {kinds}, found {type(value).__name__}")
    elif isinstance(value, float) and math.isnan(value):
        raise ConstError(f"the Const {name!r} is NaN; pass a number")


def _scalar(name: str, value: Any, dtype: DType) -> int | float:
    if dtype is float32:
        if isinstance(value, bool | np.bool_):
            raise ArgumentKind(f"{name!r} must be a number, found {value!r}")
        return float(value)
    if dtype is bool_:
        if not isinstance(value, bool | np.bool_):
            raise ArgumentKind(f"{name!r} must be True or False, found {value!r}")
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ArgumentKind(f"{name!r} must be a whole number, found {value!r}")
    if not -(2 ** (dtype.bits - 1)) <= value < 2 ** (dtype.bits - 1):
        raise ArgumentKind(f"{name!r} is {value}, which does not fit {dtype}; annotate it int64")
    return int(value)


def _check_overlap(plan: Plan, arrays: Sequence[Any], parameters: Sequence[Parameter]) -> None:
    """No output may share memory with another argument. Byte ranges first; interleaved views are looked at exactly."""
    ranges = [(a + low, a + high) for a, (low, high) in zip(map(tensors.address, arrays), plan.spans, strict=True)]
    for i in plan.outputs:
        low, high = ranges[i]
        for j, (other_low, other_high) in enumerate(ranges):
            if i != j and low < other_high and other_low < high and _share(arrays[i], arrays[j]):
                names = [parameters[plan.array_at[k]].name for k in (i, j)]
                raise OverlappingOutput(f"the output {names[0]!r} shares memory with {names[1]!r}; pass separate arrays")


def _share(a: Any, b: Any) -> bool:
    if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray):
        return True  # torch has no exact test: overlapping ranges are refused
    try:
        return bool(np.shares_memory(a, b, max_work=10**6))
    except np.exceptions.TooHardError:
        return True



