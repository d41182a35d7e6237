"""Cores and caches on macOS, by sysctl. Of cores of two kinds the fast ones (perflevel0) count."""

from __future__ import annotations

import ctypes

from . import memory


def number(name: str) -> int | None:
    """Return a number that the system knows by a name, of 32 or 64 bits; None if it does not, or if it is 0."""
    found, size = ctypes.c_uint64(), ctypes.c_size_t(8)
    ask = memory.libc().sysctlbyname
    ask.argtypes = (ctypes.c_char_p, *[ctypes.c_void_p] * 3, ctypes.c_size_t)
    failed = ask(name.encode(), ctypes.byref(found), ctypes.byref(size), None, 0)
    return None if failed else found.value or None


def l2_bytes() -> int | None:
    """Return a core's share of its L2 cache, which cores of Apple's chips have in common; None if it is unknown."""
    shared = number("hw.perflevel0.l2cachesize")
    if shared is not None:
        return shared // (number("hw.perflevel0.cpusperl2") or 1)
    return number("hw.l2cachesize")
