"""Complex functions for Python in Wine, whose C library only has stubs for some that NumPy calls. NumPy does not import
without the first two. And no WMI, which `platform` asks from Python 3.12 on: it ends the process in Wine 8. run.py puts
this module where Python imports it when it starts."""

from __future__ import annotations

import cmath
import ctypes
import struct
import sys
from collections.abc import Callable
from typing import Any

# A function takes a complex64 in rcx, and the address of a complex128. movd xmm0, ecx; shr rcx, 32; movsd xmm0, [rcx]
PARTS = {
    "crealf": "660f6ec1c3", "cimagf": "48c1e920660f6ec1c3", "creal": "f20f1001c3", "cimag": "f20f104108c3",
    "creall": "f20f1001c3", "cimagl": "f20f104108c3",
}  # fmt: skip
NAMES = (
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "exp", "log", "log10", "sin", "sinh", "sqrt",
    "tan", "tanh",
)  # fmt: skip
FUNCTIONS = {name: getattr(cmath, name) for name in NAMES} | {"pow": pow}
LENGTHS = {"abs": abs, "arg": cmath.phase}
NOT_A_NUMBER = complex(cmath.nan, cmath.nan)
# sub rsp, 40; lea rcx, [library]; lea rdx, [name]: then it calls what ends the process.
STUB, STUB_NEXT = bytes.fromhex("4883ec28488d0d"), bytes.fromhex("488d15")

address, word = ctypes.c_void_p, ctypes.c_uint64
kept: list[Any] = []  # functions that machine code calls


def replace(name: str, code: bytes) -> None:
    """Write code over a function of the C library if it is a stub."""
    place = ctypes.cast(getattr(library, name), address).value
    begin = ctypes.string_at(place, 14)
    if begin.startswith(STUB) and begin.endswith(STUB_NEXT):
        old = ctypes.c_uint32()
        assert protect(place, len(code), 0x40, ctypes.byref(old))  # PAGE_EXECUTE_READWRITE
        ctypes.memmove(place, code, len(code))


def jump(function: Any) -> bytes:
    """mov rax, function; jmp rax"""
    kept.append(function)
    return b"\x48\xb8" + struct.pack("<Q", ctypes.cast(function, address).value) + b"\xff\xe0"


def value(function: Callable[..., complex], *numbers: complex) -> complex:
    try:
        return complex(function(*numbers))
    except (ValueError, OverflowError, ZeroDivisionError):
        return NOT_A_NUMBER


def at(place: int) -> complex:
    return complex(*struct.unpack("<2d", ctypes.string_at(place, 16)))


def inside(bits: int) -> complex:
    return complex(*struct.unpack("<2f", struct.pack("<Q", bits)))


def of_doubles(function: Callable[..., complex]) -> Callable[..., int]:
    def call(result: int, *places: int) -> int:
        found = value(function, *map(at, places))
        ctypes.memmove(result, struct.pack("<2d", found.real, found.imag), 16)
        return result

    return call


def of_floats(function: Callable[..., complex]) -> Callable[..., int]:
    def call(*words: int) -> int:
        found = value(function, *map(inside, words))
        return int(struct.unpack("<Q", struct.pack("<2f", found.real, found.imag))[0])

    return call


sys.modules["_wmi"] = None  # type: ignore[assignment]
library = ctypes.WinDLL("ucrtbase.dll")  # type: ignore[attr-defined]
protect = ctypes.WinDLL("kernel32.dll").VirtualProtect  # type: ignore[attr-defined]
protect.argtypes = (address, ctypes.c_size_t, ctypes.c_uint32, address)
for name, text in PARTS.items():
    replace(name, bytes.fromhex(text))
for name, function in FUNCTIONS.items():
    count = 1 + (name == "pow")
    doubles = jump(ctypes.CFUNCTYPE(address, *[address] * (1 + count))(of_doubles(function)))
    floats = jump(ctypes.CFUNCTYPE(word, *[word] * count)(of_floats(function)))
    for ending, code in (("", doubles), ("l", doubles), ("f", floats)):  # a long double is a double here
        replace(f"c{name}{ending}", code)
for name, length in LENGTHS.items():
    of_double = jump(ctypes.CFUNCTYPE(ctypes.c_double, address)(lambda place, f=length: f(at(place))))
    of_float = jump(ctypes.CFUNCTYPE(ctypes.c_float, word)(lambda bits, f=length: f(inside(bits))))
    for ending, code in (("", of_double), ("l", of_double), ("f", of_float)):
        replace(f"c{name}{ending}", code)
