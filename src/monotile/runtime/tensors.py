"""Array descriptions: dtype, shape, strides and address of NumPy, torch and MLX arrays, read without copying."""

from __future__ import annotations

import ctypes
import functools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..dtypes import DType
from ..errors import ArgumentAlignment, ArgumentDType, ArgumentKind, ArgumentRank, MonotileError

Layouts = tuple[list[Any], list[int]]
ALIGNMENT = 15  # bits of an address that calls alike have in common


class View(NamedTuple):
    """The description of an array. Strides are in elements."""

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: str

    def broadcast(self, shape: tuple[int, ...]) -> View:
        """Broadcast dimensions of length 1 to a shape of the same rank."""
        steps = [0 if n == 1 else s for n, s in zip(self.shape, self.strides, strict=True)]
        return View(self.dtype, shape, tuple(steps), self.device)

    def permuted(self, axes: tuple[int, ...]) -> View:
        """Return the view with its dimensions in another order."""
        shape, strides = (tuple(values[axis] for axis in axes) for values in (self.shape, self.strides))
        return View(self.dtype, shape, strides, self.device)

    def reshaped(self, shape: tuple[int, ...]) -> View | None:
        """Return the same elements in order under another shape, or None where only a copy has it."""
        return self if shape == self.shape else _reshaped(self, shape)


@functools.lru_cache(maxsize=4096)
def _reshaped(view: View, shape: tuple[int, ...]) -> View | None:
    if 0 in shape:
        return View(view.dtype, shape, dense(shape), view.device)
    # Groups of dimensions that are contiguous to each other, last first: their length and innermost stride.
    runs: list[list[int]] = []
    for length, stride in zip(view.shape[::-1], view.strides[::-1], strict=True):
        if length == 1:
            continue
        if runs and stride == runs[-1][0] * runs[-1][1]:
            runs[-1][0] *= length
        else:
            runs.append([length, stride])
    strides: list[int] = []
    following = 1  # stride given to a dimension of length 1
    for length in shape[::-1]:
        if length > 1:
            left, stride = runs[0]
            if left % length:
                return None
            runs[0] = [left // length, stride * length]
            if left == length:
                del runs[0]
        else:
            stride = following
        strides.append(stride)
        following = stride * length
    return View(view.dtype, shape, tuple(strides[::-1]), view.device)


def is_array(item: Any) -> bool:
    if isinstance(item, np.ndarray):
        return True
    torch = sys.modules.get("torch")
    return (torch is not None and isinstance(item, torch.Tensor)) or is_mlx(item)


def is_mlx(item: Any) -> bool:
    mx = sys.modules.get("mlx.core")
    return mx is not None and isinstance(item, mx.array)


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.ctypes.data)


def _peek(array: np.ndarray[Any, Any]) -> int:
    # The data pointer follows Python's object header: reading it there is five times as fast as asking NumPy.
    address: int = _WORD_AT(id(array) + _HEADER).value
    return address


_HEADER, _WORD_AT = object.__basicsize__, ctypes.c_size_t.from_address
_PROBE = np.zeros(2)
_CAN_PEEK = sys.implementation.name == "cpython" and _peek(_PROBE[1:]) == _address(_PROBE[1:]) == _address(_PROBE) + 8

numpy_address = _peek if _CAN_PEEK else _address


def address(array: Any) -> int:
    """Return the address of the first element. Arrays on Apple GPUs have none and get one unique to their buffer."""
    if isinstance(array, np.ndarray):
        return numpy_address(array)
    if is_mlx(array):
        return id(array) << 64
    if array.device.type == "mps":  # data_ptr() points to an object, so buffers would seem to overlap
        return (int(array.untyped_storage().data_ptr()) << 64) + int(array.storage_offset()) * int(array.element_size())
    return int(array.data_ptr())


def device(array: Any) -> str:
    """Return the device of an array: "cpu", "mlx", or torch's name for it."""
    if isinstance(array, np.ndarray):
        return "cpu"
    return "mlx" if is_mlx(array) else str(array.device)


