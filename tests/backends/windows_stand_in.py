"""A stand-in for Windows on x86-64 Linux: `enter` makes this process look like one there, and code that is compiled for
Windows runs in it.

What POSIX has and Windows has not is removed. kernel32 is a class that records each call, checks its arguments and maps
real pages; WaitOnAddress and the others that compiled code calls are native functions with the calling convention of
Windows, made here; and so are the bridges by which Python, which follows that of Linux, calls the pool.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
import sysconfig
from typing import Any

import llvmlite.binding as llvm

REMOVED_FROM_OS = (
    "uname", "sched_getaffinity", "sched_setaffinity", "getuid", "geteuid", "fork", "register_at_fork", "getloadavg",
    "sysconf", "statvfs", "mkfifo", "killpg", "setsid", "waitid",
)  # fmt: skip
MISSING_MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog")
BRIDGED = {"launch": 8, "drive": 1, "cancel": 2, "work": 3}  # functions of the pool, and how many words they take
HELPERS = """
define win64cc i32 @WaitOnAddress(ptr %word, ptr %expected, i64 %size, i32 %milliseconds) nounwind {
  %value = load i32, ptr %expected
  %wide = zext i32 %value to i64
  %r = call i64 (i64, ...) @syscall(i64 202, ptr %word, i64 128, i64 %wide, ptr null)
  ret i32 1
}
define win64cc void @WakeByAddressSingle(ptr %word) nounwind {
  %r = call i64 (i64, ...) @syscall(i64 202, ptr %word, i64 129, i64 1)
  ret void
}
define win64cc i32 @SwitchToThread() nounwind { %r = call i32 @sched_yield() ret i32 %r }
define win64cc float @fused(float %a, float %b, float %c) nounwind {
  %r = call float @fmaf(float %a, float %b, float %c)
  ret float %r
}
define win64cc float @lower(float %a) nounwind { %r = call float @floorf(float %a) ret float %r }
declare float @fmaf(float, float, float)
declare float @floorf(float)
declare i64 @syscall(i64, ...)
declare i32 @sched_yield()
"""
_engines: list[Any] = []
_memory = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_executable = mmap.PROT_READ | mmap.PROT_EXEC
_libc = ctypes.CDLL(None)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def native(text: str) -> Any:
    """Compile functions for Linux."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(text), machine)
    engine.finalize_object()
    _engines.append(engine)
    return engine.get_function_address


class Kernel32:
    """The calls of memory and processors. `calls` lists their names."""

    calls: list[str] = []  # noqa: RUF012
    allocations: dict[int, int] = {}  # noqa: RUF012
    affinity = 0b1011
    groups = (0,)  # of this process
    cores = ((0, 0b0011), (0, 0b1100))  # the group of each, and its processors there
    # level, associativity, bytes of a line, bytes, kind, number of groups, processors, group
    caches = (
        (1, 8, 64, 48 << 10, 2, 1, 0b0011, 0),
        (2, 16, 64, 2 << 20, 0, 1, 0b1100, 0),
        (2, 8, 64, 1 << 20, 0, 0, 3, 0),
    )

    def VirtualAlloc(self, address: None, size: int, kind: int, protection: int) -> int | None:
        assert (address, kind, protection) == (None, 0x3000, 0x04) and size > 0
        found = _libc.mmap(None, size, *_memory, -1, 0)
        self.allocations[found] = size
        return int(found)

    def VirtualFree(self, address: int, size: int, kind: int) -> int:
        assert (size, kind) == (0, 0x8000)
        _libc.munmap(address, self.allocations.pop(address))
        return 1

    def VirtualProtect(self, address: int, size: int, protection: int, old: Any) -> int:
        assert protection == 0x20 and size <= self.allocations[address]
        old._obj.value = 0x04
        return int(_libc.mprotect(address, size, _executable) == 0)

    def FlushInstructionCache(self, process: int, address: int, size: int) -> int:
        assert process == self.GetCurrentProcess() and size <= self.allocations[address]
        return 1

    def GetCurrentProcess(self) -> int:
        return 2**64 - 1

    def GetProcessAffinityMask(self, process: int, mine: Any, everyone: Any) -> int:
        mine._obj.value, everyone._obj.value = self.affinity, 0b1111
        return 1

    def GetProcessGroupAffinity(self, process: int, count: Any, groups: Any) -> int:
        if not self.groups:
            return 0
        assert count._obj.value >= len(self.groups)
        count._obj.value, groups[: len(self.groups)] = len(self.groups), self.groups
        return 1

    def GetLogicalProcessorInformationEx(self, kind: int, buffer: Any, size: Any) -> int:
        bodies = {
            0: [struct.pack("<BB20xHQH6x", 1, 0, 1, mask, group) for group, mask in self.cores],
            2: [struct.pack("<BBHIi18xHQH6x", *cache) for cache in self.caches],
        }[kind]
        data = b"".join(struct.pack("<II", kind, 8 + len(body)) + body for body in bodies)
        given, size._obj.value = size._obj.value, len(data)
        if buffer is None or given < len(data):
            return 0
        buffer[: len(data)] = data
        return 1


