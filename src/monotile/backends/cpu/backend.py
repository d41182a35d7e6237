"""The cpu backend: passes, lowering, object cache, launch."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from ... import ir
from ...runtime import cache
from ..base import Backend, Emitted, Program
from . import loader, pool
from .choices import CpuChoices
from .host import host


class CpuProgram(Program):
    """A loaded kernel. A bound launch is the argument block with everything in it but addresses and scalars."""

    def __init__(self, kernel: ir.Kernel, payload: bytes) -> None:
        (self.scratch_bytes,) = struct.unpack_from("<q", payload)
        self._code = loader.load(payload[8:])
        self._kernel, self._programs = self._code.address("kernel"), self._code.address("programs")
        self._ranks = [tensor.rank for tensor in kernel.tensors]
        self._scalars = "".join("f4x" if dtype.is_float else "q" for _, dtype in kernel.scalars)

    def bind(self, words: Sequence[int], device: str = "cpu") -> Any:
        """The argument block as a packer and its values: an address and the bytes behind it by turns, then scalars."""
        layout, values, at = "", [], 0
        for rank in self._ranks:
            layout += f"q{16 * rank}s"
            values += [0, struct.pack(f"{2 * rank}q", *words[at + 1 : at + 1 + 2 * rank])]
            at += 1 + 2 * rank
        return struct.Struct("=" + layout + self._scalars).pack, values

    def launch(
        self, bound: Any, arrays: Sequence[Any], addresses: Sequence[int], scalars: Sequence[Any], threads: int | None
    ) -> None:
        pack, values = bound
        values = values.copy()
        values[::2] = addresses
        pool.run(self._kernel, self._programs, pack(*values, *scalars), self.scratch_bytes, threads)


class CpuBackend(Backend):
    name = "cpu"
    choices = CpuChoices()

    def why_not(self) -> str | None:
        return None

    def accepts(self, device: str) -> bool:
        return device == "cpu"

    def identity(self) -> str:
        return f"{cache.compiler_fingerprint()} {host()} {loader.takes_images()}"

    def key(self, kernel: ir.Kernel) -> str:
        return cache.fingerprint(self.identity(), ir.show(kernel))

    def cached(self, key: str, kernel: ir.Kernel) -> Program | None:
        payload = cache.load(key, self.name)
        return None if payload is None else CpuProgram(kernel, payload)

    def compile(self, kernel: ir.Kernel) -> Program:
        key = self.key(kernel)
        found = self.cached(key, kernel)
        if found is not None:
            return found
        from . import jit
        from .compiler import to_llvm

        lowered = to_llvm(kernel)
        payload = struct.pack("<q", lowered.scratch_bytes) + jit.compile_code(lowered.text)
        cache.store_compiled(key, self.name, payload)
        return CpuProgram(kernel, payload)

    def stages(
        self, kernel: ir.Kernel, schedule: Any = None, device: str | None = None
    ) -> dict[str, Callable[[], str]]:
        from ...passes import pipeline
        from . import jit
        from .compiler import OPTIONS, to_llvm

        return {
            "ir": lambda: ir.show(kernel),
            "passes": lambda: pipeline.after_each(kernel, OPTIONS),
            "llvm": lambda: to_llvm(kernel).text,
            "asm": lambda: jit.assembly(to_llvm(kernel).text),
        }

    def emit(self, kernel: ir.Kernel, schedule: Any = None, device: str | None = None) -> Emitted:
        from .emission import emitted

        return emitted(kernel)


BACKEND = CpuBackend()
