"""Processors and memory on Windows, by the documented calls of kernel32."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_COMMIT_RESERVE, _RELEASE = 0x3000, 0x8000  # MEM_COMMIT | MEM_RESERVE, MEM_RELEASE
_READ_WRITE, _EXECUTE_READ = 0x04, 0x20  # PAGE_READWRITE, PAGE_EXECUTE_READ
_CORE = 0  # RelationProcessorCore


def map_pages(size: int) -> int | None:
    """Allocate zeroed pages to read and write; None if there is no memory."""
    found: int | None = kernel32().VirtualAlloc(None, size, _COMMIT_RESERVE, _READ_WRITE)
    return found


def unmap_pages(address: int) -> None:
    kernel32().VirtualFree(address, 0, _RELEASE)  # the size must be 0: the whole allocation


def make_executable(address: int, size: int) -> bool:
    """Make pages executable and no longer writable. Return False if the system refuses."""
    old = ctypes.c_uint32()
    library = kernel32()
    if not library.VirtualProtect(address, size, _EXECUTE_READ, ctypes.byref(old)):
        return False
    return bool(library.FlushInstructionCache(library.GetCurrentProcess(), address, size))


def process_affinity() -> frozenset[int]:
    """Return the processors that this process may run on: those of its first group, of at most 64."""
    process, system = ctypes.c_size_t(), ctypes.c_size_t()
    library = kernel32()
    library.GetProcessAffinityMask(library.GetCurrentProcess(), ctypes.byref(process), ctypes.byref(system))
    return _numbers(process.value or 1)


class _Relation(ctypes.Structure):
    """SYSTEM_LOGICAL_PROCESSOR_INFORMATION."""

    _fields_ = (("mask", ctypes.c_size_t), ("kind", ctypes.c_int32), ("_details", ctypes.c_uint64 * 2))


def cores() -> list[frozenset[int]]:
    """Return the processors of each core; nothing if the system does not tell."""
    size = ctypes.c_uint32()
    library = kernel32()
    library.GetLogicalProcessorInformation(None, ctypes.byref(size))  # which fails, and says how much is needed
    found = (_Relation * (size.value // ctypes.sizeof(_Relation)))()
    if not len(found) or not library.GetLogicalProcessorInformation(found, ctypes.byref(size)):
        return []
    return [_numbers(entry.mask) for entry in found if entry.kind == _CORE]


def _numbers(mask: int) -> frozenset[int]:
    return frozenset(n for n in range(mask.bit_length()) if mask >> n & 1)


def is_x86() -> bool:
    """True if this Python is a program for x86-64; on an ARM machine Windows runs those, too."""
    import sysconfig

    return sysconfig.get_platform() == "win-amd64"


@cache
def libraries() -> list[Any]:
    """Return the libraries with functions that compiled code may call: those of the system and of C, and ntdll for
    `__chkstk`, which LLVM calls in functions with more than a page of variables."""
    names = ("kernel32.dll", "api-ms-win-core-synch-l1-2-0.dll", "ucrtbase.dll", "ntdll.dll")
    return [ctypes.WinDLL(name) for name in names]  # type: ignore[attr-defined]


@cache
def kernel32() -> Any:
    library = ctypes.WinDLL("kernel32.dll")  # type: ignore[attr-defined]
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32
    library.VirtualAlloc.argtypes, library.VirtualAlloc.restype = (address, size, number, number), address
    library.VirtualFree.argtypes = (address, size, number)
    library.VirtualProtect.argtypes = (address, size, number, address)
    library.FlushInstructionCache.argtypes = (address, address, size)
    library.GetCurrentProcess.restype = address
    library.GetProcessAffinityMask.argtypes = (address, address, address)
    library.GetLogicalProcessorInformation.argtypes = (address, address)
    return library
