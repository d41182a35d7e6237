"""Problems that block sizes and schedules are chosen for."""

from __future__ import annotations

from typing import Any

from monotile.backends.choices import AttentionProblem
from monotile.dtypes import BY_NAME


def problem(head_size: int, dtype: str = "bfloat16", device: str = "cpu", **facts: Any) -> AttentionProblem:
    """A call of one batch and 16 heads with long sequences, but for what is given."""
    usual: dict[str, Any] = {"batch": 1, "query_heads": 16, "kv_heads": 16, "queries": 4096, "keys": 2**20}
    return AttentionProblem(device=device, dtype=BY_NAME[dtype], head_size=head_size, **{**usual, **facts})
