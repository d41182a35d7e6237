"""Other operating systems, on stand-ins, on Linux. tests/windows/run.py runs tests in Wine."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from monotile.backends.cpu import image, jit, loader, macos, memory, processors, target, windows
from monotile.backends.cpu.backend import CpuBackend
from monotile.backends.cpu.compiler import to_llvm
from monotile.backends.cpu.llvm import Host
from monotile.cli.catalogue import kernels
from monotile.cli.inspection import specialised
from monotile.cli.request import Request
from monotile.errors import InternalError
from monotile.runtime import machine

TESTS = Path(__file__).parents[1]
ON_X86_LINUX = sys.platform.startswith("linux") and os.uname().machine == "x86_64"
needs_x86_linux = pytest.mark.skipif(not ON_X86_LINUX, reason="the stand-in is written for Linux on x86-64")


def lowered(name: str, unit: str, triple: str) -> tuple[str, Host]:
    """A registered kernel as LLVM IR for a processor with a vector unit, on some system."""
    form, _ = specialised(kernels()[name], Request({}, {}, {}), "cpu", None)
    processor = target.host_for(unit)._replace(triple=triple)
    return to_llvm(form, processor).text, processor


def run(script: str, folder: Path, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent / 'src'}{os.pathsep}{TESTS}", **variables}
    environment["MONOTILE_CACHE_DIR"] = str(folder)
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    return result.stdout


# ---- Windows ---------------------------------------------------------------------------------------------------------

# Modules of the standard library that look at the system when they are first used are loaded before it changes.
ENTER = """
import atexit, hashlib, shutil, tempfile, threading, time, zlib
import ml_dtypes, numpy as np
from backends import windows_stand_in
windows_stand_in.enter()
import monotile
from monotile.backends.cpu import host, loader, pool, processors
assert host.host().triple == "x86_64-pc-windows-msvc" and loader.takes_images()
"""
CALLS = """
from monotile.library import check
attention = ["attention float32", "attention float16", "attention bfloat16"]
names = {"cpu": [*attention, "decode_partials", "merge"], "cpu:avx2": attention[:1], "cpu:baseline": attention[1:2]}
for backend in names:
    if monotile.backends.get(backend).why_not() is None:
        for result in check.results([check.cases(name)[0] for name in names[backend]], backend):
            assert result.ok, (backend, result)
            print(backend, result.case.name)
"""
FROM_CACHE = """
from monotile.backends.cpu import llvm
llvm.detect_host = None
assert host.host.__wrapped__() == host.host()
assert host.processor() == host._cpuid(host._LINUX)
"""
THREADS = """
assert processors.available() == {0, 1, 3} and processors.default_threads() == 2
q, k, v = (np.random.default_rng(0).standard_normal((1, 4, 700, 64)).astype(np.float32) for _ in "qkv")
expected = monotile.attention(q, k, v, causal=True, threads=1)
for threads in (2, 3, 5) * 4:
    time.sleep(0.003)  # workers fall asleep
    assert np.array_equal(monotile.attention(q, k, v, causal=True, threads=threads), expected)
