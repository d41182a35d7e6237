"""Inputs for the attention library, and the one comparison with float64 that its tests make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import monotile
from arrays import Array, numpy_type
from monotile.kernels import reference
from monotile.library import registry
from monotile.runtime import arrays as array_kinds

# Head sizes: the tuned ones, those of the documents, and some that fit no vector.
HEAD_SIZES = (1, 2, 3, 7, 16, 17, 33, 64, 80, 96, 128, 192, 256, 512, 576)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Outputs and parts hold NaN before a kernel runs: what it does not write is seen."""
    plain = array_kinds.Numpy.allocate

    def allocate(self: Any, template: Any) -> tuple[Array, int]:
        found, address = plain(self, template)
        # Four bytes of 255 are a NaN, too.
        found.fill(np.iinfo(found.dtype).max if found.dtype.kind in "iu" else np.nan)
        return found, address

    monkeypatch.setattr(array_kinds.Numpy, "allocate", allocate)
    yield


def normal(*shape: int, dtype: str = "float32", seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(numpy_type(dtype))


def qkv(
    Nq: int, Nk: int, D: int = 16, *, B: int = 1, Hq: int = 2, Hkv: int = 1, Dv: int | None = None,
    dtype: str = "float32", seed: int = 0,
) -> tuple[Array, Array, Array]:  # fmt: skip
    shapes = (B, Hq, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, Dv or D)
    q, k, v = (normal(*shape, dtype=dtype, seed=seed + n) for n, shape in enumerate(shapes))
    return q, k, v


def agrees(found: tuple[Array, ...], q: Array, k: Array, v: Array, **options: Any) -> None:
    """Output and lse, or output alone, are as near to float64 as the error rule asks, NaN and infinity included."""
    exact = reference.attention(q, k, v, **options)
    naive = reference.attention(q, k, v, **options, compute=np.float32)
    for name, a, b, c in zip(("out", "lse"), found, exact, (naive[0].astype(q.dtype), naive[1]), strict=False):
        verdict = registry.judge(name, a, b, c)
        assert verdict.ok, f"{name}: the error is {verdict.error}, {verdict.allowed} is allowed"
    assert found[0].dtype == q.dtype and all(lse.dtype == np.float32 for lse in found[1:])


def check(q: Array, k: Array, v: Array, backend: str | None = None, **options: Any) -> tuple[Array, Array]:
    """Attention, held against float64."""
    found = monotile.attention(q, k, v, return_lse=True, backend=backend, **options)
    agrees(found, q, k, v, **options)
    return found


def check_output(q: Array, k: Array, v: Array, backend: str | None = None, **options: Any) -> Array:
    """Attention without its logsumexp, held against float64."""
    out: Array = monotile.attention(q, k, v, backend=backend, **options)
    agrees((out,), q, k, v, **options)
    return out


def check_splits(q: Array, k: Array, v: Array, splits: int | None, backend: str | None = None, **options: Any) -> Any:
    """Attention in parts, merged and held against float64."""
    parts = monotile.decode_partials(q, k, v, splits=splits, backend=backend, **options)
    found = monotile.merge(*parts, dtype=q.dtype, backend=backend)
    agrees(found, q, k, v, **options)
    return parts


def equal(a: Any, b: Any) -> None:
    """The same bits, but that NaN is NaN."""
    for x, y in zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]:
        assert x.dtype == y.dtype and x.shape == y.shape
        np.testing.assert_array_equal(x.astype(np.float32), y.astype(np.float32))


def check_gradients(
    q: Array, k: Array, v: Array, backend: str | None = None, *, mask_grad: bool = False, seed: int = 7, **options: Any
) -> monotile.Gradients:
    """The gradients of attention for a random gradient of output and logsumexp, held against float64."""
    B, Hq, Nq, _ = q.shape
    do, dlse = normal(B, Hq, Nq, v.shape[3], dtype=q.dtype.name, seed=seed), normal(B, Hq, Nq, seed=seed + 1)
    o, lse = monotile.attention(q, k, v, return_lse=True, backend=backend, **options)
    given = {"do": do, "q": q, "k": k, "v": v, "dlse": dlse, "mask_grad": mask_grad, **options}
    found = monotile.attention_backward(**given, o=o, lse=lse, backend=backend)
    gradients_agree(found, given)
    return found


def gradients_agree(found: monotile.Gradients, inputs: dict[str, Any]) -> None:
    """Gradients have the type of their arguments, and are as near to float64 as the error rule asks."""
    exact, naive = registry.BACKWARD[0](inputs), registry.BACKWARD[1](inputs)
    assert {name for name, gradient in found._asdict().items() if gradient is not None} == set(exact)
    for name in exact:
        gradient = getattr(found, name)
        assert gradient.dtype == inputs[name[1:]].dtype
        verdict = registry.judge(name, gradient, exact[name], naive[name])
        assert verdict.ok, f"{name}: the error is {verdict.error}, {verdict.allowed} is allowed"
