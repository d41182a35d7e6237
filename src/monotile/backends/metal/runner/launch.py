"""Load a built kernel, place its buffers between guard pages, run it and read the findings back."""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from . import build, shader
from .diagnostics import RawFinding, explain
from .report import Counters, LaunchError, Report

MOST_BUFFERS, MOST_VARIABLES, MOST_FINDINGS, MOST_THREADS = 32, 64, 64, 1024
ABSENT = (1 << 64) - 1
ORDERS = {"ascending": 0, "descending": 1, "shuffled": 2}
COUNTERS = tuple(Counters.__dataclass_fields__)
_running = threading.Lock()  # fault handlers belong to the process


class KernelLibrary:
    """A shared library with a kernel and its runtime, whose state is global: one launch at a time."""

    def __init__(self, built: build.BuiltKernel) -> None:
        self.built = built
        handle, path = tempfile.mkstemp(suffix=".so", prefix="monotile-")
        try:
            with open(handle, "wb") as file:
                file.write(built.library)
            self.code = ctypes.CDLL(path)
        finally:
            os.unlink(path)
        self.code.mt_buffer.restype = ctypes.c_void_p
        self.code.mt_close.restype = None
        self.counters = (ctypes.c_uint64 * len(COUNTERS)).in_dll(self.code, "mt_counters")
        self.read = (ctypes.c_uint64 * MOST_BUFFERS).in_dll(self.code, "mt_buffer_read")
        self.written = (ctypes.c_uint64 * MOST_BUFFERS).in_dll(self.code, "mt_buffer_written")
        self.findings = (RawFinding * MOST_FINDINGS).in_dll(self.code, "mt_findings")
        self.finding_count = ctypes.c_int.in_dll(self.code, "mt_finding_count")


@lru_cache(maxsize=256)
def load(
    source: str, kernel: str, constants: tuple[tuple[int, bool | int | float], ...], fast_math: bool = False
) -> KernelLibrary:
    return KernelLibrary(build.build(source, kernel, dict(constants), fast_math))


def run(
    source: str,
    kernel: str,
    buffers: Mapping[int | str, Any],
    grid: int | Sequence[int],
    threads: int | Sequence[int],
    *,
    order: str = "ascending",
    check_races: bool = True,
    constants: Mapping[int, bool | int | float] | None = None,
    threadgroup_memory: Mapping[int | str, int] | None = None,
    seed: int = 0,
    fast_math: bool = False,
) -> Report:
    """Run `kernel` of the Metal source `source`: `grid` threadgroups of `threads` threads.

    `buffers` maps a buffer's index or its parameter's name to a contiguous NumPy array, a NumPy scalar or bytes; arrays
    that the kernel may write are written in place. `threadgroup_memory` gives the size in bytes of each `threadgroup`
    parameter, `constants` the value of each function constant by its index (0 when not given). `order` is the order in
    which threads run between barriers, one of `ORDERS`; `seed` picks the shuffled one. `fast_math` compiles as Metal
    does by default, which assumes that there are no infinities and no NaN.

    Mistakes of the kernel are in the report and raise nothing. A shader that does not compile raises `ShaderError`, a
    launch with invalid arguments `LaunchError`, and a machine without a compiler `NoCompiler`.
    """
    if order not in ORDERS:
        raise LaunchError(f"order={order!r}: the orders are {', '.join(ORDERS)}")
    groups, size = _three("grid", grid), _three("threads", threads)
    if not 1 <= size[0] * size[1] * size[2] <= MOST_THREADS:
        raise LaunchError(f"threads={size}: a threadgroup has 1 to {MOST_THREADS} threads")
    started = time.perf_counter()
    library = load(source, kernel, tuple(sorted((constants or {}).items())), fast_math)
    build_seconds = time.perf_counter() - started
    arguments = library.built.kernel.arguments
    arrays = {_index(arguments, "buffer", key): _bytes_of(key, value) for key, value in buffers.items()}
    dynamic = {_index(arguments, "threadgroup", key): int(n) for key, n in (threadgroup_memory or {}).items()}
    _check_bound(arguments, arrays, dynamic)
    with _running:
        started = time.perf_counter()
        _launch(library, arrays, dynamic, groups, size, ORDERS[order], check_races, seed)
        run_seconds = time.perf_counter() - started
        return _report(library, {i: a.nbytes for i, a in arrays.items()}, build_seconds, run_seconds)


