"""Memory pages from the C library: no finaliser of the interpreter unmaps them while threads use them."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

from ...errors import InternalError

PAGE = mmap.PAGESIZE


def map_pages(size: int) -> int:
    """Map zeroed pages to read and write, and return the address of the first."""
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = libc().mmap(None, size, protection, flags, -1, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise MemoryError(f"the system has no {size} bytes of memory")
    return int(address)


def unmap_pages(address: int, size: int) -> None:
    libc().munmap(address, size)


def make_executable(address: int, size: int) -> None:
    """Make pages executable and no longer writable."""
    if libc().mprotect(address, size, mmap.PROT_READ | mmap.PROT_EXEC):
        raise InternalError("the system does not let this process run code it has made: mprotect was refused")


@cache
def libc() -> Any:
    library = ctypes.CDLL(None)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.argtypes, library.mmap.restype = (address, size, number, number, number, ctypes.c_int64), address
    library.munmap.argtypes = (address, size)
    library.madvise.argtypes = (address, size, number)
    library.mprotect.argtypes = (address, size, number)
    return library
