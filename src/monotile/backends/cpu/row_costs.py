"""What rows of attention cost a processor: constants of the time model on a CPU, measured."""

from __future__ import annotations

from dataclasses import dataclass

from ...dtypes import DType
from .target import STREAMED_ROWS


@dataclass(frozen=True)
class RowCosts:
    """The time of a key: `rows + panel_key` for rows in panels, `streamed(rows)` for streamed rows. The unit is one row
    of a panel."""

    panel_key: float = 1.0
    streamed_row: float = 1.0
    streamed_key: float = 3.0
    arrival: float = 0.0  # of a streamed key from memory, which few rows wait for
    most_streamed: int = STREAMED_ROWS  # more rows are compared by the model
    long_runs: int | None = None  # the largest head size whose keys are streamed in runs of 128, not of 64

    def streamed(self, rows: int) -> float:
        return max(self.arrival, rows * self.streamed_row + self.streamed_key)


USUAL = RowCosts()  # measured on Zen 4, one thread, D 64
# Measured on Zen 5, one thread, 8192 keys of 8 heads: its FMA rate is 2.4 times that of Zen 4, memory as fast.
# Milliseconds of D 128, streamed once up to 12 rows, then twice, and in panels:
#   rows      1     4     8     10    12    16    20    24    panel of 16, of 32
#   float32   1.6   2.1   2.1   3.4   2.9   4.0   6.4   7.0   2.5, 4.3
#   bfloat16  0.73  0.73  0.90  1.33  1.50  1.72  2.60  2.96  1.57, 2.67
#   float16   0.65  0.79  1.39  1.76  2.06  2.72  3.38  3.96  2.98, 4.94
MEASURED = {
    "znver5": {
        "float32": RowCosts(6.0, 2.4, 0.0, arrival=13.0, most_streamed=8, long_runs=64),
        "bfloat16": RowCosts(5.5, 1.65, 0.0, arrival=8.0, long_runs=64),
        "float16": RowCosts(7.5, 1.4, 0.0, arrival=5.0, long_runs=64),
    }
}


def row_costs(processor: str, dtype: DType) -> RowCosts:
    """Return the costs of a processor, by its LLVM name."""
    return MEASURED.get(processor, {}).get(dtype.name, USUAL)