class Call:
    """A function of kernel32 with the types that the caller declares, which must fit its arguments."""

    def __init__(self, name: str) -> None:
        self.name, self.argtypes, self.restype = name, (), ctypes.c_int

    def __call__(self, *args: Any) -> Any:
        Kernel32.calls.append(self.name)
        assert len(args) == len(self.argtypes), f"{self.name} has {len(self.argtypes)} declared arguments"
        for kind, value in zip(self.argtypes, args, strict=True):
            if isinstance(value, int):
                assert kind(value).value == value, f"{self.name}: {value} does not fit {kind}"
        return getattr(Kernel32(), self.name)(*args)


class Library:
    def __init__(self, name: str) -> None:
        address = native(HELPERS)
        functions = {
            "kernel32.dll": {"SwitchToThread": "SwitchToThread"},
            "api-ms-win-core-synch-l1-2-0.dll": {n: n for n in ("WaitOnAddress", "WakeByAddressSingle")},
            "ucrtbase.dll": {"fmaf": "fused", "floorf": "lower"},
            "ntdll.dll": {},
        }[name]
        for windows_name, own_name in functions.items():
            setattr(self, windows_name, ctypes.CFUNCTYPE(None)(address(own_name)))
        if name == "kernel32.dll":
            for call in dir(Kernel32):
                if call[0].isupper():
                    setattr(self, call, Call(call))


def bridge(address: int, words: int) -> int:
    """Return a function of Linux that calls one of Windows."""
    names = ", ".join(f"i64 %a{n}" for n in range(words))
    text = f"""
define i64 @bridge({names}) {{
  %f = inttoptr i64 {address} to ptr
  %r = call win64cc i64 %f({names})
  ret i64 %r
}}"""
    return int(native(text)("bridge"))


def without_posix() -> None:
    """Remove what Windows does not have."""
    for name in REMOVED_FROM_OS:
        if hasattr(os, name):
            delattr(os, name)
    for name in dir(mmap):
        if name.startswith(("PROT_", "MAP_", "MADV_")):
            delattr(mmap, name)
    for name in MISSING_MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    libraries = ctypes.CDLL

    def load(name: str | None, *args: Any, **options: Any) -> Any:
        if name is None:
            raise TypeError("Windows has no library of the process itself")
        return libraries(name, *args, **options)

    ctypes.CDLL = load  # type: ignore[assignment, misc]
    sys.platform = "win32"


def enter() -> None:
    """Make this process look like one on Windows; monotile must not have been imported."""
    assert not any(name.partition(".")[0] == "monotile" for name in sys.modules)
    ctypes.WinDLL = Library  # type: ignore[attr-defined]
    llvm.get_process_triple = lambda: "x86_64-pc-windows-msvc"
    sysconfig.get_platform = lambda: "win-amd64"
    without_posix()
    os.name = "nt"
    from monotile.backends.cpu import host, loader

    host._LIBRARY = "libllvmlite.so"
    # mov r8, rdx; mov ecx, edi; mov edx, esi: arguments as Linux passes them become those of Windows.
    host._WINDOWS = "4989d0 89f9 89f2" + host._WINDOWS
    address = loader.Code.address

    def bridged(self: loader.Code, name: str) -> int:
        found = address(self, name)
        return bridge(found, BRIDGED[name]) if name in BRIDGED else found

    loader.Code.address = bridged  # type: ignore[method-assign]
