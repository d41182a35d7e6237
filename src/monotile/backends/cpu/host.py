"""Detect the processor as LLVM describes it: from LLVM the first time, from the disk cache after that.

LLVM's name and features of the processor are part of every key in the disk cache, and asking LLVM for them would load
it. So the answer is cached too, under everything it depends on: CPUID, and the LLVM library.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

from ...runtime import cache as disk
from . import llvm, memory, windows
from .llvm import Host

# The leaves of CPUID that LLVM derives names and features from, as (leaf, subleaf).
_LEAVES = ((0, 0), (1, 0), (7, 0), (7, 1), (0xD, 1), (0x14, 0), (0x19, 0), (0x1E, 1), (0x24, 0))
_EXTENDED_LEAVES = ((0x80000000, 0), (0x80000001, 0), (0x80000008, 0))
# cpuid(leaf, subleaf, four words): push rbx; leaf to eax, subleaf to ecx, words to r8; cpuid; mov [r8], eax;
# mov [r8 + 4], ebx; mov [r8 + 8], ecx; mov [r8 + 12], edx; pop rbx; ret
_CPUID = "53 {arguments} 0fa2 418900 41895804 41894808 4189500c 5b c3"
_LINUX = "89f8 89f1 4989d0"  # mov eax, edi; mov ecx, esi; mov r8, rdx
_WINDOWS = "89c8 89d1"  # mov eax, ecx; mov ecx, edx; the words are in r8
# xgetbv(0): xor ecx, ecx; xgetbv; shl rdx, 32; or rax, rdx; ret
_XGETBV = bytes.fromhex("31c9 0f01d0 48c1e220 4809d0 c3")
_XGETBV_AT = 64
_LIBRARY = "llvmlite.dll" if sys.platform == "win32" else "libllvmlite.so"


# arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) on x86-64
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


@cache
def host() -> Host:
    """Return the processor this process runs on, as far as the system lets the process use it."""
    found = _detected()
    if "+amx-tile" not in found.features.split(",") or _may_use_tiles():
        return found
    return found._replace(features=",".join(f for f in found.features.split(",") if not f.startswith("+amx-")))


def _may_use_tiles() -> bool:
    """Ask Linux for the registers of AMX. A process must ask once, for all of its threads and those it forks; where a
    signal stack is too small for them, or a sandbox forbids the call, it is refused. Other systems are not asked."""
    if not sys.platform.startswith("linux"):
        return False
    words = (ctypes.c_long(n) for n in (_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA))
    return bool(memory.libc().syscall(*words) == 0)


def _detected() -> Host:
    seen, library = processor(), llvmlite_files()
    if seen is None or library is None:
        return llvm.detect_host()
    key = disk.fingerprint(disk.compiler_fingerprint(), seen, library)
    found = _parse(disk.load(key, "host"))
    if found is None:
        found = llvm.detect_host()
        if found.llvmlite in library:  # else it was loaded before its files were replaced
            disk.store_compiled(key, "host", "\n".join(found).encode())
    return found


def processor() -> bytes | None:
    """Identify the processor: equal on two machines only if LLVM finds the same name and features on both; None on
    systems where that is not known."""
    if sys.platform == "win32":
        return _cpuid(_WINDOWS) if windows.is_x86() else None
    machine = os.uname().machine if sys.platform.startswith("linux") else ""
    if machine == "x86_64" and sys.maxsize > 2**32:
        return _cpuid(_LINUX)
    if machine == "aarch64":
        return _arm_lines()
    return None


def llvmlite_files() -> str | None:
    """Identify the llvmlite that an import would load, without loading it: its version and its library's file."""
    specs = (finder.find_spec("llvmlite", None) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    spec = next((s for s in specs if s is not None), None)
    if spec is None or spec.origin is None:
        return None
    folder = os.path.dirname(spec.origin)
    library = os.path.join(folder, "binding", _LIBRARY)
    try:
        found = os.stat(library)
        with open(os.path.join(folder, "_version.py"), encoding="utf-8") as file:
            version = file.read()
    except OSError:
        return None
    return f"{library} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}\n{version}"


def _parse(data: bytes | None) -> Host | None:
    parts = data.decode().split("\n") if data is not None else []
    return Host(*parts) if len(parts) == len(Host._fields) else None


def _cpuid(arguments: str) -> bytes:
    """Return the CPUID leaves that LLVM reads, and the register state that the system saves (XGETBV)."""
    size = memory.PAGE
    base = memory.map_pages(size)
    code = bytes.fromhex(_CPUID.format(arguments=arguments))
    try:
        ctypes.memmove(base, code, len(code))
        ctypes.memmove(base + _XGETBV_AT, _XGETBV, len(_XGETBV))
        memory.make_executable(base, size)
        words = (ctypes.c_uint32 * 4)()
        number = ctypes.c_uint32
        ask = ctypes.CFUNCTYPE(None, number, number, ctypes.c_void_p)(base)
        answers, has_xgetbv = [], 0
        for leaves in (_LEAVES, _EXTENDED_LEAVES):
            last = leaves[0][0]
            for leaf, subleaf in leaves:
                if leaf > last:  # a leaf that does not exist is undefined
                    break
                ask(leaf, subleaf, words)
                eax, ebx, ecx, edx = words
                if leaf == leaves[0][0]:
                    last = eax
                elif leaf == 1:
                    ebx = 0  # the number of the core this thread runs on
                    has_xgetbv = ecx >> 27 & 1
                elif leaf == 0xD:
                    ebx = ecx = edx = 0  # sizes of the state that is saved at the moment
                answers.append((leaf, subleaf, eax, ebx, ecx, edx))
        saved = ctypes.CFUNCTYPE(ctypes.c_uint64)(base + _XGETBV_AT)() if has_xgetbv else 0
    finally:
        memory.unmap_pages(base, size)
    return repr((answers, saved)).encode()


def _arm_lines() -> bytes | None:
    """Return the lines of /proc/cpuinfo, which LLVM reads, without the core numbers, and the system's feature lists."""
    try:
        with open("/proc/cpuinfo", "rb") as file:
            lines = {line for line in file.read().split(b"\n") if not line.startswith(b"processor")}
    except OSError:
        return None
    ask = memory.libc().getauxval
    ask.argtypes, ask.restype = (ctypes.c_ulong,), ctypes.c_ulong
    return b"\n".join(sorted(lines)) + repr([ask(kind) for kind in (16, 26)]).encode()  # AT_HWCAP, AT_HWCAP2
