"""Images of compiled code: linked once, mapped without LLVM, never writable and executable, unmapped when done with."""

from __future__ import annotations

import ctypes
import gc
import os
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest

from monotile.backends.cpu import host, image, jit, loader, machine_code, memory, pool, windows
from monotile.backends.cpu import llvm as cpu_llvm
from monotile.errors import InternalError
from monotile.kernels import examples
from monotile.launch.kernel import Kernel
from monotile.runtime import cache

pytestmark = pytest.mark.skipif(not loader.takes_images(), reason="LLVM links object files here")

SOURCES = str(Path(loader.__file__).parents[3])
ARM = "aarch64-unknown-linux-gnu"
# A constant from .rodata, a call inside, and calls of imports: math functions and the C library.
TEXT = """
@table = private unnamed_addr constant [4 x float] [float 1.0, float 2.0, float 4.0, float 8.0]
declare float @fmodf(float, float)
declare i64 @labs(i64)
define internal float @pick(i64 %i) noinline nounwind {
  %p = getelementptr [4 x float], ptr @table, i64 0, i64 %i
  %x = load float, ptr %p
  ret float %x
}
define float @inside(i64 %i) nounwind {
  %x = call float @pick(i64 %i)
  %y = fadd float %x, 0x3FB99999A0000000
  ret float %y
}
define float @outside(float %x, i64 %i) nounwind {
  %n = call i64 @labs(i64 %i)
  %y = call float @pick(i64 %n)
  %z = call float @fmodf(float %x, float %y)
  ret float %z
}
"""
VARIABLE = "@counter = global i64 7\ndefine i64 @f() nounwind { %x = load i64, ptr @counter ret i64 %x }"
IMPORTED_DATA = "@environ = external global ptr\ndefine ptr @f() nounwind { %x = load ptr, ptr @environ ret ptr %x }"


def object_for(triple: str, text: str, cpu: str = "") -> bytes:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=2, reloc="pic", codemodel="small")
    module = llvm.parse_assembly(text)
    module.triple, module.data_layout = triple, str(machine.target_data)
    return bytes(machine.emit_object(module))


class MemoryInformation(ctypes.Structure):
    """MEMORY_BASIC_INFORMATION of Windows."""

    _fields_ = (
        ("base", ctypes.c_size_t),
        ("_allocation", ctypes.c_size_t * 2),
        ("size", ctypes.c_size_t),
        ("state", ctypes.c_uint32),
        ("protection", ctypes.c_uint32),
        ("_kind", ctypes.c_size_t),
    )


def mapping_of(address: int) -> str | None:
    """The permissions of the mapping this address lies in."""
    if sys.platform == "win32":
        found = MemoryInformation()
        query = windows.kernel32().VirtualQuery
        query.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        assert query(address, ctypes.byref(found), ctypes.sizeof(found)) == ctypes.sizeof(found) == 48
        return {0: None, 0x04: "rw-p", 0x20: "r-xp"}[found.protection]
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(number, 16) for number in line.split()[0].split("-"))
        if low <= address < high:
            return line.split()[1]
    return None


def function(code: Any, name: str, result: Any, *arguments: Any) -> Any:
    return ctypes.CFUNCTYPE(result, *arguments)(code.address(name))


def test_image_runs() -> None:
    data = jit.compile_code(TEXT)
    assert data.startswith(loader.MAGIC)
    code = machine_code.load(data)
    inside = function(code, "inside", ctypes.c_float, ctypes.c_int64)
    outside = function(code, "outside", ctypes.c_float, ctypes.c_float, ctypes.c_int64)
    assert [inside(i) for i in range(4)] == pytest.approx([1.1, 2.1, 4.1, 8.1])
    assert [outside(11.0, -i) for i in range(4)] == [0.0, 1.0, 3.0, 3.0]
    with pytest.raises(InternalError, match="no 'pick'"):
        code.address("pick")


def test_never_writable_and_executable(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    protect = memory.make_executable

    def watched(address: int, size: int) -> None:
        seen.append(mapping_of(address))
        protect(address, size)
        seen.append(mapping_of(address))

    monkeypatch.setattr(memory, "make_executable", watched)
    code = machine_code.load(jit.compile_code(TEXT))
    assert seen == ["rw-p", "r-xp"]
    assert mapping_of(code.address("outside")) == "r-xp"


def executable_bytes() -> int:
    ranges = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if " r-xp " in line]
    return sum(int(high, 16) - int(low, 16) for low, high in (text.split("-") for text in ranges))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no list of mappings")
