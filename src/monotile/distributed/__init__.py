"""Attention across devices: one sequence divided among the ranks of a torch.distributed group.

import monotile.distributed as md

q, k, v = (md.shard(x) for x in (q, k, v))  # this rank's part
o = md.attention(q, k, v, causal=True)  # this rank's part of the output
"""

from __future__ import annotations

from .costs import ContextProblem, Cost
from .decoding import decode
from .entry import attention
from .layouts import positions, shard, unshard
from .transport import Traffic, traffic

__all__ = [
    "ContextProblem", "Cost", "Traffic", "attention", "decode", "positions", "shard", "traffic", "unshard",
]  # fmt: skip
