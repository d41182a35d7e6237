"""Block sizes of the library's kernels on a CPU: what fits its caches."""

from __future__ import annotations

from functools import cache

from ..choices import AttentionProblem, Choice, Choices, row_block

# The least work for which another thread is woken: about twice the cost of waking it.
FLOPS_PER_THREAD = 2_000_000
BYTES_PER_THREAD = 256_000
STRIPS = (8, 4)  # rows of a mask read at a time: as many memory streams as a core follows
TILE_BYTES = 32768


class CpuChoices(Choices):
    def forward(self, problem: AttentionProblem) -> Choice:
        """BQ is the largest block whose queries and accumulators fit in L2: each block of queries streams all of K and
        V once."""
        keys = 64 if problem.head_size > 256 else 128
        for rows in (32, 64, 128):
            if problem.queries <= rows:
                return Choice({"BQ": rows, "BK": keys}, why=f"{problem.queries} queries fit one block of {rows}")
            if 16 * rows * problem.head_size > l2_bytes():
                why = f"queries and accumulators of {rows} rows fill the L2 cache of {l2_bytes() >> 10} KiB"
                return Choice({"BQ": rows, "BK": keys}, why=why)
        return Choice({"BQ": 256, "BK": keys}, why="the largest block: queries and accumulators fit in L2")

    def marks_covered(self, problem: AttentionProblem) -> bool:
        """The map is read in strips; those of an additive mask seldom hide anything, and where positions hide nothing
        either, all keys are seen."""
        return problem.has_additive_mask and not problem.has_positions and not problem.mask_mod

    def decode(self, problem: AttentionProblem, per_split: int) -> Choice:
        """Long runs of keys, if a split is a whole number of them: accumulators are rescaled seldom. 16-bit keys of
        size 129 to 256 are a tenth slower in runs twice as long (measured on Zen 4)."""
        size, width = problem.head_size, problem.dtype.bytes
        run = 64 if 128 < size <= 256 and width < 4 else 128
        if per_split % run:
            run = next((b for b in (64, 32) if b * size * width <= TILE_BYTES), 16)
        return Choice({"BR": row_block(problem.rows), "BK": run}, why=f"splits of {per_split} keys in runs of {run}")

    def merge(self, parts: int, device: str, *, after_decode: bool = False) -> Choice:
        return Choice({"BS": 16 if parts <= 32 else 64, "SPAN": None})

    def mask_blocks(self, BQ: int, BK: int, device: str) -> Choice:
        strip = next((rows for rows in STRIPS if BQ % rows == 0), BQ)
        return Choice({"STRIP": strip, "SPAN": None}, why="strips are read in the order of memory")

    def threads(self, flops: int, bytes_: int) -> int:
        from .pool import default_threads

        return min(default_threads(), max(1, flops // FLOPS_PER_THREAD, bytes_ // BYTES_PER_THREAD))


@cache
def l2_bytes() -> int:
    """Bytes of a core's L2 cache; where the system does not tell, what processors have at least."""
    try:
        with open("/sys/devices/system/cpu/cpu0/cache/index2/size") as file:  # pathlib takes 5 ms to load
            return int(file.read().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return 512 * 1024