def test_memory_is_given_back() -> None:
    data = jit.compile_code(TEXT)
    gc.collect()  # kernels of other tests
    before = executable_bytes()
    codes = [machine_code.load(data) for _ in range(100)]
    assert executable_bytes() == before + 100 * os.sysconf("SC_PAGE_SIZE")
    codes.clear()
    assert executable_bytes() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_images_after_fork() -> None:
    data = jit.compile_code(TEXT)
    old = machine_code.load(data)
    child = os.fork()
    if child == 0:
        try:
            both = [function(c, "inside", ctypes.c_float, ctypes.c_int64)(1) for c in (old, machine_code.load(data))]
            os._exit(0 if both[0] == both[1] != 0 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("text", [VARIABLE] if sys.platform == "win32" else [VARIABLE, IMPORTED_DATA])
def test_what_images_do_not_have_is_linked_by_llvm(text: str) -> None:
    with pytest.raises(image.Unlinkable):
        image.link(jit.compile_object(text))
    data = jit.compile_code(text)
    assert not data.startswith(loader.MAGIC)
    expected = 7 if text == VARIABLE else ctypes.c_void_p.in_dll(memory.libc(), "environ").value
    assert function(machine_code.load(data), "f", ctypes.c_int64)() == expected


def test_import_that_does_not_exist() -> None:
    with pytest.raises(InternalError, match="no_such_function"):
        machine_code.load(jit.compile_code(TEXT.replace("@labs", "@no_such_function")))


@pytest.mark.parametrize("triple", ["x86_64-unknown-linux-gnu", ARM])
def test_every_truncation_is_refused(triple: str) -> None:
    whole = object_for(triple, TEXT)
    assert image.link(whole).startswith(loader.MAGIC)
    for length in range(0, len(whole) - 1, 3):
        with pytest.raises(image.Unlinkable):
            image.link(whole[:length])
    data = jit.compile_code(TEXT)
    for length in range(len(loader.MAGIC), len(data)):
        with pytest.raises(InternalError):
            machine_code.load(data[:length])
    with pytest.raises(InternalError):
        machine_code.load(data + b"x 0\n")


@pytest.mark.parametrize("triple", ["x86_64-unknown-linux-gnu", ARM])
def test_every_unknown_relocation_is_refused(triple: str) -> None:
    """Each relocation of an object is made another kind."""
    whole = object_for(triple, TEXT)
    _, sections = image._header(whole)
    (table,) = [s for s in sections if s.name == ".rela.text"]
    known = {2, 4} if triple != ARM else {275, 277, 278, 282, 283, 284, 285, 286, 299}
    for at in range(table.offset, table.offset + table.size, 24):
        for kind in set(range(1, 600)) - known:
            damaged = bytearray(whole)
            struct.pack_into("<I", damaged, at + 8, kind)
            with pytest.raises(image.Unlinkable, match=f"relocation {kind} "):
                image.link(bytes(damaged))


def test_references_that_are_too_far() -> None:
    code = bytearray(8)
    for kind in (2, 4):
        image._patch_x86(code, kind, 0, 2**31 - 1)
        with pytest.raises(image.Unlinkable, match="too far"):
            image._patch_x86(code, kind, 0, 2**31)
    for kind, reach in ((283, 2**27), (275, 2**32)):
        image._patch_arm(code, kind, 0, reach - 4)
        image._patch_arm(code, kind, 0, -reach)
        with pytest.raises(image.Unlinkable, match="too far"):
            image._patch_arm(code, kind, 0, reach)
    with pytest.raises(image.Unlinkable, match="not aligned"):
        image._patch_arm(code, 299, 0, 8)


def test_aarch64_references_arrive() -> None:
    """Follows the instructions of a linked image from each call and page address to where they lead."""
    data = image.link(object_for(ARM, TEXT))
    size, imports, functions = loader._read(data)
    code = data[loader.HEADER.size : loader.HEADER.size + size]
    words = [int.from_bytes(code[n : n + 4], "little") for n in range(0, size - size % 4, 4)]
    assert set(imports) == {"labs", "fmodf"}
    reached = [_stub_word(words, n) for n in range(len(words)) if words[n] >> 26 == 0b100101]
    assert {word for word in reached if word is not None} == set(imports.values())
    tables = [_page_target(words, n) for n in range(len(words)) if words[n] & 0x9F000000 == 0x90000000]
    assert struct.pack("<4f", 1, 2, 4, 8) in {code[t : t + 16] for t in tables}
    assert all(code[place : place + 4] != bytes(4) for place in functions.values())


def _stub_word(words: list[int], n: int) -> int | None:
    """Where the stub that this `bl` calls finds its address; None for a function inside."""
    distance = words[n] & 0x3FFFFFF
    to = n + (distance - (1 << 26) if distance >> 25 else distance)
    return _page_target(words, to) if words[to] & 0x9F00001F == 0x90000010 and words[to + 2] == 0xD61F0200 else None


def _page_target(words: list[int], n: int) -> int:
    """What an `adrp` and the `add` or `ldr` after it refer to."""
    pages = (words[n] >> 29 & 3) | (words[n] >> 5 & 0x7FFFF) << 2
    pages = pages - (1 << 21) if pages >> 20 else pages
    register, page = words[n] & 31, (n * 4 >> 12) + pages << 12
    low = next(
        w for w in words[n + 1 :] if w >> 5 & 31 == register and w & 0x1F000000 in (0x11000000, 0x19000000, 0x1D000000)
    )
    is_add = low & 0x1F000000 == 0x11000000
    scale = 0 if is_add else low >> 30 | (4 if low >> 23 & 1 and low >> 26 & 1 else 0)
    return page + ((low >> 10 & 0xFFF) << scale)


# ---- the processor ---------------------------------------------------------------------------------------------------


def test_host_is_what_llvm_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOTILE_CACHE_DIR", str(tmp_path))
    asked, found = [], cpu_llvm.detect_host()
    monkeypatch.setattr(cpu_llvm, "detect_host", lambda: asked.append(1) or found)
    ask = host.host.__wrapped__
    assert ask() == ask() == found
    assert len(asked) == 1
    for path in tmp_path.glob("*.host"):
        path.write_bytes(path.read_bytes()[:-1])
    assert ask() == found
    assert len(asked) == 2


@pytest.mark.parametrize("change", ["processor", "llvmlite_files"])
def test_another_processor_or_llvm_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """A cache directory may be shared by different machines."""
    monkeypatch.setenv("MONOTILE_CACHE_DIR", str(tmp_path))
    ask = host.host.__wrapped__
    here = ask()
    other = here._replace(cpu="another", features="")
    monkeypatch.setattr(cpu_llvm, "detect_host", lambda: other)
    assert ask() == here
    old = getattr(host, change)()
    monkeypatch.setattr(host, change, lambda: old + type(old)(*((b"x",) if isinstance(old, bytes) else ("x",))))
    assert ask() == other


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not say where threads may run")
def test_every_processor_of_the_machine_says_the_same() -> None:
    before = os.sched_getaffinity(0)
    try:
        seen = set()
        for number in before:
            os.sched_setaffinity(0, {number})
            seen.add(host.processor())
    finally:
        os.sched_setaffinity(0, before)
    assert len(seen) == 1


# ---- from the disk cache ---------------------------------------------------------------------------------------------

CALL = """
import sys
import numpy as np
from monotile.kernels import examples
a = np.arange(12, dtype=np.float32).reshape(3, 4)
c = np.full((3, 3), np.nan, np.float32)
examples.matmul(a, a.T.copy(), c)
assert np.array_equal(c, a @ a.T), c
print("llvmlite" in sys.modules)
"""


ATTENTION = """
import sys
import numpy as np
import monotile
q, k, v = (np.ones((1, 4, 200, 64), np.float32) for _ in "qkv")
assert abs(monotile.attention(q, k, v, causal=True) - 1).max() < 1e-5
print("llvmlite" in sys.modules)
"""


def call(folder: Path, script: str = CALL) -> str:
    environment = {**os.environ, "PYTHONPATH": SOURCES, "MONOTILE_CACHE_DIR": str(folder)}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout.strip()


def test_cached_kernel_needs_no_llvm(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    assert [call(folder), call(folder)] == ["True", "False"]
    files = {path.suffix: path for path in folder.iterdir()}
    assert set(files) == {".cpu", ".host", ".pool", ".source_key", ".sources"}
    assert all(loader.MAGIC in files[kind].read_bytes() for kind in (".cpu", ".pool"))
    for path in files.values():
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        call(folder)
        assert path.read_bytes() == whole, f"{path.suffix} is made again"
    assert call(folder) == "False"


def test_attention_from_the_cache_needs_no_llvm(tmp_path: Path) -> None:
    assert [call(tmp_path / "kernels", ATTENTION) for _ in "12"] == ["True", "False"]


def test_many_processes_start_at_once(tmp_path: Path) -> None:
    """All of them compile, or find what another has kept; and all are right."""
    with ThreadPoolExecutor() as starter:
        assert set(starter.map(call, [tmp_path / "kernels"] * 6)) <= {"True", "False"}
    assert call(tmp_path / "kernels") == "False"
    assert len(list((tmp_path / "kernels").iterdir())) == 5


def test_freed_kernel_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped: list[loader.Code] = []
    freed: set[int] = set()
    load, unmap = machine_code.load, memory.unmap_pages
    monkeypatch.setattr(machine_code, "load", lambda data: mapped.append(load(data)) or mapped[-1])
    monkeypatch.setattr(memory, "unmap_pages", lambda address, size: (freed.add(address), unmap(address, size)))
    kernel = Kernel(examples.copy.function)
    kernel(np.ones((3, 5), np.float32), np.zeros((3, 5), np.float32))
    base = mapped[0]._base  # the pool may have come after it
    mapped.clear()
    freed.clear()  # other pages may have lain there before
    assert mapping_of(base) == "r-xp"
    del kernel
    gc.collect()
    assert base in freed


def test_pool_is_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOTILE_CACHE_DIR", str(tmp_path))
    assert pool.native_code().startswith(loader.MAGIC)
    monkeypatch.setattr(jit, "compile_code", lambda text: pytest.fail("compiled again"))
    assert cache.load("absent", "pool") is None
    assert pool.native_code().startswith(loader.MAGIC)
