"""Find a call's compiled program on disk without running the front end.

The front end makes a kernel's IR from source text, constants, tensor descriptions, and whatever the names in the text
refer to. A `SourceKey` is a fingerprint of all that. Computing one takes a millisecond where the front end takes
several, and a kernel's program is stored on disk under it.

A key covers more than the front end reads: whole files, and every global whose name occurs in a function that may be
inlined. It must never cover less. So a name is followed if it refers to a number, a string, an element type, a tuple, a
word of the language, a plain function, a module, or one of a few types and functions of Python that depend on nothing
but their arguments. If it refers to anything else, the call has no source key and goes through the front end.
"""

from __future__ import annotations

import builtins
import linecache
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes, ir
from ..backends.base import Backend, Program
from ..dtypes import DType
from ..frontend import vocabulary
from ..frontend.functions import is_fixed_table
from ..ir.builder import GlobalRead
from ..runtime import cache
from .arguments import Specialisation

GlobalReads = tuple[GlobalRead, ...]

FILE_KIND = "source_key"
PLAIN = (bool, int, float, str, type(None))
PURE_TYPES = (bool, int, float, str, tuple, range, zip, enumerate, reversed)
PURE_FUNCTIONS = (abs, all, any, divmod, isinstance, len, max, min, pow, round, sum)


class NoSourceKey(Exception):
    """A name refers to something that a source key cannot cover."""


class SourceKey(NamedTuple):
    key: str
    globals_read: GlobalReads


class CompiledKernel(NamedTuple):
    kernel: ir.Kernel
    program: Program
    globals_read: GlobalReads  # the program is valid while these globals keep their values


class Outline(ir.Kernel):
    """A kernel without a body: what launching a program from disk needs to know of it."""

    def __init__(self, name: str, spec: Specialisation, outputs: frozenset[int]) -> None:
        super().__init__(name, spec.tensors, spec.scalars)
        self._outputs = outputs

    @property
    def written(self) -> frozenset[int]:
        return self._outputs


def recall(
    backend: Backend, schedule: Any, function: types.FunctionType, spec: Specialisation,
    compile_call: Callable[[], CompiledKernel],
) -> CompiledKernel:  # fmt: skip
    """Load the program stored under the call's source key; otherwise compile it and store it there."""
    source = source_key(backend, schedule, function, spec)
    if source is None:
        return compile_call()
    stored = cache.load(source.key, FILE_KIND)
    if stored is not None:
        program_key, outputs = stored.decode().split("\n")
        kernel = Outline(function.__name__, spec, frozenset(int(n) for n in outputs.split()))
        program = backend.cached(program_key, kernel, schedule)
        if program is not None:
            return CompiledKernel(kernel, program, source.globals_read)
    compiled = compile_call()
    after = source_key(backend, schedule, function, spec)
    if after is not None and after.key == source.key:  # no global was rebound while compiling
        outputs = " ".join(str(n) for n in sorted(compiled.kernel.written))
        cache.store_compiled(source.key, FILE_KIND, f"{backend.key(compiled.kernel, schedule)}\n{outputs}".encode())
    return compiled


def source_key(backend: Backend, schedule: Any, function: types.FunctionType, spec: Specialisation) -> SourceKey | None:
    """Return the key of a call: calls with equal keys get equal IR from the front end. None if there is no such key."""
    identity = backend.identity()
    if identity is None or sys.flags.optimize:  # -O takes names that the front end reads out of the code
        return None
    walk = _Walk(spec)
    try:
        walk.function(function, with_defaults=False)
        for name, value in sorted(spec.consts.items()):
            walk.parts += ["const", name]
            walk.value(value)
        walk.follow_attributes()
    except (NoSourceKey, RecursionError):
        return None
    versions = f"{sys.version_info} {np.__version__}"
    arguments = repr((spec.tensors, spec.scalars, schedule))
    return SourceKey(cache.fingerprint(identity, versions, arguments, *walk.parts), tuple(walk.globals_read.values()))


