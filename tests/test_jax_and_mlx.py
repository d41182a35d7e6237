"""Arrays of JAX, and of MLX on any system, on the cpu backend: every dtype, every function, kernels of the language."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
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


def lost_gradients(mx: Any) -> dict[str, Callable[[], Any]]:
    """Calls that ask for derivatives which monotile does not compute, by name."""
    import monotile.mlx

    attention = functools.partial(monotile.attention, backend="cpu")
    q, k, v = map(mx.array, qkv(5, 5))
    x, offsets, bias = q[0].swapaxes(0, 1), mx.array(np.array([0, 2, 5], np.int32)), mx.arange(5).astype(mx.float32)
    table, lengths = mx.array(np.array([[1, 0]], np.int32)), mx.array(np.array([6], np.int32))

    def loss(o: Any) -> Any:
        return (o**2).sum()

    def plain(function: Callable[[Any], Any], at: Any) -> Callable[[], Any]:
        return lambda: mx.grad(lambda array: loss(function(array)))(at)

    def biased(by: Any) -> Any:
        return lambda s, b, h, i, j: s + by[j]

    def merged(a: Any) -> Any:
        return monotile.merge(*monotile.decode_partials(a, k, v, backend="cpu"), backend="cpu")[0]

    def backward(do: Any) -> Any:
        o, lse = attention(q, k, v, return_lse=True)
        return monotile.attention_backward(do, q, k, v, o, lse, backend="cpu").dk

    def second(a: Any) -> Any:
        return mx.grad(lambda b: loss(monotile.mlx.attention(b, k, v)))(a)

    return {
        "plain q": plain(lambda a: attention(a, k, v), q),
        "plain v": plain(lambda a: attention(q, k, a), v),
        "plain bfloat16": plain(lambda a: attention(a, a, a), q.astype(mx.bfloat16)),
        "plain mask": plain(lambda a: attention(q, k, v, mask=a), mx.zeros((5, 5))),
        "plain lse": plain(lambda a: attention(a, k, v, return_lse=True)[1], q),
        "plain captured": plain(lambda a: attention(q, k, v, score_mod=biased(a)), bias),
        "plain varlen": plain(lambda a: monotile.attention_varlen(a, x, x, offsets, offsets, backend="cpu"), x),
        "plain paged": plain(
            lambda a: monotile.attention_paged(
                a, mx.zeros((2, 4, 2, 64)), mx.zeros((2, 4, 2, 64)), table, lengths, backend="cpu"
            ),
            mx.zeros((1, 4, 1, 64)),
        ),
        "plain partials": plain(lambda a: monotile.decode_partials(a, k, v, backend="cpu").o, q),
        "plain merge": plain(merged, q),
        "plain merge_lse": plain(lambda a: monotile.merge_lse([a, q], [q[..., 0]] * 2, backend="cpu")[0], q),
        "plain backward": plain(backward, q),
        "forward plain": lambda: mx.jvp(lambda a: attention(a, k, v), [q], [q]),
        "forward mlx": lambda: mx.jvp(lambda a: monotile.mlx.attention(a, k, v), [q], [q]),
        "second": plain(second, q),
        "captured": plain(lambda a: monotile.mlx.attention(q, k, v, score_mod=biased(a)), bias),
        "captured scale": plain(lambda a: monotile.mlx.attention(q, k, v, scale=a), mx.array(0.5)),
    }


REFUSED = {
    "plain": "no derivative in MLX, .*use monotile.mlx.attention",
    "forward": "no forward-mode derivatives",
    "second": "gradients of monotile.mlx.attention have no derivatives",
    "captured": "no gradient for an array that score_mod or mask_mod reads, nor for a scale",
}


def test_no_gradient_is_lost_in_mlx() -> None:
    for name, ask in lost_gradients(pytest.importorskip("mlx.core")).items():
        with pytest.raises(errors.NoGradient, match=REFUSED[name.partition(" ")[0]]):
            pytest.fail(f"{name}: {ask()}")


def test_what_mlx_does_not_differentiate_is_not_refused() -> None:
    mx = pytest.importorskip("mlx.core")
    import monotile.mlx

    q, k, v = map(mx.array, qkv(5, 5))
    plain = functools.partial(monotile.attention, backend="cpu")
    places = mx.arange(5)

    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return places[j] <= places[i]

    def gradient(function: Callable[[Any], Any]) -> Any:
        return np.array(mx.grad(lambda a: (function(a) ** 2).sum())(q))

    expected = gradient(lambda a: monotile.mlx.attention(a, k, v, causal=True))
    for function in (
        lambda a: monotile.mlx.attention(a, k, v, causal=True) + 0 * mx.stop_gradient(plain(a, k, v)),
        lambda a: monotile.mlx.attention(a, k, v, causal=True) + 0 * plain(mx.stop_gradient(a), k, v),
        lambda a: monotile.mlx.attention(a, k, v, causal=True) + 0 * plain(q, k, v),
        mx.checkpoint(lambda a: monotile.mlx.attention(a, k, v, causal=True)),
        lambda a: monotile.mlx.attention(a, k, v, mask_mod=causal),
        lambda a: monotile.mlx.attention(a, k, v, mask_mod=monotile.block_mask(causal, None, None, 5, 5)),
    ):
        np.testing.assert_allclose(gradient(function), expected, rtol=1e-5, atol=1e-5)


def test_a_result_is_read_in_another_thread() -> None:
    """MLX evaluates an array in the thread that it was made in, so outside of a transform results are evaluated."""
    mx = pytest.importorskip("mlx.core")
    q, k, v = map(mx.array, qkv(6, 7))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(monotile.attention(q, k, v, backend="cpu")))
    thread.start()
    thread.join()
    np.testing.assert_array_equal(np.array(found[0]), np.array(monotile.attention(q, k, v, backend="cpu")))


def test_gradients_in_mlx_are_of_what_a_function_held() -> None:
    """A closure over the variable of a loop has gone on when gradients are computed."""
    mx = pytest.importorskip("mlx.core")
    import monotile.mlx

    q, k, v = map(mx.array, qkv(5, 5))

    def shared(a: Any) -> Any:
        total = mx.array(0.0)
        for length in (1, 3):
            total += (monotile.mlx.attention(a, k, v, mask_mod=lambda b, h, i, j: j < length) ** 2).sum()  # noqa: B023
        return total

    def apart(a: Any) -> Any:
        return sum((monotile.mlx.attention(a, k[:, :, :n], v[:, :, :n]) ** 2).sum() for n in (1, 3))

    np.testing.assert_allclose(np.array(mx.grad(shared)(q)), np.array(mx.grad(apart)(q)), rtol=1e-5, atol=1e-5)


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
