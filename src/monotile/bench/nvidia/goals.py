"""Performance goals on a GPU (sm_90), and the worst row of each kind of work against them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..goals import SLICE, Goal, Measure, Report, Tags, WorstRow, worst_rows

TORCH = Measure("against the best of torch", lambda row: row["ratios"].get("torch"))
PLAIN = Measure("against the same without", lambda row: row["ratios"].get("no option"))
RATE = Measure("rate", lambda row: row["limit"]["rate_per_s"], "{:.0f} TFLOP/s", 1e-12)
READ = Measure("of the read rate", lambda row: row["limit"]["share"], "{:.0%}")
HOST = Measure("host", lambda row: row["times"]["monotile"]["median_s"], "{:.1f} us", 1e6, at_most=True)


def _forward(D: int, length: int | None = None, causal: bool | None = None) -> Callable[[Tags], bool]:
    def matches(t: Tags) -> bool:
        plain = t["op"] == "prefill" and not t["extra"] and t["D"] == D
        return plain and length in (None, t["N"]) and causal in (None, t["causal"])

    return matches


def _decode(t: Tags) -> bool:
    return bool(t["op"] == "decode" and not t["extra"])


def _extend(t: Tags) -> bool:
    return bool(t["op"] == "extend" and not t["MLA"] and not t["extra"])


def _latent(group: int) -> Callable[[Tags], bool]:
    """Match MLA rows with this many query heads."""
    return lambda t: bool(t["op"] == "extend" and t["MLA"] and t["group"] == group)


def _wide(t: Tags) -> bool:
    return _decode(t) and t["D"] == 512


def _long(t: Tags) -> bool:
    return _decode(t) and t["N"] == 131072


def _backward(t: Tags) -> bool:
    return bool(t["op"] == "backward")


GOALS = (
    Goal("forward D 64", _forward(64), TORCH, 1.1),
    Goal("forward D 128", _forward(128), TORCH, 0.95),
    Goal("forward D 256", _forward(256), TORCH, 0.88),
    Goal("forward D 512", _forward(512), TORCH, 5.0),
    Goal("forward D 512, N 8192", _forward(512, 8192, False), RATE, 240e12),
    Goal("forward D 512, N 8192, causal", _forward(512, 8192, True), RATE, 260e12),
    Goal(
        "forward with masks, window, softcap, sinks", lambda t: t["op"] == "prefill" and bool(t["extra"]), PLAIN, 0.85
    ),
    Goal("decode", lambda t: _decode(t) and not _wide(t), TORCH, 1.05),
    Goal("decode N 131072", lambda t: _long(t) and not _wide(t), READ, 0.9),
    Goal("decode D 512", _wide, TORCH, 50.0),
    Goal("decode D 512, N 131072", lambda t: _long(t) and _wide(t), READ, 0.85),
    Goal("extend", _extend, TORCH, 1.1),
    Goal("extend, MLA 128/1", _latent(128), RATE, 400e12),
    Goal("extend, MLA 16/1", _latent(16), READ, 0.85),
    Goal("few queries, 512 visible keys", lambda t: "visible" in t["extra"], SLICE, 1.3),
    Goal("backward", lambda t: _backward(t) and t["D"] <= 256 and t["N"] > 1024, TORCH, 0.88),
    Goal("backward N 1024", lambda t: _backward(t) and t["N"] <= 1024, TORCH, 0.79),
    Goal("backward D 512", lambda t: _backward(t) and t["D"] == 512, RATE, 176e12),
    Goal("a warm call", lambda t: bool(t["op"] == "host"), HOST, 30e-6),
)


def judge(rows: list[Report]) -> Iterator[WorstRow]:
    """Yield the worst row for every goal that some row matches."""
    return worst_rows(GOALS, rows)
