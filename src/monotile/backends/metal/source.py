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
        return "\n".join([f"{INCLUDES}#define UNROLL {UNROLL}\n", *self.helpers])

    @property
    def source(self) -> str:
        return f"{self.head}\n{self.signature} {{\n{self.body}\n}}\n"

    @property
    def rolled_source(self) -> str:
        """The same without unrolling, for a target whose registers have addresses: it compiles faster, and without
        the macro it needs no preprocessor. Lines have the same numbers."""
        return self.source.replace(f"#define UNROLL {UNROLL}", "").replace("UNROLL ", "")
