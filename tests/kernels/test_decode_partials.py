"""decode_partials: keys in any number of runs, each with a softmax state of its own."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import monotile
from kernels.cases import check_splits, equal, normal, qkv

FAST = settings(deadline=None, derandomize=True, max_examples=10, suppress_health_check=list(HealthCheck))
SPLITS = st.sampled_from([None, 1, 2, 3, 7, 16, 48, 65, 200])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@FAST
@given(splits=SPLITS, Nq=st.sampled_from([1, 2, 3, 20]), Nk=st.sampled_from([0, 1, 5, 63, 64, 65, 500, 1025]))
def test_any_number_of_splits(dtype: str, splits: int | None, Nq: int, Nk: int, backend: str) -> None:
    check_splits(*qkv(Nq, Nk, B=2, Hq=4, Hkv=2, dtype=dtype), splits, backend)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": "upper_left", "softcap": 2.0},
        {"window": (20, 0), "scale": 0.4},
        {"mask": np.random.default_rng(0).random((4, 3, 300)) < 0.2},
        {"mask": normal(300)},
        {"mask_mod": lambda b, h, q_idx, kv_idx: kv_idx % 3 == h % 3},
        {"score_mod": lambda score, b, h, q_idx, kv_idx: score + 0.01 * (kv_idx - q_idx)},
    ],
    ids=["causal", "upper left", "window", "bool mask", "additive mask", "mask_mod", "score_mod"],
)
def test_options(options: dict[str, Any], backend: str) -> None:
    for splits in (1, 5, 300):
        check_splits(*qkv(3, 300, Hq=4, Hkv=2), splits, backend, **options)


def test_parts_have_the_documented_shapes(backend: str) -> None:
    q, k, v = qkv(3, 100, 8, B=2, Hq=4, Hkv=2, Dv=24, dtype="float16")
    parts = monotile.decode_partials(q, k, v, splits=5, backend=backend)
    assert isinstance(parts, monotile.Partials)
    assert [p.shape for p in parts] == [(2, 4, 3, 5, 24), (2, 4, 3, 5), (2, 4, 3, 5)]
    assert {p.dtype for p in parts} == {np.dtype(np.float32)}
    without = monotile.decode_partials(q[1], k[1], v[1], splits=5, backend=backend)
    equal(tuple(p[1] for p in parts), tuple(without))


def test_parts_are_unnormalised_with_natural_maxima(backend: str) -> None:
    q, k, v = qkv(1, 128, 8, Hq=1)
    o, m, l = (p[0, 0, 0] for p in monotile.decode_partials(q, k, v, splits=2, backend=backend))
    scores = (k[0, 0].astype(np.float64) @ q[0, 0, 0]) / np.sqrt(8)
    for s, run in enumerate((slice(0, 64), slice(64, 128))):
        weights = np.exp(scores[run] - scores[run].max())
        np.testing.assert_allclose(m[s], scores[run].max(), rtol=1e-5)
        np.testing.assert_allclose(l[s], weights.sum(), rtol=1e-5)
        np.testing.assert_allclose(o[s], weights @ v[0, 0, run], rtol=1e-4, atol=1e-5)


def test_empty_parts_say_so(backend: str) -> None:
    """A part that saw no key: nothing summed, maximum -inf, no NaN."""
    for Nk, splits in ((0, 3), (5, 64)):
        o, m, l = monotile.decode_partials(*qkv(2, Nk), splits=splits, backend=backend)
        empty = l == 0
        assert empty.any() and (m[empty] == -np.inf).all() and (o[empty] == 0).all() and np.isfinite(m[~empty]).all()


@FAST
@given(cuts=st.lists(st.integers(0, 300), max_size=5), Nq=st.sampled_from([1, 4, 20]))
def test_merging_any_partition_is_the_whole(cuts: list[int], Nq: int, backend: str) -> None:
    """Parts from calls of their own, as from other machines: empty ones, long ones, in any order."""
    q, k, v = qkv(Nq, 300, Hq=4, Hkv=2)
    out, lse = monotile.attention(q, k, v, return_lse=True, backend=backend)
    ends = [0, *sorted(cuts), 300]
    runs = [slice(a, b) for a, b in itertools.pairwise(ends)][::-1]
    parts = [monotile.decode_partials(q, k[:, :, r], v[:, :, r], splits=3, backend=backend) for r in runs]
    joined = [np.concatenate(x, axis=3) for x in zip(*parts, strict=True)]
    finished = [monotile.attention(q, k[:, :, r], v[:, :, r], return_lse=True, backend=backend) for r in runs]
    outs, lses = zip(*finished, strict=True)
    for found in (monotile.merge(*joined, backend=backend), monotile.merge_lse(outs, lses, backend=backend)):
        np.testing.assert_allclose(found[0], out, rtol=1e-4, atol=2e-6)
        np.testing.assert_allclose(found[1], lse, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"causal": "upper_left"}], ids=["plain", "causal"])
def test_a_row_does_not_depend_on_other_rows(options: dict[str, Any], backend: str) -> None:
    """With `splits` given: more heads, more batches and more queries change no bit."""
    q, k, v = qkv(9, 700, B=2, Hq=6, Hkv=2)
    whole = monotile.decode_partials(q, k, v, splits=4, backend=backend, **options)
    for b, h, n in ((0, 0, 1), (1, 1, 3), (0, 1, 9)):
        heads = slice(3 * h, 3 * h + 3)
        alone = monotile.decode_partials(
            q[b, heads, :n], k[b, h : h + 1], v[b, h : h + 1], splits=4, backend=backend, **options
        )
        equal(tuple(p[b, heads, :n] for p in whole), tuple(alone))
    one_head = monotile.decode_partials(q[:, :1], k[:, :1], v[:, :1], splits=4, backend=backend, **options)
    equal(tuple(p[:, :1] for p in whole), tuple(one_head))


def test_threads_change_no_bit() -> None:
    q, k, v = qkv(2, 3000, 32, B=2, Hq=6, Hkv=2)
    first, *others = [monotile.decode_partials(q, k, v, splits=13, threads=n, backend="cpu") for n in (1, 2, 3)]
    for other in others:
        equal(tuple(first), tuple(other))


def test_unused_slots_of_a_cache_are_never_read(backend: str) -> None:
    q, k, v = qkv(1, 200)
    k[:, :, 77:], v[:, :, 77:] = np.nan, np.inf
    check_splits(q, k[:, :, :77], v[:, :, :77], 4, backend)
    hidden = {"mask": np.arange(200) < 77}
    parts = monotile.decode_partials(q, k, v, splits=4, backend=backend, **hidden)
    assert all(np.isfinite(p).all() for p in (parts.o, parts.l))


def test_recommended_splits() -> None:
    """The documents' curve for its chip, a measured one for CPUs; each of them for any length."""
    assert [monotile.recommended_splits(n, 32, "m5_max") for n in (0, 1024, 8192, 8193, 32768, 65536, 10**6)] == [
        64, 64, 128, 256, 256, 512, 1024,
    ]  # fmt: skip
    assert monotile.recommended_splits(10**6, 4, "m5_max") == 64
    assert [monotile.recommended_splits(n, 1) for n in (0, 1, 512, 513, 262144)] == [1, 1, 1, 2, 512]
