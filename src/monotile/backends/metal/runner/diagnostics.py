"""Turn the runtime's findings into sentences about the shader."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

from .report import BufferRace, Finding
from .shader import ShaderKernel

MOST_VARIABLES = 64


class RawFinding(ctypes.Structure):
    """The struct Finding of abi.h."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("line", ctypes.c_int),
        ("other_line", ctypes.c_int),
        ("place", ctypes.c_int),
        ("write", ctypes.c_int),
        ("other_write", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("other_thread", ctypes.c_int),
        ("group", ctypes.c_uint32 * 3),
        ("count", ctypes.c_uint32),
        ("offset", ctypes.c_long),
        ("bytes", ctypes.c_long),
    )


KINDS = (
    "out of bounds",
    "race",
    "divergence",
    "threadgroup memory",
    "unwritten",
    "misaligned",
    "array bounds",
    "division by zero",
    "read-only",
    "fault",
    "inactive lane",
)
WAITS = (
    "run",
    "returned",
    "threadgroup_barrier",
    "simdgroup_barrier",
    "a shuffle or broadcast",
    "a simdgroup reduction",
    "simdgroup_multiply_accumulate",
)


def explain(raw: RawFinding, kernel: ShaderKernel, variables: Sequence[str], sizes: Mapping[int, int]) -> Finding:
    kind, place = KINDS[raw.kind], _place(raw.place, kernel, variables)
    thread = f"thread {raw.thread} of threadgroup {tuple(raw.group)}"
    did = "writes" if raw.write else "reads"
    if kind == "out of bounds":
        size = f"{raw.bytes} bytes" if raw.bytes else "memory"
        message = f"line {raw.line}: {thread} {did} {size} at byte {raw.offset} of {place}{_size(raw.place, sizes)}"
        if raw.offset < 0:
            message = f"line {raw.line}: {thread} {did} {size} {-raw.offset} bytes before the start of {place}"
    elif kind == "race":
        message = _race(raw, place, did)
    elif kind == "divergence":
        message = _divergence(raw)
    elif kind == "threadgroup memory":
        message = f"a threadgroup needs {raw.offset} bytes of threadgroup memory; there are {raw.bytes}"
    elif kind == "unwritten":
        message = f"line {raw.line}: {thread} reads byte {raw.offset} of {place}, which its group has not written"
    elif kind == "misaligned":
        message = f"line {raw.line}: {thread} accesses a value at an address that its type's alignment does not divide"
    elif kind == "array bounds":
        message = f"line {raw.line}: {thread} uses index {raw.offset} of an array that is shorter"
    elif kind == "division by zero":
        message = f"line {raw.line}: {thread} divides an integer by zero"
    elif kind == "read-only":
        message = f"line {raw.line}: {thread} writes to {place}, which the kernel declares const"
    elif kind == "inactive lane":
        message = f"line {raw.line}: {thread} asks for the value of lane {raw.offset}, which takes no part"
    else:
        what = "overflows its stack" if raw.offset else "follows a pointer to memory that is no buffer"
        message = f"line {raw.line}: {thread} {what}"
    return Finding(kind, raw.line, message, raw.other_line, place, raw.count, _buffer_race(raw, kind))


def _buffer_race(raw: RawFinding, kind: str) -> BufferRace | None:
    if kind != "race" or raw.place < 0:
        return None
    return BufferRace(raw.place, tuple(raw.group), bool(raw.bytes), bool(raw.write), bool(raw.other_write))


def _race(raw: RawFinding, place: str, did: str) -> str:
    other = "wrote" if raw.other_write else "read"
    accesses = f"line {raw.line} {did} byte {raw.offset} of {place} (thread {raw.thread})"
    accesses = f"{accesses} that line {raw.other_line} {other}"
    if raw.place >= 0 and raw.bytes:
        return f"{accesses} in another threadgroup than {tuple(raw.group)}"
    between = "with no barrier and fence between, in threadgroup"
    return f"{accesses} (thread {raw.other_thread}), {between} {tuple(raw.group)}"


def _divergence(raw: RawFinding) -> str:
    waits = f"line {raw.line}: thread {raw.thread} of threadgroup {tuple(raw.group)} waits at {WAITS[raw.offset]}"
    if not raw.other_line:
        return f"{waits}, which thread {raw.other_thread} never reaches: it has returned"
    return f"{waits}, while thread {raw.other_thread} waits at line {raw.other_line} ({WAITS[raw.bytes]})"


def _place(place: int, kernel: ShaderKernel, variables: Sequence[str]) -> str:
    if place >= 0:
        name = next((a.name for a in kernel.arguments if a.role == "buffer" and a.index == place), "?")
        return f"buffer {place} ({name})"
    index = -1 - place
    if index < MOST_VARIABLES:
        name = next((a.name for a in kernel.arguments if a.role == "threadgroup" and a.index == index), "?")
    else:
        index -= MOST_VARIABLES
        name = variables[index] if index < len(variables) else "?"
    return f"threadgroup memory {name}"


def _size(place: int, sizes: Mapping[int, int]) -> str:
    return f", which has {sizes[place]}" if place in sizes else ", past its end"
