"""Processors and memory on Windows, by the documented calls of kernel32."""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from typing import Any

_COMMIT_RESERVE, _RELEASE = 0x3000, 0x8000  # MEM_COMMIT | MEM_RESERVE, MEM_RELEASE
_READ_WRITE, _EXECUTE_READ = 0x04, 0x20  # PAGE_READWRITE, PAGE_EXECUTE_READ
_CORE, _CACHE = 0, 2  # RelationProcessorCore, RelationCache
_GROUP = 64  # processors in a group, at most


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
    """Return the processors that this process may run on: those of its groups, and of a single group those of its
    affinity mask. Empty if the system does not tell."""
    library = kernel32()
    mine, groups, count = library.GetCurrentProcess(), (ctypes.c_uint16 * 32)(), ctypes.c_uint16(32)
    if not library.GetProcessGroupAffinity(mine, ctypes.byref(count), groups) or count.value == 0:
        count.value, groups[0] = 1, 0
    if count.value > 1:
        found = set(groups[: count.value])
        return frozenset(n for n in processors() if n // _GROUP in found)
    process, system = ctypes.c_size_t(), ctypes.c_size_t()
    library.GetProcessAffinityMask(mine, ctypes.byref(process), ctypes.byref(system))
    return _numbers(groups[0], process.value)


def processors() -> frozenset[int]:
    """Return the processors of this machine; none if the system does not tell."""
    return frozenset().union(*cores())


def cores() -> list[frozenset[int]]:
    """Return the processors of each core; nothing if the system does not tell."""
    return [_members(entry, 22) for entry in _relations(_CORE)]


def l2_bytes() -> int | None:
    """Return the size of the first processor's L2 cache, or None if the system does not tell."""
    for entry in _relations(_CACHE):
        if entry[0] == 2 and 0 in _members(entry, 30):
            return int.from_bytes(entry[4:8], "little")
    return None


def _relations(kind: int) -> list[bytes]:
    """Return the PROCESSOR_RELATIONSHIPs or CACHE_RELATIONSHIPs of this machine; nothing if the call fails."""
    size = ctypes.c_uint32()
    ask = kernel32().GetLogicalProcessorInformationEx
    ask(kind, None, ctypes.byref(size))  # which fails, and says how much is needed
    buffer = ctypes.create_string_buffer(size.value)
    if not size.value or not ask(kind, buffer, ctypes.byref(size)):
        return []
    found, data = [], buffer.raw[: size.value]
    while data:  # each entry: its kind, its size and what it relates
        _, length = struct.unpack_from("<II", data)
        found.append(data[8:length])
        data = data[length:]
    return found


def _members(entry: bytes, count_at: int) -> frozenset[int]:
    """Return the processors of an entry: a number of groups, and behind it one GROUP_AFFINITY for each."""
    (count,) = struct.unpack_from("<H", entry, count_at)
    # The number was added to CACHE_RELATIONSHIP later; where it is 0 there is one group.
    masks = [struct.unpack_from("<QH", entry, count_at + 2 + 16 * n) for n in range(max(count, 1))]
    return frozenset().union(*(_numbers(group, mask) for mask, group in masks))


def _numbers(group: int, mask: int) -> frozenset[int]:
    return frozenset(group * _GROUP + n for n in range(mask.bit_length()) if mask >> n & 1)


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
    library.GetProcessGroupAffinity.argtypes = (address, address, address)
    library.GetLogicalProcessorInformationEx.argtypes = (number, address, address)
    return library
