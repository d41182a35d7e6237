"""Rotations of a call on a cache whose keys or values are rotated: of its queries before, of its outputs after."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from ..dtypes import float32
from ..kernels.codecs import Codec
from ..kernels.rotate import rotate
from ..runtime import tensors
from . import aura
from .calls import ArrayRef, CallBuilder
from .torch_calls import is_tensor

ROTATIONS = ("k_rotation", "v_rotation")  # of queries as keys are rotated, and of outputs back from that of values


def is_rotated(codec: Codec | None) -> bool:
    return codec is not None and codec.kind == "aura"


def matrices(q: Any, codecs: tuple[Codec | None, Codec | None]) -> tuple[Any, ...]:
    """Return the arrays of ROTATIONS, None where nothing is rotated, in the library and on the device of q."""
    sizes = [codec.size if codec is not None and codec.kind == "aura" else None for codec in codecs]
    if sizes == [None, None] or tensors.is_mlx(q) or not hasattr(q, "device"):  # what q must be, the call's checks say
        return None, None
    return tuple(
        None if size is None else _tensor(size, back, q.device) if is_tensor(q) else _array(size, back)
        for size, back in zip(sizes, (False, True), strict=True)
    )


@cache
def _array(size: int, back: bool) -> Any:
    return np.ascontiguousarray(aura.rotation(size) if back else aura.rotation(size).T)


@cache
def _tensor(size: int, back: bool, device: Any) -> Any:
    """The matrix as a tensor, copied to its device once: a copy in every call would wait for the GPU, and could not be
    captured in a graph."""
    import torch

    return torch.from_numpy(_array(size, back)).to(device)


def rotated_queries(builder: CallBuilder, q: ArrayRef, codec: Codec | None) -> ArrayRef:
    """Queries (B, H, N, D) as keys of this codec are rotated, in their own type."""
    if not is_rotated(codec) or 0 in q.shape:
        return q
    turned = builder.temporary(q.shape, q.dtype)
    _add(builder, q, builder.input(ROTATIONS[0]), turned)
    return turned


def before_rotation(builder: CallBuilder, out: ArrayRef, codec: Codec | None) -> ArrayRef:
    """The array that takes the place of an output until it is rotated back: float32, to be rounded once."""
    return builder.temporary(out.shape, float32) if is_rotated(codec) else out


def rotate_back(builder: CallBuilder, found: ArrayRef, out: ArrayRef, codec: Codec | None) -> None:
    """Rotate outputs (B, H, ..., D) back from the rotation of values."""
    if is_rotated(codec):
        B, H, *rows, D = out.shape
        shape = B, H, math.prod(rows), D
        _add(builder, found.reshaped(*shape), builder.input(ROTATIONS[1]), out.reshaped(*shape))


def _add(builder: CallBuilder, x: ArrayRef, matrix: ArrayRef, y: ArrayRef) -> None:
    rows, D = math.prod(x.shape[:3]), x.shape[3]
    threads = builder.threads_for(2 * rows * D * D, rows * D * (x.dtype.bytes + y.dtype.bytes))
    builder.launch(rotate, x, matrix, y, choice=builder.choices.rotation(x.shape[2]), threads=threads)
