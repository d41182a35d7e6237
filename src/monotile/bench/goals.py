"""How far the kernels are to reach, and the worst row of each kind of work against that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Report = dict[str, Any]
PER_THREAD = 0.925  # of as many times the speed as there are threads


@dataclass(frozen=True)
class Goal:
    """At least so many times the speed of a peer, and such a part of the machine's limit, in every row of a kind."""

    work: str
    holds: Callable[[Report], bool]  # of a row's tags
    peer: str | None = None
    times: float = 0.0
    share: float = 0.0


@dataclass(frozen=True)
class Found:
    """The worst row against a goal, for one measure."""

    work: str
    measure: str
    wanted: float
    worst: float
    row: str
    threads: int

    @property
    def ok(self) -> bool:
        return self.worst >= self.wanted

    @property
    def shown(self) -> tuple[str, str]:
        """The worst and the wanted value."""
        form = "{:.0%}" if self.measure == "of the limit" else "{:.2f} x"
        return form.format(self.worst), form.format(self.wanted)


def _prefill(dtype: str, causal: bool | None = None, low: int = 0, high: int = 512) -> Callable[[Report], bool]:
    """Without masks and the like, for head sizes from `low` to `high`."""

    def holds(t: Report) -> bool:
        plain = t.get("op") == "prefill" and not t["extra"] and t["dtype"] == dtype and low <= t["D"] <= high
        return plain and (causal is None or t["causal"] == causal)

    return holds


def _decode(dtype: str) -> Callable[[Report], bool]:
    return lambda t: t.get("op") == "decode" and t["N"] >= 16384 and t["dtype"] == dtype


def _masked(t: Report) -> bool:
    return t.get("extra") in ("bool mask", "additive mask")


GOALS = (
    Goal("prefill float32, D 64-256", _prefill("float32", False, 64, 256), "torch", 1.15, 0.8),
    Goal("prefill float32, D 64-256, causal", _prefill("float32", True, 64, 256), "torch", 1.3, 0.8),
    Goal("prefill float32, D 512", _prefill("float32", False, 512), "torch", 1.05, 0.78),
    Goal("prefill float32, D 512, causal", _prefill("float32", True, 512), "torch", 1.3, 0.78),
    Goal("prefill bfloat16", _prefill("bfloat16"), "torch", 1.2, 0.75),
    Goal("prefill float16", _prefill("float16"), "torch", 1.6, 0.75),
    Goal("prefill, bool or additive mask", _masked, "torch", 1.2),
    Goal("prefill, nine blocks of ten hidden", lambda t: "hidden" in t.get("extra", ""), "no mask", 5.0),
    Goal("decode float32, N >= 16384", _decode("float32"), "torch", 2.2, 0.75),
    Goal("decode bfloat16, N >= 16384", _decode("bfloat16"), "torch", 3.0, 0.75),
    Goal("decode float16, N >= 16384", _decode("float16"), "torch", 10.0, 0.75),
    Goal("decode, N 128-2048", lambda t: t.get("op") == "decode" and t["N"] <= 2048, "torch", 2.0),
    Goal("merge, mask_blocks", lambda t: t.get("op") in ("merge", "mask_blocks"), "NumPy", 2.0, 0.6),
)


def judge(rows: list[Report]) -> Iterator[Found]:
    """The worst row for every measure of every goal that some row is about."""
    for goal in GOALS:
        about = [row for row in rows if row.get("tags") and goal.holds(row["tags"])]
        peer = [(row["ratios"][goal.peer], row) for row in about if goal.peer in row["ratios"]]
        shares = [(row["limit"]["share"], row) for row in about if goal.share and "limit" in row]
        for name, wanted, found in ((f"against {goal.peer}", goal.times, peer), ("of the limit", goal.share, shares)):
            if found:
                worst, row = min(found, key=lambda pair: pair[0])
                yield Found(goal.work, name, wanted, worst, row["name"], row["threads"])
    yield from _scaling(rows)


def _scaling(rows: list[Report]) -> Iterator[Found]:
    one = {row["name"]: row["times"]["monotile"]["best_s"] for row in rows if row["threads"] == 1}
    gains = [
        (one[row["name"]] / row["times"]["monotile"]["best_s"], row)
        for row in rows
        if row["threads"] > 1 and row["name"] in one and row.get("tags", {}).get("op") == "prefill"
    ]
    if gains:
        gain, row = min(gains, key=lambda pair: pair[0] / pair[1]["threads"])
        wanted = PER_THREAD * row["threads"]
        yield Found(f"prefill, {row['threads']} threads", "against 1 thread", wanted, gain, row["name"], row["threads"])
