"""How the library's kernels run on NVIDIA GPUs: block sizes and schedules in one table, measured on an H200 (sm_90).

On other architectures, and for element types without a row, blocks follow from what fits shared memory and the schedule
from the backend's own rule. What `monotile tune` measured on this machine's GPU comes before both. A choice changes how
fast a call is, never what it computes, but for rounding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ...dtypes import DType
from ...library import blocks as schedule

MEASURED = "sm_90"
# Up to so many keys a forward program's start and end count for more than a slightly slower loop: CTAs are
# persistent. Measured at D 128; at D 64 and 256 they are slower or no faster. With softcap, which is bound by
# special functions, they are faster at any length.
SHORT, SHORT_CAUSAL = 1024, 8192
LEAST_KEYS = 128  # of a split: fewer do not outweigh its output
MANY_KEYS = 512  # of a split: with so many, two programs on a multiprocessor are faster than one twice as long
TWO_FIT = 16384  # bytes of a tile of keys: up to so many, two decode programs fit a multiprocessor


@dataclass(frozen=True)
class Choice:
    """Block sizes by name, and the backend's schedule; None leaves it to the backend's rule."""

    blocks: Mapping[str, int]
    schedule: Any = None


def _tuned(kernel: str, head_size: int, dtype: DType, device: str) -> Choice | None:
    if not device.startswith("cuda"):
        return None
    from . import tuning  # which knows what a choice is

    return tuning.lookup(kernel, head_size, dtype.name, device)


def forward(
    head_size: int, dtype: DType, device: str, *, keys: int = 2**20, causal: bool = False, capped: bool = False,
    masked: bool = False, cleans: bool = False,
) -> Choice:  # fmt: skip
    """The attention kernel. `cleans`: it makes copies of blocks in which it hides rows, which takes room; all kernels
    with a mask do, and some without."""
    tuned = _tuned("attention", head_size, dtype, device) if not cleans else None  # measured without copies
    if tuned is not None:
        return tuned
    # Products of float32 are written out, and with a mask once for each kind of block: the assembler then keeps 32
    # registers and spills thousands of bytes, unless blocks are those of larger heads.
    large = masked and dtype.bytes == 4 and 128 < head_size <= 256
    BQ, BK = schedule.attention_blocks(2**20, 512 if large else head_size, dtype.bytes, "gpu")
    usual = Choice({"BQ": BQ, "BK": BK})
    if architecture(device) != MEASURED or dtype.bytes != 2 or not _shares():
        return usual
    laps = capped or keys <= (SHORT_CAUSAL if causal else SHORT)
    table = _cleaning_table(masked) if cleans else _forward_table(laps)
    return next((choice for most, choice in table if head_size <= most), usual)


def _shares() -> bool:
    """Whether programs can share what they fetch: the table is for those."""
    from .gluon import support

    return support.version_supported()


@cache
def _forward_table(laps: bool) -> tuple[tuple[int, Choice], ...]:
    """Up to a head size."""
    from .schedule import Schedule

    return (
        (64, Choice({"BQ": 64, "BK": 128}, Schedule(4, 3, consumers=3, registers=160))),
        (128, Choice({"BQ": 64, "BK": 128}, Schedule(4, 2, consumers=2, registers=232, persistent=laps))),
        (256, Choice({"BQ": 64, "BK": 64}, Schedule(4, 2, consumers=2))),
        (512, Choice({"BQ": 64, "BK": 64}, Schedule(8, 1, consumers=1))),
    )


@cache
def _cleaning_table(masked: bool) -> tuple[tuple[int, Choice], ...]:
    """The same for kernels that make copies. With a mask's tile three programs of D 64 have too few registers."""
    from .schedule import Schedule

    three, two = Schedule(4, 3, consumers=3, registers=152), Schedule(4, 3, consumers=2, registers=240)
    return (
        (64, Choice({"BQ": 64, "BK": 128}, two if masked else three)),
        (128, Choice({"BQ": 64, "BK": 128}, Schedule(4, 2, consumers=2, registers=240 if masked else 232))),
        (256, Choice({"BQ": 64, "BK": 32}, Schedule(4, 2, consumers=2, registers=232))),
        (512, Choice({"BQ": 64, "BK": 32}, Schedule(8, 1, consumers=1))),
    )


def decode(head_size: int, dtype: DType, device: str, *, whole: bool = False) -> Choice:
    """The decode kernel, but for its rows. `whole`: keys are not split, as there are many heads."""
    tuned = _tuned("decode", head_size, dtype, device)
    if tuned is not None:
        return tuned
    usual = Choice({"BK": schedule.decode_block(head_size, dtype.bytes, "gpu")})
    if architecture(device) != MEASURED or dtype.bytes != 2:
        return usual
    return next((choice for most, choice in _decode_table(whole) if head_size <= most), usual)


@cache
def _decode_table(whole: bool) -> tuple[tuple[int, Choice], ...]:
    """Edges that are not pipelined make the code shorter, which counts where programs are short. They also take less
    room, so that three programs fit a multiprocessor; many long ones are better taken two by two."""
    from .schedule import Schedule

    usual = Schedule(4, 3, edge_stages=0 if whole else 1, triggers_dependents=True)
    return (
        (64, Choice({"BK": 128}, usual)),
        (128, Choice({"BK": 64}, usual)),
        (512, Choice({"BK": 32}, usual)),
    )


def merge_after_decode(device: str) -> Any:
    """The schedule of a merge right behind the decode whose parts it reads; None leaves it to the rule."""
    if architecture(device) != MEASURED:
        return None
    from .schedule import Schedule

    return Schedule(4, waits_for_previous=True)


def mask_map(device: str) -> Any:
    """The schedule of a mask's map: without a limit its edges, which seldom run, take all registers, and only two
    programs fit a multiprocessor."""
    if architecture(device) != MEASURED:
        return None
    from .schedule import Schedule

    return Schedule(4, max_registers=128)


def keys_per_split(keys: int, heads: int, row_bytes: int, block: int, device: str) -> int:
    """So many keys that every multiprocessor has a program, in whole blocks; two programs where two fit and have
    enough to do. `heads`: KV heads of all batches. `row_bytes`: of a key or value."""
    for together in (2, 1) if block * row_bytes <= TWO_FIT else (1,):
        splits = max(1, round(together * cores(device) / max(1, heads)))
        per = _up(_up(keys, splits) // splits, block)
        if per >= MANY_KEYS:
            break
    return max(per, _up(LEAST_KEYS, block))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@cache
def architecture(device: str) -> str:
    """Like "sm_90"; nothing where there is no GPU (Triton's interpreter)."""
    if not device.startswith("cuda"):
        return ""
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def cores(device: str) -> int:
    """Multiprocessors of a GPU; 1 where there is none (Triton's interpreter)."""
    if not device.startswith("cuda"):
        return 1
    from .device import multiprocessors

    return multiprocessors(device)
