"""Performance goals on a GPU (sm_90), and the worst row of each kind of work against them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..goals import CLIFF, SLICE, Goal, Measure, Report, Tags, WorstRow, worst_rows

LARGE = 200e6  # bytes of keys and values from which on decode is held to the read rate
TORCH = Measure("against the best of torch", lambda row: row["ratios"].get("torch"))
FLEX = Measure("against FlexAttention", TORCH.of)  # the only variant of rows with mods
RATE = Measure("rate", lambda row: row["limit"]["rate_per_s"], "{:.0f} TFLOP/s", 1e-12)
READ = Measure("of the read rate", lambda row: row["limit"]["share"], "{:.0%}")
DENSE = Measure("against dense tensors", lambda row: row["ratios"].get("dense"))
LARGE_READ = Measure(READ.name, lambda row: READ.of(row) if _bytes_read(row) >= LARGE else None, READ.form)
HOST = Measure("host", lambda row: row["times"]["monotile"]["median_s"], "{:.1f} us", 1e6, at_most=True)


def _bytes_read(row: Report) -> float:
    return float(row["limit"]["rate_per_s"] * row["times"]["monotile"]["median_s"])


def _prefill(t: Tags) -> bool:
    return bool(t["op"] == "prefill" and not t["extra"])


def _forward(D: int, length: int, causal: bool | None = None) -> Callable[[Tags], bool]:
    def matches(t: Tags) -> bool:
        return _prefill(t) and t["D"] == D and t["N"] == length and causal in (None, t["causal"])

    return matches


def _other_sizes(t: Tags) -> bool:
    """Match head sizes between powers of two."""
    return _prefill(t) and t["N"] >= 4096 and 64 < t["D"] < 256 and t["D"] != 128


def _with(extra: str) -> Callable[[Tags], bool]:
    """Match prefill with a mask, a window or a mod."""
    return lambda t: bool(t["op"] == "prefill" and t["extra"].startswith(extra))


def _decode(t: Tags) -> bool:
    return bool(t["op"] == "decode" and not t["extra"] and t["D"] <= 256)


def _extend(t: Tags) -> bool:
    return bool(t["op"] == "extend" and not t["MLA"] and not t["extra"])


def _latent(group: int) -> Callable[[Tags], bool]:
    """Match MLA rows with this many query heads."""
    return lambda t: bool(t["op"] == "extend" and t["MLA"] and t["group"] == group)


def _backward(least: int, most: int) -> Callable[[Tags], bool]:
    """Match the backward pass of long sequences, for head sizes from `least` to `most`."""
    return lambda t: bool(t["op"] == "backward" and least <= t["D"] <= most and t["N"] > 1024)


def _host(*, decode: bool) -> Callable[[Tags], bool]:
    """Match the host's part of a call: the row of decode has grouped heads."""
    return lambda t: bool(t["op"] == "host" and t["grouped"] == decode)


def _cache(kind: str, form: str | None = None) -> Callable[[Tags], bool]:
    """Match a kind of cache, in one format or in all."""
    return lambda t: bool(t["op"] == f"{kind} cache" and form in (None, t["form"]))


# Of the backward pass: 0.88 of what sums in no order should reach, because ours have one.
GOALS = (
    Goal("forward D 64, N 16384", _forward(64, 16384), TORCH, 1.12),
    Goal("forward D 128, N 16384", _forward(128, 16384), TORCH, 1.08),
    Goal("forward D 256, N 16384", _forward(256, 16384), TORCH, 1.08),
    Goal("forward D 72-112, 160-224, N >= 4096", _other_sizes, TORCH, 1.0),
    Goal("forward N 256-2048", lambda t: _prefill(t) and 256 <= t["N"] <= 2048, TORCH, 0.95),
    Goal("forward D 512, N 8192", _forward(512, 8192, False), RATE, 400e12),
    Goal("forward D 512, N 8192, causal", _forward(512, 8192, True), RATE, 350e12),
    Goal("bool mask", _with("bool mask"), TORCH, 1.7),
    Goal("additive mask", _with("additive mask"), TORCH, 1.5),
    Goal("documents by a mask_mod", _with("documents"), FLEX, 1.0),
    Goal("prefix-LM by a mask_mod", _with("prefix"), FLEX, 1.1),
    Goal("alibi by a score_mod", _with("alibi"), FLEX, 1.1),
    Goal("window of 1024, and by a mask_mod", _with("near window"), FLEX, 1.1),
    Goal("decode D 64-256", _decode, TORCH, 1.0),
    Goal("decode, keys and values over 200 MB", _decode, LARGE_READ, 0.9),
    Goal("extend", _extend, TORCH, 1.1),
    Goal("extend, MLA 128/1", _latent(128), RATE, 400e12),
    Goal("extend, MLA 16/1", _latent(16), READ, 0.85),
    Goal("sweep over the queries", lambda t: bool(t["op"] == "sweep"), CLIFF, 1.25),
    Goal("few queries, 512 visible keys", lambda t: "visible" in t["extra"], SLICE, 1.3),
    Goal("backward D 64-128", _backward(64, 128), TORCH, 0.88),
    Goal("backward D 256", _backward(256, 256), TORCH, 0.97),
    Goal("backward N 1024", lambda t: bool(t["op"] == "backward" and t["N"] <= 1024), TORCH, 0.79),
    Goal("backward D 512", _backward(512, 512), RATE, 176e12),
    Goal("ragged, lengths alike", _cache("varlen"), DENSE, 0.95),
    Goal("paged decode", _cache("paged"), DENSE, 0.9),
    Goal("128 sequences of 100 to 100,000 keys", _cache("mixed"), READ, 0.85),
    Goal("int8 decode against bfloat16", _cache("quantised", "int8"), DENSE, 1.7),
    Goal("fp8 decode against bfloat16", _cache("quantised", "fp8_e4m3"), DENSE, 1.7),
    Goal("int4 decode against bfloat16", _cache("quantised", "int4"), DENSE, 2.4),
    Goal("aura4 decode against bfloat16", _cache("quantised", "aura4"), DENSE, 1.8),
    Goal("a warm call", _host(decode=False), HOST, 25e-6),
    Goal("a warm call of decode", _host(decode=True), HOST, 20e-6),
)


def judge(rows: list[Report]) -> Iterator[WorstRow]:
    """Yield the worst row for every goal that some row matches."""
    return worst_rows(GOALS, rows)