def signature(array: Any) -> Any:
    """Return everything about an array but its address, contents and writability; the type of anything else."""
    if array is None:
        return None
    if isinstance(array, np.ndarray):
        return array.shape, array.strides, array.dtype, type(array)
    if is_mlx(array):
        return tuple(array.shape), array.dtype
    if is_array(array):
        if array.layout is not sys.modules["torch"].strided or not _is_in_memory(array):
            return type(array), array.layout
        return array.shape, array.stride(), array.dtype, array.device, array.is_neg()
    return type(array)


def layouts(arrays: Sequence[Any]) -> Layouts:
    """Return the signature of each array of a call and its address, 0 for what has none. One more signature tells
    how the addresses are aligned. Common kinds of arrays are read in a loop of their own: a function call for each
    array would take as long as the rest of a warm call."""
    read = _READERS.get(type(arrays[0]))
    if read is not None and (found := read(arrays)) is not None:
        return found
    torch = sys.modules.get("torch")
    if torch is not None and type(arrays[0]) is torch.Tensor and _has_address(torch, arrays[0]):
        _READERS[torch.Tensor] = _read_torch_tensors
    addresses = [address(a) if _has_memory(a) else 0 for a in arrays]
    return [*map(signature, arrays), functools.reduce(operator.or_, addresses) & ALIGNMENT], addresses


def _is_in_memory(tensor: Any) -> bool:
    """False for a strided tensor without a block of memory for its elements: fake, meta, freed or nested, a CausalBias,
    or one that a transform of torch.func has wrapped."""
    if tensor.is_nested or type(tensor).__name__ in ("FakeTensor", "CausalBias"):
        return False
    if sys.modules["torch"]._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    if tensor.device.type == "mps":  # data_ptr() is no address there
        return True
    return bool(tensor.data_ptr() or not tensor.numel())


def _has_memory(item: Any) -> bool:
    """True for arrays whose elements lie in memory by strides: not MLX's, nor sparse tensors."""
    if isinstance(item, np.ndarray):
        return True
    strided = is_array(item) and not is_mlx(item) and item.layout is sys.modules["torch"].strided
    return strided and _is_in_memory(item)


def _has_address(torch: Any, tensor: Any) -> bool:
    """True if this tensor and every later one has an address: none is on an Apple GPU."""
    return tensor.device.type != "mps" and not torch.backends.mps.is_available()


def _read_numpy_arrays(arrays: Sequence[Any]) -> Layouts | None:
    signatures: list[Any] = []
    addresses, bits = [], 0
    for a in arrays:
        if type(a) is np.ndarray:
            at = _WORD_AT(id(a) + _HEADER).value
            signatures.append((a.shape, a.strides, a.dtype))
            addresses.append(at)
            bits |= at
        elif a is None:
            signatures.append(None)
            addresses.append(0)
        else:
            return None
    signatures.append(bits & ALIGNMENT)
    return signatures, addresses


def _read_torch_tensors(tensors: Sequence[Any]) -> Layouts | None:
    kind = type(tensors[0])
    signatures: list[Any] = []
    addresses, bits = [], 0
    try:
        for t in tensors:
            if type(t) is kind:
                at = t.data_ptr()
                if not at and t.numel():
                    return None
                signatures.append((t.shape, t.stride(), t.dtype, t.device, t.is_neg()))
                addresses.append(at)
                bits |= at
            elif t is None:
                signatures.append(None)
                addresses.append(0)
            else:
                return None
    except RuntimeError:  # a layout without strides
        return None
    signatures.append(bits & ALIGNMENT)
    return signatures, addresses


# The readers of common kinds of arrays; that of torch tensors is added by the first of them.
_READERS: dict[type, Callable[[Sequence[Any]], Layouts | None]] = {}
if _CAN_PEEK:
    _READERS[np.ndarray] = _read_numpy_arrays


