"""Metal source compiled with fast math, as a program that takes Metal's defaults compiles it: no result relies on an
infinity or a NaN. The runner compiles with clang's -ffast-math, and its fast tanh overflows as Metal's does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import monotile
import test_hazards
from backends.metal_orders import forget
from kernels.cases import agrees, qkv
from monotile import metal
from monotile.backends.metal import backend as metal_backend
from monotile.backends.metal.render import render
from monotile.cli import catalogue, inspection
from monotile.cli.request import Request, parse_dtypes
from monotile.kernels import examples
from monotile.language import Const, Tensor, exp2, full, inf, kernel, log, maximum, where

pytestmark = pytest.mark.skipif(metal.why_not() is not None, reason=str(metal.why_not()))


@pytest.fixture(autouse=True)
def fast_math(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    forget()
    monkeypatch.setattr(metal_backend, "BACKEND", metal_backend.MetalBackend("shuffled", fast_math=True))
    yield
    forget()


SHADER = """#include <metal_stdlib>
using namespace metal;
kernel void hide(device float *x [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  float hidden = i % 2 ? x[i] : -INFINITY;
  x[i] = hidden == -INFINITY ? 1.0f : 2.0f;
  if (i == 0) x[0] = tanh(x[32]);
}"""


@pytest.mark.parametrize("fast_math", [False, True])
def test_fast_math_has_no_infinities(fast_math: bool) -> None:
    """The mode can fail: text that compares with infinity goes wrong in it, and so does tanh of a large number."""
    x = np.full(33, 50, np.float32)
    metal.run(SHADER, "hide", {"x": x}, 1, 32, fast_math=fast_math).check()
    if fast_math:
        assert np.isnan(x[0]) and (x[1:32] == 2).all()
    else:
        np.testing.assert_array_equal(x, [1] + [2, 1] * 15 + [2, 50])


@pytest.mark.parametrize("options", [{"window": (3, 0)}, {"causal": True}, {"window": (20, 4), "softcap": 30.0}])
@pytest.mark.parametrize("shape", [(65, 129), (129, 65), (2, 300)])
def test_windows(options: dict[str, Any], shape: tuple[int, int]) -> None:
    q, k, v = qkv(*shape, 32, Hq=2, Hkv=1)
    agrees(monotile.attention(q, k, v, return_lse=True, backend="metal", **options), q, k, v, **options)


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("rows", [2, 40])
def test_rows_that_see_nothing(additive: bool, rows: int) -> None:
    q, k, v = qkv(rows, 300, 32, Hq=2, Hkv=1)
    mask = np.random.default_rng(0).random((rows, 300)) < 0.5
    mask[1::3] = False
    given = np.where(mask, 0, -np.inf).astype(np.float32) if additive else mask
    out, lse = monotile.attention(q, k, v, mask=given, return_lse=True, backend="metal")
    agrees((out, lse), q, k, v, mask=mask)
    assert (out[:, :, 1::3] == 0).all() and (lse[:, :, 1::3] == -np.inf).all()
    parts = monotile.decode_partials(q, k, v, mask=given, splits=4, backend="metal")
    assert (parts.m[:, :, 1::3] == -np.inf).all() and (parts.l[:, :, 1::3] == 0).all()
    agrees(monotile.merge(*parts, backend="metal"), q, k, v, mask=mask)


@pytest.mark.parametrize("hazard", ["first_chunk_all_minus_inf", "biases_of_any_size"])
def test_hazard(hazard: str) -> None:
    getattr(test_hazards, f"test_{hazard}")("metal")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_garbage_in_hidden_memory(bad: float) -> None:
    test_hazards.test_garbage_in_unused_cache_slots(bad, "metal")


def test_a_mask_of_lowest_numbers() -> None:
    """The lowest finite number hides nothing: a row of them weighs all keys alike."""
    q, k, v = qkv(9, 70, 32)
    mask = np.full((9, 70), np.finfo(np.float32).min)
    out, lse = monotile.attention(q, k, v, mask=mask, return_lse=True, backend="metal")
    np.testing.assert_allclose(out, np.broadcast_to(v.mean(2, keepdims=True), out.shape), atol=1e-5)
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_softcap_of_large_scores(dtype: str) -> None:
    """tanh(x) far above 45 in float32, and an exponential that would overflow in 16 bits."""
    q, k, v = qkv(9, 70, 32, dtype=dtype)
    q = (q * 100).astype(dtype)
    agrees((monotile.attention(q, k, v, softcap=2.0, backend="metal"),), q, k, v, softcap=2.0)


@kernel
def logs(x: Tensor["N M"], y: Tensor["N M"], z: Tensor["N M"], w: Tensor["N M"], scale: float, *, N: Const, M: Const):
    lowest = where(x[:, :] > 0.0, x[:, :], -inf)
    y[:, :] = log(maximum(x[:, :], 0.0)) * 2.0 + 1.0
    z[:, :] = lowest * scale - 3.0
    w[:, :] = exp2(lowest - full((N, M), 1.0)) + where(x[:, :] < 0.0, inf, 0.0)


def test_infinities_are_stored() -> None:
    """Infinities that arithmetic of a kernel makes or keeps are infinities in memory."""
    x = np.linspace(-2, 2, 64, dtype=np.float32).reshape(4, 16)
    for scale in (1e-30, -2.0):
        found, expected = ([metal.poisoned(x.shape, np.float32) for _ in range(3)] for _ in range(2))
        logs(x, *found, scale, backend="metal")
        logs(x, *expected, scale, backend="interpreter")
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def test_row_softmax() -> None:
    x, y = qkv(5, 5, 70)[0][0, 0], metal.poisoned((5, 70), np.float32)
    examples.row_softmax(x, y, BR=4, BC=32, backend="metal")
    exact = np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(1, keepdims=True)
    np.testing.assert_allclose(y, exact, rtol=1e-5)


@pytest.mark.parametrize("name", catalogue.kernels())
def test_the_text_names_no_infinity(name: str) -> None:
    dtypes = parse_dtypes(["mask=float32"] if name in ("attention", "mask_blocks") else [])
    form, _ = inspection.specialised(catalogue.kernels()[name], Request({}, {}, dtypes), "metal", None)
    source = render(metal_backend.MetalBackend().lower(form)).source
    text = re.sub(r"//.*", "", source)
    assert not re.search(r"\b(INFINITY|NAN|isnan|isinf|isfinite)\b|(?<!precise::)\btanh\(", text)
