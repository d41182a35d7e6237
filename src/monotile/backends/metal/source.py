"""The generated source of a kernel, and the facts that a launch needs."""

from __future__ import annotations

from dataclasses import dataclass

from .budget import Budget, live_registers
from .preamble import MetaEntry

INCLUDES = """#include <metal_stdlib>
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
using namespace metal;
"""
UNROLL = '_Pragma("clang loop unroll(full)")'


@dataclass(frozen=True)
class MetalSource:
    """A kernel's text in parts, for launchers that write their own signature. `meta` says what the array `meta` holds;
    `integers` and `floats` are the names of the scalar parameters, each kind in an array of its own."""

    helpers: tuple[str, ...]
    signature: str
    body: str
    name: str
    threads: int
    meta: tuple[MetaEntry, ...]
    integers: tuple[str, ...]
    floats: tuple[str, ...]
    threadgroup_bytes: int

    @property
    def budget(self) -> Budget:
        return Budget(self.threads, live_registers(self.body.split("\n")), self.threadgroup_bytes)

    @property
    def head(self) -> str:
        """The includes and helpers before the signature."""
        return self._head(UNROLL)

    @property
    def source(self) -> str:
        return self._source(UNROLL)

    @property
    def rolled_source(self) -> str:
        """The same without unrolling, for a target whose registers have addresses: it compiles faster."""
        return self._source("")

    def _head(self, unroll: str) -> str:
        return "\n".join([f"{INCLUDES}#define UNROLL {unroll}\n", *self.helpers])

    def _source(self, unroll: str) -> str:
        return f"{self._head(unroll)}\n{self.signature} {{\n{self.body}\n}}\n"
