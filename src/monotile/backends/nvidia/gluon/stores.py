"""Results that leave by TMA. A consumer writes such a tile to shared memory once, and one thread has it copied from
there. Stores from registers would take an address and an instruction for each pair of elements, which is a third of a
short call: they are slow, and their code is long.

The tile lies where nothing is read any more: in the consumer's scratch tile, or in the slot of an operand that was
loaded before the loops. A persistent consumer's next operands arrive meanwhile, in another slot; where there is no
other, results have memory of their own if that fits."""

from __future__ import annotations

from dataclasses import dataclass

from ....dtypes import int32
from ....ir import Kernel, Op, starts, walk
from ..schedule import SHARED_BYTES, Schedule
from ..triton.descriptors import ALIGNMENT, MAX_DIMENSIONS, MAX_ROWS, padding_is_outside, strides_are_even
from ..triton.padding import padded
from . import shared_memory
from .persistent import ResidentPlace
from .pipeline import Pipeline, tile_block

BYTES = 2  # of an element: those of splits, which have 4, leave from registers
CONSUMER = "CONSUMER"  # its number, in the text


@dataclass(frozen=True)
class StagedStore:
    """A store that goes through shared memory."""

    name: str  # of its descriptor
    tile: str  # that it is written to
    operand: str = ""  # the resident operand in whose slot that is
    allocated: str = ""  # the tiles of all consumers that are allocated for it


def staged_stores(kernel: Kernel, schedule: Schedule, pipeline: Pipeline) -> dict[Op, StagedStore]:
    """Return the stores behind the loops that TMA can copy and that find memory."""
    if pipeline.rows < 16 * schedule.num_warps:
        return {}  # warps share rows: as fast from registers at D 512, and at D 576 that spills less
    ops, place = kernel.body.ops, resident_place(pipeline, schedule)
    behind = ops.index(pipeline.outer or pipeline.loops[-1])
    found, taken = dict[Op, StagedStore](), set[str]()
    free = SHARED_BYTES - shared_memory.CONVERSIONS - shared_memory.needed(pipeline, schedule)
    for op in ops[behind:]:
        if op.kind != "store" or not _can_copy(kernel, op):
            continue
        name, size = pipeline.name(op), schedule.consumers * shared_memory.tile_size(tile_block(op), BYTES)
        scratch = [r for r in pipeline.zeroed_rings if not pipeline.holds_private(r) and _alike(r.load, op)]
        scratches = [f"{ring.name}_scratch.index({pipeline.scratch_tile_index(ring, CONSUMER)})" for ring in scratch]
        scratches = [f"{tile}.reshape({list(tile_block(op))})" for tile in scratches]
        operands = [pipeline.name(load) for load in pipeline.resident if _alike(load, op)]
        operands = operands if place.slots > 1 or not schedule.persistent else []
        if tile := next((one for one in scratches if one not in taken), ""):
            found[op] = StagedStore(name, tile)
            taken.add(tile)
        elif operand := next((one for one in operands if one not in taken), ""):
            found[op] = StagedStore(name, f"{operand}_resident.index({place.index(CONSUMER)})", operand)
            taken.add(operand)
        elif size <= free:
            tiles = f"{name}_stored"
            found[op] = StagedStore(name, f"{tiles}.index({CONSUMER})", allocated=tiles)
            free -= size
    return found


def resident_place(pipeline: Pipeline, schedule: Schedule) -> ResidentPlace:
    return ResidentPlace(shared_memory.resident_slots(pipeline, schedule), schedule.persistent)


def _alike(load: Op, store: Op) -> bool:
    """True if the tiles of a load lie in shared memory as those of a store do."""
    return tile_block(load) == tile_block(store) and load.attrs["tensor"].dtype is store.attrs["tensor"].dtype


def _can_copy(kernel: Kernel, op: Op) -> bool:
    """True if TMA can copy a tile to its tensor, which nothing else accesses: what lies outside is dropped."""
    tensor, extents = op.attrs["tensor"], op.attrs["extents"]
    last, shape = tensor.rank - 1, op.operands[0].shape
    accesses = [other for other in walk(kernel.body) if other.attrs.get("tensor") is tensor]
    if "view" in op.attrs or len(op.operands) != 1 + tensor.rank or any(other.kind != "store" for other in accesses):
        return False
    if not 2 <= tensor.rank <= MAX_DIMENSIONS or tensor.unit != last or tensor.dtype.bytes != BYTES:
        return False
    if len(shape) != 2 or 1 in shape or extents[last] is None or any(v.dtype is not int32 for v in starts(op)):
        return False
    rows, width = (padded(side) for side in shape)
    outside = all(padding_is_outside(op, axis) for axis, extent in enumerate(extents) if extent is not None)
    return outside and strides_are_even(tensor) and rows <= MAX_ROWS and width * tensor.dtype.bytes >= 2 * ALIGNMENT
