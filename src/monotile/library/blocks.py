"""Block sizes and splits: what is chosen for a call, never what it computes.

A row's result depends on the block of keys (`BK`) and on where splits begin, so these follow from the head size and
the number of keys alone, not from how many rows or threads there are.
"""

from __future__ import annotations

from functools import cache

from ..errors import BadOption

# What one thread must at least have to do before another is woken: about twice what waking it costs.
FLOPS_PER_THREAD = 2_000_000
BYTES_PER_THREAD = 256_000

FEW_ROWS = 8  # up to so many query positions a call is split over the keys
ROW_BLOCKS = (1, 2, 4, 8)
KEYS_PER_SPLIT = 512  # on a CPU: enough work to outweigh a part's output, small enough to share among cores


# BQ, BK on a GPU, up to a head size: what fits shared memory, and registers without thousands of bytes spilled. Tiles
# are powers of two, so that beyond 512 they are as large as for 1024. float32 has its operands in registers, too.
GPU_BLOCKS = ((128, 128, 128), (256, 128, 64), (512, 64, 64), (576, 32, 32))
GPU_BLOCKS_FLOAT32 = ((64, 64, 64), (128, 32, 32), (256, 32, 16), (576, 16, 16))
METAL_TILE, METAL_STAGE = 18 << 10, 8 << 10
METAL_ROWS = 2304  # a lane holds a 32nd of the queries and of the sums


def attention_blocks(queries: int, head_size: int, element_bytes: int, machine: str) -> tuple[int, int]:
    """BQ, BK of the forward kernel. On a CPU: as many rows as fill the second-level cache with queries and sums, at
    most: fewer blocks of rows are fewer readings of keys and values."""
    if machine == "metal":
        return _metal_blocks(head_size, element_bytes)
    if machine != "cpu":
        table = GPU_BLOCKS if element_bytes < 4 else GPU_BLOCKS_FLOAT32
        return next((rows, keys) for most, rows, keys in table if head_size <= most)
    keys = 64 if head_size > 256 else 128
    for rows in (32, 64, 128):
        if queries <= rows or 16 * rows * head_size > second_level_cache():
            return rows, keys
    return 256, keys


def _metal_blocks(head_size: int, element_bytes: int) -> tuple[int, int]:
    """Queries take 18 of the 32 KiB of threadgroup memory, sums 72 registers of a lane. With 64 rows keys and
    values are staged, 8 KiB of each; with fewer rows simdgroups share out the columns and read them in place."""
    rows = next((r for r in (64, 32, 16) if r * head_size * element_bytes <= METAL_TILE), 8)
    keys = next((k for k in (64, 32) if k * head_size * element_bytes <= METAL_STAGE), 16) if rows == 64 else 64
    return rows, keys


@cache
def second_level_cache() -> int:
    """Bytes of a core's second-level cache; where the system does not tell, what processors have at least."""
    try:
        with open("/sys/devices/system/cpu/cpu0/cache/index2/size") as file:  # pathlib takes 5 ms to load
            return int(file.read().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return 512 * 1024


def merge_block(parts: int, machine: str) -> int:
    """BS of the merge: how many parts of a row are taken at once. Follows from their number and not from the rows', as
    results depend on it. A GPU takes all at once where it can: a second turn waits for memory once more."""
    if machine == "gpu":
        return next((block for block in (16, 32, 64) if parts <= block), 128)
    return 16 if machine == "cpu" and parts <= 32 else 64


def merge_span(machine: str) -> int | None:
    """How many columns of a row one program merges; None for all. GPUs need many programs."""
    return 32 if machine == "gpu" else None


def mask_span(block: int, machine: str) -> int | None:
    """How many columns of a mask one program maps; None for all. GPUs need many programs."""
    return max(1, 1024 // block) * block if machine == "gpu" else None


def mask_strip(block_rows: int, machine: str) -> int:
    """STRIP of the mask's map: on a CPU as many rows as memory streams a core follows at once; a GPU reads whole
    blocks."""
    return next((s for s in (8, 4) if block_rows % s == 0 and machine == "cpu"), block_rows)


def decode_block(head_size: int, element_bytes: int, machine: str, per: int = KEYS_PER_SPLIT) -> int:
    """BK of the decode kernel: a tile of 32 KiB at most, which fits shared memory beside its companion. On Apple GPUs
    keys and values pass through registers only; on a CPU they come in long runs, if the keys of a split are made of
    them, and sums are updated seldom. (16-bit keys of size 256 are a tenth slower in runs twice as long.)"""
    if machine == "metal":
        return 64
    run = 64 if 128 < head_size <= 256 and element_bytes < 4 else 128
    if machine == "cpu" and per % run == 0:
        return run
    return next((b for b in (64, 32) if b * head_size * element_bytes <= 32768), 16)


def row_block(rows: int, head_size: int, machine: str) -> int:
    """BR of the decode kernel."""
    most = [r for r in ROW_BLOCKS if machine != "metal" or r * head_size <= METAL_ROWS or r == 1]
    return next((r for r in most if rows <= r), most[-1])


def enough_threads(flops: int, bytes_: int) -> int:
    """How many threads some work is worth, of those there are. Results never depend on it."""
    from ..backends.cpu.pool import default_threads

    return min(default_threads(), max(1, flops // FLOPS_PER_THREAD, bytes_ // BYTES_PER_THREAD))


def recommended_splits(n_kv: int, n_simds: int, device: str = "cpu") -> int:
    """Into how many parts to cut `n_kv` keys read by `n_simds` rows (query heads of a group times query length).

    `m5_max` is the curve of MLX and MetalTile for that chip. `cpu` was measured: parts of 512 keys."""
    for name, value in (("n_kv", n_kv), ("n_simds", n_simds)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise BadOption(f"{name} must be a whole number from 0 up, found {value!r}")
    if device == "cpu":
        return max(1, -(-n_kv // KEYS_PER_SPLIT))
    if device == "m5_max":
        if n_kv <= 1024 or n_simds <= 4:
            return 64
        return next((s for n, s in ((8192, 128), (32768, 256), (65536, 512)) if n_kv <= n), 1024)
    raise BadOption(
        f"no split curve is known for device {device!r}; known are 'cpu' and 'm5_max': pass splits yourself"
    )
