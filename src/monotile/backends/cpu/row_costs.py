"""What rows of attention cost a processor: constants of the time model on a CPU, measured."""

from __future__ import annotations

from dataclasses import dataclass

from ...dtypes import DType


@dataclass(frozen=True)
class RowCosts:
    """The time of a key: `rows + panel_key` for rows in panels, `rows * streamed_row + streamed_key` for streamed rows.
    The unit is one row of a panel."""

    panel_key: float = 1.0
    streamed_row: float = 1.0
    streamed_key: float = 3.0
    long_runs: int | None = None  # the largest head size whose keys are streamed in runs of 128, not of 64


USUAL = RowCosts()  # measured on Zen 4, one thread, D 64
# Measured on Zen 5, one thread, D 128, 8192 keys of 8 heads: its FMA rate is 2.4 times that of Zen 4, memory as fast.
# 8 float32 rows take 1.9 ms streamed and 2.5 in a panel of 16, 12 rows 2.6 and 2.5; 17 bfloat16 rows 2.1 ms streamed
# twice and 2.6 in two panels, 24 rows 2.7 and 2.7.
MEASURED = {
    "znver5": {
        "float32": RowCosts(6.0, 1.4, 6.3, long_runs=64),
        "bfloat16": RowCosts(5.5, 2.3, -5.0, long_runs=64),
        "float16": RowCosts(7.0, 0.9, 6.0, long_runs=64),
    }
}


def row_costs(processor: str, dtype: DType) -> RowCosts:
    """Return the costs of a processor, by its LLVM name."""
    return MEASURED.get(processor, {}).get(dtype.name, USUAL)
