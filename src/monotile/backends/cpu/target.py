"""Vector units: how many float32 lanes a vector has, and how large a register block of a dot may be.

Code is made for the unit of the processor it runs on, or for the one that MONOTILE_CPU names. `host_for` describes a
lesser processor of the same kind to LLVM, so that one machine can compile, inspect and test what the others get.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache

from ...errors import UnknownBackend
from .host import host
from .llvm import Host

# A dot with at most this many rows streams its tile, on every vector unit: with one vector of the tile and a broadcast,
# as many accumulators fit 16 registers. Up to here that is no slower than a panel of 16 lanes, most of them unused.
# Streamed inner products add in another order than register blocks do, so the limit must not be less than the row
# blocks a caller chooses from for a row whose bits are to be the same in all of them.
STREAMED_ROWS = 12


@dataclass(frozen=True)
class Streaming:
    """How streamed tiles are prefetched (prefetch.py)."""

    in_order: bool = False  # all that is streamed next is requested, in the order of memory
    bytes_ahead: int = 0  # each line of a tile is requested again, into L1, so far before it is read; 0: it is not


@dataclass(frozen=True)
class Target:
    """A vector has `lanes` float32s; a panel has `vectors` of them. A dot holds `heights[n - 1]` x n accumulators in
    registers: more of them than FMAs are in flight, two for each cycle of their latency."""

    name: str
    lanes: int
    rows: int  # that are skipped together
    vectors: int
    heights: tuple[int, ...]
    registers: int  # that hold a vector
    bfloat16_pairs: bool = False  # an instruction that adds two products of bfloat16 to a float32
    amx: bool = False  # registers of 16 x 16 sums, to which an instruction adds products of bfloat16
    amx_bytes: bool = False  # and another one those of int8 and uint8
    streaming: Streaming = Streaming()

    @property
    def has_scalef(self) -> bool:
        """True if an instruction scales whole vectors by powers of two (VSCALEFPS)."""
        return self.name.startswith("avx512")

    @property
    def has_half(self) -> bool:
        """True if an instruction converts vectors of float16."""
        return self.name != "baseline"

    @property
    def accumulators(self) -> int:
        """Return the accumulators of a register block whose operands come from memory, which then is the limit."""
        return self.rows * self.vectors

    def block_rows(self, vectors: int) -> int:
        """Return the rows of a register block of some vectors."""
        return self.heights[min(vectors, len(self.heights)) - 1]

    def max_vectors(self, rows: int) -> int:
        """Return the most vectors a register block of some rows may have: accumulators, one row of vectors and a
        broadcast must fit the registers."""
        return max(1, (self.registers - 1) // (rows + 1))


# By LLVM's name of the processor. Zen 5, one thread, four rows of float32, D 128: 22 GB/s with the next tile requested
# in order, 29 where lines are requested again; reading alone has 43.
_STREAMING = {"znver5": Streaming(in_order=True, bytes_ahead=4096)}
# Accumulators, one row of lane vectors and a broadcast must fit the registers.
_AVX512 = Target("avx512", lanes=16, rows=8, vectors=2, heights=(16, 8), registers=32, bfloat16_pairs=True)
UNITS = {
    unit.name: unit
    for unit in (
        replace(_AVX512, name="avx512-amx", amx=True, amx_bytes=True),
        _AVX512,
        Target("avx2", lanes=8, rows=4, vectors=2, heights=(12, 6, 4), registers=16),
        Target("neon", lanes=4, rows=4, vectors=4, heights=(16, 8, 4, 4), registers=32),
        Target("baseline", lanes=4, rows=2, vectors=2, heights=(4, 2), registers=16),
    )
}
_AMX = ("+avx512bf16", "+amx-tile", "+amx-bf16")
NEEDED = {
    "avx512-amx": ("+avx512f", "+avx512vl", "+avx512bw", "+avx512dq", "+avx512cd", *_AMX),
    "avx512": ("+avx512f", "+avx512vl", "+avx512bw", "+avx512dq", "+avx512cd"),
    "avx2": ("+avx2", "+fma", "+f16c", "+bmi2"),
}
_X86 = "x86_64-unknown-linux-gnu"
# The least processor with each unit: triple, LLVM's name for it, features. `host_for` prefers this machine's own.
_PROCESSORS = {
    "avx512-amx": (_X86, "x86-64-v4", "+avx512f,+avx512vl,+avx512bw,+avx512bf16,+amx-tile,+amx-bf16,+amx-int8"),
    "avx512": (_X86, "x86-64-v4", "+avx512f,+avx512vl,+avx512bw,+avx512bf16"),
    "avx2": (_X86, "x86-64-v3", "+avx2,+fma"),
    "neon": ("aarch64-unknown-linux-gnu", "generic", "+neon"),
    "baseline": (_X86, "x86-64", ""),
}


def target(host: Host) -> Target:
    """Return the vector unit of a processor."""
    features = host.features.split(",")
    if "+avx512f" in features and "+avx512vl" in features and "+avx512bw" in features:
        if all(feature in features for feature in _AMX):
            return replace(UNITS["avx512-amx"], amx_bytes="+amx-int8" in features)
        streaming = _STREAMING.get(host.cpu, Streaming())
        return replace(_AVX512, bfloat16_pairs="+avx512bf16" in features, streaming=streaming)
    if "+avx2" in features and "+fma" in features:
        return UNITS["avx2"]
    return UNITS["neon" if host.triple.startswith(("aarch64", "arm64")) else "baseline"]


def host_for(unit: str) -> Host:
    """Describe a processor whose vector unit is the named one: this machine's own, or the least that has it."""
    if unit not in UNITS:
        raise UnknownBackend(str(why_not(unit)))
    here = host()
    if target(here).name == unit:
        return here
    triple, cpu, features = _PROCESSORS[unit]
    same = _is_x86(here.triple) == _is_x86(triple)
    return here._replace(triple=here.triple if same else triple, cpu=cpu, features=features)


