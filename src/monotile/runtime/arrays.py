"""Array libraries (NumPy, torch, MLX, DLPack): read the caller's arrays and allocate results of the same library."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .. import dtypes
from ..errors import ArgumentKind, OutOfDeviceMemory
from . import mlx_graph, tensors
from .tensors import View, numpy_address

MAX_TEMPLATES = 1024
_templates: dict[View, Any] = {}  # of torch tensors


class Numpy:
    """NumPy arrays, and arrays of other libraries that lie in this machine's memory, which they share."""

    def __init__(self, home: Any = None) -> None:
        self.home = home  # the library results are converted to; None for NumPy itself

    def adopt(self, name: str, array: Any) -> Any:
        """Return an array of a call, all of whose arrays are of one library, as this one computes with it."""
        return array if isinstance(array, np.ndarray) else host_view(name, array)

    def template(self, view: View) -> Any:
        """Return what `allocate` makes contiguous arrays like this one from."""
        return view.shape, dtypes.to_numpy(view.dtype)

    def allocate(self, template: Any) -> tuple[Any, int]:
        """Return a new array and its address."""
        shape, dtype = template
        array: Any = np.empty(shape, dtype)
        return array, numpy_address(array)

    def contiguous(self, array: Any, shape: tuple[int, ...]) -> Any:
        """Return a contiguous copy, broadcast to a shape of more elements, or with the same number of them."""
        return np.ascontiguousarray(array if array.size == math.prod(shape) else np.broadcast_to(array, shape))

    def stack(self, arrays: list[Any], axis: int) -> Any:
        return np.stack(arrays, axis)

    def sum(self, array: Any, axes: tuple[int, ...]) -> Any:
        return array.sum(axes, dtype=np.float32).astype(array.dtype)

    def give_back(self, array: Any) -> Any:
        return array if self.home is None else _into_library(self.home, array)

    def queue(self, device: str) -> int | None:
        """Return the queue of launches that a launch would join now; None while a graph of launches is recorded."""
        return 0


class Torch:
    """torch tensors on any device. Gradients are not tracked."""

    def __init__(self) -> None:
        self.torch = sys.modules["torch"]

    def adopt(self, name: str, array: Any) -> Any:
        return array

    def template(self, view: View) -> Any:
        """Return a tensor of the shape whose elements are all one element, so that it takes no memory."""
        found = _templates.get(view)
        if found is None:
            dtype = getattr(self.torch, view.dtype.name)
            found = self.torch.empty((), dtype=dtype, device=view.device).expand(view.shape)
            if type(found) is self.torch.Tensor:  # not one of a trace
                if len(_templates) >= MAX_TEMPLATES:
                    _templates.clear()
                _templates[view] = found
        return found

    def allocate(self, template: Any) -> tuple[Any, int]:
        torch = self.torch
        try:
            # half the time of torch.empty
            tensor = torch.empty_like(template, memory_format=torch.contiguous_format)
        except RuntimeError as error:
            if type(error).__name__ != "OutOfMemoryError":
                raise
            said, found = (
                str(error).partition(". GPU")[0],
                f"no memory is left for a result of shape {tuple(template.shape)}",
            )
            raise OutOfDeviceMemory(f"{found}; free arrays, or pass smaller ones: {said}") from None
        return tensor, tensor.data_ptr()

    def contiguous(self, array: Any, shape: tuple[int, ...]) -> Any:
        array = array.detach()
        return (array if array.numel() == math.prod(shape) else array.expand(shape)).contiguous()

    def stack(self, arrays: list[Any], axis: int) -> Any:
        return self.torch.stack([a.detach() for a in arrays], axis)

    def sum(self, array: Any, axes: tuple[int, ...]) -> Any:
        return array.sum(axes)

    def give_back(self, array: Any) -> Any:
        return array

    def queue(self, device: str) -> int | None:
        if not device.startswith("cuda"):
            return 0
        cuda, index = self.torch.cuda, device.partition(":")[2]
        if cuda.is_current_stream_capturing():
            return None
        # Triton asks for it in the same way: a Stream object would take microseconds.
        return int(self.torch._C._cuda_getCurrentRawStream(int(index) if index else cuda.current_device()))


class Mps(Torch):
    """torch tensors on an Apple GPU, which have no address."""

    def template(self, view: View) -> Any:
        return view.shape, getattr(self.torch, view.dtype.name), self.torch.device(view.device)

    def allocate(self, template: Any) -> tuple[Any, int]:
        shape, dtype, device = template
        return self.torch.empty(shape, dtype=dtype, device=device), 0


class Mlx:
    """MLX arrays, which are immutable: a kernel's output is a new array."""

    def __init__(self) -> None:
        self.core = sys.modules["mlx.core"]

    def adopt(self, name: str, array: Any) -> Any:
        return array

    def template(self, view: View) -> Any:
        dtype = self.core.bool_ if view.dtype is dtypes.bool_ else getattr(self.core, view.dtype.name)
        return view.shape, dtype

    def allocate(self, template: Any) -> tuple[Any, int]:
        shape, dtype = template
        return self.core.zeros(shape, dtype=dtype), 0

    def contiguous(self, array: Any, shape: tuple[int, ...]) -> Any:
        # MLX makes a kernel's inputs contiguous.
        return array if array.size == math.prod(shape) else self.core.broadcast_to(array, shape)

    def stack(self, arrays: list[Any], axis: int) -> Any:
        return self.core.stack(arrays, axis)

    def sum(self, array: Any, axes: tuple[int, ...]) -> Any:
        return array.sum(axes)

    def give_back(self, array: Any) -> Any:
        return array

    def queue(self, device: str) -> int | None:
        return 0


