"""Positional arguments of the attention kernel, in its order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monotile.kernels.attention import DENSE


def over_all_keys(
    q: Any, k: Any, v: Any, o: Any, lse: Any = None, *, mask: Any = None, block_map: Any = None, sinks: Any = None,
    scale: float = 0.1, queries: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """A call that writes the output. Rows are packed where `queries`, those of one head, are given."""
    return q, k, v, mask, block_map, sinks, o, lse, None, None, None, *DENSE, scale, queries or q.shape[2], 0, 0


def in_splits(
    q: Any, k: Any, v: Any, parts: Sequence[Any], blocks_per_split: int, *, mask: Any = None, scale: float = 0.1,
    queries: int = 1,
) -> tuple[Any, ...]:  # fmt: skip
    """A call that writes the softmax states (o, m, l) of splits, with rows packed."""
    return q, k, v, mask, None, None, None, None, *parts, *DENSE, scale, queries, 0, blocks_per_split
