"""Arrays of JAX, and of MLX on any system, on the cpu backend: every dtype, every function, kernels of the language."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import monotile
from kernels.cases import qkv
from monotile import errors
from monotile.language import Const, Tensor, arange, kernel

DTYPES = ("float32", "bfloat16", "float16")


@kernel
def double(x: Tensor["N"], y: Tensor["N"]):  # noqa: UP037
    y[arange(16)] = x[arange(16)] * 2.0


@kernel
def apply(x: Tensor["N"], y: Tensor["N"], *, mod: Const):  # noqa: UP037
    y[arange(16)] = mod(x[arange(16)])


@pytest.fixture(params=["jax.numpy", "mlx.core"])
def library(request: pytest.FixtureRequest) -> Any:
    return pytest.importorskip(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
def test_functions_give_arrays_of_the_callers_library(library: Any, dtype: str) -> None:
    kind = getattr(library, dtype)
    plain = qkv(20, 30)
    q, k, v = (library.array(a).astype(kind) for a in plain)
    o, lse = monotile.attention(q, k, v, causal=True, return_lse=True, backend="cpu")
    assert type(o) is type(lse) is type(q) and o.dtype == kind and lse.dtype == library.float32

    def exact(array: Any) -> Any:
        return np.array(array.astype(library.float32))

    rounded = [exact(a) for a in (q, k, v)]
    tolerance = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    expected = monotile.attention(*rounded, causal=True)
    np.testing.assert_allclose(exact(o), expected, rtol=tolerance, atol=tolerance)
    parts = monotile.decode_partials(q, k, v, backend="cpu")
    merged, _ = monotile.merge(*parts, backend="cpu")
    np.testing.assert_allclose(np.array(merged), monotile.attention(*rounded), rtol=tolerance, atol=tolerance)
    assert monotile.attention_backward(o, q, k, v, o, lse, causal=True, backend="cpu").dq.dtype == kind


def test_kernels_read_them_and_do_not_write_them(library: Any) -> None:
    x, out = library.arange(16).astype(library.float32), np.zeros(16, np.float32)
    double(x, out, backend="cpu")
    assert (out == 2.0 * np.arange(16)).all()
    with pytest.raises(errors.ReadOnlyOutput, match="'y' is written by double but is read-only"):
        double(out, x, backend="cpu")


def test_gradients_in_mlx() -> None:
    """Of every array, against MLX's own arithmetic."""
    mx = pytest.importorskip("mlx.core")
    import monotile.mlx

    rng = np.random.default_rng(0)
    shapes = (1, 4, 20, 16), (1, 4, 30, 16), (1, 4, 30, 16), (20, 30), (4,)
    given = [mx.array(rng.standard_normal(shape).astype(np.float32)) for shape in shapes]

    def formula(q: Any, k: Any, v: Any, mask: Any, sinks: Any) -> Any:
        s = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5 + mask
        s = mx.concatenate([s, mx.broadcast_to(sinks[None, :, None, None], (*s.shape[:3], 1))], axis=-1)
        return (mx.softmax(s, axis=-1)[..., :-1] @ v), mx.logsumexp(s, axis=-1)

    def gradients(function: Any) -> Any:
        def loss(*arrays: Any) -> Any:
            o, lse = function(*arrays)
            return (o**2).sum() + mx.sin(lse).sum()

        return mx.grad(loss, argnums=tuple(range(5)))(*given)

    found = gradients(
        lambda q, k, v, mask, sinks: monotile.mlx.attention(q, k, v, mask=mask, sinks=sinks, return_lse=True)
    )
    for a, b in zip(found, gradients(formula), strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-4, atol=1e-4)
    with pytest.raises(errors.ArgumentKind, match="'k' must be an MLX array, found ndarray"):
        monotile.mlx.attention(given[0], np.array(given[1]), given[2])


@pytest.mark.parametrize("backend", ["cpu", "interpreter"])
def test_a_function_captures_an_array_of_another_library(library: Any, backend: str) -> None:
    q, k, v = qkv(20, 30)
    own = [library.array(a) for a in (q, k, v)]
    bias = np.linspace(-1, 1, 30, dtype=np.float32)

    def attend(given: Any, table: Any) -> Any:
        return np.array(monotile.attention(*given, score_mod=lambda s, b, h, i, j: s + table[j], backend=backend))

    expected = attend((q, k, v), bias)
    strided = library.array(np.stack([bias, bias], 1))[:, 0]
    for table in (library.array(bias), strided):
        np.testing.assert_array_equal(attend((q, k, v), table), expected)
        np.testing.assert_array_equal(attend(own, table), expected)
    exact = library.array(np.round(bias * 8) / 8)
    np.testing.assert_array_equal(attend(own, exact.astype(library.bfloat16)), attend(own, exact))


def test_masks_and_kernels_capture_arrays_of_another_library(library: Any) -> None:
    limit = np.arange(0, 200, 2, dtype=np.int32)
    table, factor = library.array(limit), library.array(np.full(16, 3.0, np.float32))
    blocks = monotile.block_mask(lambda b, h, i, j: j < table[i], None, None, 100, 200)
    assert blocks.shares() == monotile.block_mask(lambda b, h, i, j: j < limit[i], None, None, 100, 200).shares()
    q, k, v = qkv(100, 200)
    expected = monotile.attention(q, k, v, mask_mod=lambda b, h, i, j: j < limit[i])
    np.testing.assert_array_equal(monotile.attention(q, k, v, mask_mod=blocks), expected)
    mine = monotile.attention(*(library.array(a) for a in (q, k, v)), mask_mod=blocks, backend="cpu")
    np.testing.assert_array_equal(np.array(mine), expected)
    for x in (np.arange(16, dtype=np.float32), library.arange(16).astype(library.float32)):
        out = np.zeros(16, np.float32)
        apply(x, out, mod=lambda y: y * factor[arange(16)], backend="cpu")
        assert (out == 3.0 * np.arange(16)).all()