assert sum(thread.name.startswith("monotile-") for thread in threading.enumerate()) == 4
calls = windows_stand_in.Kernel32.calls
assert calls.count("VirtualProtect") == calls.count("FlushInstructionCache") > 1
assert {"VirtualAlloc", "GetProcessAffinityMask", "GetLogicalProcessorInformationEx"} <= set(calls)
assert processors.l2_bytes() == 1 << 20
team = pool.Team()
team._grow(1, 1 << 12)
pages = len(windows_stand_in.Kernel32.allocations)
team._grow(1, 1 << 22)
assert len(windows_stand_in.Kernel32.allocations) == pages and "VirtualFree" in calls
"""


@needs_x86_linux
def test_kernels_run_as_on_windows(tmp_path: Path) -> None:
    """Code with the calling convention of Windows, in memory from VirtualAlloc, for each vector unit."""
    found = run(ENTER + CALLS, tmp_path)
    assert found.count("attention") >= 4 and "decode_partials" in found and "merge" in found
    kinds = {path.suffix for path in tmp_path.iterdir()}
    assert {".cpu", ".pool", ".host"} <= kinds
    assert run(ENTER + CALLS + FROM_CACHE, tmp_path) == found


@needs_x86_linux
def test_threads_run_as_on_windows(tmp_path: Path) -> None:
    run(ENTER + THREADS, tmp_path)


@needs_x86_linux
def test_processors_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of processors, cores of two kinds, and what happens if calls fail."""
    from backends.windows_stand_in import Kernel32

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(windows, "kernel32", Kernel32)
    assert processors.available() == {0, 1, 3} and processors.all_processors() == {0, 1, 2, 3}
    assert processors.physical_cores({0, 1}) == 1 and processors.physical_cores({0, 1, 3}) == 2
    assert windows.l2_bytes() == 1 << 20, "that of the first processor"
    monkeypatch.setattr(Kernel32, "cores", ((0, 0b11), (0, 0b100), (1, 0b11)))
    monkeypatch.setattr(Kernel32, "groups", (1,))
    monkeypatch.setattr(Kernel32, "affinity", 0b01)
    assert processors.available() == {64} and processors.all_processors() == {0, 1, 2, 64, 65}
    monkeypatch.setattr(Kernel32, "groups", (0, 1))
    assert processors.available() == processors.all_processors()
    assert processors.physical_cores(processors.all_processors()) == 3
    monkeypatch.setattr(Kernel32, "groups", ())
    assert processors.available() == {0}
    monkeypatch.setattr(Kernel32, "cores", ())
    monkeypatch.setattr(Kernel32, "caches", ())
    assert processors.physical_cores({0, 1}) == 2 and processors.l2_bytes.__wrapped__() == 512 << 10
    monkeypatch.setattr(Kernel32, "affinity", 0)
    assert processors.available() == processors.all_processors() == set(range(7))


def test_name_of_the_processor_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry has it; without it, what Python knows."""
    names = ["Some Processor 9000   ", FileNotFoundError]

    def value(key: object, name: str) -> tuple[str, int]:
        assert name == "ProcessorNameString"
        if not isinstance(found := names.pop(0), str):
            raise found
        return found, 1

    registry = types.SimpleNamespace(
        HKEY_LOCAL_MACHINE=2, OpenKey=lambda key, path: contextlib.nullcontext(), QueryValueEx=value
    )
    monkeypatch.setitem(sys.modules, "winreg", registry)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(platform, "processor", lambda: "AMD64 Family 26")
    ask = machine.processor.__wrapped__
    assert [ask(), ask()] == ["Some Processor 9000", "AMD64 Family 26"]


@pytest.mark.skipif(not (ON_X86_LINUX or sys.platform == "win32"), reason="links an image for x86-64")
def test_a_large_frame_probes_its_stack() -> None:
    """`__chkstk` touches each page of a frame; it is imported from ntdll like any other function."""
    text = """
define void @kernel(ptr %args, i64 %program, ptr %scratch) nounwind {
  %large = alloca [20000 x i8]
  call void @fill(ptr %large)
  ret void
}
define internal void @fill(ptr %place) nounwind noinline { store volatile i8 1, ptr %place ret void }
"""
    processor = target.host_for("baseline")._replace(triple="x86_64-pc-windows-msvc")
    data = jit.compile_code(text, processor)
    _, imports, functions = loader._read(data)
    assert set(imports) == {"__chkstk"} and set(functions) == {"kernel"}
    if sys.platform == "win32":
        code = loader.Code(data)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)(code.address("kernel"))(None, 0, None)


@pytest.mark.parametrize("name", kernels())
@pytest.mark.parametrize("unit", ["avx512", "avx2", "baseline"])
def test_images_for_windows_import_what_it_has(name: str, unit: str) -> None:
    linked = image.link(jit.compile_object(*lowered(name, unit, "x86_64-pc-windows-msvc-elf")))
    _, imports, _ = loader._read(linked)
    assert set(imports) <= ({"fmaf", "floorf", "__chkstk"} if unit == "baseline" else {"__chkstk"})


def test_windows_on_arm_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(loader, "takes_images", lambda: False)
    assert "x86-64" in (CpuBackend().why_not() or "")
    monkeypatch.setattr(loader, "takes_images", lambda: True)
    assert CpuBackend().why_not() is None


def test_refused_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(windows, "map_pages", lambda size: None)
    monkeypatch.setattr(windows, "make_executable", lambda address, size: False)
    with pytest.raises(MemoryError, match="no 4096 bytes"):
        memory.map_pages(4096)
    with pytest.raises(InternalError, match="VirtualProtect"):
        memory.make_executable(0, 4096)


# ---- macOS -----------------------------------------------------------------------------------------------------------

MACOS = """
import mmap, os, sys, threading
import llvmlite.binding, numpy as np
sys.platform = "darwin"
for name in ("sched_getaffinity", "sched_setaffinity"):
    if hasattr(os, name):
        delattr(os, name)
