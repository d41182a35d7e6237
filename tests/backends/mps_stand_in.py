"""A stand-in for torch on a Mac: tensors on "mps", which have no address, and `torch.mps.compile_shader`.

It checks a launch against what torch documents: positional arguments are bound to buffers 0, 1, ...; a tensor begins at
its storage offset; a list of integers is int64, a list of floats float32; sizes count threads. The source runs in the
runner.
"""

from __future__ import annotations

import itertools
import re
import types
from typing import Any

import ml_dtypes
import numpy as np

from arrays import Array
from monotile import metal

ELEMENTS = {
    "float32": "float", "float16": "half", "bfloat16": "bfloat", "int64": "long", "int32": "int", "int8": "char",
    "uint8": "uchar", "bool": "bool",
}  # fmt: skip
_storages = itertools.count(0x600000, 16)  # close together, as the objects of buffers are


class DType:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"torch.{self.name}"


class Device:
    type, index = "mps", 0

    def __str__(self) -> str:
        return "mps:0"


class Storage:
    def __init__(self, memory: Array) -> None:
        self.memory, self.number = memory, next(_storages)

    def data_ptr(self) -> int:
        return self.number

    def nbytes(self) -> int:
        return self.memory.nbytes


DTYPES = {name: DType(name) for name in (*ELEMENTS, "float64")}
DEVICE, STRIDED = Device(), object()


class Tensor:
    layout, device = STRIDED, DEVICE
    requires_grad = is_nested = is_meta = False

    def __init__(self, view: Array, storage: Storage) -> None:
        self.view, self.storage = view, storage

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape

    @property
    def ndim(self) -> int:
        return self.view.ndim

    def dim(self) -> int:
        return self.view.ndim

    @property
    def dtype(self) -> DType:
        return DTYPES[self.view.dtype.name]

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self.view.itemsize for s in self.view.strides)

    def storage_offset(self) -> int:
        return (self.view.ctypes.data - self.storage.memory.ctypes.data) // self.view.itemsize

    def untyped_storage(self) -> Storage:
        return self.storage

    def element_size(self) -> int:
        return self.view.itemsize

    def data_ptr(self) -> int:
        raise AssertionError("for an MPS tensor this is not the address of its elements")

    def detach(self) -> Tensor:
        return self

    def is_conj(self) -> bool:
        return False

    is_neg = is_conj

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(self.view[index], self.storage)

    def reshape(self, *shape: Any) -> Tensor:
        made = self.view.reshape(*shape)
        return Tensor(made, self.storage) if np.shares_memory(made, self.view) or not made.size else tensor(made)

    def contiguous(self) -> Tensor:
        return self if self.view.flags.c_contiguous else tensor(self.view)


def tensor(array: Array) -> Tensor:
    """Return a copy on the GPU."""
    memory = array.reshape(-1).copy()
    return Tensor(memory.reshape(array.shape), Storage(memory))


class Function:
    def __init__(self, source: str, name: str) -> None:
        self.source, self.name = source, name
        signature = source[source.index(f"void {name}(") :].partition(") {")[0]
        found = re.findall(r"(device|constant) (?:const )?(\w+) \*\w+ \[\[buffer\((\d+)\)\]\]", signature)
        self.parameters = {int(index): (space, kind) for space, kind, index in found}
        most = re.search(r"max_total_threads_per_threadgroup\((\d+)\)", source)
        self.max_threads_per_threadgroup = int(most[1]) if most else 1024

    def __call__(self, *args: Any, threads: Any = None, group_size: Any = None, arg_casts: Any = None) -> None:
        assert arg_casts is None and set(self.parameters) == set(range(len(args)))
        buffers = {n: self._bound(value, *self.parameters[n]) for n, value in enumerate(args)}
        assert 1 <= len(threads) == len(group_size) <= 3
        assert all(type(side) is int and side > 0 for side in (*threads, *group_size))
        assert np.prod(group_size) <= self.max_threads_per_threadgroup
        assert all(total % side == 0 for total, side in zip(threads, group_size, strict=True)), "a partial threadgroup"
        grid = [total // side for total, side in zip(threads, group_size, strict=True)]
        metal.run(self.source, self.name, buffers, grid, group_size).check()

    def _bound(self, value: Any, space: str, kind: str) -> Array:
        if isinstance(value, Tensor):
            assert space == "device" and ELEMENTS[value.dtype.name] == kind
            return value.storage.memory[value.storage_offset() :]
        assert isinstance(value, list) and value and space == "constant"
        if isinstance(value[0], int):
            assert kind == "long" and all(type(n) is int for n in value)
            return np.array(value, np.int64)
        assert kind == "float" and all(type(n) is float for n in value)
        return np.array(value, np.float32)


class Library:
    def __init__(self, source: str) -> None:
        self.source = source

    def __getattr__(self, name: str) -> Function:
        if f"void {name}(" not in self.source:
            raise AttributeError(name)
        return Function(self.source, name)


def compile_shader(source: str) -> Library:
    if "#error" in source:
        raise SyntaxError("program_source:1:2: error")
    return Library(source)


def torch() -> types.ModuleType:
    """Return a module to be put into sys.modules."""
    module = types.ModuleType("torch")
    available = types.SimpleNamespace(is_available=lambda: True)

    def empty(shape: tuple[int, ...], *, dtype: DType, device: Device) -> Tensor:
        assert device is DEVICE
        kind = ml_dtypes.bfloat16 if dtype.name == "bfloat16" else dtype.name
        return tensor(metal.poisoned(shape, kind))

    parts = {
        "device": lambda name: DEVICE if name == "mps:0" else None,
        "Tensor": Tensor, "strided": STRIDED, "empty": empty, "__version__": "2.13.0", **DTYPES,
        "broadcast_to": lambda t, shape: Tensor(np.broadcast_to(t.view, shape), t.storage),
        "stack": lambda ts, axis: tensor(np.stack([t.view for t in ts], axis)),
        "backends": types.SimpleNamespace(mps=available),
        "mps": types.SimpleNamespace(compile_shader=compile_shader),
        "is_autocast_enabled": lambda kind: False, "is_grad_enabled": lambda: False,
        "compiler": types.SimpleNamespace(is_compiling=lambda: False), "nn": types.SimpleNamespace(Parameter=Tensor),
        "autograd": types.SimpleNamespace(forward_ad=types.SimpleNamespace(_current_level=-1)),
        "_C": types.SimpleNamespace(
            _are_functorch_transforms_active=lambda: False, _is_any_autocast_enabled=lambda: False,
            _len_torch_dispatch_stack=lambda: 0, _is_tracing=lambda: False,
            _functorch=types.SimpleNamespace(is_functorch_wrapped_tensor=lambda t: False),
        ),
    }  # fmt: skip
    vars(module).update(parts)
    return module
