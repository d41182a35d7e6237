"""Reading the parts that `merge` and `merge_lse` take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import dtypes
from ..dtypes import BY_NAME, DType, float32
from ..errors import ArgumentRank, ArgumentShape, BadOption, HeadSize, MixedDTypes
from ..runtime import tensors
from ..runtime.arrays import Library
from .calls import ArrayRef
from .inputs import FLOATS, MAX_HEAD_SIZE, one_device


def check_parts(o: ArrayRef, others: Mapping[str, ArrayRef]) -> None:
    """Parts to be merged: o (..., S, Dv) and its companions (..., S)."""
    if len(o.shape) < 2:
        raise ArgumentRank(f"parts have shape (..., S, Dv), found {o.shape}")
    if not 1 <= o.shape[-1] <= MAX_HEAD_SIZE:
        raise HeadSize(f"the head size is {o.shape[-1]}; it must be from 1 to {MAX_HEAD_SIZE}")
    if o.dtype not in FLOATS:
        raise MixedDTypes(f"parts are float32, float16 or bfloat16, found {o.dtype}; cast them")
    for name, array in others.items():
        if array.shape != o.shape[:-1]:
            raise ArgumentShape(f"{name!r} has shape {array.shape}; parts {o.shape} need {o.shape[:-1]}")
        if array.dtype is not float32:
            raise MixedDTypes(
                f"{name!r} must be float32, found {array.dtype}: narrower maxima and sums lose the result"
            )
    one_device({"parts": o, **others})


def stack_parts(lib: Library, name: str, parts: Any, axis: int) -> Any:
    """One array of a sequence of parts that are alike."""
    parts = [lib.adopt(name, part) for part in parts]
    views = [tensors.read(name, part) for part in parts]
    kinds = {(view.shape, view.dtype, view.device) for view in views}
    if len(kinds) != 1 or len(views[0].shape) < -1 - axis:
        listing = ", ".join(sorted(f"{shape} {dtype}" for shape, dtype, _ in kinds)) or "none"
        raise ArgumentShape(f"{name!r} must be parts of one shape, element type and device, found {listing}")
    return lib.stack(parts, axis)


def read_dtype(dtype: Any) -> DType:
    """An element type as monotile, NumPy or torch names it."""
    if isinstance(dtype, DType):
        found: DType | None = dtype
    else:
        name = str(dtype).removeprefix("torch.") if not isinstance(dtype, type) else None
        found = BY_NAME.get(name) if name in BY_NAME else _numpy_dtype(dtype)
    if found not in FLOATS:
        raise BadOption(f"dtype must be float32, float16 or bfloat16, found {dtype!r}")
    assert found is not None
    return found


def _numpy_dtype(dtype: Any) -> DType | None:
    import numpy as np

    try:
        return dtypes.from_numpy(np.dtype(dtype))
    except (TypeError, ValueError):
        return None
