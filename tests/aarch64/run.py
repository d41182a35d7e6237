"""Run the code for AArch64 in an emulator, on any Linux machine:

    python tests/aarch64/run.py [--qemu PATH] [tests, and options of pytest]

Needs qemu-aarch64 (Debian: apt-get install qemu-user) and ziglang, which the development packages have. By default the
example kernels and every case of `monotile check` are held against their references, as on the other backends.

Kernels are compiled for `neon`, linked to images as for the disk cache, and launched by launch.c in the emulator. What
a launch reads and writes is copied there and back.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

import pytest  # noqa: E402

import usable  # noqa: E402
from monotile import ir  # noqa: E402
from monotile.backends.base import Program  # noqa: E402
from monotile.backends.cpu import backend, image, jit, loader  # noqa: E402
from monotile.backends.cpu.compiler import to_llvm  # noqa: E402

UNIT = "neon"
DEFAULT = (str(TESTS / "test_examples.py"), f"{TESTS / 'kernels' / 'test_check.py'}::test_registered_cases")
EMULATORS = ("qemu-aarch64", "qemu-aarch64-static")


class EmulatedProgram(Program):
    """A kernel whose launches run in the emulator."""

    def __init__(self, kernel: ir.Kernel, code: bytes, scratch_bytes: int, command: Sequence[str]) -> None:
        self._size, self._imports, self._functions = loader._read(code)
        self._code = code[loader.HEADER.size : loader.HEADER.size + self._size]
        self._scratch_bytes, self._command, self._tensors = scratch_bytes, command, kernel.tensors
        self._written = {op.attrs["tensor"] for op in ir.walk(kernel.body) if op.kind in ir.WRITES}
        self._scalars = "".join("f4x" if dtype.is_float else "q" for _, dtype in kernel.scalars)

    def bind(self, words: Sequence[int], device: str = "cpu") -> Any:
        return list(words)

    def launch(
        self, bound: Any, arrays: Sequence[Any], addresses: Sequence[int], scalars: Sequence[Any], threads: int | None
    ) -> None:
        regions, layouts, at = [], [], 0
        for n, (tensor, address) in enumerate(zip(self._tensors, addresses, strict=True)):
            lengths, strides = bound[at + 1 :][: tensor.rank], bound[at + 1 + tensor.rank :][: tensor.rank]
            steps = [(n - 1) * s for n, s in zip(lengths, strides, strict=True)]
            size = tensor.dtype.bits // 8 or 1
            below = -sum(min(step, 0) for step in steps) * size
            whole = below + (1 + sum(max(step, 0) for step in steps)) * size if all(lengths) else 0
            regions.append((8 * n, below, whole, address - below, tensor in self._written))
            layouts += [*lengths, *strides]
            at += 1 + 2 * tensor.rank
        given = struct.pack("<" + self._scalars, *scalars)
        words = bytes(8 * len(addresses)) + given + struct.pack(f"<{len(layouts)}q", *layouts)
        self._run(words, regions)

    def _run(self, words: bytes, regions: list[tuple[int, int, int, int, bool]]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            job, result = Path(folder) / "job", Path(folder) / "result"
            with job.open("wb") as file:
                functions = self._functions["kernel"], self._functions["programs"]
                sizes = self._size, len(words), self._scratch_bytes
                file.write(struct.pack("<7Q", *sizes, *functions, len(self._imports), len(regions)))
                for name, offset in self._imports.items():
                    file.write(struct.pack("<24sQ", name.encode(), offset))
                file.write(self._code + words)
                for place, below, size, address, _ in regions:
                    file.write(struct.pack("<3Q", place, below, size) + ctypes.string_at(address, size))
            subprocess.run([*self._command, str(job), str(result)], check=True)
            found, at = result.read_bytes(), 0
            for _, _, size, address, written in regions:
                if written:
                    ctypes.memmove(address, found[at : at + size], size)
                at += size


class EmulatedBackend(backend.CpuBackend):
    """The cpu backend for AArch64, whose programs run in the emulator. Nothing is kept in the disk cache."""

    def __init__(self, command: Sequence[str]) -> None:
        super().__init__(UNIT)
        self._command = command

    def why_not(self) -> str | None:
        return None

    def identity(self) -> None:  # type: ignore[override]
        return None

    def compile(self, kernel: ir.Kernel) -> Program:
        lowered = to_llvm(kernel, self.processor)
        code = image.link(jit.compile_object(lowered.text, self.processor))
        return EmulatedProgram(kernel, code, lowered.scratch_bytes, self._command)


def build(folder: str) -> str:
    """Compile launch.c for AArch64."""
    made = str(Path(folder) / "launch")
    source = str(Path(__file__).with_name("launch.c"))
    flags = ["-target", "aarch64-linux-musl", "-static", "-O1", "-o", made]
    subprocess.run([sys.executable, "-m", "ziglang", "cc", *flags, source], check=True)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--qemu", help="the emulator, where it is not on the path")
    parser.add_argument("tests", nargs="*", default=DEFAULT, help="whose backend is the emulated one")
    options, words = parser.parse_known_args()
    qemu = options.qemu or next(filter(None, map(shutil.which, EMULATORS)), None)
    if qemu is None:
        print(f"there is no {' or '.join(EMULATORS)} here; install qemu-user, or name it: --qemu PATH")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        emulated = EmulatedBackend([qemu, build(folder)])
        backend.for_unit = lambda unit: emulated  # type: ignore[assignment]
        usable.IN_MEMORY = (f"cpu:{UNIT}",)
        return int(pytest.main(["-p", "no:cacheprovider", *words, *options.tests]))


if __name__ == "__main__":
    sys.exit(main())
