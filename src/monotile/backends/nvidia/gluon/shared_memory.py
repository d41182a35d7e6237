"""How much shared memory a Gluon module takes: the tiles that it allocates, which are known before it is compiled."""

from __future__ import annotations

from collections import Counter
from math import prod

from ....dtypes import DType
from ....ir import walk
from ..schedule import SHARED_BYTES, Schedule
from ..triton.padding import padded_shape
from .pipeline import Pipeline, load_of, tile_bytes

MARGIN = 256  # for barriers
CONVERSIONS = 5 << 10  # bytes that Triton may add, for conversions between layouts of vectors
ALIGNMENT = 1024  # of a tile in shared memory


def needed(pipeline: Pipeline, schedule: Schedule) -> int:
    """Return the bytes that a module allocates: resident operands, private and scratch tiles and those in which warps
    exchange operands for each consumer, blocks of K and V for each stage; without tiles of results (stores.py), which
    take what is left."""
    return _needed(pipeline, schedule, resident_slots(pipeline, schedule))


def resident_slots(pipeline: Pipeline, schedule: Schedule) -> int:
    """Return the tiles that a consumer has for each resident operand: two, of which one arrives for a persistent
    consumer's next tile while the other is read, where they fit."""
    fit = _needed(pipeline, schedule, 2) <= SHARED_BYTES - CONVERSIONS
    return 2 if schedule.persistent and fit else 1


def _needed(pipeline: Pipeline, schedule: Schedule, slots: int) -> int:
    rings = sum(_aligned(tile_bytes(ring.load)) for ring in pipeline.rings.values())
    private = slots * sum(_aligned(tile_bytes(op)) for op in pipeline.resident) + _scratch(pipeline)
    private += sum(_exchanged(pipeline, schedule))
    return schedule.num_stages * rings + schedule.consumers * private + MARGIN


def _scratch(pipeline: Pipeline) -> int:
    apart = [ring for ring in pipeline.zeroed_rings if not pipeline.holds_private(ring)]
    together = _aligned(pipeline.scratch_bytes) if pipeline.private else 0
    return together + sum(_aligned(tile_bytes(ring.load)) for ring in apart)


def _exchanged(pipeline: Pipeline, schedule: Schedule) -> list[int]:
    """Return the tiles of computed left operands, which warps that share rows trade in shared memory."""
    if pipeline.rows >= 16 * schedule.num_warps:
        return []
    tiles = Counter[tuple[tuple[int, ...], DType]]()
    bodies = [
        body for n in pipeline.loops for body in (pipeline.cases[id(n)].bodies if id(n) in pipeline.cases else [n])
    ]
    for body in bodies:
        lefts = {op.operands[0] for op in walk(body.blocks[0]) if op.kind == "dot" and load_of(op.operands[0]) is None}
        tiles |= Counter((padded_shape(value.shape), value.dtype) for value in lefts)
    return [_aligned(shape[0] * shape[1] * dtype.bytes) * count for (shape, dtype), count in tiles.items()]


def tile_size(block: tuple[int, ...], element: int) -> int:
    """Return the bytes that a tile takes, aligned; `element` are those of an element."""
    return _aligned(prod(block) * element)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
