"""Python functions as targets of XLA's foreign function interface, which hands over buffers in place.

XLA calls a handler with a frame that describes arguments, results and attributes (`xla/ffi/api/c_api.h`). The
structures here are the beginning of XLA's. `jax.pure_callback` would copy every argument.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .. import dtypes

METADATA, EXECUTE, INVALID_ARGUMENT = 1, 3, 3  # kind of extension, stage, code of an error
DTYPES = {1: dtypes.bool_, 10: dtypes.float16, 11: dtypes.float32, 16: dtypes.bfloat16}
Array = np.ndarray[Any, Any]
Run = Callable[[str, list[Array]], list[Array]]  # of a request and the arguments


class _Extension(ctypes.Structure):
    _fields_ = (("struct_size", ctypes.c_size_t), ("kind", ctypes.c_int), ("next", ctypes.c_void_p))


class _ApiVersion(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    )  # fmt: skip


class _Metadata(ctypes.Structure):
    _fields_ = (("struct_size", ctypes.c_size_t), ("api_version", _ApiVersion), ("traits", ctypes.c_uint32))


class _MetadataExtension(ctypes.Structure):
    _fields_ = (("base", _Extension), ("metadata", ctypes.POINTER(_Metadata)))


class _ErrorArgs(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("message", ctypes.c_char_p),
        ("code", ctypes.c_int),
    )  # fmt: skip


class _Api(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("version", _ApiVersion),
        ("internal", ctypes.c_void_p), ("create_error", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_ErrorArgs))),
    )  # fmt: skip


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p), ("rank", ctypes.c_int64), ("dims", ctypes.POINTER(ctypes.c_int64)),
    )  # fmt: skip


class _Buffers(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p), ("items", ctypes.POINTER(ctypes.POINTER(_Buffer))),
    )  # fmt: skip


class _Bytes(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p), ("names", ctypes.c_void_p), ("items", ctypes.POINTER(ctypes.POINTER(_Bytes))),
    )  # fmt: skip


class _Frame(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("api", ctypes.POINTER(_Api)),
        ("context", ctypes.c_void_p), ("stage", ctypes.c_int), ("args", _Buffers), ("results", _Buffers),
        ("attributes", _Attributes),
    )  # fmt: skip


_Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Frame))
_registered: list[Any] = []  # handlers, which XLA may call as long as the process lives


def register(name: str, run: Run) -> None:
    """Make a function the target `name` on the CPU. Calls pass it one attribute, a string, and their arguments; what it
    returns is copied into the results."""

    def handle(frame: Any) -> int | None:
        called = frame.contents
        try:
            if called.extension and _Extension.from_address(called.extension).kind == METADATA:
                _tell_version(called)
            elif called.stage == EXECUTE:
                text = called.attributes.items[0].contents
                request = ctypes.string_at(text.at, text.length).decode()
                found = run(request, _arrays(called.args))
                for result, array in zip(_arrays(called.results), found, strict=True):
                    np.copyto(result, array)
        except BaseException as error:
            message = f"{type(error).__module__}.{type(error).__qualname__}: {error}".encode()
            args = _ErrorArgs(ctypes.sizeof(_ErrorArgs), None, message, INVALID_ARGUMENT)
            made: int | None = called.api.contents.create_error(ctypes.byref(args))
            return made
        return None

    handler = _Handler(handle)
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
    _registered.append(handler)


def _tell_version(frame: Any) -> None:
    metadata = _MetadataExtension.from_address(frame.extension).metadata.contents
    version = frame.api.contents.version
    metadata.api_version.major, metadata.api_version.minor = version.major, version.minor
    metadata.traits = 0


def _arrays(buffers: Any) -> list[Array]:
    found = []
    for n in range(buffers.size):
        buffer = buffers.items[n].contents
        dtype, shape = dtypes.to_numpy(DTYPES[buffer.dtype]), tuple(buffer.dims[: buffer.rank])
        size = dtype.itemsize
        for length in shape:
            size *= length
        if size:
            memory: Any = (ctypes.c_char * size).from_address(buffer.data)
            found.append(np.frombuffer(memory, dtype).reshape(shape))
        else:
            found.append(np.empty(shape, dtype))
    return found