for name in dir(mmap):
    if name.startswith("MADV_HUGE"):
        delattr(mmap, name)
import monotile
from monotile.backends.cpu import loader, memory, processors
memory.libc().sysctlbyname = lambda *words: -1
assert not loader.takes_images() and processors.default_threads() <= os.cpu_count()
q, k, v = (np.random.default_rng(0).standard_normal((1, 4, 300, 64)).astype(np.float32) for _ in "qkv")
one, three = (monotile.attention(q, k, v, causal=True, threads=n) for n in (1, 3))
assert np.array_equal(one, three)
assert abs(monotile.attention(q[:, :, :1], k, k * 0 + 1) - 1).max() < 1e-6
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is written for POSIX")
def test_code_is_linked_by_llvm_as_on_macos(tmp_path: Path) -> None:
    run(MACOS, tmp_path)
    assert all(loader.MAGIC not in path.read_bytes() for path in tmp_path.iterdir())
    run(MACOS, tmp_path)


@pytest.mark.parametrize(
    ("known", "cores", "cache"),
    [
        ({"hw.perflevel0.l2cachesize": 12 << 20, "hw.perflevel0.cpusperl2": 4, "hw.physicalcpu": 8}, 8, 3 << 20),
        ({"hw.perflevel0.l2cachesize": 1 << 20, "hw.l2cachesize": 1 << 21}, 8, 1 << 20),
        ({"hw.l2cachesize": 256 << 10, "hw.physicalcpu": 4}, 4, 256 << 10),
        ({"hw.l2cachesize": 0, "hw.physicalcpu": 99}, 8, 512 << 10),
        ({}, 8, 512 << 10),
    ],
)
def test_processors_of_macos(monkeypatch: pytest.MonkeyPatch, known: dict[str, int], cores: int, cache: int) -> None:
    def sysctlbyname(name: bytes, found: Any, size: Any, new: None, new_size: int) -> int:
        assert (size._obj.value, new, new_size) == (8, None, 0)
        if name.decode() not in known:
            return -1
        size._obj.value = 4  # most of these numbers have 32 bits
        ctypes.memmove(found, known[name.decode()].to_bytes(4, "little"), 4)
        return 0

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(memory, "libc", lambda: types.SimpleNamespace(sysctlbyname=sysctlbyname))
    assert processors.physical_cores(range(8)) == cores
    assert processors.l2_bytes.__wrapped__() == cache
    assert macos.number("hw.none") is None


# ---- objects and imports ---------------------------------------------------------------------------------------------

OBJECTS = {
    "x86_64-pc-windows-msvc": ("avx2", b"\x64\x86"),
    "x86_64-apple-darwin": ("avx2", b"\xcf\xfa\xed\xfe"),
    "arm64-apple-darwin": ("neon", b"\xcf\xfa\xed\xfe"),
}


@pytest.mark.parametrize("name", kernels())
@pytest.mark.parametrize("triple", OBJECTS)
def test_every_kernel_compiles_for_other_systems(name: str, triple: str) -> None:
    unit, magic = OBJECTS[triple]
    assert jit.compile_object(*lowered(name, unit, triple)).startswith(magic)


# What others import is loaded before: some of them look at the system, too.
IMPORTS = """
import asyncio, importlib, pkgutil, subprocess, tempfile, unittest.mock
import llvmlite.binding, ml_dtypes, numpy, rich.progress, rich.table, typer, typer.testing
from backends import windows_stand_in
windows_stand_in.without_posix()
import monotile
optional = ("torch", "triton", "mlx")
names = [module.name for module in pkgutil.walk_packages(monotile.__path__, "monotile.")]
for name in names:
    if name.endswith("__main__"):
        continue
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert error.name.partition(".")[0] in optional, (name, error)
print(len(names))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="nothing of POSIX is here")
def test_every_module_imports_without_posix(tmp_path: Path) -> None:
    """An import needs nothing that only POSIX has; optional packages may be absent."""
    hidden = "import sys; sys.modules.update(dict.fromkeys(('torch', 'triton', 'mlx')))\n"
    assert int(run(hidden + IMPORTS, tmp_path)) > 150
