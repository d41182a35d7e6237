"""A model of a core of M1 to M4 GPUs: the clocks that each of its units needs for what a launch did.

Rates are public measurements of other people (docs/internals/metal_cost.md names them); nothing here was measured. It
ranks schedules of one kernel. It knows no latency, no barrier, no address arithmetic and no occupancy."""

from __future__ import annotations

from .report import Counters

MULTIPLY_ADDS = 128  # of float32 in a clock
EXPONENTIALS = 32
ON_CORE_BYTES = 64  # of threadgroup memory and the first cache together
OFF_CORE_BYTES = 32  # from the caches that cores share
MEMORY_BYTES = 8  # from memory: a core's share
SHUFFLED_BYTES = 256
MATRIX, LANES, REDUCTION_STEPS = 8, 32, 5


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
    }
