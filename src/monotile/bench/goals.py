"""Performance goals on a CPU, and the worst row of each kind of work against them.

`Measure`, `Goal` and `WorstRow` serve the GPU's goals too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

Report = dict[str, Any]
Tags = dict[str, Any]
PER_THREAD = 0.925  # wanted speedup on n threads: 0.925 n


@dataclass(frozen=True)
class Measure:
    """A number read from a row of a report, and its format."""

    name: str
    of: Callable[[Report], float | None]  # None where the row lacks it
    form: str = "{:.2f} x"
    scale: float = 1.0
    at_most: bool = False  # smaller is better

    def show(self, value: float) -> str:
        return self.form.format(value * self.scale)


@dataclass(frozen=True)
class Goal:
    """The value that a measure must reach in every row whose tags match."""

    work: str
    matches: Callable[[Tags], bool]
    measure: Measure
    wanted: float


@dataclass(frozen=True)
class WorstRow:
    """The row that is furthest from a goal."""

    goal: Goal
    value: float
    row: str
    threads: int

    @property
    def ok(self) -> bool:
        return self.value <= self.goal.wanted if self.goal.measure.at_most else self.value >= self.goal.wanted

    @property
    def shown(self) -> tuple[str, str]:
        """The row's value and the wanted one, formatted."""
        return self.goal.measure.show(self.value), self.goal.measure.show(self.goal.wanted)


def worst_rows(goals: Iterable[Goal], rows: list[Report]) -> Iterator[WorstRow]:
    """Yield the worst row for every goal that some row matches."""
    for goal in goals:
        matching = [row for row in rows if row.get("tags") and goal.matches(row["tags"])]
        values = [(value, row) for row in matching if (value := goal.measure.of(row)) is not None]
        if values:
            worst, row = (max if goal.measure.at_most else min)(values, key=lambda pair: pair[0])
            yield WorstRow(goal, worst, row["name"], row["threads"])


# ---- on a CPU --------------------------------------------------------------------------------------------------------


def _against(peer: str) -> Measure:
    return Measure(f"against {peer}", lambda row: row["ratios"].get(peer))


LIMIT = Measure("of the limit", lambda row: row["limit"]["share"] if "limit" in row else None, "{:.0%}")
CLIFF = Measure("one more query", lambda row: row.get("worst_step", {}).get("cliff"), at_most=True)
SLICE = Measure(
    "time over the slice's", lambda row: 1 / row["ratios"]["slice"] if "slice" in row["ratios"] else None, at_most=True
)
SPEEDUP = Measure("against 1 thread", lambda row: None)  # of two rows: see `_worst_speedup`


def _prefill(dtype: str, causal: bool | None = None, low: int = 0, high: int = 512) -> Callable[[Tags], bool]:
    """Match prefill without masks, windows or sinks, for head sizes from `low` to `high`."""

    def matches(t: Tags) -> bool:
        plain = t.get("op") == "prefill" and not t["extra"] and t["dtype"] == dtype and low <= t["D"] <= high
        return plain and (causal is None or t["causal"] == causal)

    return matches


def _decode(dtype: str, low: int, high: int) -> Callable[[Tags], bool]:
    """Match decode of long caches for head sizes from `low` to `high`."""

    def matches(t: Tags) -> bool:
        plain = t.get("op") == "decode" and not t["extra"] and t["dtype"] == dtype
        return plain and t["N"] >= 8192 and low <= t["D"] <= high

    return matches


def _short_decode(t: Tags) -> bool:
    return t.get("op") == "decode" and t["N"] <= 2048


def _extend(t: Tags) -> bool:
    return t.get("op") == "extend" and not t["extra"]


def _gradients(passes: str, dtype: str, causal: bool | None = None) -> Callable[[Tags], bool]:
    """Match the backward pass, alone or after the forward pass."""

    def matches(t: Tags) -> bool:
        return t.get("op") == passes and t["dtype"] == dtype and (causal is None or t["causal"] == causal)

    return matches


def _masked(t: Tags) -> bool:
    return t.get("extra") in ("bool mask", "additive mask")


def _goals(
    work: str, matches: Callable[[Tags], bool], peer: str, times: float, share: float | None = None
) -> tuple[Goal, ...]:
    """Return the goals of a kind of work: `times` the speed of a peer and, where given, a share of the limit."""
    against = Goal(work, matches, _against(peer), times)
    return (against,) if share is None else (against, Goal(work, matches, LIMIT, share))


def _cache(kind: str, *forms: str) -> Callable[[Tags], bool]:
    """Match a kind of cache that is longer than the caches of a processor; all its forms if none is given."""

    def matches(t: Tags) -> bool:
        return t.get("op") == f"{kind} cache" and (not forms or (t["form"] in forms and t["N"] >= 32768))

    return matches


