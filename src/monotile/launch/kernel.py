"""What a decorated kernel is: it checks a call, finds or makes the program for it, and runs it.

Two tables keep a warm call short. `_plans` is keyed by everything about the call but addresses and contents: a hit goes
straight to the backend. `_programs` is keyed by what the compiled code depends on (element types, constants, layout
facts, never lengths): a new sequence length makes a new plan, not a new program.
"""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import backends
from ..backends.base import Backend, Program
from ..dtypes import DType, bool_, float32, int32
from ..errors import (
    ArgumentAlignment,
    ArgumentCount,
    ArgumentDevice,
    ArgumentKind,
    ArgumentRank,
    ArgumentShape,
    BadOption,
    BadSignature,
    ConstError,
    InternalError,
    MonotileError,
    OverlappingOutput,
    ReadOnlyOutput,
    UnknownBackend,
)
from ..ir import Kernel as KernelIR
from ..ir import Tensor as TensorIR
from ..runtime import tensors
from ..runtime.tensors import View, numpy_address
from . import source_keys
from .signature import (
    NUMBERS,
    Parameter,
    captured_arrays,
    check_const,
    check_threads,
    const_key,
    mentions,
    plain_const,
    read_scalar,
    read_signature,
)

MAX_LENGTH = 2**31 - 2**16  # positions are int32; the margin keeps `start + tile side` from wrapping
MAX_PLANS = 4096
Reads = tuple[tuple[dict[str, Any], str, Any], ...]


@dataclass(slots=True)
class Plan:
    """A checked call: only addresses, scalars and what may be written are left to look at."""

    program: Program
    bound: Any
    array_at: tuple[int, ...]
    scalars: tuple[tuple[int, str, DType], ...]  # position, name and type of each scalar
    spans: tuple[tuple[int, int], ...]  # bytes each array covers, from its address on
    aligned: tuple[int, ...]  # address bits that must be zero
    outputs: tuple[int, ...]
    all_arrays: bool  # no scalars among the arguments
    reads: Reads  # globals with the values that were compiled in


