"""How a kernel is run on a GPU, apart from what it computes. The rules here go by tile size; choices.py has measured
schedules, which come before them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...dtypes import float32
from ...ir import Kernel, Op, Value, walk
from ...ir.matchers import untransposed
from .triton.padding import padded_shape

SHARED_BYTES = 227 * 1024  # of one CTA on sm_90
MAX_STAGES = 3


@dataclass(frozen=True)
class Schedule:
    num_warps: int = 4  # of a program, or of each consumer
    num_stages: int = 1  # iterations of a loop whose loads are in flight; slots of a ring in shared memory
    warp_specialize: bool = False  # Triton's own: loads and dots on different warps, in loops that have both
    peel: bool = True  # split loops into masked and unmasked iterations; Triton specialises warps in single loops only
    tensor_descriptors: bool = False  # operands of dots come through TMA where their strides allow it
    consumers: int = 0  # consumer warpgroups of a CTA, which one producer warp feeds (gluon/); 0: plain Triton
    registers: int = 240  # of a consumer's thread
    persistent: bool = False  # a CTA computes several tiles per consumer (gluon/persistent.py)
    edge_stages: int = 0  # num_stages of masked loops, which have few iterations; 0: as of the others
    max_registers: int = 0  # of a thread, on the average of a CTA's: fewer let more run at once; 0: no limit
    triggers_dependents: bool = False  # programmatic dependent launch: the next launch may begin before this one ends
    waits_for_previous: bool = False  # begins before the launch in front of it ends, and first waits for its end

    def describe(self) -> str:
        """Say the schedule in words."""
        words = [count(self.num_warps, "warp"), count(self.num_stages, "stage")]
        words += [f"{self.edge_stages} in masked loops"] if self.edge_stages else []
        if self.consumers:
            words[0] = f"{count(self.consumers, 'consumer')} of {count(self.num_warps, 'warp')}"
            words.append(f"{self.registers} registers per consumer thread")
            words.append("persistent tiles" if self.persistent else "one tile per consumer")
        words += [f"at most {self.max_registers} registers per thread"] if self.max_registers else []
        words += ["TMA descriptors"] if self.tensor_descriptors else []
        words += ["Triton's warp specialisation"] if self.warp_specialize else []
        words += [] if self.peel else ["loops not peeled"]
        words += ["triggers dependent launches early"] if self.triggers_dependents else []
        words += ["waits for the launch before it on the GPU"] if self.waits_for_previous else []
        return ", ".join(words)

    def smaller(self) -> Iterator[Schedule]:
        """Yield this schedule, then ones that need less shared memory: one stage fewer each."""
        yield self
        for stages in range(self.num_stages - 1, 0, -1):
            yield replace(self, num_stages=stages, edge_stages=min(self.edge_stages, stages))

    @property
    def options(self) -> dict[str, Any]:
        """Triton's compile options."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": False}
        options |= {"launch_pdl": True} if self.waits_for_previous else {}
        return options | ({"maxnreg": self.max_registers} if self.max_registers else {})


def count(number: int, noun: str) -> str:
    """Write a number with its noun: "1 warp", "2 warps"."""
    return f"{number} {noun}{'s' if number != 1 else ''}"


def choose(kernel: Kernel, shared_bytes: int = SHARED_BYTES) -> Schedule:
    """Choose warps by the largest tile of a dot or reduction, stages by what fits shared memory beside the operands
    that stay there."""
    largest = max((_elements(v) for op in walk(kernel.body) for v in (*op.results, *op.operands)), default=1)
    dots = [op for op in walk(kernel.body) if op.kind == "dot"]
    if not dots:
        return Schedule(num_warps=1 if largest <= 256 else 2 if largest <= 512 else 4 if largest <= 8192 else 8)
    warps = 4 if largest <= (32 * 64 if any(map(_in_registers, dots)) else 64 * 128) else 8
    return Schedule(warps, _stages(kernel, dots, shared_bytes))


def _in_registers(dot: Op) -> bool:
    """Return True if a dot has its operands in registers: the matrix unit takes no float32."""
    return dot.operands[0].dtype is float32 and 1 not in (*dot.result.shape, *dot.operands[0].shape)


def _stages(kernel: Kernel, dots: list[Op], shared_bytes: int) -> int:
    """Operands that are loaded in a loop take shared memory once for every stage, others once."""
    operands = {_loaded(v) for op in dots for v in op.operands} - {None}
    loops = [op.blocks[0] for op in walk(kernel.body) if op.kind == "for"]
    moving = [sum(_bytes(op.result) for op in walk(body) if op.results and op.results[0] in operands) for body in loops]
    everything = {v: _bytes(v) for v in operands if v is not None}
    inside = {v for body in loops for op in walk(body) for v in op.results}
    staying = sum(size for v, size in everything.items() if v not in inside)
    largest = max(moving, default=0)
    return 1 if largest == 0 else max(1, min(MAX_STAGES, (shared_bytes - staying) // largest))


def _loaded(value: Value) -> Value | None:
    """Return the loaded tile behind an operand, seen through transposes."""
    value, _ = untransposed(value)
    return value if value.op is not None and value.op.kind == "load" else None


def _elements(value: Value) -> int:
    total = 1
    for side in padded_shape(value.shape):
        total *= side
    return total


def _bytes(value: Value) -> int:
    return _elements(value) * value.dtype.bytes
