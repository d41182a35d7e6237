"""Integer values as linear forms: `constant + sum(coefficient * scalar) + sum(coefficient * position along a dimension)`.

The front end uses them to recognise slices (`start + arange(n)`), the passes to decide comparisons of positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from .ir import Value

K = TypeVar("K")


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
    op = value.op
    if not value.dtype.is_int:
        return None
    if op is not None:
        form = _from_op(value)
        if form is not None:
            return form
    return None if value.shape else Linear(terms={value: 1})


def _from_op(value: Value) -> Linear | None:
    op = value.op
    assert op is not None
    if op.kind == "const":
        return Linear(int(op.attrs["value"]))
    if op.kind == "arange":
        return Linear(iotas={0: 1})
    if op.kind not in ("add", "sub", "mul", "neg", "expand", "trans", "broadcast", "cast"):
        return None
    forms = [linear(v) for v in op.operands]
    if any(f is None for f in forms):
        return None
    first = forms[0]
    assert first is not None
    if op.kind == "cast":
        # Narrowing may wrap, so a sum may not be taken apart through it.
        return first if op.operands[0].dtype.bits <= value.dtype.bits else None
    if op.kind == "expand":
        at = op.attrs["position"]
        return Linear(first.const, first.terms, {d + (d >= at): c for d, c in first.iotas.items()})
    if op.kind == "trans":
        return Linear(first.const, first.terms, {1 - d: c for d, c in first.iotas.items()})
    if op.kind == "neg":
        return first.times(-1)
    if op.kind == "broadcast":
        return first
    second = forms[1]
    assert second is not None
    if op.kind == "add":
        return first + second
    if op.kind == "sub":
        return first - second
    for a, b in ((first, second), (second, first)):
        if b.is_const:
            return a.times(b.const)
    return None