class _Walk:
    """Follow everything a function's names refer to and record it in `parts`, in the order it is met."""

    def __init__(self, spec: Specialisation) -> None:
        self.parts: list[str] = []
        self.globals_read: dict[tuple[int, str], GlobalRead] = {}
        self._captured, self._numbers = spec.captured, spec.numbers
        self._files: dict[str, int] = {}
        self._functions: dict[int, int] = {}
        self._modules: dict[int, tuple[int, types.ModuleType]] = {}
        self._tuples: list[Any] = []
        self._names: dict[str, None] = {}  # every name in the code of any function: it may be an attribute of a module

    def value(self, value: Any, place: Any = None) -> None:
        """`place` is where a number would be bound that is an argument of the kernel."""
        kind = type(value)
        if place in self._numbers or id(value) in self._numbers:
            self.parts.append(f"number {self._numbers.get(place) or self._numbers[id(value)]}")
        elif id(value) in self._captured:
            self.parts.append(f"captured {self._captured[id(value)].index}")
        elif kind in PLAIN or isinstance(value, np.generic):
            if isinstance(value, np.generic) and value.dtype.kind not in "biuf":
                raise NoSourceKey
            self.parts.append(f"{kind.__name__} {value!r}")
        elif isinstance(value, DType):
            if dtypes.BY_NAME.get(value.name) is not value:
                raise NoSourceKey
            self.parts.append(f"dtype {value.name}")
        elif isinstance(value, tuple):
            if kind is not tuple:
                self.type(kind)
            self.parts.append(f"tuple of {len(value)}")
            for item in value:
                self.value(item)
        elif is_fixed_table(value):
            self.parts.append(f"table {value.dtype} {value.tolist()!r}")
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
            raise NoSourceKey

    def type(self, value: type) -> None:
        """Record a type of Python or NumPy by its name, a named tuple by its fields."""
        if any(value is known for known in PURE_TYPES) or (
            issubclass(value, np.generic) and getattr(np, value.__name__, None) is value
        ):
            self.parts.append(f"type {value.__module__} {value.__name__}")
            return
        fields = getattr(value, "_fields", None)
        if fields is None or value.__mro__ != (value, tuple, object):  # a subclass may do anything
            raise NoSourceKey
        self.parts.append(f"named tuple {value.__name__} {fields}")
        if value not in self._tuples:
            self._tuples.append(value)
            for name, default in value._field_defaults.items():  # type: ignore[attr-defined]
                self.parts.append(name)
                self.value(default)

    def function(self, function: types.FunctionType, with_defaults: bool = True) -> None:
        if function.__module__ == vocabulary.__name__:
            if not _is_of(vocabulary, function):
                raise NoSourceKey
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
                self.value(content, id(cell))
        if with_defaults:  # a kernel's defaults are among the constants of the call
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
        self.value(value, (id(names), name))
        if (id(names), name) in self._numbers:
            return
        fixed = isinstance(value, types.ModuleType | types.BuiltinFunctionType | type | DType)
        if not fixed and getattr(value, "__module__", None) != vocabulary.__name__ and not self._is_argument(value):
            self.globals_read[id(names), name] = names, name, value

    def _is_argument(self, value: Any) -> bool:
        return id(value) in self._captured or id(value) in self._numbers

    def follow_attributes(self) -> None:
        """Look up every name met anywhere in every module met anywhere, since modules may be passed as arguments.

        Names are also looked up in named tuples, of which only fields and `_replace` are covered."""
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
                elif hasattr(module, "__getattr__"):  # a module with __getattr__ may have any attribute
                    raise NoSourceKey
        for kind in self._tuples:
            if any(name in vars(kind) and name not in (*kind._fields, "_replace") for name in self._names):
                raise NoSourceKey

    def file(self, path: str, names: dict[str, Any]) -> None:
        """Record the text of a file as the front end would read it."""
        if path not in self._files:
            self._files[path] = len(self._files)
            linecache.checkcache(path)
            lines = linecache.getlines(path, names)
            if not lines:
                raise NoSourceKey
            self.parts.append("".join(lines))
        self.parts.append(f"file {self._files[path]}")


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the globals and attributes named in the code and in functions nested in it."""
    yield from code.co_names
    for item in code.co_consts:
        if isinstance(item, types.CodeType):
            yield from _names(item)


def _is_of(module: Any, value: Any) -> bool:
    return getattr(module, value.__name__, None) is value