def why_not(unit: str) -> str | None:
    """Say why this machine cannot run code for a vector unit, and which ones it has; None if it can."""
    if unit not in UNITS:
        shown = ", ".join(name for name in UNITS if name not in runnable())
        also = f" (and shows the text of {shown})" if shown else ""
        return f"there is no vector unit {unit!r}; this machine has {', '.join(runnable())}{also}"
    lacks = _lacks(unit)
    return None if lacks is None else f"{lacks}; this machine has {', '.join(runnable())}"


def runnable() -> list[str]:
    """Return the vector units whose code this machine can run, its own first."""
    return [unit for unit in UNITS if _lacks(unit) is None]


@cache
def chosen() -> str | None:
    """Return MONOTILE_CPU, the vector unit that this process compiles for; None for the processor's own. Read once."""
    return os.environ.get("MONOTILE_CPU", "").strip() or None


def why_not_chosen() -> str | None:
    """Say why this machine cannot run code for the vector unit in MONOTILE_CPU; None if it can."""
    unit = chosen()
    reason = None if unit is None else why_not(unit)
    return None if reason is None else f"MONOTILE_CPU is {unit!r}: {reason}; unset it to use {target(host()).name}"


def processor(unit: str | None = None) -> Host:
    """Return the processor to compile for: that of a vector unit, or of MONOTILE_CPU, or this machine's own."""
    if unit is not None:
        return host_for(unit)
    reason, named = why_not_chosen(), chosen()
    if reason is not None:
        raise UnknownBackend(reason)
    return host() if named is None else host_for(named)


def _lacks(unit: str) -> str | None:
    here, other = host(), host_for(unit)
    if other == here:
        return None
    if _is_x86(here.triple) != _is_x86(other.triple):
        return f"the vector unit {unit!r} is not one of {here.triple}; only its text can be shown"
    missing = [f for f in NEEDED.get(unit, ()) if f not in here.features.split(",")]
    return f"this processor has no {', '.join(f[1:] for f in missing)}" if missing else None


def _is_x86(triple: str) -> bool:
    return triple.startswith(("x86_64", "i686", "amd64"))
