"""A model of what a rank sends and computes, to choose a method by. docs/guide/distributed.md has the formulas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .heads import heads_of
from .schedule import RankSchedule, Sight, schedule

LSE_BYTES = 4


class Cost(NamedTuple):
    """What one rank sends in the forward and in the backward pass, and the operations of the forward pass."""

    sent: int  # bytes
    sent_backward: int
    flops: int


@dataclass(frozen=True)
class ContextProblem:
    """A call of attention on a divided sequence."""

    length: int
    ranks: int
    heads: tuple[int, int]  # of queries, of keys and values
    sizes: tuple[int, int]  # of keys, of values
    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    batch: int = 1
    element_bytes: int = 2

    def cost(self, rank: int, method: str = "ring", layout: str = "zigzag") -> Cost:
        """What a rank sends and computes."""
        plan = self._schedule(rank, layout)
        (D, Dv), (Hq, Hkv) = self.sizes, self.heads
        if method == "all_to_all":
            return self._cost_of_heads(plan)
        row = self.batch * Hkv * (D + Dv) * self.element_bytes
        sent, received = (
            sum(f(other).length for other in range(self.ranks) if other != rank) for f in (plan.sent, plan.received)
        )
        flops = 2 * self.batch * Hq * (D + Dv) * plan.pairs()
        return Cost(sent * row, (sent + received) * row, flops)

    def seconds(self, method: str, layout: str, flops_per_s: float, bytes_per_s: float) -> float:
        """The forward pass of the slowest rank: a ring computes while it sends, other methods before or after it."""
        found = []
        for rank in range(self.ranks):
            cost = self.cost(rank, method, layout)
            computing, sending = cost.flops / flops_per_s, cost.sent / bytes_per_s
            found.append(max(computing, sending) if method == "ring" and self.window is None else computing + sending)
        return max(found)

    def _schedule(self, rank: int, layout: str) -> RankSchedule:
        left, right = self.window or (None, None)
        return schedule(Sight(self.length, self.causal, left, right), self.ranks, rank, layout)

    def _cost_of_heads(self, plan: RankSchedule) -> Cost:
        """Rows of this rank with the heads of others go out, rows of others with its own heads come back."""
        (D, Dv), (Hq, Hkv), own = self.sizes, self.heads, plan.own.length
        heads = [heads_of(rank, self.ranks, Hq, Hkv) for rank in range(self.ranks)]
        mine, rest = heads[plan.rank].queries.length, self.length - own
        others = sum(h.width(D, Dv) for rank, h in enumerate(heads) if rank != plan.rank)
        out = own * others * self.element_bytes
        back = rest * mine * (Dv * self.element_bytes + LSE_BYTES)
        gradients = own * (Hq - mine) * Dv + rest * heads[plan.rank].width(D, Dv)
        pairs = sum(self._schedule(rank, "contiguous").pairs() for rank in range(self.ranks))
        flops = 2 * self.batch * mine * (D + Dv) * pairs
        return Cost(self.batch * (out + back), self.batch * gradients * self.element_bytes, flops)
