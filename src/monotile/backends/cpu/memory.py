"""Memory pages from the system: no finaliser of the interpreter unmaps them while threads use them."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from typing import Any

from ...errors import InternalError
from . import windows

PAGE = mmap.PAGESIZE


def map_pages(size: int) -> int:
    """Map zeroed pages to read and write, and return the address of the first."""
    address = windows.map_pages(size) if sys.platform == "win32" else _map_pages(size)
    if address is None:
        raise MemoryError(f"the system has no {size} bytes of memory")
    return address


def unmap_pages(address: int, size: int) -> None:
    if sys.platform == "win32":
        windows.unmap_pages(address)
    else:
        libc().munmap(address, size)


def make_executable(address: int, size: int) -> None:
    """Make pages executable and no longer writable."""
    if sys.platform == "win32":
        refused = "" if windows.make_executable(address, size) else "VirtualProtect"
    else:
        refused = "mprotect" if libc().mprotect(address, size, mmap.PROT_READ | mmap.PROT_EXEC) else ""
    if refused:
        raise InternalError(f"the system does not let this process run code it has made: {refused} was refused")


def advise_huge_pages(address: int, size: int) -> None:
    """Ask for huge pages. It is advice: a system without them refuses it, which is harmless."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        libc().madvise(address, size, mmap.MADV_HUGEPAGE)


def _map_pages(size: int) -> int | None:
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address: int | None = libc().mmap(None, size, protection, flags, -1, 0)
    return None if address == ctypes.c_void_p(-1).value else address


@cache
def libc() -> Any:
    """Return the functions of the process itself; not on Windows."""
    library = ctypes.CDLL(None)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.argtypes, library.mmap.restype = (address, size, number, number, number, ctypes.c_int64), address
    library.munmap.argtypes = (address, size)
    library.madvise.argtypes = (address, size, number)
    library.mprotect.argtypes = (address, size, number)
    return library