def _launch(
    library: KernelLibrary,
    arrays: Mapping[int, np.ndarray[Any, Any]],
    dynamic: Mapping[int, int],
    groups: tuple[int, int, int],
    size: tuple[int, int, int],
    order: int,
    check_races: bool,
    seed: int,
) -> None:
    code = library.code
    declared = {a.index: a for a in library.built.kernel.arguments if a.role == "buffer"}
    sizes = (ctypes.c_uint64 * MOST_BUFFERS)(*[ABSENT] * MOST_BUFFERS)
    granules = (ctypes.c_uint32 * MOST_BUFFERS)(*[1] * MOST_BUFFERS)
    writable, constant = (ctypes.c_uint8 * MOST_BUFFERS)(), (ctypes.c_uint8 * MOST_BUFFERS)()
    for index, array in arrays.items():
        argument = declared[index]
        sizes[index] = array.nbytes
        granules[index] = 1 if argument.byte_type else min(array.itemsize, 4)
        writable[index], constant[index] = not argument.read_only, argument.constant
    alias, starts = (ctypes.c_uint8 * MOST_BUFFERS)(), (ctypes.c_uint64 * MOST_BUFFERS)()
    for region in _regions(arrays, {index for index in arrays if writable[index]}):
        owner = min(region)
        first = min(arrays[index].ctypes.data for index in region) // 16 * 16  # which keeps every alignment
        sizes[owner] = max(arrays[index].ctypes.data + arrays[index].nbytes for index in region) - first
        for index in region:
            alias[index], starts[index] = owner, arrays[index].ctypes.data - first
            writable[owner] |= writable[index]
            granules[owner] = min(granules[owner], granules[index])
    shared = (ctypes.c_uint64 * MOST_VARIABLES)()
    for index, count in dynamic.items():
        shared[index] = count
    if code.mt_open(sizes, granules, writable, constant, alias, starts, shared, int(check_races)):
        raise LaunchError(
            f"not enough memory for buffers of {sum(a.nbytes for a in arrays.values())} bytes and their guards"
        )
    try:
        for index, array in arrays.items():
            ctypes.memmove(code.mt_buffer(index), array.ctypes.data, array.nbytes)
        if code.mt_run((ctypes.c_uint32 * 3)(*groups), (ctypes.c_uint32 * 3)(*size), order, ctypes.c_uint64(seed)):
            raise LaunchError("not enough memory for the stacks of the threads")
        for index, array in arrays.items():
            if writable[index]:
                ctypes.memmove(array.ctypes.data, code.mt_buffer(index), array.nbytes)
    finally:
        code.mt_close()


def _regions(arrays: Mapping[int, np.ndarray[Any, Any]], writable: set[int]) -> list[list[int]]:
    """Return the buffers that are the same memory: arrays that overlap, if one of them is written, and arrays that are
    equal. Others get memory of their own, with a guard after it."""
    regions: list[list[int]] = []
    end = 0
    for index in sorted(arrays, key=lambda index: (arrays[index].ctypes.data, -arrays[index].nbytes)):
        start, size = arrays[index].ctypes.data, arrays[index].nbytes
        if size and regions and start < end:
            regions[-1].append(index)
        else:
            regions.append([index])
        end = max(end, start + size)
    found: list[list[int]] = []
    for region in regions:
        if writable.isdisjoint(region):
            equal: dict[tuple[int, int], list[int]] = {}
            for index in region:
                equal.setdefault((arrays[index].ctypes.data, arrays[index].nbytes), []).append(index)
            found += equal.values()
        else:
            found.append(region)
    return found


def _report(library: KernelLibrary, sizes: Mapping[int, int], build_seconds: float, run_seconds: float) -> Report:
    kernel, variables = library.built.kernel, library.built.variables
    raw = library.findings[: library.finding_count.value]
    names = {argument.index: argument.name for argument in kernel.arguments if argument.role == "buffer"}
    return Report(
        findings=tuple(explain(finding, kernel, variables, sizes) for finding in raw),
        counters=Counters(*library.counters),
        bytes_read={name: library.read[index] for index, name in names.items()},
        bytes_written={name: library.written[index] for index, name in names.items()},
        build_seconds=build_seconds,
        run_seconds=run_seconds,
    )


def _three(what: str, value: int | Sequence[int]) -> tuple[int, int, int]:
    sides = (value,) if isinstance(value, int) else tuple(int(side) for side in value)
    if not 1 <= len(sides) <= 3 or any(side < 0 for side in sides):
        raise LaunchError(f"{what}={value!r}: expected one to three sizes")
    x, y, z = (*sides, 1, 1)[:3]
    return x, y, z


def _index(arguments: Sequence[shader.ShaderArgument], role: str, key: int | str) -> int:
    of_role = [argument for argument in arguments if argument.role == role]
    for argument in of_role:
        if key in (argument.index, argument.name):
            return argument.index
    known = ", ".join(f"{argument.name} ({argument.index})" for argument in of_role) or "none"
    raise LaunchError(f"the kernel has no {role} argument {key!r}; it has: {known}")


def _bytes_of(key: int | str, value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, bytes | bytearray):
        return np.frombuffer(bytearray(value), np.uint8)
    if isinstance(value, np.generic):
        return np.array(value)
    if not isinstance(value, np.ndarray):
        raise LaunchError(f"buffer {key!r} is a {type(value).__name__}; expected a NumPy array or scalar, or bytes")
    if not value.flags.c_contiguous:
        raise LaunchError(f"buffer {key!r} is not contiguous, and a buffer is one stretch of memory: copy it first")
    return value


def _check_bound(
    arguments: Sequence[shader.ShaderArgument], arrays: Mapping[int, np.ndarray[Any, Any]], dynamic: Mapping[int, int]
) -> None:
    for argument in arguments:
        array = arrays.get(argument.index) if argument.role == "buffer" else None
        if array is not None and not argument.read_only and not array.flags.writeable:
            raise LaunchError(f"the kernel may write to {argument.name!r}, and that array is read-only")
        if argument.role == "threadgroup" and argument.index not in dynamic:
            raise LaunchError(
                f"threadgroup memory {argument.name!r} has no size: "
                f"pass threadgroup_memory={{{argument.name!r}: bytes}}"
            )
