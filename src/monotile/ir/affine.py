"""Affine analysis: integer values as `constant + sum(factor * scalar) + sum(factor * position along a dimension)`.

The front end recognises slices (`start + arange(n)`) by it, the passes decide comparisons of positions. For those a
tile of remainders `x % d` may be a term as well: of each element only the range is known, 0 to d - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ..dtypes import DType, int32, uint32
from .builder import Builder
from .ops import Value

K = TypeVar("K")
LINEAR_OPS = frozenset({"add", "sub", "mul", "neg", "expand", "trans", "broadcast", "cast"})


@dataclass(frozen=True)
class Linear:
    """A linear form of an integer value."""

    const: int = 0
    terms: dict[Value, int] = field(default_factory=dict)  # factor of each scalar
    iotas: dict[int, int] = field(default_factory=dict)  # factor of the position along each dimension of the tile
    remainders: dict[Value, int] = field(default_factory=dict)  # factor of each tile of remainders (`linear_or_mod`)

    def __add__(self, other: Linear) -> Linear:
        return Linear(
            self.const + other.const,
            _merge(self.terms, other.terms),
            _merge(self.iotas, other.iotas),
            _merge(self.remainders, other.remainders),
        )

    def __sub__(self, other: Linear) -> Linear:
        return self + other.times(-1)

    def times(self, factor: int) -> Linear:
        if factor == 0:
            return Linear()
        return Linear(
            self.const * factor,
            {v: c * factor for v, c in self.terms.items()},
            {d: c * factor for d, c in self.iotas.items()},
            {v: c * factor for v, c in self.remainders.items()},
        )

    @property
    def is_const(self) -> bool:
        return not self.terms and not self.iotas and not self.remainders

    def scalar_range(self) -> tuple[Linear, Linear]:
        """Return the least and greatest sum of the scalars and the remainders, as forms of scalars alone."""
        low = high = Linear(0, self.terms)
        for value, factor in self.remainders.items():
            span = (Linear(-1) + divisor_of(value)).times(factor)
            low, high = (low + span, high) if factor < 0 else (low, high + span)
        return low, high

    def offset_range(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the least and greatest sum of the constant and the positions over a tile of this shape."""
        low = high = self.const
        for dim, factor in self.iotas.items():
            span = factor * (shape[dim] - 1)
            low, high = low + min(span, 0), high + max(span, 0)
        return low, high


def _merge(a: dict[K, int], b: dict[K, int]) -> dict[K, int]:
    out = dict(a)
    for key, factor in b.items():
        total = out.get(key, 0) + factor
        if total:
            out[key] = total
        else:
            out.pop(key, None)
    return out


def divisor_of(remainder: Value) -> Linear:
    """Return the divisor of a tile of remainders, a scalar."""
    assert remainder.op is not None
    divisor = linear(remainder.op.operands[1])
    assert divisor is not None
    return divisor


def linear(value: Value) -> Linear | None:
    """Return the linear form of an integer value, or None. A scalar always has one: at worst, itself as a term."""
    return linear_or_mod(value, lambda _: False)


def linear_or_mod(value: Value, is_remainder: Callable[[Value], bool]) -> Linear | None:
    """Return the linear form of an integer value, in which tiles that `is_remainder` accepts are terms, too."""
    known: dict[Value, Linear | None] = {}
    stack = [value]
    while stack:  # not recursive: a chain of additions may be longer than Python's stack
        current = stack[-1]
        if current not in known:
            missing = [v for v in _parts(current) if v not in known]
            stack += missing
            if missing:
                continue
            form = _from_op(current, known)
            if form is None and current.shape and is_remainder(current):
                form = Linear(remainders={current: 1})
            known[current] = (
                form if form is not None or current.shape or not current.dtype.is_int else Linear(terms={current: 1})
            )
        stack.pop()
    return known[value]


def _parts(value: Value) -> tuple[Value, ...]:
    """Return the operands whose linear forms make up that of the value."""
    op = value.op
    if op is None or not value.dtype.is_int or op.kind not in LINEAR_OPS or value.dtype is uint32:
        return ()
    return op.operands


def _from_op(value: Value, known: Mapping[Value, Linear | None]) -> Linear | None:
    op = value.op
    if op is None or not value.dtype.is_int:
        return None
    if op.kind == "const":
        return Linear(int(op.attrs["value"]))
    if op.kind == "arange":
        # A single position is always 0, also where it is broadcast.
        return Linear(iotas={0: 1}) if value.shape[0] > 1 else Linear()
    if op.kind not in LINEAR_OPS or value.dtype is uint32:  # a difference of unsigned numbers often wraps
        return None
    first, second = (*(known[v] for v in op.operands), None)[:2]
    if first is None or (second is None and len(op.operands) == 2):
        return None
    if op.kind == "cast":
        return first if _is_lossless(op.operands[0].dtype, value.dtype) else None
    if op.kind == "expand":
        at = op.attrs["position"]
        return replace(first, iotas={d + (d >= at): c for d, c in first.iotas.items()})
    if op.kind == "trans":
        return replace(first, iotas={1 - d: c for d, c in first.iotas.items()})
    if op.kind == "neg":
        return first.times(-1)
    if second is None:  # broadcast
        return first
    if op.kind == "add":
        return first + second
    if op.kind == "sub":
        return first - second
    for a, b in ((first, second), (second, first)):
        if b.is_const:
            return a.times(b.const)
    return None


def _is_lossless(source: DType, target: DType) -> bool:
    """Return True if a cast keeps every number. A narrowing cast may wrap, so a form does not extend through it."""
    (source_low, source_high), (target_low, target_high) = source.limits, target.limits
    return target_low <= source_low and source_high <= target_high


def to_scalar(b: Builder, form: Linear, dtype: DType = int32) -> Value:
    """Emit code that computes a linear form without positions in the given type."""
    total: Value | None = None
    for value, factor in form.terms.items():
        wide = b.cast(value, dtype)
        term = wide if factor == 1 else b.binary("mul", wide, factor)
        total = term if total is None else b.binary("add", total, term)
    if total is None:
        return b.const(form.const, int32)
    return total if form.const == 0 else b.binary("add", total, form.const)