# Of every vector unit.
COMMON = (
    *_goals("ragged, lengths alike", _cache("varlen"), "dense", 0.97),
    *_goals("paged decode", _cache("paged"), "dense", 0.9),
    *_goals("int8 decode against bfloat16", _cache("quantised", "int8"), "dense", 1.5),
    *_goals("int4 decode against bfloat16", _cache("quantised", "int4"), "dense", 1.7),
    *_goals("fp8 and aura4 decode against bfloat16", _cache("quantised", "fp8_e4m3", "aura4"), "dense", 1.2),
    *_goals("prefill, bool or additive mask", _masked, "torch", 1.2),
    *_goals("prefill, nine blocks of ten hidden", lambda t: "hidden" in t.get("extra", ""), "no mask", 5.0),
    Goal("extend, MLA", lambda t: _extend(t) and t["MLA"], LIMIT, 0.75),
    Goal("sweep over the queries", lambda t: t.get("op") == "sweep", CLIFF, 1.25),
    Goal("few queries, 512 visible keys", lambda t: "visible" in t.get("extra", ""), SLICE, 1.3),
    *_goals("merge, mask_blocks", lambda t: t.get("op") in ("merge", "mask_blocks"), "NumPy", 2.0, 0.6),
)

# Times the speed of torch, held to the same vector unit, and share of the limit. A unit that is not here has the common
# goals alone.
Wanted = tuple[float, float | None] | None
COLUMNS = ("avx2", "avx512", "avx512-amx")
TABLE: tuple[tuple[str, Callable[[Tags], bool], tuple[Wanted, Wanted, Wanted]], ...] = (
    ("prefill float32, D 64-256", _prefill("float32", False, 64, 256), ((1.15, 0.84), (1.15, 0.85), (1.15, None))),
    ("prefill float32, D 64-256, causal", _prefill("float32", True, 64, 256), ((1.3, 0.84), (1.3, 0.85), (1.2, None))),
    ("prefill float32, D 512", _prefill("float32", None, 512), ((1.15, None), (1.15, None), (1.1, None))),
    ("prefill bfloat16", _prefill("bfloat16"), ((1.2, 0.8), (1.9, None), (1.3, None))),
    ("prefill float16", _prefill("float16"), ((1.5, None), (1.4, None), (1.2, None))),
    ("decode float32, N >= 8192, D 64-256", _decode("float32", 64, 256), ((2.0, 0.8), (2.2, 0.75), (2.0, None))),
    ("decode bfloat16, N >= 8192, D 64-256", _decode("bfloat16", 64, 256), ((3.0, 0.8), (3.0, 0.75), (2.5, None))),
    ("decode float16, N >= 8192, D 64-256", _decode("float16", 64, 256), ((8.0, 0.8), (8.0, 0.75), (2.5, None))),
    ("decode float32, N >= 8192, D 512", _decode("float32", 512, 512), ((1.8, None), (2.0, None), (1.5, None))),
    ("decode bfloat16, N >= 8192, D 512", _decode("bfloat16", 512, 512), ((2.2, None), (2.5, None), (2.0, None))),
    ("decode float16, N >= 8192, D 512", _decode("float16", 512, 512), ((5.0, None), (6.0, None), None)),
    ("decode, N 128-2048", _short_decode, ((1.5, None), (1.75, None), (1.2, None))),
    ("backward float32", _gradients("backward", "float32", False), ((1.3, 0.75), (1.3, 0.75), (1.3, None))),
    ("backward float32, causal", _gradients("backward", "float32", True), ((1.5, 0.75), (1.5, 0.75), (1.5, None))),
    ("forward+backward bfloat16", _gradients("forward+backward", "bfloat16"), ((3.0, None), (3.0, None), (3.0, None))),
    ("extend", _extend, ((1.3, None), (1.5, None), (1.3, None))),
)


def goals_of(unit: str) -> tuple[Goal, ...]:
    """Return the goals of a vector unit."""
    if unit not in COLUMNS:
        return COMMON
    rows = ((work, matches, wanted[COLUMNS.index(unit)]) for work, matches, wanted in TABLE)
    own = (_goals(work, matches, "torch", *wanted) for work, matches, wanted in rows if wanted is not None)
    return (*(goal for found in own for goal in found), *COMMON)


def judge(rows: list[Report], unit: str = "avx512") -> Iterator[WorstRow]:
    """Yield the worst row for every goal of a vector unit, and the worst speedup of prefill on several threads."""
    yield from worst_rows(goals_of(unit), rows)
    yield from _worst_speedup(rows)


def _worst_speedup(rows: list[Report]) -> Iterator[WorstRow]:
    one = {row["name"]: row["times"]["monotile"]["best_s"] for row in rows if row["threads"] == 1}
    gains = [
        (one[row["name"]] / row["times"]["monotile"]["best_s"], row)
        for row in rows
        if row["threads"] > 1 and row["name"] in one and row.get("tags", {}).get("op") == "prefill"
    ]
    if gains:
        gain, row = min(gains, key=lambda pair: pair[0] / pair[1]["threads"])
        threads = row["threads"]
        goal = Goal(f"prefill, {threads} threads", lambda t: True, SPEEDUP, PER_THREAD * threads)
        yield WorstRow(goal, gain, row["name"], threads)