Library = Numpy | Torch | Mlx


def library(name: str, array: Any, backend: str | None = None) -> Library:
    """Return the library an array belongs to, in which results are returned. On a backend that does not run MLX's
    kernels its arrays are read as NumPy's."""
    if isinstance(array, np.ndarray):
        return Numpy()
    if tensors.is_mlx(array):
        return Mlx() if takes_mlx(backend) else Numpy(sys.modules["mlx.core"])
    if tensors.is_array(array):
        return Mps() if array.device.type == "mps" else Torch()
    if hasattr(array, "__dlpack__"):
        home = array.__array_namespace__() if hasattr(array, "__array_namespace__") else None
        return Numpy(home)
    raise ArgumentKind(f"{name!r} must be an array, found {type(array).__name__}; pass NumPy arrays or torch tensors")


def check_one_library(named: Iterable[tuple[str, Any]]) -> None:
    """Raise an error where arrays of a call are of different libraries; those that share memory by DLPack alone, as
    JAX's, may have NumPy's beside them. What is no array at all is left to whoever reads it."""
    found = [(n, a, _kind(a)) for n, a in named if tensors.is_array(a) or hasattr(a, "__dlpack__")]
    for name, array, kind in found:
        first, other, expected = found[0]
        if kind != expected and (tensors.is_array(other) or not isinstance(array, np.ndarray)):
            raise ArgumentKind(f"{name!r} is {kind} and {first!r} {expected}; pass arrays of one library")


def _kind(array: Any) -> str:
    """The library of an array, in words."""
    if isinstance(array, np.ndarray):
        return "a NumPy array"
    if tensors.is_array(array):
        return "an MLX array" if tensors.is_mlx(array) else "a torch tensor"
    if hasattr(array, "__array_namespace__"):
        return f"an array of {array.__array_namespace__().__name__.partition('.')[0]}"
    return f"of type {type(array).__name__}"


def given_back(lib: Library, result: Any, sources: Sequence[Any]) -> Any:
    """Results as arrays of the caller's library. `sources` are the arrays that they were computed from."""
    several = isinstance(result, tuple)
    found = [None if array is None else lib.give_back(array) for array in (result if several else (result,))]
    if isinstance(lib, Numpy) and lib.home is sys.modules.get("mlx.core", lib):
        found = mlx_graph.without_derivatives(found, sources)
    if not several:
        return found[0]
    return type(result)(*found) if hasattr(result, "_fields") else tuple(found)


def takes_mlx(backend: Any) -> bool:
    return backend is None or backend == "metal"


def is_foreign(array: Any, backend: Any) -> bool:
    """True for an array that a kernel on this backend reads through `host_view`."""
    if tensors.is_array(array):
        return tensors.is_mlx(array) and not takes_mlx(backend)
    return hasattr(array, "__dlpack__")


def host_views(names: list[str], given: tuple[Any, ...], backend: Any) -> tuple[Any, ...]:
    """Return arguments with arrays of other libraries as NumPy arrays."""
    names = [*names, *[f"argument {n}" for n in range(len(names), len(given))]]
    return tuple([host_view(n, a) if is_foreign(a, backend) else a for n, a in zip(names, given, strict=False)])


def host_view(name: str, array: Any) -> Any:
    """Return an array of another library in this machine's memory as a NumPy array without copying."""
    if tensors.is_mlx(array):
        core = sys.modules["mlx.core"]
        is_bfloat16 = array.dtype == core.bfloat16  # which NumPy's buffers do not know
        found = np.array(array.view(core.uint16) if is_bfloat16 else array, copy=False)
        found = found.view(dtypes.to_numpy(dtypes.bfloat16)) if is_bfloat16 else found
        found.flags.writeable = False  # MLX's arrays do not change
        return found
    try:
        return np.from_dlpack(array)
    except (TypeError, ValueError, BufferError, RuntimeError, AttributeError) as error:
        if _is_on_host(array):  # of a type that DLPack knows and NumPy does not: bfloat16
            return np.asarray(array)
        if "Tracer" in type(array).__name__:
            raise ArgumentKind(f"{name!r} is traced by JAX; in jit, grad and vmap use monotile.jax.attention") from None
        raise ArgumentKind(f"{name!r} is not an array monotile can read: {error}; pass NumPy or torch arrays") from None


def _is_on_host(array: Any) -> bool:
    try:
        return int(array.__dlpack_device__()[0]) == 1 and hasattr(array, "__array__")
    except Exception:  # a tracer, or a library without devices
        return False


def _into_library(home: Any, array: np.ndarray[Any, Any]) -> Any:
    """Return a NumPy array as one of another library."""
    is_bfloat16 = array.dtype == dtypes.to_numpy(dtypes.bfloat16)
    if home.__name__ == "mlx.core":
        return home.array(array.view(np.uint16)).view(home.bfloat16) if is_bfloat16 else home.array(array)
    return home.asarray(array) if is_bfloat16 else home.from_dlpack(array)