class Kernel:
    """A kernel of the tile language. Call it with arrays and scalars in order and constants by name."""

    def __init__(self, function: Callable[..., None]) -> None:
        if not isinstance(function, types.FunctionType):
            found = f"@kernel needs a plain function, found {type(function).__name__}"
            raise BadSignature(found, "put @kernel directly above a def")
        self.function = function
        self.name = function.__name__
        self.__doc__, self.__name__, self.__wrapped__ = function.__doc__, function.__name__, function
        self.__module__, self.__qualname__ = function.__module__, function.__qualname__
        try:
            self.parameters, self.const_names, self.defaults = read_signature(function)
        except BadSignature as error:
            raise error.with_traceback(None) from None
        self._plans: dict[Any, Plan] = {}
        self._programs: dict[Any, tuple[KernelIR, Program, Reads]] = {}
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"<monotile kernel {self.name}>"

    def __call__(
        self, *args: Any, backend: str | None = None, threads: int | None = None, schedule: Any = None, **consts: Any
    ) -> None:
        own = len(args)
        if consts:
            args = (*args, *captured_arrays(consts.values()))
        shapes = [(a.shape, a.strides, a.dtype) if type(a) is np.ndarray else tensors.signature(a) for a in args]
        key: Any = (backend, schedule, *shapes)
        if consts:
            key += tuple([(n, v if type(v) is int else const_key(v)) for n, v in consts.items()])
            if len(args) > own:
                key += mentions(consts.values())
        try:
            plan = self._plans.get(key)
        except TypeError:  # something unhashable: the full check will say what
            plan = None
        if plan is not None:
            for names, name, value in plan.reads:
                if names.get(name) is not value:  # given another value since: compile again
                    self._plans.clear()
                    plan = None
                    break
        if threads is not None:
            check_threads(threads)
        if plan is None:
            try:
                plan = self.plan(args, own, consts, backend, schedule)
            except InternalError:
                raise
            except MonotileError as error:  # without the frames of the compiler
                raise error.with_traceback(None) from None
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        arrays = args if plan.all_arrays else [args[n] for n in plan.array_at]
        addresses = [numpy_address(a) if type(a) is np.ndarray else tensors.address(a) for a in arrays]
        self._check_memory(plan, arrays, addresses)
        scalars = [] if plan.all_arrays else [read_scalar(name, args[n], dtype) for n, name, dtype in plan.scalars]
        plan.program.launch(plan.bound, arrays, addresses, scalars, threads)

    def _check_memory(self, plan: Plan, arrays: Sequence[Any], addresses: Sequence[int]) -> None:
        """What may differ between calls with one plan: alignment, writability, and whether an output shares memory with
        another argument. Byte ranges are compared first; interleaved views are looked at exactly."""
        for n, address in enumerate(addresses):
            if address & plan.aligned[n]:
                name = self._array_name(plan, n)
                raise ArgumentAlignment(f"{name!r} is not aligned to its elements; pass {name}.copy()")
        spans = plan.spans
        for i in plan.outputs:
            if not tensors.is_writable(arrays[i]):
                name = self._array_name(plan, i)
                raise ReadOnlyOutput(f"{name!r} is written by {self.name} but is read-only; pass a writable array")
            low, high = spans[i]
            low, high = low + addresses[i], high + addresses[i]
            for j, address in enumerate(addresses):
                begin, end = spans[j]
                if low < end + address and begin + address < high and i != j and tensors.share(arrays[i], arrays[j]):
                    names = self._array_name(plan, i), self._array_name(plan, j)
                    found = f"the output {names[0]!r} shares memory with {names[1]!r}"
                    raise OverlappingOutput(f"{found}; pass separate arrays")

    def _array_name(self, plan: Plan, n: int) -> str:
        return self._parameter(plan.array_at[n]).name

    # ---- a first call with given shapes ------------------------------------------------------------------------------

    def plan(
        self, args: Sequence[Any], own: int, consts: Mapping[str, Any], backend: str | None, schedule: Any = None
    ) -> Plan:
        """Checks a call and finds or makes its program. The first `own` of the arguments are the caller's, others are
        arrays that functions among the constants refer to; a `View` may stand for an array."""
        views = self._views(args, own)
        bound_consts = self._bind(args, views, consts)
        chosen = self._backend(views, backend)
        if schedule is not None and not isinstance(schedule, chosen.schedules or ()):
            takes = f"takes a {chosen.schedules.__name__}" if chosen.schedules else "takes no schedule"
            raise BadOption(f"backend {chosen.name!r} {takes}, found {type(schedule).__name__}; leave it out")
        facts = self._facts(args, views, bound_consts)
        consts_key = tuple([(n, const_key(v)) for n, v in bound_consts.items()])
        key = chosen.name, schedule, facts, consts_key, mentions(bound_consts.values())
        with self._lock:
            found = self._programs.get(key)
            if found is None or any(names.get(name) is not value for names, name, value in found[2]):
                specialised = facts, bound_consts, self._captured(args, facts[0], own)

                def make() -> source_keys.Found:
                    reads: list[tuple[dict[str, Any], str, Any]] = []
                    kernel = self._build(*specialised, reads)
                    self._check_outputs(kernel, views)
                    program = chosen.compile(kernel) if schedule is None else chosen.compile_as(kernel, schedule)
                    return kernel, program, _distinct(reads)

                recalled = schedule is None
                found = source_keys.recall(chosen, self.function, *specialised, make) if recalled else make()
                self._programs[key] = found
        kernel, program, known = found
        self._check_outputs(kernel, views)
        words: list[int] = []
        for view in views.values():
            words += [0, *view.shape, *view.strides]
        scalar_at = [n for n, arg in enumerate(args) if n not in views and arg is not None]
        scalars = tuple((n, name, dtype) for n, (name, dtype) in zip(scalar_at, kernel.scalars, strict=True))
        return Plan(
            program,
            program.bind(words + [0] * len(scalars), next((v.device for v in views.values()), "cpu")),
            tuple(views),
            scalars,
            tuple(tensors.span(v) for v in views.values()),
            tuple(v.dtype.bytes - 1 for v in views.values()),
            tuple(sorted(kernel.written)),
            len(views) == len(args),
            known,
        )

    def ir(self, *args: Any, **consts: Any) -> KernelIR:
        """The IR this call would compile."""
        own = len(args)
        args = (*args, *captured_arrays(consts.values()))
        views = self._views(args, own)
        bound = self._bind(args, views, consts)
        facts = self._facts(args, views, bound)
        return self._build(facts, bound, self._captured(args, facts[0], own))

    def _parameter(self, n: int) -> Parameter:
        """The parameter at a position; arrays that functions among the constants captured come after the author's
        own."""
        own = len(self.parameters)
        return self.parameters[n] if n < own else Parameter(f"captured{n - own}")

    def _captured(self, args: Sequence[Any], facts: Sequence[TensorIR], own: int) -> dict[int, TensorIR]:
        """The tensors that stand for captured arrays, by the identity of the array."""
        count = len(args) - own
        return {id(a): t for a, t in zip(args[own:], facts[len(facts) - count :], strict=True)}

    def _views(self, args: Sequence[Any], own: int) -> dict[int, View]:
        """The array arguments by position; everything else must be a scalar, or None for a tensor that is left out."""
        if own != len(self.parameters):
            names = ", ".join(p.name for p in self.parameters)
            takes = f"{self.name}({names}) takes {len(self.parameters)} arrays and scalars"
            raise ArgumentCount(f"{takes}, found {own}; constants are passed by name")
        views = {}
        for n, arg in enumerate(args):
            parameter = self._parameter(n)
            name, plain = parameter.name, isinstance(arg, NUMBERS)
            if arg is None and parameter.dims is not None:
                continue
            if parameter.dtype is not None or (parameter.dims is None and plain):
                if not plain:
                    found = f"{name!r} must be a {parameter.dtype} scalar, found {type(arg).__name__}"
                    raise ArgumentKind(f"{found}; pass a Python number")
                read_scalar(name, arg, self._scalar_dtype(n, arg))
                continue
            view = views[n] = tensors.describe(name, arg)
            if parameter.dims is not None and len(view.shape) != len(parameter.dims):
                shape = " ".join(map(str, parameter.dims))
                found = f"{name!r} must have {len(parameter.dims)} dimensions ({shape}), found shape {view.shape}"
                raise ArgumentRank(f"{found}; reshape it")
            if max(view.shape, default=0) > MAX_LENGTH:
                found = f"{name!r} has a side of {max(view.shape)}"
                raise ArgumentShape(f"{found}; at most {MAX_LENGTH} is supported: split it")
        return views

    def _bind(self, args: Sequence[Any], views: Mapping[int, View], given: Mapping[str, Any]) -> dict[str, Any]:
        """The constants of this call: given, bound by a tensor's length, or default; tensors left out; and every named
        length agrees."""
        given = {name: plain_const(value) for name, value in given.items()}
        for name, value in given.items():
            if name not in self.const_names:
                raise ConstError(f"{self.name} has no Const {name!r}; it has {', '.join(self.const_names) or 'none'}")
            check_const(name, value)
        lengths: dict[str, tuple[int, str]] = {}
        consts = {n: given.get(n, self.defaults.get(n, inspect.Parameter.empty)) for n in self.const_names}
        for n, view in views.items():
            parameter = self._parameter(n)
            for axis, (dim, length) in enumerate(zip(parameter.dims or (), view.shape, strict=False)):
                title = f"{parameter.name}.shape[{axis}]"
                if dim == "_":
                    continue
                if isinstance(dim, int):
                    expected, source = dim, "the signature"
                elif dim in given:
                    expected, source = given[dim], "the call"
                    if type(expected) is not int:
                        found = f"the Const {dim!r} is a length, found {type(expected).__name__}"
                        raise ConstError(f"{found}; pass an int, or leave it out")
                else:
                    expected, source = lengths.setdefault(dim, (length, title))
                if expected != length:
                    found = f"{title} is {length}, but {dim!r} is {expected} (from {source})"
                    raise ArgumentShape(f"{found}; pass arrays whose lengths agree")
                if dim in consts and dim not in given:
                    consts[dim] = length
        missing = [n for n, v in consts.items() if v is inspect.Parameter.empty]
        if missing:
            raise ConstError(f"{self.name} needs the Const {', '.join(missing)}; pass it by name: {missing[0]}=...")
        return consts | {p.name: None for p, arg in zip(self.parameters, args, strict=False) if arg is None}

    def _backend(self, views: Mapping[int, View], name: str | None) -> Backend:
        if name is not None and not isinstance(name, str):
            raise UnknownBackend(f"a backend is chosen by name, found {type(name).__name__}; pass backend='cpu'")
        devices = {v.device for v in views.values()}
        if len(devices) > 1:
            listing = ", ".join(f"{self._parameter(n).name} on {v.device}" for n, v in views.items())
            raise ArgumentDevice(f"the arrays lie on different devices: {listing}; move them to one")
        device = next(iter(devices), "cpu")
        chosen = backends.usable(name if name is not None else backends.home(device))
        if not chosen.accepts(device):
            cures = {"mlx": "pass numpy.array(x)", "cpu": "move them with .cuda()"}
            cure = cures.get(device, "move them with .cpu()")
            raise ArgumentDevice(f"backend {chosen.name!r} cannot use arrays on {device!r}; {cure}")
        return chosen

    def _facts(
        self, args: Sequence[Any], views: Mapping[int, View], consts: Mapping[str, Any]
    ) -> tuple[tuple[TensorIR, ...], tuple[tuple[str, DType], ...]]:
        """What the compiler may know of tensors and scalars."""
        facts = tuple(self._tensor(n, i, v, consts) for i, (n, v) in enumerate(views.items()))
        scalars = [
            (self._parameter(n).name, self._scalar_dtype(n, a))
            for n, a in enumerate(args)
            if n not in views and a is not None
        ]
        return facts, tuple(scalars)

    def _tensor(self, n: int, index: int, view: View, consts: Mapping[str, Any]) -> TensorIR:
        """What the compiler may know of a tensor: no lengths, but which stride is 1 and which constants fix."""
        parameter = self._parameter(n)
        symbols = parameter.dims or ("_",) * len(view.shape)
        dims: list[str | int] = []
        for axis, d in enumerate(symbols):
            # A length without a name gets one no author can write, so that it is equal to no other.
            dims.append(d if isinstance(d, int) else f"{parameter.name}.{axis}" if d == "_" else consts.get(d, d))
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
        return TensorIR(parameter.name, index, view.dtype, tuple(dims), unit, tuple(strides))

    def _scalar_dtype(self, n: int, arg: Any) -> DType:
        declared = self._parameter(n).dtype
        if declared is not None:
            return declared
        if isinstance(arg, bool | np.bool_):
            return bool_
        return int32 if isinstance(arg, int | np.integer) else float32

    def _build(
        self,
        facts: tuple[tuple[TensorIR, ...], tuple[tuple[str, DType], ...]],
        consts: Mapping[str, Any],
        captured: Mapping[int, TensorIR],
        reads: list[tuple[dict[str, Any], str, Any]] | None = None,
    ) -> KernelIR:
        from ..frontend.build import build
        from ..ir import verify

        kernel = build(self.function, *facts, consts, captured, reads)
        verify.check(kernel, "frontend")
        return kernel

    def _check_outputs(self, kernel: KernelIR, views: Mapping[int, View]) -> None:
        ordered = list(views.items())
        for index in kernel.written:
            n, view = ordered[index]
            if tensors.overlaps_itself(view):
                found = f"{self._parameter(n).name!r} is written by {self.name}, but its elements share memory"
                raise OverlappingOutput(f"{found}; pass a copy")


def _distinct(reads: list[tuple[dict[str, Any], str, Any]]) -> Reads:
    return tuple({(id(names), name): (names, name, value) for names, name, value in reads}.values())