def is_writable(array: Any) -> bool:
    return bool(array.flags.writeable) if isinstance(array, np.ndarray) else True


def describe(name: str, array: Any) -> View:
    """Describe a kernel's argument, or raise an error that says why it cannot be one. A View passes as it is and stands
    for an array given at the launch."""
    view = array if isinstance(array, View) else read(name, array)
    if not view.shape:
        raise ArgumentRank(f"{name!r} has no dimensions; pass {name}.item() as a scalar or {name}.reshape(1)")
    return view


def read(name: str, array: Any) -> View:
    """Describe an array of any rank, 0 included."""
    if isinstance(array, np.ndarray):
        return _read_numpy(name, array)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _read_torch(torch, name, array)
    if is_mlx(array):
        return _read_mlx(name, array)
    cure = "pass a NumPy array, a torch tensor or an MLX array"
    raise ArgumentKind(f"{name!r} must be an array, found {type(array).__name__}; {cure}")


def _read_numpy(name: str, array: np.ndarray[Any, Any]) -> View:
    if "numpy.ma" in sys.modules and isinstance(array, np.ma.MaskedArray):  # do not import numpy.ma just to ask
        raise ArgumentKind(f"{name!r} is a masked array, whose mask a kernel would not see; pass {name}.filled(0)")
    dtype = dtypes.from_numpy(array.dtype) if array.dtype.isnative else None
    if dtype is None:
        raise ArgumentDType(f"{name!r} has dtype {array.dtype}; {_dtype_cure()}")
    size = array.dtype.itemsize
    if any(s % size for s in array.strides) or not array.flags.aligned:
        raise ArgumentAlignment(f"{name!r} is not aligned to its elements; pass {name}.copy()")
    strides = tuple(s // size for s in array.strides)
    return View(dtype, array.shape, strides if array.size else dense(array.shape), "cpu")


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous array. Empty arrays count as contiguous, so they share its program."""
    if not shape:
        return ()
    strides = [1]
    for length in shape[:0:-1]:
        strides.append(strides[-1] * length)
    return tuple(strides[::-1])


def _read_torch(torch: Any, name: str, tensor: Any) -> View:
    if tensor.is_nested:
        raise ArgumentKind(
            f"{name!r} is a nested tensor; pass torch.nested.to_padded_tensor({name}, 0.0) and a mask, or each part"
        )
    dtype = _torch_dtype(tensor.dtype)
    if dtype is None:
        raise ArgumentDType(f"{name!r} has dtype {tensor.dtype}; {_dtype_cure()}")
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        cure = f"pass {name}.to_dense().resolve_conj().resolve_neg()"
        raise ArgumentKind(f"{name!r} is not an ordinary strided tensor; {cure}")
    if type(tensor).__name__ == "CausalBias":
        cure = "pass causal='upper_left' or causal='lower_right' instead"
        raise ArgumentKind(f"{name!r} is a CausalBias of torch, which has lengths and no elements; {cure}")
    if torch._C._is_tracing():
        cure = "use torch.export; attention and attention_varlen can be traced, where all arrays are tensors"
        raise ArgumentKind(f"torch.jit.trace would not record this call, which reads {name!r} itself; {cure}")
    if not _is_in_memory(tensor):
        why = "it is on the meta device, belongs to a trace or to torch.func, or its storage was freed"
        raise ArgumentKind(f"{name!r} has no memory: {why}; pass a tensor that holds its elements")
    if address(tensor) % dtype.bytes:
        raise ArgumentAlignment(f"{name!r} is not aligned to its elements; pass {name}.clone()")
    shape = tuple(tensor.shape)
    view = View(dtype, shape, dense(shape) if 0 in shape else tensor.stride(), _torch_device(tensor.device))
    end = tensor.storage_offset() * dtype.bytes + span(view)[1]
    if end > tensor.untyped_storage().nbytes() and 0 not in shape:
        raise ArgumentKind(f"{name!r} reaches beyond its storage, which was resized; pass a tensor that was not")
    return view


_torch_device = functools.cache(str)  # of its devices


@functools.cache
def _torch_dtype(dtype: Any) -> DType | None:
    return dtypes.BY_NAME.get(str(dtype).removeprefix("torch."))


def _read_mlx(name: str, array: Any) -> View:
    """Describe an MLX array; MLX makes a kernel's inputs contiguous."""
    dtype = dtypes.BY_NAME.get(str(array.dtype).removeprefix("mlx.core."))
    if dtype is None:
        raise ArgumentDType(f"{name!r} has dtype {array.dtype}; {_dtype_cure()}")
    shape = tuple(array.shape)
    return View(dtype, shape, dense(shape), "mlx")


def _dtype_cure() -> str:
    return f"monotile has {', '.join(d.name for d in dtypes.ALL)}: cast it"


def span(view: View) -> tuple[int, int]:
    """Return the first byte an array covers and one past the last, relative to its address; (0, 0) when empty."""
    if 0 in view.shape:
        return 0, 0
    low = high = 0
    for length, stride in zip(view.shape, view.strides, strict=True):
        if stride > 0:
            high += (length - 1) * stride
        else:
            low += (length - 1) * stride
    size = view.dtype.bytes
    return low * size, (high + 1) * size


def overlaps_itself(view: View) -> bool:
    """Return True if two elements may share memory, as in a broadcast view, which cannot be an output."""
    if 0 in view.shape:
        return False
    reach = 0
    for stride, length in sorted((abs(s), n) for n, s in zip(view.shape, view.strides, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (length - 1)
    return False


def is_leading_part(part: Any, whole: Any) -> bool:
    """True if `part` is `whole[..., :n]`, the same memory with the same strides; False for anything but arrays of one
    library."""
    if part is whole:
        return is_array(part) and not is_mlx(part)
    if type(part) is not type(whole) or not is_array(part) or is_mlx(part) or part.ndim != whole.ndim:
        return False
    alike = part.dtype == whole.dtype and tuple(part.shape[:-1]) == tuple(whole.shape[:-1])
    if not alike or part.shape[-1] > whole.shape[-1] or device(part) != device(whole):
        return False
    try:
        return read("", part).strides == read("", whole).strides and address(part) == address(whole)
    except MonotileError:  # whoever reads them will say what is wrong
        return False


def share(a: Any, b: Any) -> bool:
    """Return True if two arrays whose byte ranges overlap have an element in common, or may have one."""
    views = read("", a), read("", b)
    if any(0 in view.shape for view in views):
        return False
    places = address(a), address(b)
    shift = 2**40 - min(places)  # places on Apple GPUs are beyond 64 bits
    first, second = (
        memory_as_array(place + shift, view.dtype, view.shape, view.strides)
        for place, view in zip(places, views, strict=True)
    )
    try:
        return bool(np.shares_memory(first, second, max_work=10**6))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def same_view(a: Any, b: Any) -> bool:
    """True if two arrays are the same elements in the same order. Those of MLX are never written in place."""
    return not is_mlx(a) and address(a) == address(b) and read("", a) == read("", b)


class _Memory:
    """An array interface to memory that NumPy does not own."""

    def __init__(self, **facts: Any) -> None:
        self.__array_interface__ = {"version": 3, **facts}


def memory_as_array(place: int, dtype: DType, shape: Sequence[int], strides: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return memory as a NumPy array, without reading it."""
    target = dtypes.to_numpy(dtype)
    if 0 in shape:
        return np.empty(shape, target)
    steps = tuple(stride * target.itemsize for stride in strides)
    kind = f"V{target.itemsize}"  # NumPy has no name for bfloat16: the elements pass as bytes
    memory = _Memory(data=(place, False), shape=tuple(shape), strides=steps, typestr=f"|{kind}")
    return np.asarray(memory).view(target)
