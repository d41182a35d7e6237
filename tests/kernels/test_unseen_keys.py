"""Keys that no query may see by position hold NaN here, for every way positions hide keys."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import monotile
from monotile.kernels.reference import attention as reference

LENGTHS = [(1, 1), (1, 40), (3, 2), (10, 13), (13, 10), (9, 70), (70, 9), (65, 66)]
WINDOWS = [None, (0, None), (2, None), (None, 1), (3, 4), (0, 0)]
CAUSALITY = [False, "lower_right", "upper_left"]
# Each window with two kinds of causality.
PAIRS = [(window, CAUSALITY[n]) for w, window in enumerate(WINDOWS) for n in range(3) if n != w % 3]


@pytest.mark.parametrize(("window", "causal"), PAIRS)
def test_what_no_query_sees_never_matters(causal: bool | str, window: tuple[int | None, int | None] | None) -> None:
    rng = np.random.default_rng(7)
    for queries, keys in LENGTHS:
        q, k, v = (rng.standard_normal((1, 2, n, 8)).astype(np.float32) for n in (queries, keys, keys))
        expected, _ = reference(q, k, v, causal=causal, window=window)
        unseen = ~_seen(queries, keys, causal, window).any(axis=0)
        k[:, :, unseen] = np.nan
        v[:, :, unseen] = np.nan
        found = monotile.attention(q, k, v, causal=causal, window=window)
        np.testing.assert_allclose(found, expected, atol=2e-6, err_msg=f"{queries} queries, {keys} keys")


def _seen(queries: int, keys: int, causal: bool | str, window: tuple[int | None, int | None] | None) -> np.ndarray:
    left, right = window or (None, None)
    seen = np.zeros((queries, keys), bool)
    for i, j in itertools.product(range(queries), range(keys)):
        place = i + keys - queries
        seen[i, j] = (
            not (causal == "lower_right" and j > place)
            and not (causal == "upper_left" and j > i)
            and not (left is not None and j < place - left)
            and not (right is not None and j > place + right)
        )
    return seen
