"""What functions among the constants of a call refer to: arrays and numbers that become arguments of the kernel, and
the keys under which functions that compile alike are found.

A number is named by where it is bound: a closure's cell, an argument of a partial, an attribute of an object. So the
same place in a function made anew for every call is the same argument. Numbers in tuples and defaults of parameters are
constants. A global is a constant until it is bound to another number. A function that needs a number while it is
compiled (a length, a range, a position in a tuple) is remembered by its code, and its numbers are constants.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..dtypes import DType, float32, int32, int64
from ..errors import CapturedChanged, KernelError
from ..frontend.functions import ABSENT, attribute, call_of, code_of, is_object
from ..ir.builder import LARGEST, GlobalRead
from ..runtime.arrays import host_view
from ..runtime.tensors import View, is_array, is_mlx
from .reads import Read, cells, globals_loaded, names_in, reads_of

MAX_NESTING = 8  # of functions captured by functions
PLAIN = frozenset([bool, int, str, type(None)])  # constants that are equal if their types and values are
Number = int | float
Result = TypeVar("Result")

_compiled_in: dict[int, types.CodeType] = {}  # code whose numbers are constants, by its id
_rebound: set[tuple[int, str]] = set()  # globals that were bound to another number


class _Earlier(threading.local):
    """Numbers that this thread reads in place of those bound now, by where they are bound."""

    numbers: Mapping[Any, Number] = {}


_earlier = _Earlier()


class Captures(NamedTuple):
    """The arrays and numbers that functions refer to, each once, in order. Functions with equal keys compile alike only
    if their patterns agree: `x + x` and `x + y` differ in nothing else."""

    arrays: dict[int, Any]  # by the id of what is referred to; those of other libraries as NumPy arrays
    numbers: dict[Any, Number]  # by where they are bound
    pattern: tuple[Any, ...]  # which of them each reference is

    def beside(self, given: Iterable[Any]) -> Captures:
        """Return the captures of a call on `given`, arrays or views of such. Arrays of MLX are read in this machine's
        memory, where JAX's are, unless the call's own arrays are MLX's."""
        if not self.arrays or "mlx.core" not in sys.modules:
            return self
        if not any(map(is_mlx, self.arrays.values())) or any(map(_is_of_mlx, given)):
            return self
        found = {place: host_view("captured", a) if is_mlx(a) else a for place, a in self.arrays.items()}
        return self._replace(arrays=found)


def _is_of_mlx(item: Any) -> bool:
    return item.device == "mlx" if isinstance(item, View) else is_mlx(item)


NOTHING = Captures({}, {}, ())


def captures(values: Iterable[Any]) -> Captures:
    """Return what functions among the values refer to by closures, arguments, attributes and globals."""
    walk = None
    for value in values:
        kind = type(value)
        if kind is int or (kind is types.FunctionType and not value.__closure__ and not value.__code__.co_names):
            continue  # the common cases, which refer to nothing
        walk = walk or _References()
        walk.visit(value, 0)
    return NOTHING if walk is None else Captures(walk.arrays, walk.numbers, tuple(walk.pattern))


def captures_and_reads(values: Iterable[Any]) -> tuple[Captures, dict[Any, Read]]:
    """Return what `captures` does, and every value that functions read, by where it is bound: in a closure's cell, as
    an attribute of an object or of a module, as a global."""
    reads: dict[Any, Read] = {}
    walk = None
    for value in values:
        plain = type(value) is types.FunctionType and not value.__closure__ and not value.__code__.co_names
        if not plain or globals_loaded(value.__code__):
            walk = walk or _References(reads)
            walk.visit(value, 0)
    return NOTHING if walk is None else Captures(walk.arrays, walk.numbers, tuple(walk.pattern)), reads


