"""The cpu backend: passes, lowering, object cache, launch."""

from __future__ import annotations

import functools
import itertools
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ... import ir
from ...runtime import cache
from ..base import Backend, Emitted, Program, picker
from . import loader, machine_code, pool, target
from .choices import CpuChoices
from .llvm import Host

KIND = "cpu"  # of the files in the disk cache
HEADER = struct.Struct("<q?7x")  # of such a file: scratch_bytes, longest_first
AMX_DOTS = "bfloat16 dots of more rows in AMX tiles, blocks of 32 rows x 2 vectors"


class CpuProgram(Program):
    """A loaded kernel. The argument block of a launch is its addresses and scalars, then what `bind` made."""

    def __init__(self, kernel: ir.Kernel, payload: bytes) -> None:
        self.scratch_bytes, self._longest_first = HEADER.unpack_from(payload)
        self._code = machine_code.load(payload[HEADER.size :])
        self._kernel, self._programs = self._code.address("kernel"), self._code.address("programs")
        ranks = [tensor.rank for tensor in kernel.tensors]
        scalars = "".join("f4x" if dtype.is_float else "q" for _, dtype in kernel.scalars)
        self._pack = struct.Struct(f"={len(ranks)}q{scalars}").pack
        addresses = itertools.accumulate([1 + 2 * rank for rank in ranks], initial=0)
        bound = [at + 1 + n for at, rank in zip(addresses, ranks, strict=False) for n in range(2 * rank)]
        self._bound, self._pack_bound = picker(bound), struct.Struct(f"={len(bound)}q").pack

    def bind(self, words: Sequence[int], device: str = "cpu") -> bytes:
        """Return the lengths and strides, which end the argument block."""
        return self._pack_bound(*self._bound(words))

    def launch(
        self, bound: bytes, arrays: Sequence[Any], addresses: Sequence[int], scalars: Sequence[Any], threads: int | None
    ) -> None:
        args = self._pack(*addresses, *scalars) + bound
        pool.run(self._kernel, self._programs, args, self.scratch_bytes, threads, self._longest_first)


class CpuBackend(Backend):
    """The backend for this process's vector unit, or for another one that the machine may be able to run."""

    def __init__(self, unit: str | None = None) -> None:
        self.name = "cpu" if unit is None else f"cpu:{unit}"
        self.choices = CpuChoices(unit)
        self._unit = unit

    @property
    def processor(self) -> Host:
        return target.processor(self._unit)

    def why_not(self) -> str | None:
        if sys.platform == "win32" and not loader.takes_images():
            return (
                "on Windows it needs a Python for x86-64 (AMD64), which Windows on ARM runs as well; install that one"
            )
        return target.why_not_chosen() if self._unit is None else target.why_not(self._unit)

    def accepts(self, device: str) -> bool:
        return device == "cpu"

    def identity(self) -> str:
        return f"{cache.compiler_fingerprint()} {self.processor} {loader.takes_images()}"

    def key(self, kernel: ir.Kernel, schedule: Any = None) -> str:
        return cache.fingerprint(self.identity(), ir.show(kernel))

    def cached(self, key: str, kernel: ir.Kernel, schedule: Any = None) -> Program | None:
        payload = cache.load(key, KIND)
        return None if payload is None else CpuProgram(kernel, payload)

    def compile(self, kernel: ir.Kernel) -> Program:
        key = self.key(kernel)
        found = self.cached(key, kernel)
        if found is not None:
            return found
        from . import jit
        from .compiler import to_llvm

        processor = self.processor
        lowered = to_llvm(kernel, processor)
        header = HEADER.pack(lowered.scratch_bytes, lowered.longest_first)
        payload = header + jit.compile_code(lowered.text, processor)
        cache.store_compiled(key, KIND, payload)
        return CpuProgram(kernel, payload)

    def stages(
        self, kernel: ir.Kernel, schedule: Any = None, device: str | None = None
    ) -> dict[str, Callable[[], str]]:
        from ...passes import pipeline
        from . import jit
        from .compiler import OPTIONS, to_llvm

        processor = self._processor_of(device)
        return {
            "ir": lambda: ir.show(kernel),
            "passes": lambda: pipeline.after_each(kernel, OPTIONS),
            "llvm": lambda: to_llvm(kernel, processor).text,
            "asm": lambda: jit.assembly(to_llvm(kernel, processor).text, processor),
        }

    def explain(self, kernel: ir.Kernel, schedule: Any = None, device: str | None = None) -> list[str]:
        unit = target.target(self._processor_of(device))
        return [
            f"path: LLVM IR for {unit.name}, {unit.lanes} float32 lanes; dots in register blocks of "
            f"{unit.block_rows(unit.vectors)} rows x {unit.vectors} vectors, "
            f"streamed with {target.STREAMED_ROWS} rows or fewer" + (f"; {AMX_DOTS}" if unit.amx else "")
        ]

    def emit(self, kernel: ir.Kernel, schedule: Any = None, device: str | None = None) -> Emitted:
        from .emission import emitted

        return emitted(kernel, self._processor_of(device))

    def _processor_of(self, device: str | None) -> Host:
        """Return the processor to show or emit code for: that of a named vector unit, or the backend's."""
        return self.processor if device in (None, "cpu") else target.host_for(device)


BACKEND = CpuBackend()


@functools.cache
def for_unit(unit: str) -> CpuBackend:
    """Return the backend that compiles for a vector unit, a key of `target.UNITS`."""
    target.host_for(unit)  # raises for an unknown one
    return CpuBackend(unit)
