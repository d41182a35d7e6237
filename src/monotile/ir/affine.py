"""Integer values as linear forms: `constant + sum(factor * scalar) + sum(factor * position along a dimension)`.

The front end uses them to recognise slices (`start + arange(n)`), the passes to decide comparisons of positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from ..dtypes import DType, int32
from .builder import Builder
from .ops import Value

K = TypeVar("K")
TAKEN_APART = frozenset({"add", "sub", "mul", "neg", "expand", "trans", "broadcast", "cast"})


@dataclass(frozen=True)
class Linear:
    const: int = 0
    terms: dict[Value, int] = field(default_factory=dict)  # scalar values that are not taken apart further
    iotas: dict[int, int] = field(default_factory=dict)  # dimension of the tile -> coefficient of its position

    def __add__(self, other: Linear) -> Linear:
        return Linear(self.const + other.const, _merge(self.terms, other.terms), _merge(self.iotas, other.iotas))

    def __sub__(self, other: Linear) -> Linear:
        return self + other.times(-1)

    def times(self, factor: int) -> Linear:
        if factor == 0:
            return Linear()
        return Linear(
            self.const * factor,
            {v: c * factor for v, c in self.terms.items()},
            {d: c * factor for d, c in self.iotas.items()},
        )

    @property
    def is_const(self) -> bool:
        return not self.terms and not self.iotas

    def offset_range(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Least and greatest value of the constant and the positions together, over a tile of this shape."""
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


def linear(value: Value) -> Linear | None:
    """The linear form of an integer value, or None when it has none. A scalar always has one: itself."""
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
            known[current] = (
                form if form is not None or current.shape or not current.dtype.is_int else Linear(terms={current: 1})
            )
        stack.pop()
    return known[value]


def _parts(value: Value) -> tuple[Value, ...]:
    """What the form of a value is made of."""
    op = value.op
    if op is None or not value.dtype.is_int or op.kind not in TAKEN_APART:
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
    if op.kind not in TAKEN_APART:
        return None
    first, second = (*(known[v] for v in op.operands), None)[:2]
    if first is None or (second is None and len(op.operands) == 2):
        return None
    if op.kind == "cast":
        return first if _keeps(op.operands[0].dtype, value.dtype) else None
    if op.kind == "expand":
        at = op.attrs["position"]
        return Linear(first.const, first.terms, {d + (d >= at): c for d, c in first.iotas.items()})
    if op.kind == "trans":
        return Linear(first.const, first.terms, {1 - d: c for d, c in first.iotas.items()})
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


def _keeps(source: DType, target: DType) -> bool:
    """Whether a cast keeps every number: narrowing may wrap, so a sum may not be taken apart through it."""
    (low, high), (least, most) = source.limits, target.limits
    return least <= low and high <= most


def to_scalar(b: Builder, form: Linear, dtype: DType = int32) -> Value:
    """Code, in this type, for a linear form without positions."""
    total: Value | None = None
    for value, factor in form.terms.items():
        wide = b.cast(value, dtype)
        term = wide if factor == 1 else b.binary("mul", wide, factor)
        total = term if total is None else b.binary("add", total, term)
    if total is None:
        return b.const(form.const, int32)
    return total if form.const == 0 else b.binary("add", total, form.const)
