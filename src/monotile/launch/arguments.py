"""The arguments of a call, checked against the kernel's signature and reduced to what the compiler may know of them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..dtypes import DType
from ..errors import (
    ArgumentCount,
    ArgumentDevice,
    ArgumentKind,
    ArgumentRank,
    ArgumentShape,
    ConstError,
    OverlappingOutput,
)
from ..ir import Kernel, Tensor
from ..ir.ops import MAX_LENGTH
from ..runtime import tensors
from ..runtime.tensors import View
from .captures import Captures, number_dtype
from .signature import NUMBERS, Parameter, Signature, check_const, plain_const, read_scalar, scalar_dtype


@dataclass(frozen=True)
class Specialisation:
    """Everything a kernel's code depends on besides its source. Lengths are left out unless a Const fixes them."""

    tensors: tuple[Tensor, ...]
    scalars: tuple[tuple[str, DType], ...]  # name and type of each run-time scalar
    consts: Mapping[str, Any]
    captured: Mapping[int, Tensor]  # tensors that stand for captured arrays, by the array's id
    numbers: Mapping[Any, str]  # names of the scalars that stand for captured numbers, by where those are bound


class Arguments:
    """The arguments of one call: the caller's positional arguments, then the arrays and the numbers that functions
    among the constants capture. A `View` may stand for an array. Raises a CallError where they do not fit the
    signature."""

    def __init__(
        self, signature: Signature, given: Sequence[Any], captured: Captures, consts: Mapping[str, Any]
    ) -> None:
        self.signature, self.captured, self.positional_count = signature, captured, len(given)
        self.args = (*given, *captured.arrays.values(), *captured.numbers.values())
        self.views = self._read_views()  # of array arguments, by position
        self.consts = self._bind_consts(consts)

    def parameter(self, position: int) -> Parameter:
        return self.signature.parameter(position)

    @property
    def device(self) -> str:
        """The device all arrays are on; raises ArgumentDevice if they are on several."""
        devices = {v.device for v in self.views.values()}
        if len(devices) > 1:
            listing = ", ".join(f"{self.parameter(n).name} on {v.device}" for n, v in self.views.items())
            raise ArgumentDevice(f"the arrays lie on different devices: {listing}; move them to one")
        return next(iter(devices), "cpu")

    @property
    def scalar_positions(self) -> list[int]:
        return [n for n, arg in enumerate(self.args) if n not in self.views and arg is not None]

    # ---- checks ------------------------------------------------------------------------------------------------------

    def _read_views(self) -> dict[int, View]:
        """Return the array arguments by position. All others must be scalars, or None for an omitted tensor."""
        parameters = self.signature.parameters
        if self.positional_count != len(parameters):
            names = ", ".join(p.name for p in parameters)
            takes = f"{self.signature.name}({names}) takes {len(parameters)} arrays and scalars"
            raise ArgumentCount(f"{takes}, found {self.positional_count}; constants are passed by name")
        views = {}
        for n, arg in enumerate(self.args):
            parameter = self.parameter(n)
            is_number = isinstance(arg, NUMBERS)
            if arg is None and parameter.dims is not None:
                continue
            if parameter.dtype is not None or (parameter.dims is None and is_number):
                if not is_number:
                    found = f"{parameter.name!r} must be a {parameter.dtype} scalar, found {type(arg).__name__}"
                    raise ArgumentKind(f"{found}; pass a Python number")
                read_scalar(parameter.name, arg, self._scalar_dtype(n))
                continue
            views[n] = _read_view(parameter, arg if n < self.positional_count else _with_a_dimension(arg))
        return views

    def _bind_consts(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the value of every Const: given by name, bound to a tensor's length, or the default; then None for
        each omitted tensor. Dimensions of one name must have one length."""
        signature = self.signature
        given = {name: plain_const(value) for name, value in given.items()}
        for name, value in given.items():
            if name not in signature.const_names:
                known = ", ".join(signature.const_names) or "none"
                raise ConstError(f"{signature.name} has no Const {name!r}; it has {known}")
            check_const(name, value)
        consts = {n: given.get(n, signature.defaults.get(n, inspect.Parameter.empty)) for n in signature.const_names}
        lengths: dict[str, tuple[int, str]] = {}  # of named dimensions, with the place each was first seen
        for n, view in self.views.items():
            parameter = self.parameter(n)
            for axis, (dim, length) in enumerate(zip(parameter.dims or (), view.shape, strict=False)):
                if dim == "_":
                    continue
                title = f"{parameter.name}.shape[{axis}]"
                expected, source = _expected_length(dim, given, lengths, (length, title))
                if expected != length:
                    found = f"{title} is {length}, but {dim!r} is {expected} (from {source})"
                    raise ArgumentShape(f"{found}; pass arrays whose lengths agree")
                if dim in consts and dim not in given:
                    consts[str(dim)] = length
        missing = [n for n, v in consts.items() if v is inspect.Parameter.empty]
        if missing:
            raise ConstError(
                f"{signature.name} needs the Const {', '.join(missing)}; pass it by name: {missing[0]}=..."
            )
        omitted = [p.name for p, arg in zip(signature.parameters, self.args, strict=False) if arg is None]
        return consts | dict.fromkeys(omitted)

    def check_outputs(self, kernel: Kernel) -> None:
        """Refuse an output whose elements share memory, such as a broadcast view."""
        positions = list(self.views)
        for index in kernel.written:
            position = positions[index]
            if tensors.overlaps_itself(self.views[position]):
                name = self.parameter(position).name
                found = f"{name!r} is written by {self.signature.name}, but its elements share memory"
                raise OverlappingOutput(f"{found}; pass a copy")

    def words(self) -> list[int]:
        """Return the launch words: a place for the address, lengths and strides of each tensor, then scalars."""
        tensors = [word for view in self.views.values() for word in (0, *view.shape, *view.strides)]
        return tensors + [0] * len(self.scalar_positions)

    # ---- what the compiler may know ----------------------------------------------------------------------------------

    def specialisation(self) -> Specialisation:
        found = tuple(self._tensor(index, n) for index, n in enumerate(self.views))
        scalars = tuple((self.parameter(n).name, self._scalar_dtype(n)) for n in self.scalar_positions)
        arrays, places = self.captured.arrays, self.captured.numbers
        captured = dict(zip(arrays, found[len(found) - len(arrays) :], strict=True))
        names = [name for name, _ in scalars[len(scalars) - len(places) :]]
        return Specialisation(found, scalars, self.consts, captured, dict(zip(places, names, strict=True)))

    def _scalar_dtype(self, position: int) -> DType:
        """Return the type of a scalar: a captured number's is wide enough for it, the author's own are as declared."""
        value = self.args[position]
        dtype = number_dtype(value) if position >= self.positional_count else None
        return dtype or scalar_dtype(self.parameter(position), value)

    def _tensor(self, index: int, position: int) -> Tensor:
        """Describe a tensor to the compiler: its Const lengths, its unit stride, and the strides that those fix."""
        parameter, view = self.parameter(position), self.views[position]
        symbols: tuple[str | int, ...] = parameter.dims or ("_",) * len(view.shape)
        if position >= self.positional_count and not self.args[position].ndim:
            symbols = (1,)  # a captured number: unlike an array of one element it is used without a subscript
        dims: list[str | int] = []
        for axis, d in enumerate(symbols):
            # A length without a name gets one no author can write, so that it is equal to no other.
            dims.append(d if isinstance(d, int) else f"{parameter.name}.{axis}" if d == "_" else self.consts.get(d, d))
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
        return Tensor(parameter.name, index, view.dtype, tuple(dims), unit, tuple(strides))


def _with_a_dimension(captured: Any) -> Any:
    """A captured array of no dimensions as a view of one element."""
    view = tensors.read("captured", captured)
    return View(view.dtype, (1,), (1,), view.device) if not view.shape else captured


def _read_view(parameter: Parameter, array: Any) -> View:
    view = tensors.describe(parameter.name, array)
    name, dims, longest = parameter.name, parameter.dims, max(view.shape, default=0)
    if dims is not None and len(view.shape) != len(dims):
        found = f"{name!r} must have {len(dims)} dimensions ({' '.join(map(str, dims))}), found shape {view.shape}"
        raise ArgumentRank(f"{found}; reshape it")
    if longest > MAX_LENGTH:
        raise ArgumentShape(f"{name!r} has a side of {longest}; at most {MAX_LENGTH} is supported: split it")
    return view


def _expected_length(
    dim: str | int, given: Mapping[str, Any], lengths: dict[str, tuple[int, str]], found: tuple[int, str]
) -> tuple[int, str]:
    """Return the length a dimension must have and what fixes it: the signature, a given Const, or the first tensor
    with a dimension of this name, which `found` becomes if there was none."""
    if isinstance(dim, int):
        return dim, "the signature"
    if dim not in given:
        return lengths.setdefault(dim, found)
    expected = given[dim]
    if type(expected) is not int:
        raise ConstError(
            f"the Const {dim!r} is a length, found {type(expected).__name__}; pass an int, or leave it out"
        )
    return expected, "the call"
