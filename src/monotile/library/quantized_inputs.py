"""Quantised keys and values of a call: their fields as arrays of it, and as arguments of the kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ..dtypes import DType
from ..errors import ArgumentShape
from ..ir.ops import MAX_LENGTH
from ..kernels.codecs import Codec
from ..runtime import tensors
from ..runtime.tensors import View
from .calls import ArrayRef, CallBuilder
from .leading import Lead

Codecs = tuple[Codec | None, Codec | None]  # of keys and of values; None: plain
PLAIN: Codecs = (None, None)
FIELDS = ("k_scales", "k_zeros", "v_scales", "v_zeros")


def codecs_of(options: Any) -> Codecs:
    """The codecs among the options of a call; those of plain calls have none."""
    found: Codecs = getattr(options, "codecs", PLAIN)
    return found


class StoredFields(NamedTuple):
    """The fields of quantised keys and values of a call: codes, scales and zeros, or None for plain ones."""

    keys: tuple[ArrayRef | None, ...] = (None, None, None)
    values: tuple[ArrayRef | None, ...] = (None, None, None)
    codecs: Codecs = (None, None)

    @property
    def is_plain(self) -> bool:
        return self.codecs == PLAIN

    def arguments(self, k: ArrayRef, v: ArrayRef | None) -> tuple[ArrayRef | None, ...]:
        """Return keys, values and the fields of quantised ones as the kernel takes them."""
        plain = [x if codec is None else None for x, codec in zip((k, v), self.codecs, strict=True)]
        return (*plain, *self.keys, *self.values)

    @property
    def constants(self) -> dict[str, Any]:
        """The codecs as constants of the kernel; none for a plain call."""
        pairs = zip(("k_codec", "v_codec"), self.codecs, strict=True)
        return {name: codec for name, codec in pairs if codec is not None}


ALL_PLAIN = StoredFields()


def read_fields(builder: CallBuilder, codecs: Codecs, batched: Callable[[ArrayRef], ArrayRef]) -> StoredFields:
    """The fields of quantised keys and values, each as (batch, heads, positions, width), which `batched` makes it."""
    found = []
    for name, codec in zip("kv", codecs, strict=True):
        refs: list[ArrayRef | None] = [None, None, None]
        if codec is not None:
            refs = [builder.inputs.get(n) for n in (name, f"{name}_scales", f"{name}_zeros")]
            refs = [None if a is None else batched(_unit_last(builder, a)) for a in refs]
        found.append(tuple(refs))
    return StoredFields(found[0], found[1], codecs)


def read_paged_fields(builder: CallBuilder, codecs: Codecs, batch: int) -> StoredFields:
    """The fields of quantised pages (P, page, Hkv, width) as those of keys (batch, Hkv, P * page, width), which are the
    same in every batch."""
    found = []
    for name, codec in zip(("k", "v"), codecs, strict=True):
        refs: list[ArrayRef | None] = [None, None, None]
        if codec is not None:
            refs = [builder.inputs.get(n) for n in (f"{name}_pages", f"{name}_scales", f"{name}_zeros")]
            refs = [None if a is None else _in_a_row(name, a, batch) for a in refs]
        found.append(tuple(refs))
    return StoredFields(found[0], found[1], codecs)


def _in_a_row(name: str, pages: ArrayRef, batch: int) -> ArrayRef:
    P, T, H, width = pages.shape
    flat = pages.view.reshaped((1, P * T, H, width))
    if flat is None or (width > 1 and 0 not in pages.shape and flat.strides[3] != 1):
        found = f"the fields of {name + '_pages'!r} have strides {pages.view.strides}"
        raise ArgumentShape(f"{found}; quantised pages must lie one after the other: copy them once")
    if P * T > MAX_LENGTH:
        raise ArgumentShape(f"{P} quantised pages of {T} positions; at most {MAX_LENGTH} positions are supported")
    return ArrayRef(pages.place, flat).permuted(0, 2, 1, 3).broadcast((batch, H, P * T, width))


def as_numbers(array: ArrayRef, codec: Codec | None, dtype: DType) -> ArrayRef:
    """Codes as the numbers they stand for: an array that is checked and counted, but not read."""
    if codec is None:
        return array
    shape = (*array.shape[:-1], codec.size)
    return ArrayRef(array.place, View(dtype, shape, tensors.dense(shape), array.view.device))


def numbers_in_one_batch(numbers: ArrayRef, lead: Lead) -> ArrayRef:
    """`as_numbers` with one batch in place of the leading dimensions."""
    shape = math.prod(lead), *numbers.shape[-3:]
    return ArrayRef(numbers.place, View(numbers.dtype, shape, tensors.dense(shape), numbers.view.device))


def _unit_last(builder: CallBuilder, array: ArrayRef) -> ArrayRef:
    last = array.view.strides[-1] if array.shape else 1
    return array if array.shape[-1] <= 1 or 0 in array.shape or last == 1 else builder.contiguous(array)
