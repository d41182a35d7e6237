"""Making arrays of the caller's own kind: outputs, broadcasts and contiguous copies, for NumPy, torch and DLPack."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from . import dtypes, tensors
from .dtypes import DType
from .errors import ArgumentDType, ArgumentKind


class Numpy:
    """NumPy arrays, and arrays of other libraries that share their memory through DLPack."""

    def __init__(self, home: Any = None) -> None:
        self.home = home  # the library results go back to; None for NumPy itself

    def adopt(self, name: str, array: Any) -> Any:
        if isinstance(array, np.ndarray):
            return array
        try:
            return np.from_dlpack(array)
        except (TypeError, ValueError, BufferError, RuntimeError, AttributeError) as error:
            raise ArgumentKind(
                f"{name!r} is not an array monotile can read: {error}; pass NumPy or torch arrays"
            ) from None

    def empty(self, shape: tuple[int, ...], dtype: DType, like: Any) -> Any:
        return np.empty(shape, dtypes.to_numpy(dtype))

    def broadcast(self, array: Any, shape: tuple[int, ...]) -> Any:
        return np.broadcast_to(array, shape)

    def contiguous(self, array: Any) -> Any:
        return np.ascontiguousarray(array)

    def stack(self, arrays: list[Any], axis: int) -> Any:
        return np.stack(arrays, axis)

    def give_back(self, array: Any) -> Any:
        return array if self.home is None else self.home.from_dlpack(array)


class Torch:
    """torch tensors, on whatever device they are."""

    def adopt(self, name: str, array: Any) -> Any:
        if not tensors.is_array(array) or isinstance(array, np.ndarray):
            raise ArgumentKind(f"{name!r} is {type(array).__name__} where the others are torch tensors; pass one kind")
        return array.detach()

    def empty(self, shape: tuple[int, ...], dtype: DType, like: Any) -> Any:
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype.name), device=like.device)

    def broadcast(self, array: Any, shape: tuple[int, ...]) -> Any:
        return sys.modules["torch"].broadcast_to(array, shape)

    def contiguous(self, array: Any) -> Any:
        return array.contiguous()

    def stack(self, arrays: list[Any], axis: int) -> Any:
        return sys.modules["torch"].stack(arrays, axis)

    def give_back(self, array: Any) -> Any:
        return array


Library = Numpy | Torch


def library(name: str, array: Any) -> Library:
    """The library an array belongs to; results are given back in it."""
    if isinstance(array, np.ndarray):
        return Numpy()
    if tensors.is_array(array):
        return Torch()
    if hasattr(array, "__dlpack__"):
        home = array.__array_namespace__() if hasattr(array, "__array_namespace__") else None
        return Numpy(home)
    raise ArgumentKind(f"{name!r} must be an array, found {type(array).__name__}; pass NumPy arrays or torch tensors")


def dtype_of(name: str, array: Any) -> DType:
    found = dtypes.from_numpy(array.dtype) if isinstance(array, np.ndarray) else None
    if not isinstance(array, np.ndarray):
        found = dtypes.BY_NAME.get(str(array.dtype).removeprefix("torch."))
    if found is None:
        raise ArgumentDType(f"{name!r} has dtype {array.dtype}; monotile has {', '.join(d.name for d in dtypes.ALL)}")
    return found


def unit_last(lib: Library, array: Any) -> Any:
    """The array itself if its last stride is 1, else a copy: the only one attention makes of its inputs."""
    if array.shape[-1] <= 1 or 0 in array.shape:
        return array
    stride = array.strides[-1] // array.itemsize if isinstance(array, np.ndarray) else array.stride()[-1]
    return array if stride == 1 else lib.contiguous(array)
