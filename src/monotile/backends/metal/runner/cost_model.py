"""A model of M1 to M5 GPUs: the clocks that each unit of a core needs for what a launch did, and the least time of the
launch on a chip.

Rates and chips are public figures of other people, and assumptions where none was found (docs/internals/metal_cost.md
says which); nothing here was measured. It ranks schedules of one kernel. It knows no latency but that of barriers, no
address arithmetic and no occupancy."""

from __future__ import annotations

from dataclasses import dataclass

from .report import Counters

MULTIPLY_ADDS = 128  # of float32 in a clock
EXPONENTIALS = 32
ON_CORE_BYTES = 64  # of threadgroup memory and the first cache together
OFF_CORE_BYTES = 32  # from the caches that cores share
MEMORY_BYTES = 8  # from memory: a core's share
SHUFFLED_BYTES = 256
BARRIER = 32  # clocks that a threadgroup waits
MATRIX, LANES, REDUCTION_STEPS = 8, 32, 5


@dataclass(frozen=True)
class Chip:
    """The GPU of a chip, with all its cores."""

    cores: int
    gigahertz: float
    gigabytes: float  # of memory in a second

    @property
    def memory_bytes(self) -> float:
        """Bytes from memory in a clock of a core, where all cores read."""
        return self.gigabytes / (self.cores * self.gigahertz)


CHIPS = {
    "M1": Chip(8, 1.278, 68),
    "M1 Pro": Chip(16, 1.296, 200),
    "M1 Max": Chip(32, 1.296, 400),
    "M2": Chip(10, 1.398, 100),
    "M2 Pro": Chip(19, 1.398, 200),
    "M2 Max": Chip(38, 1.398, 400),
    "M3": Chip(10, 1.398, 100),
    "M3 Pro": Chip(18, 1.398, 150),
    "M3 Max": Chip(40, 1.398, 400),
    "M4": Chip(10, 1.470, 120),
    "M4 Pro": Chip(20, 1.470, 273),
    "M4 Max": Chip(40, 1.678, 546),
    "M5": Chip(10, 1.740, 153),
    "M5 Pro": Chip(20, 1.740, 307),
    "M5 Max": Chip(40, 1.740, 614),
}


def core_clocks(counters: Counters) -> dict[str, float]:
    """Return the clocks of one core by unit. The greatest is the least that the launch takes on one core."""
    device = counters.device_bytes_read + counters.device_bytes_written
    shared = counters.threadgroup_bytes_read + counters.threadgroup_bytes_written
    shuffles = counters.shuffles + REDUCTION_STEPS * counters.reductions
    return {
        "matrix products": counters.multiplies * MATRIX**3 / MULTIPLY_ADDS,
        "exponentials": counters.exponentials / EXPONENTIALS,
        "memory on the core": (device + shared) / ON_CORE_BYTES,
        "memory off the core": device / OFF_CORE_BYTES,
        "shuffles": shuffles * LANES * 4 / SHUFFLED_BYTES,
        "barriers": float(counters.barriers * BARRIER),
    }


def least_us(counters: Counters, chip: Chip, threadgroups: int, buffer_bytes: int) -> float:
    """Return the least microseconds of a launch on a chip, beside those of launching it: its threadgroups, all alike,
    are shared out among the cores, and its buffers are read or written once. Units overlap; what is read again comes
    from caches."""
    rounds = -(-threadgroups // chip.cores)  # threadgroups of the busiest core
    clocks = max(core_clocks(counters).values()) * rounds / threadgroups
    accessed = min(counters.device_bytes_read + counters.device_bytes_written, buffer_bytes)
    return max(clocks / chip.gigahertz, accessed / chip.gigabytes) / 1e3