class _References:
    """Follow functions to the arrays and numbers that they refer to; `reads` takes all that they read."""

    def __init__(self, reads: dict[Any, Read] | None = None) -> None:
        self.reads, self.earlier = reads, _earlier.numbers
        self.arrays: dict[int, Any] = {}
        self.numbers: dict[Any, Number] = {}
        self.pattern: list[Any] = []
        self._order: dict[Any, int] = {}
        self._objects: set[tuple[int, types.CodeType]] = set()

    def visit(self, value: Any, depth: int, code: types.CodeType | None = None, place: Any = None) -> None:
        """`code` is that of the function with the reference, and `place` where a number would be bound."""
        kind = type(value)
        if kind is bool or kind is str or value is None:
            return
        if kind is int or kind is float:
            if place is not None and number_dtype(value) is not None:
                self._number(place, value, code)
        elif isinstance(value, tuple):
            for item in value:
                self.visit(item, depth, code)
        elif kind is types.FunctionType:
            if depth < MAX_NESTING:
                self._function(value, depth + 1)
        elif isinstance(value, functools.partial):
            if depth < MAX_NESTING:
                of = code_of(value)
                self.visit(value.func, depth + 1, of)
                for name, item in _partial_items(value):
                    self.visit(item, depth + 1, of, (id(value), name))
        elif depth and is_array(value):
            number = number_of(value)
            if number is None or not self._number(id(value), number, code):
                self._add(id(value), self.arrays, value)
        elif isinstance(value, types.MethodType):
            self.visit(value.__func__, depth)
            self._object(value.__self__, code_of(value), depth)
        elif place is not None and (number := number_of(value)) is not None:
            self._number(place, number, code)
        elif depth and hasattr(value, "__dlpack__") and not isinstance(value, np.generic):
            self._add(id(value), self.arrays, host_view("captured", value))
        elif is_object(value):
            self.visit(call_of(value), depth)
            self._object(value, code_of(value), depth)
            self._object(value, code, depth)

    def _function(self, function: types.FunctionType, depth: int) -> None:
        code = function.__code__
        if self.reads is not None:
            self.reads.update(reads_of(function))
        for cell, content in cells(function):
            if content is not ABSENT:
                self.visit(content, depth, code, id(cell))
        names = function.__globals__
        for name in code.co_names:
            value = names.get(name)
            if value is not None:
                place = id(names), name
                self.visit(value, depth, code, place if place in _rebound else None)

    def _object(self, owner: Any, code: types.CodeType | None, depth: int) -> None:
        """Visit the attributes of an object that a function's code names."""
        if code is None or (id(owner), code) in self._objects or depth >= MAX_NESTING:
            return
        self._objects.add((id(owner), code))
        for name, value in _attributes(owner, code):
            if self.reads is not None:
                self.reads[id(owner), name] = Read(value, name, owner)
            self.visit(value, depth + 1, code, (id(owner), name))

    def _number(self, place: Any, number: Number, code: types.CodeType | None) -> bool:
        """Add a number, unless it is a constant of the code that refers to it. True if it was added."""
        if self.earlier:
            earlier = self.earlier.get(place, number)
            if id(code) in _compiled_in and earlier != number:
                raise CapturedChanged(
                    f"a number that score_mod or mask_mod reads was {earlier} in the call whose gradients are computed "
                    f"and is {number} now, and the function is compiled for one number; change it after backward, or "
                    "read it from a closure"
                )
            number = earlier
        if id(code) in _compiled_in:
            return False
        self._add(place, self.numbers, number)
        return True

    def _add(self, place: Any, found: dict[Any, Any], value: Any) -> None:
        found.setdefault(place, value)
        self.pattern.append(self._order.setdefault(place, len(self._order)))
        if found is self.numbers:
            self.pattern.append(number_dtype(value))


@contextlib.contextmanager
def reading_earlier(numbers: Mapping[Any, Number]) -> Iterator[None]:
    """Let functions be read with earlier numbers, by where these are bound. It is an error if one of them is bound to
    another number by now and is a constant of the compiled function."""
    before, _earlier.numbers = _earlier.numbers, numbers
    try:
        yield
    finally:
        _earlier.numbers = before


def number_of(value: Any) -> Number | None:
    """Return the Python number that a kernel takes for a value: an int or a float of Python or NumPy, or an array of no
    dimensions in this machine's memory. None for bools, for numbers that no element type holds, and for all else."""
    kind = type(value)
    if kind is not int and kind is not float:
        if isinstance(value, np.generic | np.ndarray):
            if value.ndim or value.dtype.kind not in "iuf":
                return None
        elif not _is_host_tensor(value):
            return None
        value = value.item()
    return value if number_dtype(value) is not None else None


def _is_host_tensor(value: Any) -> bool:
    """True for a plain torch tensor of one number in this machine's memory."""
    torch = sys.modules.get("torch")
    if torch is None or type(value) is not torch.Tensor or value.dim() or value.device.type != "cpu":
        return False
    plain = value.dtype is not torch.bool and not value.is_complex() and value.layout is torch.strided
    return bool(plain and not value.requires_grad and value.untyped_storage().nbytes() > 0)


def number_dtype(value: Number) -> DType | None:
    """Return the type a captured number has in the kernel; None where none holds it."""
    if isinstance(value, float):
        return None if LARGEST <= abs(value) < float("inf") else float32
    for dtype in (int32, int64):
        low, high = dtype.limits
        if low <= value <= high:
            return dtype
    return None


# ---- keys ------------------------------------------------------------------------------------------------------------


def const_key(value: Any, depth: int = 0, code: types.CodeType | None = None) -> Any:
    """Return a key that is equal for constants that compile alike: a lambda made anew for every call keeps its key.
    `code` is that of the function that refers to the value."""
    kind = type(value)
    if kind in PLAIN:
        return kind, value
    if kind is types.FunctionType and depth < MAX_NESTING:
        return _function_key(value, depth + 1)
    if isinstance(value, functools.partial) and depth < MAX_NESTING:
        of = code_of(value)
        items = [(name, _key_of(item, depth + 1, of)) for name, item in _partial_items(value)]
        return kind, const_key(value.func, depth + 1, of), tuple(items)
    if isinstance(value, types.MethodType) and depth < MAX_NESTING:
        return kind, const_key(value.__func__, depth), _object_key(value.__self__, code_of(value), depth + 1)
    if isinstance(value, tuple):
        return kind, tuple([const_key(v, depth + 1, code) for v in value])
    if depth and (is_array(value) or hasattr(value, "__dlpack__")):
        return kind  # its element type, rank and layout are part of the key as those of an argument
    if isinstance(value, float):
        return kind, repr(value)  # tells -0.0 from 0.0, and NaN is equal to itself
    if depth < MAX_NESTING and is_object(value):
        called = const_key(call_of(value), depth), _object_key(value, code_of(value), depth + 1)
        return called, _object_key(value, code, depth + 1)
    return kind, value


