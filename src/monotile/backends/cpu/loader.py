"""Load an image: map it, fill in the addresses of its imports and make it executable.

An image (image.py links it when a kernel is compiled) needs no further linking, so a kernel from the disk cache runs
without LLVM.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from ...errors import InternalError
from . import memory, windows

# MAGIC, length of the code, length of the table; then the code; then the table, a line for each name:
# `name offset` of a function in the image, or `?name offset` of the word that is to hold an import's address.
MAGIC = b"monoimg1"
HEADER = struct.Struct("<8sQQ")
IMPORT = "?"


@cache
def takes_images() -> bool:
    """True if this process can run images: on Linux and Windows, on processors whose relocations image.py knows."""
    if sys.maxsize < 2**32:
        return False
    if sys.platform == "win32":
        return windows.is_x86()
    if not sys.platform.startswith("linux"):
        return False
    return os.uname().machine == "x86_64" or (_is_arm() and symbol("__clear_cache") is not None)


def _is_arm() -> bool:
    return sys.platform.startswith("linux") and os.uname().machine == "aarch64"


class Code:
    """Functions in memory, with addresses that are valid as long as this object lives; then the pages are unmapped."""

    def __init__(self, data: bytes) -> None:
        self._base = 0
        self.size, imports, self._functions = _read(data)
        addresses = {offset: _import(name) for name, offset in imports.items()}
        self._base = memory.map_pages(self.size)
        ctypes.memmove(self._base, data[HEADER.size : HEADER.size + self.size], self.size)
        for offset, address in addresses.items():
            ctypes.c_uint64.from_address(self._base + offset).value = address
        memory.make_executable(self._base, self.size)
        if _is_arm():
            # Instruction and data caches are not coherent there.
            begin, end = ctypes.c_void_p(self._base), ctypes.c_void_p(self._base + self.size)
            ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(_import("__clear_cache"))(begin, end)

    def address(self, name: str) -> int:
        """Return the address of a function."""
        if name not in self._functions:
            raise InternalError(f"the compiled code has no {name!r}")
        return self._base + self._functions[name]

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # Threads may still run the code when the interpreter exits, and the system frees all memory then. Modules may
        # have been emptied by then as well: so `ending` is a default.
        if not ending() and self._base:
            memory.unmap_pages(self._base, self.size)


def symbol(name: str) -> int | None:
    """Return the address of a function of the C library or libgcc; None if this process has none."""
    for library in windows.libraries() if sys.platform == "win32" else (memory.libc(), _helpers()):
        if library is not None:
            try:
                return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
            except AttributeError:
                continue
    return None


@cache
def _helpers() -> Any:
    """Load libgcc for the function that flushes the instruction cache of AArch64."""
    try:
        return ctypes.CDLL("libgcc_s.so.1")
    except OSError:
        return None


def _import(name: str) -> int:
    address = symbol(name)
    if address is None:
        raise InternalError(f"the compiled code calls {name!r}, which this process does not have")
    return address


def _read(data: bytes) -> tuple[int, dict[str, int], dict[str, int]]:
    """Parse an image: size of the code, offsets of the imports' words and of the functions. The cache has verified the
    checksum; this checks every offset against the size all the same."""
    try:
        magic, size, table_size = HEADER.unpack_from(data)
        lines = data[HEADER.size + size :].decode("ascii").split("\n")[:-1]
        table = {name: int(offset) for name, offset in (line.split(" ") for line in lines)}
    except (struct.error, ValueError) as error:
        raise InternalError(f"an image cannot be read: {error}") from error
    imports = {name[1:]: offset for name, offset in table.items() if name.startswith(IMPORT)}
    functions = {name: offset for name, offset in table.items() if not name.startswith(IMPORT)}
    whole = magic == MAGIC and size > 0 and len(data) == HEADER.size + size + table_size
    inside = all(0 <= n < size for n in functions.values()) and all(0 <= n <= size - 8 for n in imports.values())
    if not whole or not inside:
        raise InternalError("an image does not have the sizes it names")
    return size, imports, functions
