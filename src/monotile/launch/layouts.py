"""Calls that differ from a checked one in lengths and strides alone, as every step of decoding does.

A call's program depends on the layout of each tensor (element type, unit stride, which strides are those of a
contiguous array), on lengths that are constants, and on the constants. Calls that agree in these need one check more:
that dimensions of one name have one length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from ..ir.ops import MAX_LENGTH
from ..runtime import tensors
from ..runtime.tensors import View
from .captures import const_key
from .signature import Signature

Positions = tuple[tuple[int, int], ...]  # argument and axis


class ArgumentLayout(NamedTuple):
    """What a plan needs of a view, and the pattern that its program depends on."""

    pattern: tuple[Any, ...]
    shape: tuple[int, ...]
    words: tuple[int, ...]  # 0 for the address, lengths, strides
    span: tuple[int, int]  # bytes, relative to the address
    overlaps_itself: bool
    is_too_long: bool


@lru_cache(maxsize=4096)
def layout_of(view: View) -> ArgumentLayout:
    """Return the layout of a view. In a call of the library most views are those of an earlier call."""
    dtype, shape, strides, last = view.dtype, view.shape, view.strides, len(view.shape) - 1
    dense, bits, unit = 1, 0, None
    for axis in range(last, -1, -1):
        stride, length = strides[axis], shape[axis]
        bits = 2 * bits + (stride == dense)
        if unit is None and (stride == 1 or (axis == last and length == 1)):
            unit = axis
        dense *= length
    pattern = dtype, view.device, len(shape), unit, bits
    words, too_long = (0, *shape, *strides), max(shape, default=0) > MAX_LENGTH
    return ArgumentLayout(pattern, shape, words, tensors.span(view), tensors.overlaps_itself(view), too_long)


class LayoutReader:
    """Read the layouts of a kernel's arguments, and the key under which calls share a program."""

    def __init__(self, signature: Signature) -> None:
        consts = signature.const_names
        self.dims = [p.dims for p in signature.parameters]
        self.fixed = [[a for a, d in enumerate(dims or ()) if type(d) is int or d in consts] for dims in self.dims]
        named: dict[str, list[tuple[int, int]]] = {}
        for n, dims in enumerate(self.dims):
            for axis, dim in enumerate(dims or ()):
                if isinstance(dim, str) and dim != "_" and dim not in consts:
                    named.setdefault(dim, []).append((n, axis))
        self.named = [tuple(places) for places in named.values()]

    def read(
        self, given: Sequence[Any], consts: Mapping[str, Any], backend: str | None, schedule: Any
    ) -> tuple[Any, dict[int, ArgumentLayout]]:
        """Return the key and the layouts by position; the key is None where only the full check can tell."""
        kinds = [type(arg) for arg in given]
        key: list[Any] = [backend, schedule, *kinds]
        layouts: dict[int, ArgumentLayout] = {}
        if len(kinds) != len(self.fixed):
            return None, layouts
        for n in [n for n, kind in enumerate(kinds) if kind is View]:
            layouts[n] = layout = layout_of(given[n])
            shape, dims = layout.shape, self.dims[n]
            if (dims is not None and len(dims) != len(shape)) or layout.is_too_long:
                return None, layouts
            key.append(layout.pattern)
            for axis in self.fixed[n]:
                key.append(shape[axis])
        for name, value in consts.items():
            key += name, const_key(value)
        return tuple(key), layouts

    def shared_lengths(self, layouts: Mapping[int, ArgumentLayout]) -> tuple[Positions, ...]:
        """Return the dimensions of these tensors that must have one length."""
        present = [tuple(place for place in places if place[0] in layouts) for places in self.named]
        return tuple(places for places in present if len(places) > 1)


def lengths_agree(shared: tuple[Positions, ...], layouts: Mapping[int, ArgumentLayout]) -> bool:
    for (n, axis), *others in shared:
        length = layouts[n].shape[axis]
        for other, at in others:
            if layouts[other].shape[at] != length:
                return False
    return True
