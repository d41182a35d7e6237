"""Which program a call needs, found without running the front end.

The front end makes a kernel's IR from source text, constants, facts about tensors, and what the names in the text stand
for. An `Origin` is a fingerprint of all that. It takes a millisecond where the front end takes several, and it is under
its name that a kernel's program is found on disk.

It names more than the front end would read: whole files, and every global whose name occurs in a function that may be
inlined. It must never name less. So what stands for a name is followed if it is a number, a string, an element type,
a tuple, a word of the language, a plain function, a module, or one of a few types and functions of Python that depend
on nothing but their arguments; anything else, and the call has no origin and goes through the front end.
"""

from __future__ import annotations

import builtins
import linecache
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes, ir
from ..backends.base import Backend, Program
from ..dtypes import DType
from ..frontend import vocabulary
from ..runtime import cache

Facts = tuple[tuple[ir.Tensor, ...], tuple[tuple[str, DType], ...]]
Reads = tuple[tuple[dict[str, Any], str, Any], ...]
Found = tuple[ir.Kernel, Program, Reads]

KIND = "origin"
PLAIN = (bool, int, float, str, type(None))
PURE_TYPES = (bool, int, float, str, tuple, range, zip, enumerate, reversed)
PURE_FUNCTIONS = (abs, all, any, divmod, isinstance, len, max, min, pow, round, sum)


class Unknown(Exception):
    """Something that cannot be named."""


class Origin(NamedTuple):
    name: str
    reads: Reads  # globals that were looked at, with their values


class Outline(ir.Kernel):
    """A kernel whose program is known: what launching it needs, without a body."""

    def __init__(self, name: str, facts: Facts, outputs: frozenset[int]) -> None:
        super().__init__(name, *facts)
        self._outputs = outputs

    @property
    def written(self) -> frozenset[int]:
        return self._outputs


def recall(
    backend: Backend,
    function: types.FunctionType,
    facts: Facts,
    consts: Mapping[str, Any],
    captured: Mapping[int, ir.Tensor],
    make: Callable[[], Found],
) -> Found:
    """The program of a call: kept on disk for its origin, or else what `make` makes, which is then noted."""
    origin = of(backend, function, facts, consts, captured)
    if origin is None:
        return make()
    kept = cache.load(origin.name, KIND)
    if kept is not None:
        key, outputs = kept.decode().split("\n")
        kernel = Outline(function.__name__, facts, frozenset(int(n) for n in outputs.split()))
        program = backend.cached(key, kernel)
        if program is not None:
            return kernel, program, origin.reads
    found = make()
    after = of(backend, function, facts, consts, captured)
    if after is not None and after.name == origin.name:  # nothing was given another value meanwhile
        outputs = " ".join(str(n) for n in sorted(found[0].written))
        cache.store_compiled(origin.name, KIND, f"{backend.key(found[0])}\n{outputs}".encode())
    return found


def of(
    backend: Backend,
    function: types.FunctionType,
    facts: Facts,
    consts: Mapping[str, Any],
    captured: Mapping[int, ir.Tensor],
) -> Origin | None:
    """What the front end would make of a call is the same for calls of equal origin. None if that cannot be said."""
    identity = backend.identity()
    if identity is None or sys.flags.optimize:  # -O takes names that the front end reads out of the code
        return None
    walk = _Walk(captured)
    try:
        walk.function(function, with_defaults=False)
        for name, value in sorted(consts.items()):
            walk.parts += ["const", name]
            walk.value(value)
        walk.follow_attributes()
    except (Unknown, RecursionError):
        return None
    versions = f"{sys.version_info} {np.__version__}"
    return Origin(cache.fingerprint(identity, versions, repr(facts), *walk.parts), tuple(walk.reads.values()))


