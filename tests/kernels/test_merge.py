"""merge and merge_lse: softmax states of different keys become the attention over all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import monotile
from arrays import Array, numpy_type
from kernels.cases import equal, normal
from monotile.kernels import reference
from monotile.library import registry

FAST = settings(deadline=None, derandomize=True, max_examples=15, suppress_health_check=list(HealthCheck))
SHAPES = st.tuples(
    st.sampled_from([(), (1,), (3,), (2, 3), (2, 0), (1, 2, 3, 2)]), st.sampled_from([0, 1, 2, 63, 64, 65, 200])
)


def parts(lead: tuple[int, ...], S: int, Dv: int = 16, seed: int = 0) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    l = (1 + 100 * rng.random((*lead, S))).astype(np.float32)
    m = (30 * rng.standard_normal((*lead, S))).astype(np.float32)
    return (normal(*lead, S, Dv, seed=seed) * l[..., None]).astype(np.float32), m, l


def agrees(found: tuple[Array, Array], o: Array, m: Array, l: Array, dtype: str = "float32") -> None:
    exact, naive = reference.merge(o, m, l), reference.merge(o, m, l, np.float32)
    rounded = naive[0].astype(numpy_type(dtype)), naive[1]
    assert found[0].dtype == numpy_type(dtype) and found[1].dtype == np.float32
    for name, a, b, c in zip(("out", "lse"), found, exact, rounded, strict=True):
        assert registry.judge(name, np.asarray(a), b, c).ok


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@FAST
@given(shape=SHAPES, hidden=st.sampled_from([0, 0.3, 1]))
def test_any_number_of_parts(dtype: str, shape: tuple[tuple[int, ...], int], hidden: float, backend: str) -> None:
    """Parts that saw no key are skipped, whatever they hold; with none left the output is 0 and lse -inf."""
    o, m, l = parts(*shape)
    gone = np.random.default_rng(1).random(l.shape) < hidden
    l[gone] = 0
    for left_m, left_o in ((-np.inf, 0), (np.nan, np.nan), (np.inf, -np.inf), (5, 5)):
        m[gone], o[gone] = left_m, left_o
        agrees(monotile.merge(o, m, l, dtype=dtype, backend=backend), o, m, l, dtype)


@pytest.mark.parametrize("Dv", [1, 7, 80, 128, 512, 576])
def test_head_sizes(Dv: int, backend: str) -> None:
    given = parts((3,), 9, Dv)
    agrees(monotile.merge(*given, backend=backend), *given)


def test_maxima_far_apart(backend: str) -> None:
    """What is too small to count adds nothing, and no exponential overflows."""
    o, m, l = parts((1,), 3)
    m[0] = -3e4, 3e4, 0
    out, lse = monotile.merge(o, m, l, backend=backend)
    agrees((out, lse), o, m, l)
    np.testing.assert_allclose(out[0], o[0, 1] / l[0, 1], rtol=1e-6)


def test_dtype_is_named_in_any_way() -> None:
    given = parts((2,), 3)
    for dtype in ("float16", np.float16, np.dtype("float16")):
        assert monotile.merge(*given, dtype=dtype)[0].dtype == np.float16


def test_finished_parts(backend: str) -> None:
    """The same from outputs and their lse, as one array or as a list of them."""
    o, m, l = parts((2, 3), 5)
    l[..., 2] = 0
    with np.errstate(divide="ignore", invalid="ignore"):
        outs, lses = o / l[..., None], m + np.log(l)
    found = monotile.merge_lse(outs, lses, backend=backend)
    agrees(found, outs, lses, (lses != -np.inf).astype(np.float32))
    expected = monotile.merge(o, m, l, backend=backend)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4, atol=1e-5)
    listed = monotile.merge_lse([outs[..., s, :] for s in range(5)], [lses[..., s] for s in range(5)], backend=backend)
    equal(found, listed)


def test_finished_parts_of_narrow_types_stay_so(backend: str) -> None:
    outs, lses = normal(4, 3, 16, dtype="bfloat16"), normal(4, 3)
    out, lse = monotile.merge_lse(outs, lses, backend=backend)
    agrees((out, lse), outs, lses, np.ones_like(lses), "bfloat16")


def test_strided_parts(backend: str) -> None:
    o, m, l = parts((6,), 10)
    views = o[::2, ::-1], m[::2, ::-1], l[::2, ::-1]
    agrees(monotile.merge(*views, backend=backend), *views)


def test_threads_change_no_bit() -> None:
    given = parts((50,), 130, 32)
    first, *others = [monotile.merge(*given, threads=n, backend="cpu") for n in (1, 2, 3)]
    for other in others:
        equal(first, other)


def test_no_parts() -> None:
    with pytest.raises(monotile.MonotileError, match="'outs' must be an array, found list"):
        monotile.merge_lse([], [])
