"""Scales of either sign and zero, and the pass that lets a scale follow the maximum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import monotile
from kernel_calls import over_all_keys
from monotile import ir
from monotile.kernels.attention import attention as attention_kernel
from monotile.kernels.reference import attention as reference
from monotile.kernels.scores import Options
from monotile.passes import pipeline


@pytest.mark.parametrize("scale", [None, 0.2, -0.3, 0.0, -0.0])
@pytest.mark.parametrize(("queries", "keys"), [(3, 700), (1, 1500), (70, 300)])
def test_scale_of_either_sign(backend: str, scale: float | None, queries: int, keys: int) -> None:
    if backend not in ("cpu", "interpreter") and keys > 700:
        pytest.skip("long on an interpreter")
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 2, n, 32)).astype(np.float32) for n in (queries, keys, keys))
    expected, lse = reference(q, k, v, scale=scale, causal=True)
    found, found_lse = monotile.attention(q, k, v, scale=scale, causal=True, return_lse=True, backend=backend)
    np.testing.assert_allclose(found, expected, atol=5e-6)
    np.testing.assert_allclose(found_lse, lse, atol=5e-6)


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"score_mod": lambda s, b, h, i, j: s + 0.0}], ids=list)
def test_the_greatest_scale(backend: str, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((1, 2, n, 16)).astype(np.float32) for n in (12, 40, 40))
    q, k = q * np.float32(7e-20), k * np.float32(7e-20)
    for scale in (1.99e38, -1.99e38):
        expected, lse = reference(q, k, v, scale=scale, **options)
        found = monotile.attention(q, k, v, scale=scale, return_lse=True, backend=backend, **options)
        np.testing.assert_allclose(found[0], expected, atol=5e-6)
        np.testing.assert_allclose(found[1], lse, atol=2e-5)


def test_scores_are_not_scaled_before_their_maximum() -> None:
    """Only differences are scaled: one product for each row's maximum, not for each score."""
    q = np.zeros((1, 1, 64, 16), np.float32)
    call = over_all_keys(q, q, q, q.copy())
    kernel = attention_kernel.ir(*call, options=Options(causal="lower_right"), BR=32, BK=32)
    pipeline.run(kernel, pipeline.PipelineOptions())
    folds = [op for op in ir.walk(kernel.body) if op.kind == "reduce" and op.attrs["fold"] == "max"]
    assert folds
    for fold in folds:  # of the products themselves, or of those that are seen
        made = fold.operands[0].op
        assert made is not None
        made = made.operands[1].op if made.kind == "where" else made
        assert made is not None and made.kind == "dot"
