"""The parts of a generated module: the dialect, lines, names, and the text of each value."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from typing import Any

from ....dtypes import FP8, DType, bfloat16, bool_, float32, int32, int64, to_numpy
from ....ir import Kernel, show
from ....runtime import cache

RESERVED = {*keyword.kwlist, *keyword.softkwlist, "tl", "triton", "range", "float", "min", "max", "pid"}


@dataclass(frozen=True)
class Dialect:
    """How the words that Triton and Gluon share are spelled."""

    module: str  # the language's module, as the text imports it
    jit: str  # the decorator
    barrier: str  # a call at which all threads of a program or consumer meet

    def type(self, dtype: DType) -> str:
        if dtype in FP8:  # the bits: the oldest GPUs have no conversions, and newer ones saturate
            return f"{self.module}.uint8"
        return f"{self.module}.int1" if dtype is bool_ else f"{self.module}.{dtype.name}"

    def number(self, value: Any, dtype: DType) -> str:
        """Write a constant as a scalar of its type."""
        if dtype in FP8:
            return f"{self.module}.full([], {to_numpy(dtype).type(value).tobytes()[0]}, {self.module}.uint8)"
        if dtype is bfloat16:
            value = float(to_numpy(bfloat16).type(value))
        plain, kind = literal(value, float32 if dtype.is_float else int32), self.type(dtype)
        if dtype.is_float and repr(value) == "-0.0":
            return f"{self.module}.full([], 0.0, {kind}) * -1.0"
        if dtype.is_float and plain is None:  # a subnormal or huge number: Triton takes such a literal for a float64
            return f"{self.module}.full([], {value!r}, {self.module}.float64).to({kind})"
        return f"{self.module}.full([], {int(value) if not dtype.is_float else plain}, {kind})"


TRITON = Dialect("tl", "triton.jit", "tl.debug_barrier()")
GLUON = Dialect("gl", "gluon.jit", "gl.thread_barrier()")


@dataclass(frozen=True)
class RegisterLayout:
    """A register layout in Gluon: one that the module defines, or a slice of it for vectors."""

    name: str
    sliced: int | None = None  # the dimension that a slice leaves out

    def __str__(self) -> str:
        return self.name if self.sliced is None else f"gl.SliceLayout({self.sliced}, {self.name})"

    @property
    def parent(self) -> RegisterLayout:
        return RegisterLayout(self.name)

    def slice(self, dim: int) -> RegisterLayout:
        return RegisterLayout(self.name, dim)


@dataclass(frozen=True)
class Text:
    """A Triton expression: its text, and the shape it has, which may still have to be broadcast to the value's own."""

    text: str
    shape: tuple[int, ...] = ()
    constant: int | float | None = None  # of a bare Python number, whose type is chosen by what it meets
    layout: RegisterLayout | None = None  # in Gluon, of a tile in registers; None while what it meets decides
    shared: bool = False  # in Gluon: a tile in shared memory
    vector: str = ""  # in Gluon, of a vector that became a row or column: the vector

    @property
    def literal(self) -> bool:
        return self.constant is not None

    def __str__(self) -> str:
        return self.text


def literal(value: Any, dtype: DType) -> str | None:
    """Write a constant as a bare number; None where Triton would give it another type or lose its sign."""
    if dtype is float32:
        if value != value:
            return 'float("nan")'
        if abs(value) == float("inf"):
            return f'float("{value}")'
        plain = 2.0**-126 <= abs(value) < 2.0**127 or repr(value) == "0.0"
        return repr(value) if plain else None
    if dtype is int32 or dtype is int64:
        return str(value) if -(2**31) <= value < 2**31 else None
    return None


def shape_text(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def meet(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that Triton gives an elementwise expression of these."""
    rank = max((len(s) for s in shapes), default=0)
    tiles = [s for s in shapes if s]
    return tuple(max(s[axis] for s in tiles) for axis in range(rank))


class Names:
    """Python names for values, after their author's."""

    def __init__(self) -> None:
        self.taken: set[str] = set(RESERVED)

    def fresh(self, stem: str) -> str:
        stem = re.sub(r"\W", "_", stem, flags=re.ASCII).strip("_") or "v"
        stem = f"v_{stem}" if stem[0].isdigit() else stem
        name, n = stem, 0
        while name in self.taken:
            n += 1
            name = f"{stem}_{n}"
        self.taken.add(name)
        return name


class SourceLines:
    """Indented lines of source."""

    def __init__(self, depth: int = 1) -> None:
        self.lines: list[str] = []
        self.depth = depth

    def add(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)


def function_name(kernel: Kernel, options: str) -> str:
    """Name a module's function: the kernel, its constants as far as they are short, and a fingerprint of everything."""
    parts = [f"{n}{v}" if not isinstance(v, bool) else n for n, v in kernel.consts.items() if names_module(v)]
    stem = re.sub(r"\W", "", "_".join([kernel.name, *parts]), flags=re.ASCII)[:80]
    return f"{stem}_{cache.fingerprint(show(kernel), options, cache.compiler_fingerprint())[:10]}"


def names_module(value: Any) -> bool:
    """Return True for constants short enough to be part of a module's name."""
    return isinstance(value, int) and value is not False
