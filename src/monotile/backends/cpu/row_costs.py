"""What rows of attention cost a processor: constants of the time model on a CPU, measured."""

from __future__ import annotations

from dataclasses import dataclass

from ...dtypes import DType
from .target import STREAMED_ROWS


@dataclass(frozen=True)
class RowCosts:
    """The time of a key: `rows + panel_key` for rows in panels, `rows * streamed_row + streamed_key` for streamed rows.
    The unit is one row of a panel."""

    panel_key: float = 1.0
    streamed_row: float = 1.0
    streamed_key: float = 3.0
    most_streamed: int = STREAMED_ROWS  # more rows are compared by the model


USUAL = RowCosts()  # measured on Zen 4, one thread, D 64
# Measured on Zen 5, one thread, D 64 and 128, 8192 keys of 8 heads: its FMA rate is 2.4 times that of Zen 4, memory as
# fast. Panels compute while keys arrive, streamed rows wait for them: 10 float32 rows of D 128 take 3.8 ms streamed and
# 2.5 in a panel of 16; 20 rows 7.0 ms streamed twice and 4.3 in two panels.
MEASURED = {
    "znver5": {
        "float32": RowCosts(7.0, 1.7, 12.0, most_streamed=8),
        "bfloat16": RowCosts(7.0, 1.4, 7.0),
        "float16": RowCosts(7.0, 0.9, 6.0),
    }
}


def row_costs(processor: str, dtype: DType) -> RowCosts:
    """Return the costs of a processor, by its LLVM name."""
    return MEASURED.get(processor, {}).get(dtype.name, USUAL)