class _Walk:
    """Visits everything that a function's names stand for and writes down what it sees, in the order it sees it."""

    def __init__(self, captured: Mapping[int, ir.Tensor]) -> None:
        self.parts: list[str] = []
        self.reads: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        self._captured = captured
        self._files: dict[str, int] = {}
        self._functions: dict[int, int] = {}
        self._modules: dict[int, tuple[int, types.ModuleType]] = {}
        self._tuples: list[Any] = []
        self._names: dict[str, None] = {}  # every name in the code of any function: it may be an attribute of a module

    def value(self, value: Any) -> None:
        kind = type(value)
        if id(value) in self._captured:
            self.parts.append(f"captured {self._captured[id(value)].index}")
        elif kind in PLAIN or isinstance(value, np.generic):
            if isinstance(value, np.generic) and value.dtype.kind not in "biuf":
                raise Unknown
            self.parts.append(f"{kind.__name__} {value!r}")
        elif isinstance(value, DType):
            if dtypes.BY_NAME.get(value.name) is not value:
                raise Unknown
            self.parts.append(f"dtype {value.name}")
        elif isinstance(value, tuple):
            if kind is not tuple:
                self.type(kind)
            self.parts.append(f"tuple of {len(value)}")
            for item in value:
                self.value(item)
        elif kind is types.FunctionType:
            self.function(value)
        elif kind is types.ModuleType:
            number, _ = self._modules.setdefault(id(value), (len(self._modules), value))
            self.parts.append(f"module {number} {value.__name__}")
        elif isinstance(value, type):
            self.type(value)
        elif kind is types.BuiltinFunctionType and (value in PURE_FUNCTIONS or _is_of(math, value)):
            self.parts.append(f"builtin {value.__module__} {value.__name__}")
        else:
            raise Unknown

    def type(self, value: type) -> None:
        """Types of Python and NumPy by their name; a named tuple by its fields."""
        if any(value is known for known in PURE_TYPES) or (
            issubclass(value, np.generic) and getattr(np, value.__name__, None) is value
        ):
            self.parts.append(f"type {value.__module__} {value.__name__}")
            return
        fields = getattr(value, "_fields", None)
        if fields is None or value.__mro__ != (value, tuple, object):  # a class made from one may do anything
            raise Unknown
        self.parts.append(f"named tuple {value.__name__} {fields}")
        if value not in self._tuples:
            self._tuples.append(value)
            for name, default in value._field_defaults.items():  # type: ignore[attr-defined]
                self.parts.append(name)
                self.value(default)

    def function(self, function: types.FunctionType, with_defaults: bool = True) -> None:
        if function.__module__ == vocabulary.__name__:
            if not _is_of(vocabulary, function):
                raise Unknown
            self.parts.append(f"word {function.__name__}")
            return
        if id(function) in self._functions:
            self.parts.append(f"function {self._functions[id(function)]}")
            return
        self._functions[id(function)] = len(self._functions)
        code = function.__code__
        self.parts.append(f"function {function.__name__} {code.co_name} at {code.co_firstlineno}")
        if code.co_name == "<lambda>":  # there may be several on a line
            self.parts.append(repr((code.co_varnames, list(code.co_positions()))))
        self.file(code.co_filename, function.__globals__)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self.parts.append(f"captured {name}")
            try:
                content = cell.cell_contents
            except ValueError:  # a variable that is not bound yet
                self.parts.append("unbound")
            else:
                self.value(content)
        if with_defaults:  # a kernel's own are among the constants of the call
            self.value(function.__defaults__ or ())
            for name, default in (function.__kwdefaults__ or {}).items():
                self.parts.append(f"default {name}")
                self.value(default)
        for name in dict.fromkeys(_names(code)):
            self._names[name] = None
            if name in function.__globals__:
                self.read(function.__globals__, name)
            elif name in vars(builtins):
                self.read(vars(builtins), name)

    def read(self, names: dict[str, Any], name: str) -> None:
        value = names[name]
        self.parts.append(f"name {name}")
        self.value(value)
        fixed = isinstance(value, types.ModuleType | types.BuiltinFunctionType | type | DType)
        if not fixed and getattr(value, "__module__", None) != vocabulary.__name__ and id(value) not in self._captured:
            self.reads[id(names), name] = names, name, value

    def follow_attributes(self) -> None:
        """A module may be passed on, so every name met anywhere may be looked up in every module met anywhere. The same
        holds for named tuples; of those, only what their fields make of them is known."""
        seen: set[tuple[int, str]] = set()
        while True:
            pairs = [(n, m, name) for n, m in self._modules.values() for name in self._names if (n, name) not in seen]
            if not pairs:
                break
            for number, module, name in pairs:
                seen.add((number, name))
                if name in vars(module):
                    self.parts.append(f"of module {number}")
                    self.read(vars(module), name)
                elif hasattr(module, "__getattr__"):  # it may answer anything
                    raise Unknown
        for kind in self._tuples:
            if any(name in vars(kind) and name not in (*kind._fields, "_replace") for name in self._names):
                raise Unknown

    def file(self, path: str, names: dict[str, Any]) -> None:
        """The text of a file, as the front end would read it."""
        if path not in self._files:
            self._files[path] = len(self._files)
            linecache.checkcache(path)
            lines = linecache.getlines(path, names)
            if not lines:
                raise Unknown
            self.parts.append("".join(lines))
        self.parts.append(f"file {self._files[path]}")


def _names(code: types.CodeType) -> Iterator[str]:
    """Names that the code, or code written inside it, looks up outside of itself or as attributes."""
    yield from code.co_names
    for item in code.co_consts:
        if isinstance(item, types.CodeType):
            yield from _names(item)


def _is_of(module: Any, value: Any) -> bool:
    return getattr(module, value.__name__, None) is value