def _function_key(function: types.FunctionType, depth: int) -> Any:
    code = function.__code__
    # Code objects of different files may be equal, so the file and its globals belong to the key.
    key = [code, code.co_filename, id(function.__globals__)]
    for _, content in cells(function):
        key.append(ABSENT if content is ABSENT else _key_of(content, depth, code))
    key += [const_key(v, depth, code) for v in function.__defaults__ or ()]
    key += [(n, const_key(v, depth, code)) for n, v in (function.__kwdefaults__ or {}).items()]
    return tuple(key)


def _object_key(owner: Any, code: types.CodeType | None, depth: int) -> Any:
    items = [] if code is None else [(name, _key_of(v, depth, code)) for name, v in _attributes(owner, code)]
    return type(owner), tuple(items)


def _key_of(value: Any, depth: int, code: types.CodeType | None) -> Any:
    """Return the key of what a function refers to: of a number, that it is one."""
    kind = type(value)
    is_number = kind is int or kind is float or isinstance(value, np.generic)
    if is_number and id(code) not in _compiled_in and number_of(value) is not None:
        return "number"
    return const_key(value, depth, code)


def _partial_items(value: functools.partial[Any]) -> list[tuple[Any, Any]]:
    return [*enumerate(value.args), *value.keywords.items()]


def _attributes(owner: Any, code: types.CodeType) -> list[tuple[str, Any]]:
    """Return the attributes of an object that code names, or a method of the object that it may call."""
    if not is_object(owner):
        return []
    found: list[tuple[str, Any]] = []
    called = call_of(owner)
    names = dict.fromkeys([*names_in(code), *(names_in(called.__code__) if called is not None else ())])
    for name in (pending := list(names)):
        value = attribute(owner, name)
        if isinstance(value, types.MethodType) and value.__self__ is owner:
            value = value.__func__
            pending += [n for n in names_in(value.__code__) if n not in names]
            names.update(dict.fromkeys(pending))
        if value is not ABSENT:
            found.append((name, value))
    return found


def frozen(function: Any) -> Any:
    """Return a function that refers to what its closure holds now, whatever is bound there later: gradients are
    computed after the caller's loop has gone on."""
    if isinstance(function, functools.partial):
        return functools.partial(frozen(function.func), *function.args, **function.keywords)
    if type(function) is not types.FunctionType or not function.__closure__:
        return function
    held = [cell if content is ABSENT else types.CellType(frozen(content)) for cell, content in cells(function)]
    names, defaults = function.__globals__, function.__defaults__
    found = types.FunctionType(function.__code__, names, function.__name__, defaults, tuple(held))
    found.__kwdefaults__ = function.__kwdefaults__
    return found


# ---- numbers that stay constants, and those that no longer do --------------------------------------------------------


def note_rebound(reads: Sequence[GlobalRead]) -> bool:
    """Make globals arguments of later calls if they were bound to another number since. True if there are any."""
    before = len(_rebound)
    for names, name, value in reads:
        now = names.get(name)
        if now is not value and type(value) in (int, float) and type(now) in (int, float):
            _rebound.add((id(names), name))
    return len(_rebound) > before


def make_argument(place: tuple[int, str]) -> None:
    """Make the global at this place an argument of later calls."""
    _rebound.add(place)


def with_constants(values: Sequence[Any], attempt: Callable[[], Result]) -> Result:
    """Make a call on functions. Where it fails while they are compiled, call again with their numbers as constants, and
    remember that if it helps."""
    try:
        return attempt()
    except KernelError as error:
        if not captures(values).numbers:
            raise
        failed = error.with_traceback(None)
    added = compile_in(values)
    try:
        return attempt()
    except KernelError:
        for code in added:
            _compiled_in.pop(id(code), None)
        raise failed from None


def compile_in(values: Iterable[Any]) -> list[types.CodeType]:
    """Make the numbers of functions constants from now on; return the code of those that had others."""
    added = [code for code in _codes(values) if id(code) not in _compiled_in]
    _compiled_in.update({id(code): code for code in added})
    return added


def _codes(values: Iterable[Any], depth: int = 0) -> Iterator[types.CodeType]:
    """Yield the code of functions, and of those they refer to, whose numbers may be arguments."""
    for value in values:
        if isinstance(value, tuple):
            yield from _codes(value, depth)
        code = code_of(value)
        if code is not None and depth < MAX_NESTING:
            yield code
            inner = value.func if isinstance(value, functools.partial) else value
            if isinstance(inner, types.FunctionType):
                yield from _codes([content for _, content in cells(inner)], depth + 1)
