"""How a kernel is run on a GPU, apart from what it computes. These are rules by tile size; measured ones come on
top."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...dtypes import float32
from ...ir import Kernel, Op, Value, walk
from .triton.padding import padded_shape

SHARED_BYTES = 227 * 1024  # what one program may use on sm_90
MOST_STAGES = 3


@dataclass(frozen=True)
class Schedule:
    num_warps: int = 4
    num_stages: int = 1  # how many turns of a loop have their loads under way
    warp_specialize: bool = False  # loads and products on warps of their own, in loops that have both
    peel: bool = True  # loops are cut into blocks with masks and without; Triton specialises warps in single loops only
    tensor_descriptors: bool = False  # operands of products come through TMA where their layout allows it
    programs: int = 0  # how many programs share what one more warp fetches for them (gluon.py); 0: none does
    registers: int = 240  # of a thread that computes, where programs share
    laps: bool = False  # a group of programs that share goes on with others (laps.py)
    edge_stages: int = 0  # like num_stages, of loops over blocks with masks, which have few turns; 0: as of others
    most_registers: int = 0  # of a thread, where no programs share: more threads fit then; 0: as many as it wants
    leads: bool = False  # the launch after this one may begin before this one ends
    follows: bool = False  # begins before the launch in front of it ends, and waits for its end before anything else

    @property
    def words(self) -> str:
        """The schedule as a reader wants it."""
        words = [_count(self.num_warps, "warp"), _count(self.num_stages, "stage")]
        words += [f"{self.edge_stages} in masked loops"] if self.edge_stages else []
        if self.programs:
            words[0] = f"{_count(self.programs, 'consumer group')} of {_count(self.num_warps, 'warp')}"
            words.append(f"{self.registers} registers per consumer thread")
            words.append("persistent tiles" if self.laps else "one tile per CTA and consumer")
        words += [f"at most {self.most_registers} registers per thread"] if self.most_registers else []
        words += ["TMA descriptors"] if self.tensor_descriptors else []
        words += ["Triton's warp specialisation"] if self.warp_specialize else []
        words += [] if self.peel else ["loops not peeled"]
        words += ["triggers the dependent launch early"] if self.leads else []
        words += ["waits on the launch before it (programmatic dependent launch)"] if self.follows else []
        return ", ".join(words)

    @property
    def options(self) -> dict[str, Any]:
        """What Triton is told."""
        told = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": False}
        told |= {"launch_pdl": True} if self.follows else {}
        return told | ({"maxnreg": self.most_registers} if self.most_registers else {})


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' if number != 1 else ''}"


def choose(kernel: Kernel, shared_bytes: int = SHARED_BYTES) -> Schedule:
    """Warps by the largest tile of a product or fold, stages by what fits shared memory beside what stays there."""
    largest = max((_elements(v) for op in walk(kernel.body) for v in (*op.results, *op.operands)), default=1)
    products = [op for op in walk(kernel.body) if op.kind == "dot"]
    if not products:
        return Schedule(num_warps=1 if largest <= 256 else 2 if largest <= 512 else 4 if largest <= 8192 else 8)
    warps = 4 if largest <= (32 * 64 if any(map(_in_registers, products)) else 64 * 128) else 8
    return Schedule(warps, _stages(kernel, products, shared_bytes))


def _in_registers(product: Op) -> bool:
    """Whether a product has its operands in registers: the matrix unit takes no float32."""
    return product.operands[0].dtype is float32 and 1 not in (*product.result.shape, *product.operands[0].shape)


def _stages(kernel: Kernel, products: list[Op], shared_bytes: int) -> int:
    """Operands that are loaded in a loop are there once for every stage, others once."""
    operands = {_loaded(v) for op in products for v in op.operands} - {None}
    loops = [op.blocks[0] for op in walk(kernel.body) if op.kind == "for"]
    moving = [sum(_bytes(op.result) for op in walk(body) if op.results and op.results[0] in operands) for body in loops]
    everything = {v: _bytes(v) for v in operands if v is not None}
    inside = {v for body in loops for op in walk(body) for v in op.results}
    staying = sum(size for v, size in everything.items() if v not in inside)
    largest = max(moving, default=0)
    return 1 if largest == 0 else max(1, min(MOST_STAGES, (shared_bytes - staying) // largest))


def _loaded(value: Value) -> Value | None:
    """The load an operand is, seen through transposes."""
    op = value.op
    while op is not None and op.kind == "trans":
        value = op.operands[0]
        op = value.op
    return value if op is not None and op.kind == "load" else None


def _elements(value: Value) -> int:
    total = 1
    for side in padded_shape(value.shape):
        total *= side
    return total


def _bytes(value: Value) -> int:
    return _elements(value) * value.dtype.bytes
