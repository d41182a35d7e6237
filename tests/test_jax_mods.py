"""Mods written with functions of JAX or reading its arrays, and quantised arrays of JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import monotile
from monotile import errors

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

import monotile.jax  # noqa: E402

N = 12
Q, K, V = (jax.random.normal(jax.random.PRNGKey(n), (1, 2, N, 16)) for n in range(3))
BIAS = jnp.arange(N) * 0.1
Mod = Callable[..., Any]
SCORES: dict[str, Mod] = {
    "functions": lambda s, b, h, i, j: jnp.where(i >= j, jnp.tanh(s), -1.0) + jnp.abs(i - j) * 0.1,
    "an array": lambda s, b, h, i, j: s + BIAS[j] * jnp.sign(i - j),
    "activations": lambda s, b, h, i, j: jax.nn.relu(s) + jax.nn.silu(s) + jnp.power(s, 2) + jax.lax.log1p(s * s),
    "finfo": lambda s, b, h, i, j: jnp.where(jnp.logical_and(i >= j, j >= 0), s, jnp.finfo(jnp.float32).min),
}


def formula(q: Any, mod: Mod) -> Any:
    scores = jnp.einsum("bhid,bhjd->bhij", q, K) * 0.25
    b, h, i, j = (jnp.arange(n) for n in (1, 2, N, N))
    return jax.nn.softmax(mod(scores, b[:, None, None, None], h[:, None, None], i[:, None], j), -1) @ V


@pytest.mark.parametrize("name", SCORES)
def test_score_mods(name: str) -> None:
    mod = SCORES[name]

    def attend(q: Any) -> Any:
        return monotile.jax.attention(q, K, V, score_mod=mod)

    for found in (monotile.attention(Q, K, V, score_mod=mod), attend(Q), jax.jit(attend)(Q)):
        np.testing.assert_allclose(found, formula(Q, mod), atol=1e-5)
    slope = jax.grad(lambda q: (formula(q, mod) ** 2).sum())(Q)
    for gradient in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        np.testing.assert_allclose(gradient(lambda q: (attend(q) ** 2).sum())(Q), slope, atol=2e-4)


def test_a_mask_mod_that_reads_an_array() -> None:
    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        return jnp.logical_or(BIAS[j] < 0.5, i >= j)

    wanted = monotile.attention(Q, K, V, mask=np.asarray(seen(0, 0, jnp.arange(N)[:, None], jnp.arange(N))))
    blocks = monotile.block_mask(seen, None, None, N, N)
    for mod in (seen, blocks):
        np.testing.assert_allclose(monotile.attention(Q, K, V, mask_mod=mod), wanted, atol=1e-6)
        found = jax.jit(lambda q, mod=mod: monotile.jax.attention(q, K, V, mask_mod=mod))(Q)
        np.testing.assert_allclose(found, wanted, atol=1e-6)


MISTAKES: dict[str, tuple[Mod, type[Exception], str]] = {
    "a function that is no word": (lambda s, b, h, i, j: jnp.take(BIAS, j), errors.NotCallable, "'take' cannot be"),
    "a function of lax": (lambda s, b, h, i, j: jax.lax.select(i >= j, s, s), errors.NotCallable, "'select' cannot"),
    "jit": (jax.jit(lambda s, b, h, i, j: s), errors.BadOption, "pass score_mod.__wrapped__"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_errors_while_a_call_is_traced(case: str) -> None:
    mod, error, words = MISTAKES[case]

    def attend(q: Any) -> Any:
        return monotile.jax.attention(q, K, V, score_mod=mod).sum()

    for call in (attend, jax.jit(attend), jax.grad(attend)):
        with pytest.raises(error, match=words):
            call(Q)


def test_traced_arrays_are_refused() -> None:
    def biased(q: Any, bias: Any) -> Any:
        return monotile.jax.attention(q, K, V, score_mod=lambda s, b, h, i, j: s + bias[j]).sum()

    for call in (jax.jit(biased), jax.grad(biased, argnums=1)):
        with pytest.raises(errors.ArgumentKind, match=r"reads an array that JAX traces; .* as the mask of attention"):
            call(Q, BIAS)
    with pytest.raises(errors.ArgumentKind, match="'x' is traced by JAX; call quantize"):
        jax.jit(lambda k: monotile.quantize(k, "int8").codes)(K)
    with pytest.raises(errors.ArgumentKind, match=r"'k' is Quantized, which monotile.jax.attention does not take"):
        monotile.jax.attention(Q, monotile.quantize(K, "int8"), V)


@pytest.mark.parametrize("format", ["int8", "int4_zero_point", "fp8_e4m3", "aura4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_arrays(format: str, dtype: str) -> None:
    """The fields and the numbers that they stand for are arrays of JAX, with the bits of NumPy's."""
    q, k = Q.astype(dtype), K.astype(dtype)
    found, wanted = monotile.quantize(k, format), monotile.quantize(np.asarray(k), format)
    for name, field in wanted.fields().items():
        assert isinstance(found.fields()[name], jax.Array)
        np.testing.assert_array_equal(np.asarray(found.fields()[name]), field)
    plain = found.dequantize()
    assert isinstance(plain, jax.Array) and plain.dtype == k.dtype
    np.testing.assert_array_equal(np.asarray(plain), wanted.dequantize())
    o = monotile.attention(q, found, found)
    assert isinstance(o, jax.Array)
    np.testing.assert_array_equal(np.asarray(o), monotile.attention(np.asarray(q), wanted, wanted))
