"""Counters of monotile's kernels against those of hand-written ones, on the same inputs in the runner.

The hand-written kernels are not part of this repository; these tests look for them in a folder beside it and skip
without it. docs/internals/metal.md has the numbers.
"""

from __future__ import annotations

import numpy as np
import pytest

import monotile
from backends.metal_orders import collect_reports
from backends.seeds import BF16, SEEDS, D, decode, expected, prefill, randoms, train, vector
from monotile import metal

pytestmark = [
    pytest.mark.skipif(metal.why_not() is not None, reason=str(metal.why_not())),
    pytest.mark.skipif(not SEEDS.is_dir(), reason=f"the hand-written kernels are not in {SEEDS}"),
]


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[metal.Report]:
    return collect_reports(monkeypatch)


def ratios(ours: list[metal.Report], theirs: metal.Report) -> dict[str, float]:
    """Return monotile's counters as multiples of a hand-written kernel's."""

    def total(reports: list[metal.Report], name: str) -> int:
        return sum(getattr(report.counters, name) for report in reports)

    def both(name: str) -> tuple[int, int]:
        return total(ours, name), total([theirs], name)

    read, written = both("threadgroup_bytes_read"), both("threadgroup_bytes_written")
    pairs = {
        "reads": both("device_bytes_read"),
        "threadgroup": (read[0] + written[0], read[1] + written[1]),
        "barriers": both("barriers"),
        "multiplies": both("multiplies"),
        "exponentials": both("exponentials"),
    }
    return {name: mine / theirs if theirs else float(mine) for name, (mine, theirs) in pairs.items()}


def assert_within(found: dict[str, float], limits: dict[str, float]) -> None:
    assert {name: found[name] for name in limits if found[name] > limits[name]} == {}, found


ATTENTION = [
    (64, 256, 256, False, {"reads": 0.6, "threadgroup": 0.5, "barriers": 0.1, "multiplies": 1.0}),
    (64, 256, 256, True, {"reads": 0.65, "threadgroup": 0.5, "barriers": 0.1, "multiplies": 1.15}),
    (256, 128, 128, False, {"reads": 1.0, "threadgroup": 0.5, "barriers": 0.25, "multiplies": 1.0}),
    (256, 128, 128, True, {"reads": 1.15, "threadgroup": 0.5, "barriers": 0.25, "multiplies": 1.2}),
    (512, 64, 256, False, {"reads": 0.55, "threadgroup": 0.5, "barriers": 0.5, "multiplies": 1.0}),
]


@pytest.mark.parametrize(("size", "rows", "keys", "causal", "limits"), ATTENTION)
def test_attention_does_less(
    size: int, rows: int, keys: int, causal: bool, limits: dict[str, float], reports: list[metal.Report]
) -> None:
    q, k, v = randoms(2, rows, size), randoms(1, keys, size, seed=1), randoms(1, keys, size, seed=2)
    o, lse = monotile.attention(q[None], k[None], v[None], causal=causal, return_lse=True, backend="metal")
    wanted, wanted_lse = expected(q, k, v, causal)
    assert np.abs(o[0].astype(np.float64) - wanted).max() < 1e-2 and np.abs(lse[0] - wanted_lse).max() < 1e-6
    assert reports[0].counters.threadgroup_memory_bytes <= 32 << 10
    theirs = prefill(q, k, v)[1] if size == D else train(q, k, v, causal)[2]
    assert_within(ratios(reports, theirs), limits)


DECODE = [
    (128, 8, 8, {"reads": 1.01}),
    (128, 8, 2, {"reads": 0.27, "exponentials": 1.1}),
    (512, 4, 4, {"reads": 1.01}),
    (512, 4, 1, {"reads": 0.27, "exponentials": 1.1}),
]


@pytest.mark.parametrize(("size", "heads", "kv_heads", "limits"), DECODE)
def test_split_decode_does_less(
    size: int, heads: int, kv_heads: int, limits: dict[str, float], reports: list[metal.Report]
) -> None:
    dtype = BF16 if size == D else np.float32
    q = randoms(heads, 1, size, dtype=dtype)
    k, v = (randoms(kv_heads, 512, size, dtype=dtype, seed=n) for n in (1, 2))
    parts = monotile.decode_partials(q[None], k[None], v[None], splits=4, backend="metal")
    o, _ = monotile.merge(parts.o, parts.m, parts.l, backend="metal")
    assert np.abs(o[0] - expected(q, k, v)[0]).max() < (1e-3 if size == D else 1e-6)
    theirs = vector(q.astype(np.float32), k, v)[1] if size == D else decode(q[:, 0], k, v)[1]
    assert_within(ratios(reports, theirs), limits | {"barriers": 0, "threadgroup": 0})
    merging = reports[1].counters
    assert merging.device_bytes_read == sum(part.nbytes for part in parts)  # each partial is read once
