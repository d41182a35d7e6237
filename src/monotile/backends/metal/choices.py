"""Block sizes of the library's kernels on Apple GPUs: what fits threadgroup memory and registers."""

from __future__ import annotations

import math

from ..choices import (
    KEYS_PER_SPLIT,
    ROW_BLOCKS,
    AttentionChoice,
    AttentionProblem,
    Choice,
    Choices,
    row_block,
)
from ..time_model import RowKind, TimeModel

QUERY_BYTES, STAGE_BYTES = 18 << 10, 8 << 10  # of 32 KiB of threadgroup memory
THREADGROUPS = 40  # that run at once: the GPU cores of a large Mac; not measured
MAX_ROW_ELEMENTS = 2304  # a lane holds a 32nd of the queries and of the accumulators


class MetalChoices(Choices):
    def attention(self, problem: AttentionProblem, keys_per_split: int | None = None) -> AttentionChoice:
        """Few rows are held in registers, and keys and values pass through them. More rows use the matrix units:
        queries take 18 of the 32 KiB of threadgroup memory, accumulators 72 registers of a lane. With 64 rows K and V
        are staged, 8 KiB of each; with fewer rows simdgroups share out the columns and read them in place."""
        fixed = keys_per_split is not None
        if fixed or problem.rows <= ROW_BLOCKS[-1]:
            fitting = tuple(r for r in ROW_BLOCKS if r * problem.head_size <= MAX_ROW_ELEMENTS or r == 1)
            rows = row_block(problem.rows, fitting)
            few = AttentionChoice({"BR": rows, "BK": 64, "packed": True}, why="rows are held in registers")
            return few if fixed else few.divided(problem, KEYS_PER_SPLIT // 64)
        row_bytes = problem.head_size * problem.dtype.bytes
        rows = next((rows for rows in (64, 32, 16) if rows * row_bytes <= QUERY_BYTES), 8)
        staged = next((keys for keys in (64, 32) if keys * row_bytes <= STAGE_BYTES), 16)
        keys = staged if rows == 64 else 64
        why = f"{rows} rows of queries fit {QUERY_BYTES >> 10} KiB of threadgroup memory"
        kind = RowKind(rows, Choice({"BR": rows, "BK": keys}, why=why), block_time=1.0, start=1.0)
        model = TimeModel(THREADGROUPS, merge=1.0, bytes_per_time=math.inf, least=KEYS_PER_SPLIT)
        return model.choose(problem, [kind])
