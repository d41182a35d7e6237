"""monotile.jax: attention inside jit, grad and vmap, against JAX's own arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.cases import qkv
from monotile import errors

jax = pytest.importorskip("jax")
jnp = jax.numpy
attention = pytest.importorskip("monotile.jax").attention


def formula(q: Any, k: Any, v: Any, mask: Any = None, sinks: Any = None, *, causal: bool = False) -> Any:
    group = q.shape[-3] // k.shape[-3]
    k, v = (jnp.repeat(a, group, -3) for a in (k, v))
    s = jnp.einsum("...qd,...kd->...qk", q, k) * q.shape[-1] ** -0.5
    s = s if mask is None else s + mask
    if causal:
        i = jnp.arange(q.shape[-2])[:, None] + k.shape[-2] - q.shape[-2]
        s = jnp.where(jnp.arange(k.shape[-2]) <= i, s, -jnp.inf)
    if sinks is not None:
        s = jnp.concatenate([s, jnp.broadcast_to(sinks[:, None, None], (*s.shape[:-1], 1))], -1)
    lse = jax.nn.logsumexp(s, -1)
    return jnp.exp(s - lse[..., None])[..., : k.shape[-2]] @ v, lse


def arrays(*, dtype: str = "float32") -> Any:
    return [jnp.asarray(a).astype(dtype) for a in qkv(20, 30, Hq=4, Hkv=2)]


def close(found: Any, expected: Any, tolerance: float = 3e-5) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=tolerance, atol=tolerance)


def test_values_and_gradients_in_jit() -> None:
    rng = np.random.default_rng(0)
    given = *arrays(), jnp.asarray(rng.standard_normal((20, 30)), "float32"), jnp.asarray([-1.0, 0.0, 0.5, 2.0])

    def loss(function: Any) -> Any:
        def of(q: Any, k: Any, v: Any, mask: Any, sinks: Any) -> Any:
            o, lse = function(q, k, v, mask=mask, sinks=sinks)
            return (o**2).sum() + jnp.sin(lse).sum()

        return jax.jit(jax.value_and_grad(of, argnums=range(5)))

    found = loss(lambda *args, **options: attention(*args, return_lse=True, **options))(*given)
    expected = loss(formula)(*given)
    close(found[0], expected[0], 1e-4)
    for a, b in zip(found[1], expected[1], strict=True):
        assert a.shape == b.shape
        close(a, b, 1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types(dtype: str) -> None:
    q, k, v = arrays(dtype=dtype)
    found = jax.jit(jax.vmap(lambda q, k, v: attention(q, k, v, causal=True)))(q, k, v)
    assert found.dtype == q.dtype
    exact = formula(*(a.astype("float32") for a in (q, k, v)), causal=True)[0]
    close(found.astype("float32"), exact, 2e-2 if dtype == "bfloat16" else 2e-3)


def test_vmap_of_gradients_under_a_bool_mask() -> None:
    q, k, v = arrays()
    rows, sinks = jnp.stack([q, 2 * q, -q]), jnp.asarray([[0.0, 1.0, 2.0, 3.0]] * 3) * jnp.arange(3)[:, None]
    seen = jnp.arange(30)[None] < 17

    def gradients(function: Any, mask: Any) -> Any:
        of = jax.grad(lambda q, k, s: (function(q, k, v, mask=mask, sinks=s)[0] ** 2).sum(), argnums=(0, 1, 2))
        return jax.jit(jax.vmap(of, (0, None, 0)))(rows, k, sinks)

    found = gradients(lambda *args, **options: attention(*args, return_lse=True, **options), seen)
    for a, b in zip(found, gradients(formula, jnp.where(seen, 0.0, -jnp.inf)), strict=True):
        close(a, b, 1e-4)


def test_leading_dimensions_are_broadcast() -> None:
    q, k, v = arrays()
    wide, mask = jnp.stack([q, 2 * q, -q]), jnp.arange(30.0) * jnp.arange(3.0)[:, None, None, None, None]

    def gradient(function: Any) -> Any:
        return jax.grad(lambda k: (function(wide, k, v[0], mask=mask)[0] ** 2).sum())(k[:1])

    close(attention(wide, k[:1], v[0], mask=mask), formula(wide, k[:1], v[0], mask)[0])
    found = gradient(lambda *args, mask: attention(*args, mask=mask, return_lse=True))
    close(found, gradient(formula), 1e-4)


def test_functions_read_arrays_that_are_not_traced() -> None:
    q, k, v = arrays()
    bias = jnp.linspace(-1, 1, 30)
    found = jax.jit(lambda q: attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[j]))(q)
    close(found, formula(q, k, v, bias)[0])
    with pytest.raises(errors.ArgumentKind, match="reads an array that JAX traces"):
        jax.jit(lambda q, t: attention(q, k, v, score_mod=lambda s, b, h, i, j: s + t[j]))(q, bias)


def test_mistakes_are_errors_of_the_trace() -> None:
    q, k, v = arrays()
    with pytest.raises(errors.LengthsDiffer, match="k has 30 positions and v has 29"):
        jax.jit(attention)(q, k, v[:, :, :29])
    with pytest.raises(errors.BadOption, match="scale must be a finite number, found"):
        jax.jit(lambda q, scale: attention(q, k, v, scale=scale))(q, 0.5)
    with pytest.raises(errors.MixedDTypes, match="found int32"):
        attention(*(a.astype("int32") for a in (q, k, v)))
    with pytest.raises(errors.ArgumentKind, match="'mask' must be an array of JAX, found list"):
        attention(q, k, v, mask=[True])


def test_an_error_in_a_call_is_raised() -> None:
    from monotile.jax import ffi

    def fail(request: str, arrays: list[Any]) -> list[Any]:
        raise ValueError(f"{request} of {arrays[0].shape}")

    ffi.register("monotile_test_fails", fail)
    call = jax.ffi.ffi_call("monotile_test_fails", jax.ShapeDtypeStruct((2,), "float32"))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"ValueError: nothing of \(3,\)"):
        jax.jit(lambda x: call(x, request="nothing"))(jnp.ones(3)).block_until_ready()
