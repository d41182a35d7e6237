"""Block sizes of the library's kernels on Apple GPUs: what fits threadgroup memory and registers."""

from __future__ import annotations

from ..choices import ROW_BLOCKS, AttentionProblem, Choice, Choices, row_block

QUERY_BYTES, STAGE_BYTES = 18 << 10, 8 << 10  # of 32 KiB of threadgroup memory
MAX_ROW_ELEMENTS = 2304  # a lane holds a 32nd of the queries and of the accumulators


class MetalChoices(Choices):
    def forward(self, problem: AttentionProblem) -> Choice:
        """Queries take 18 of the 32 KiB of threadgroup memory, accumulators 72 registers of a lane. With 64 rows K and
        V are staged, 8 KiB of each; with fewer rows simdgroups share out the columns and read them in place."""
        row_bytes = problem.head_size * problem.dtype.bytes
        rows = next((rows for rows in (64, 32, 16) if rows * row_bytes <= QUERY_BYTES), 8)
        staged = next((keys for keys in (64, 32) if keys * row_bytes <= STAGE_BYTES), 16)
        why = f"{rows} rows of queries fit {QUERY_BYTES >> 10} KiB of threadgroup memory"
        return Choice({"BQ": rows, "BK": staged if rows == 64 else 64}, why=why)

    def decode(self, problem: AttentionProblem, per_split: int) -> Choice:
        """Keys and values pass through registers only."""
        fitting = tuple(r for r in ROW_BLOCKS if r * problem.head_size <= MAX_ROW_ELEMENTS or r == 1)
        return Choice({"BR": row_block(problem.rows, fitting), "BK": 64}, why="rows are held in registers")
