"""The element types of the language and their promotion."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np


@dataclass(frozen=True)
class DType:
    """One element type. `kind` is float, int or bool; `bits` is its size in memory."""

    name: str
    kind: str
    bits: int

    @property
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
        return self.name in ("float16", "bfloat16", "int8", "uint8")

    @property
    def limits(self) -> tuple[int, int]:
        """Least and greatest value of an integer type."""
        if self.name == "uint8":
            return 0, 255
        return -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1

    def __repr__(self) -> str:
        return self.name


float32 = DType("float32", "float", 32)
float16 = DType("float16", "float", 16)
bfloat16 = DType("bfloat16", "float", 16)
int64 = DType("int64", "int", 64)
int32 = DType("int32", "int", 32)
int8 = DType("int8", "int", 8)
uint8 = DType("uint8", "int", 8)
bool_ = DType("bool", "bool", 8)

ALL = (float32, float16, bfloat16, int64, int32, int8, uint8, bool_)
BY_NAME = {d.name: d for d in ALL}


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
    return a if a.bits >= b.bits else b


@cache
def to_numpy(dtype: DType) -> np.dtype[Any]:
    if dtype is bfloat16:
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return found
    return np.dtype(dtype.name)


@cache
def from_numpy(dtype: np.dtype[Any]) -> DType | None:
    """Return the language's type for a NumPy dtype, or None if it has none."""
    return BY_NAME.get(dtype.name)
