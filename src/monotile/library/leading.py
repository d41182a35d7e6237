"""Leading dimensions of attention's arrays, (..., H, N, D): broadcast to each other, then read as one batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..errors import ArgumentRank, LengthsDiffer
from ..runtime import arrays
from .calls import ArrayRef, CallBuilder

Lead = tuple[int, ...]


def read_lead(shapes: Mapping[str, tuple[int, ...]]) -> Lead:
    """Check the ranks of q, k and v, and return what the dimensions before the last three broadcast to."""
    for name, shape in shapes.items():
        if len(shape) < 3:
            found = f"{name!r} has shape {shape}"
            raise ArgumentRank(f"{found}; attention takes (batch, heads, length, head size), or the last three")
    return broadcast_lead(shapes)


def broadcast_lead(shapes: Mapping[str, tuple[int, ...]]) -> Lead:
    """Return what the dimensions before the last three broadcast to; raise an error where they do not."""
    leads = {name: shape[:-3] for name, shape in shapes.items()}
    longest = max(map(len, leads.values()))
    found: list[int] = []
    for axis in range(-longest, 0):
        sides = {lead[axis] for lead in leads.values() if len(lead) >= -axis} - {1}
        if len(sides) > 1:
            listing = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise LengthsDiffer(f"the batch sizes do not broadcast: they must be equal, or 1 ({listing})")
        found.append(sides.pop() if sides else 1)
    return tuple(found)


def as_one_batch(builder: CallBuilder, array: ArrayRef, lead: Lead) -> ArrayRef:
    """The array with one batch dimension in place of the leading ones. It is copied at every call if two of those are
    not evenly apart in memory."""
    own, rest = array.shape[:-3], array.shape[-3:]
    if len(lead) == 1 and own == lead:
        return array
    whole = *lead, *rest
    wide = array.reshaped(*(1,) * (len(lead) - len(own)), *array.shape)
    if own != lead:
        wide = wide.broadcast(whole)
        builder.broadcast[array.place[1]] = whole
    shape = (math.prod(lead), *rest)
    view = wide.view.reshaped(shape)
    return ArrayRef(array.place, view) if view is not None else builder.contiguous(array, whole).reshaped(*shape)


def mask_as_one_batch(builder: CallBuilder, mask: ArrayRef, lead: Lead) -> ArrayRef:
    """A mask of more than 4 dimensions with one batch dimension, of length 1 if it is the same for all of them."""
    own = mask.shape[:-3]
    if not own or set(own) == {1}:
        return mask.reshaped(1, *mask.shape[-3:]) if own else mask
    return as_one_batch(builder, mask, lead)


def summed_to(array: Any, shape: tuple[int, ...]) -> Any:
    """The gradient of an array of this shape, which was broadcast to that of `array` along leading dimensions."""
    if tuple(array.shape) == shape:
        return array
    more = array.ndim - len(shape)
    axes = tuple(n for n in range(array.ndim) if n < more or shape[n - more] != array.shape[n])
    return arrays.library("gradient", array).sum(array, axes).reshape(shape)
