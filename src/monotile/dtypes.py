"""The element types of the language and their promotion."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)  # one object each: keys of calls have several, whose hashes should cost nothing
class DType:
    """One element type. `kind` is float, int or bool; `bits` is its size in memory."""

    name: str
    kind: str
    bits: int

    @cached_property
    def bytes(self) -> int:
        return max(1, self.bits // 8)

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_int(self) -> bool:
        return self.kind == "int"

    @property
    def is_narrow(self) -> bool:
        """A storage format: loaded, stored and fed to `dot`, but computed with in a wider type."""
        return self.bits < 32 and self.kind != "bool"

    @property
    def is_unsigned(self) -> bool:
        return self.name.startswith("uint")

    @cached_property
    def limits(self) -> tuple[int, int]:
        """Least and greatest value of an integer type."""
        if self.is_unsigned:
            return 0, 2**self.bits - 1
        return -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return _by_name, (self.name,)


float32 = DType("float32", "float", 32)
float16 = DType("float16", "float", 16)
bfloat16 = DType("bfloat16", "float", 16)
float8_e4m3fn = DType("float8_e4m3fn", "float", 8)  # no infinities: beyond 448 it is NaN
float8_e5m2 = DType("float8_e5m2", "float", 8)
int64 = DType("int64", "int", 64)
int32 = DType("int32", "int", 32)
uint32 = DType("uint32", "int", 32)
int8 = DType("int8", "int", 8)
uint8 = DType("uint8", "int", 8)
bool_ = DType("bool", "bool", 8)

ALL = (float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int64, int32, uint32, int8, uint8, bool_)
FLOATS = (float32, float16, bfloat16)  # that attention computes with
FP8 = (float8_e4m3fn, float8_e5m2)
BY_NAME = {d.name: d for d in ALL}


def _by_name(name: str) -> DType:
    return BY_NAME[name]


def computed(dtype: DType) -> DType:
    """Return the type in which arithmetic on `dtype` happens: float32 for narrow floats, int32 for narrow integers."""
    if not dtype.is_narrow:
        return dtype
    return float32 if dtype.is_float else int32


def promote(a: DType, b: DType) -> DType | None:
    """Return the type of `a + b`, or None when the two do not promote and the author must cast."""
    if {a.kind, b.kind} == {"int", "float"}:
        return float32
    if a.kind != b.kind:
        return None
    if a.kind == "bool":
        return bool_
    a, b = computed(a), computed(b)
    if {a, b} == {int32, uint32}:
        return None
    return a if a.bits >= b.bits else b


@cache
def to_numpy(dtype: DType) -> np.dtype[Any]:
    if dtype is bfloat16 or dtype in FP8:
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype.name))
        return found
    return np.dtype(dtype.name)


@cache
def from_numpy(dtype: np.dtype[Any]) -> DType | None:
    """Return the language's type for a NumPy dtype, or None if it has none."""
    return BY_NAME.get(dtype.name)
