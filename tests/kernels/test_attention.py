"""attention, with each option and with all of them, against float64; and what must hold whatever the numbers are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import monotile
from arrays import Array
from kernels.cases import HEAD_SIZES, agrees, check, check_output, equal, normal, qkv
from monotile.language import inf, where
from usable import ON_GPU, WITH_METAL, usable

FAST = settings(deadline=None, derandomize=True, max_examples=6, suppress_health_check=list(HealthCheck))
DTYPES = ("float32", "float16", "bfloat16")
# No queries, one, few (split decode), one past a block, more than a block; keys likewise, and more queries than keys.
LENGTHS = st.tuples(
    st.sampled_from([0, 1, 2, 3, 7, 8, 9, 31, 33, 40, 65, 130]), st.sampled_from([0, 1, 2, 13, 48, 64, 65, 127, 129,
    257, 520])
)  # fmt: skip


# ---- head sizes, element types, lengths ------------------------------------------------------------------------------


@pytest.mark.parametrize("D", HEAD_SIZES)
def test_head_sizes(D: int, backend: str) -> None:
    """Every size, with another for the values or the same, the element types in turn; by both kernels."""
    n = HEAD_SIZES.index(D)
    Dv = HEAD_SIZES[(n * 4 + 1) % len(HEAD_SIZES)] if n % 2 else D
    for Nq, Nk in ((20, 67), (1, 67)):
        check(*qkv(Nq, Nk, D, Dv=Dv, Hq=4, Hkv=2, dtype=DTYPES[n % 3]), backend, causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@FAST
@given(lengths=LENGTHS, B=st.integers(1, 2), Hkv=st.integers(1, 3), G=st.integers(1, 5))
def test_lengths(dtype: str, lengths: tuple[int, int], B: int, Hkv: int, G: int, backend: str) -> None:
    check(*qkv(*lengths, B=B, Hq=Hkv * G, Hkv=Hkv, dtype=dtype), backend)


def test_lengths_without_a_batch(backend: str) -> None:
    for Nq in (3, 20):
        q, k, v = qkv(Nq, 40, B=1, Hq=4, Hkv=2)
        out, lse = check(q, k, v, backend, causal=True)
        equal(monotile.attention(q[0], k[0], v[0], causal=True, return_lse=True, backend=backend), (out[0], lse[0]))


# ---- options ---------------------------------------------------------------------------------------------------------

SLOPES = np.array([0.5, 0.25, 0.125, 0.0625, 0.03, 0.01], np.float32)
TABLE = normal(64, seed=9)
DOCUMENTS = np.repeat(np.arange(60), 11).astype(np.int32)


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + SLOPES[h] * (kv_idx - q_idx)


def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + TABLE[q_idx - kv_idx + 32]  # outside the table there is nothing to add


def documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]


def dilated(step: int) -> Any:
    return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx + 10 * step) % step == 0


def by_head_and_batch(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx >= h * 3) & (kv_idx >= b * 5)


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "lower right": {"causal": "lower_right"},
    "upper left": {"causal": "upper_left"},
    "window": {"window": (5, 3)},
    "window to the left": {"window": (17, None)},
    "window to the right": {"window": (None, 0)},
    "causal window": {"causal": True, "window": (30, 0)},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": -0.7},
    "no scale at all": {"scale": 0},
    "alibi": {"score_mod": alibi},
    "documents": {"mask_mod": documents},
    "dilated": {"mask_mod": dilated(3), "causal": True},
    "by head and batch": {"mask_mod": by_head_and_batch},
}


@pytest.mark.parametrize("name", OPTIONS)
@settings(FAST, max_examples=5)
@given(lengths=LENGTHS, heads=st.sampled_from([(1, 1), (4, 2), (6, 1)]), B=st.integers(1, 2))
def test_options(name: str, lengths: tuple[int, int], heads: tuple[int, int], B: int, backend: str) -> None:
    check(*qkv(*lengths, B=B, Hq=heads[0], Hkv=heads[1]), backend, **OPTIONS[name])


@pytest.mark.parametrize("lengths", [(130, 257), (8, 520)], ids=str)
def test_large_scores_keep_their_digits(lengths: tuple[int, int], backend: str) -> None:
    """A bias of up to 260 is not rounded once more on its way to the exponential; with a logit beside it neither."""
    for options in ({}, {"sinks": np.linspace(-3.0, 60.0, 6, dtype=np.float32)}):
        check(*qkv(*lengths, Hq=6), backend, score_mod=alibi, **options)


@pytest.mark.parametrize("Nk", [100, 600])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_scores_beyond_float32(sign: float, Nk: int, backend: str) -> None:
    """One key far above the others is the output, also where keys are split or a sink joins: a maximum that no float32
    holds counts as the largest, never as that of a row that has seen nothing."""
    q, v = np.full((1, 1, 1, 1), 1e10, np.float32), np.arange(Nk, dtype=np.float32).reshape(1, 1, Nk, 1)
    k = np.full((1, 1, Nk, 1), min(sign, 0.0), np.float32)
    k[0, 0, 3] = 1.0 if sign > 0 else -0.5
    o, lse = monotile.attention(q, k, v, scale=1e30, return_lse=True, backend=backend)
    assert np.isfinite(o).all() and np.abs(lse).max() > 3e38
    if sign > 0 or Nk == 100:  # else maxima of splits are alike
        assert o.item() == 3.0
    with_sink = monotile.attention(q, k, v, scale=1e30, sinks=np.zeros(1, np.float32), backend=backend)
    assert with_sink.item() == (o.item() if sign > 0 else 0.0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_softcap_alone(dtype: str, backend: str) -> None:
    """Narrow outputs without a logsumexp have a shorter formula: beside other options, and far beyond the cap."""
    q, k, v = qkv(40, 70, dtype=dtype)
    mask, sinks = normal(40, 70, seed=5), np.array([3.0, -1.0], np.float32)
    for options in (
        {"softcap": 64.0, "causal": True}, {"softcap": 0.5, "scale": -2.0}, {"softcap": 30.0, "mask": mask},
        {"softcap": 20.0, "sinks": sinks, "causal": "upper_left"}, {"softcap": 9.0, "score_mod": alibi},
        {"softcap": 2.0, "scale": 1e30, "sinks": sinks}, {"softcap": 1e-30, "scale": 1e9}, {"softcap": 1e4},
    ):  # fmt: skip
        check_output(q, k, v, backend, **options)


def test_softcap_of_infinity(backend: str) -> None:
    """Capped like any other score; NaN stays."""
    q, k, v = qkv(9, 70, 1, dtype="float16")
    q[:] = 1.0
    k[:, :, 3], k[:, :, 5], k[:, :, 69] = np.inf, -np.inf, -np.inf
    for run in (check_output, check):
        run(q, k, v, backend, softcap=3.0)
    k[:, :, 6] = np.nan
    assert np.isnan(check_output(q, k, v, backend, softcap=3.0)).all()


def test_relative_bias_from_a_table(backend: str) -> None:
    for Nq in (4, 50):
        q, k, v = qkv(Nq, 50)
        found = monotile.attention(q, k, v, score_mod=relative, return_lse=True, backend=backend)
        i, j = np.arange(Nq)[:, None], np.arange(50)[None, :]
        bias = np.where((i - j + 32 >= 0) & (i - j + 32 < 64), TABLE[(i - j + 32).clip(0, 63)], 0).astype(np.float32)
        check(q, k, v, backend, mask=bias)
        expected = monotile.attention(q, k, v, mask=bias, return_lse=True, backend=backend)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", usable(*WITH_METAL))
@pytest.mark.parametrize("Nq", [3, 20])
def test_a_score_mod_that_hides_keys_itself(Nq: int, backend: str) -> None:
    """metal: half of the number that stands for -inf was a score."""
    q, k, v = qkv(Nq, 40)

    def mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return where(j < i, score, -inf) / 2.0

    out, lse = monotile.attention(q, k, v, score_mod=mod, scale=0.2, return_lse=True, backend=backend)
    seen = np.arange(40) < np.arange(Nq)[:, None]
    expected = monotile.attention(q, k, v, mask=seen, scale=0.1, return_lse=True, backend="interpreter")
    np.testing.assert_allclose(out, expected[0], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(lse, expected[1], rtol=2e-5, atol=2e-6)
    assert (out[..., 0, :] == 0).all() and (lse[..., 0] == -np.inf).all()


@pytest.mark.parametrize("backend", usable(*WITH_METAL))
def test_the_logsumexp_of_scores_that_are_nan(backend: str) -> None:
    """metal: it was -inf."""
    q, k, v = qkv(20, 40)
    q[..., 3, :] = np.nan
    lse = monotile.attention(q, k, v, return_lse=True, backend=backend)[1]
    assert np.isnan(lse[..., 3]).all() and np.isfinite(np.delete(lse, 3, axis=-1)).all()


@pytest.mark.parametrize("Nq", [1, 12])
def test_a_score_mod_of_whole_numbers(Nq: int, backend: str) -> None:
    """They are scores like others, with every kind of mask."""
    q, k, v = qkv(Nq, 40)
    bias = (np.arange(Nq)[:, None] - np.arange(40)).astype(np.float32)
    for mask in (None, bias < 5, normal(Nq, 40)):
        found = monotile.attention(
            q, k, v, score_mod=lambda score, b, h, i, j: i - j, mask=mask, return_lse=True, backend=backend
        )
        total = bias if mask is None else np.where(mask, bias, -np.inf) if mask.dtype == bool else bias + mask
        agrees(found, 0 * q, k, v, mask=total.astype(np.float32))


def test_captured_arrays_are_read_at_every_call(backend: str) -> None:
    """Their contents are data, like q: new contents need no new compilation, and are never old ones."""
    offsets = np.zeros(2, np.float32)
    shifted = lambda score, b, h, q_idx, kv_idx: score + offsets[h]  # noqa: E731
    q, k, v = qkv(10, 20)
    before = monotile.attention(q, k, v, score_mod=shifted, return_lse=True, backend=backend)[1]
    offsets[:] = 3.0, -2.0
    after = monotile.attention(q, k, v, score_mod=shifted, return_lse=True, backend=backend)[1]
    np.testing.assert_allclose(after - before, np.broadcast_to(offsets[None, :, None], before.shape), atol=1e-5)


def test_captured_constants_are_those_of_the_function(backend: str) -> None:
    for cap in (2.0, 5.0):
        check(*qkv(10, 20), backend, score_mod=lambda score, b, h, q_idx, kv_idx, cap=cap: score * cap)
        check(*qkv(10, 20), backend, score_mod=lambda score, b, h, q_idx, kv_idx: score * cap)  # noqa: B023


@pytest.mark.parametrize("Nq", [1, 40])
def test_sinks(Nq: int, backend: str) -> None:
    q, k, v = qkv(Nq, 50, Hq=4, Hkv=2)
    for sinks in (normal(4), np.float32([-np.inf, 100, -100, 0]), normal(4, dtype="bfloat16")):
        check(q, k, v, backend, sinks=sinks)
    check(*qkv(Nq, 0, Hq=4, Hkv=2), backend, sinks=normal(4))
    check(*qkv(30 + Nq, 30, Hq=4, Hkv=2), backend, causal=True, sinks=normal(4))


# ---- masks -----------------------------------------------------------------------------------------------------------

KEPT = [tuple(bool(n >> i & 1) for i in range(4)) for n in range(16)]


def mask_of(shape: tuple[int, ...], kind: str, seed: int = 5) -> Array:
    rng = np.random.default_rng(seed)
    if kind == "bool":
        return rng.random(shape) < 0.6
    mask = rng.standard_normal(shape, dtype=np.float32)
    mask[rng.random(shape) < 0.3] = -np.inf
    return mask.astype(kind) if kind != "bfloat16" else mask.astype(normal(1, dtype="bfloat16").dtype)


@pytest.mark.parametrize("kind", ["bool", "float32"])
@pytest.mark.parametrize("Nq", [3, 40])
def test_masks_of_every_shape(kind: str, Nq: int, backend: str) -> None:
    """Each side as it is or 1, and then without the leading sides of 1, down to no side at all."""
    q, k, v = qkv(Nq, 70, B=2, Hq=4, Hkv=2)
    for kept in KEPT:
        shape = tuple(n if keep else 1 for n, keep in zip((2, 4, Nq, 70), kept, strict=True))
        mask = mask_of(shape, kind)
        expected = check(q, k, v, backend, mask=mask)
        while mask.ndim and mask.shape[0] == 1:
            mask = mask.reshape(mask.shape[1:])
        equal(monotile.attention(q, k, v, mask=mask, return_lse=True, backend=backend), expected)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_masks_of_narrow_types(kind: str, backend: str) -> None:
    check(*qkv(40, 70, dtype=kind), backend, mask=mask_of((40, 70), kind))
    check(*qkv(3, 70), backend, mask=mask_of((3, 70), kind))


@pytest.mark.parametrize("kind", ["bool", "float32"])
@FAST
@given(lengths=LENGTHS)
def test_masks_of_every_length(kind: str, lengths: tuple[int, int], backend: str) -> None:
    q, k, v = qkv(*lengths, Hq=4, Hkv=2)
    check(q, k, v, backend, mask=mask_of((4, *lengths), kind))


@pytest.mark.parametrize("kind", ["bool", "float32"])
def test_blocks_of_a_mask(kind: str, backend: str) -> None:
    """Hidden, mixed and open blocks side by side, different in each head."""
    mask = np.zeros((1, 2, 300, 400), np.float32)
    mask[:, 0, :128, :128] = -np.inf
    mask[:, 0, 140:, 130:] = -np.inf
    mask[:, 1, :, 256:] = -np.inf
    mask[:, 1, 60, 5] = -np.inf
    check(*qkv(300, 400), backend, mask=mask if kind != "bool" else mask == 0)


def test_views_as_masks(backend: str) -> None:
    """A mask may have any strides."""
    q, k, v = qkv(20, 30)
    for mask in (
        mask_of((30, 20), "bool").T,
        mask_of((40, 90), "float32")[::2, ::-3],
        mask_of((20, 1), "bool")[:, [0] * 30],
    ):
        check(q, k, v, backend, mask=mask)
    check(q[:, :, :2], k, v, backend, mask=mask_of((30, 2), "bool").T)


# ---- all of them together --------------------------------------------------------------------------------------------

TOGETHER = st.fixed_dictionaries(
    {},
    optional={
        "causal": st.sampled_from([True, "upper_left"]),
        "window": st.tuples(st.sampled_from([None, 0, 3, 40]), st.sampled_from([None, 0, 2])),
        "softcap": st.just(3.0),
        "scale": st.sampled_from([0.3, 1.0]),
        "score_mod": st.just(alibi),
        "mask_mod": st.sampled_from([documents, by_head_and_batch]),
        "sinks": st.sampled_from([SLOPES[:4]]),
        "mask": st.sampled_from(["bool", "float32"]),
    },
)


def together(options: dict[str, Any], lengths: tuple[int, int], kept: tuple[bool, ...], backend: str) -> None:
    sides = (2, 4, *lengths)
    if "mask" in options:
        shape = tuple(n if keep else 1 for n, keep in zip(sides, kept, strict=True))
        options = {**options, "mask": mask_of(shape, options["mask"])}
    check(*qkv(*lengths, 8, B=2, Hq=4, Hkv=2), backend, **options)


@settings(FAST, max_examples=100)
@given(options=TOGETHER, lengths=LENGTHS, kept=st.sampled_from(KEPT))
def test_options_together_interpreted(
    options: dict[str, Any], lengths: tuple[int, int], kept: tuple[bool, ...]
) -> None:
    together(options, lengths, kept, "interpreter")


@settings(FAST, max_examples=10)
@given(options=TOGETHER, lengths=LENGTHS, kept=st.sampled_from(KEPT))
def test_options_together_compiled(options: dict[str, Any], lengths: tuple[int, int], kept: tuple[bool, ...]) -> None:
    together(options, lengths, kept, "cpu")


# ---- what holds whatever the numbers are -----------------------------------------------------------------------------


def near(a: tuple[Array, Array], b: tuple[Array, Array]) -> None:
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


@FAST
@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_the_order_of_keys_changes_rounding_only(lengths: tuple[int, int], seed: int, backend: str) -> None:
    q, k, v = qkv(*lengths, seed=seed)
    order = np.random.default_rng(seed).permutation(lengths[1])
    run = {"return_lse": True, "backend": backend}
    near(monotile.attention(q, k[:, :, order], v[:, :, order], **run), monotile.attention(q, k, v, **run))


@FAST
@given(lengths=LENGTHS, Hkv=st.integers(1, 3), G=st.integers(1, 4))
def test_groups_are_repeated_heads(lengths: tuple[int, int], Hkv: int, G: int, backend: str) -> None:
    q, k, v = qkv(*lengths, Hq=Hkv * G, Hkv=Hkv)
    repeated = k.repeat(G, axis=1), v.repeat(G, axis=1)
    run = {"return_lse": True, "backend": backend}
    near(monotile.attention(q, *repeated, **run), monotile.attention(q, k, v, **run))


@FAST
@given(lengths=LENGTHS, shift=st.floats(-50, 50, width=32))
def test_a_constant_added_to_a_row_is_added_to_its_lse(lengths: tuple[int, int], shift: float, backend: str) -> None:
    assume(0 not in lengths)
    q, k, v = qkv(*lengths)
    mask = np.zeros((lengths[0], 1), np.float32)
    mask[::2] = shift
    run = {"return_lse": True, "backend": backend}
    out, lse = monotile.attention(q, k, v, **run)
    found, moved = monotile.attention(q, k, v, mask=mask, **run)
    np.testing.assert_allclose(found, out, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(moved - lse, np.broadcast_to(mask[:, 0], lse.shape), atol=2e-5)


HIDING: dict[str, dict[str, Any]] = {
    "bool mask": {},
    "additive mask": {},
    "mask_mod": {},
    "upper left": {"causal": "upper_left"},
    "window": {"window": (3, 0)},
}


@pytest.mark.parametrize("name", HIDING)
@FAST
@given(
    Nq=st.sampled_from([1, 3, 9, 20, 40, 70, 130]),
    more=st.sampled_from([1, 30, 64, 129, 600]),
    bad=st.sampled_from(["nan", "inf", "-inf"]),
)
def test_what_a_hidden_key_holds_never_matters(name: str, Nq: int, more: int, bad: str, backend: str) -> None:
    options, Nk = dict(HIDING[name]), Nq + more
    q, k, v = qkv(Nq, Nk)
    keys = np.arange(Nk)
    if name == "mask_mod":  # heads and rows that are not there would see them
        options = {"mask_mod": lambda b, h, q_idx, kv_idx: (kv_idx % 7 != 2) | (h > 1) | (q_idx >= limit)}
        limit, hidden = Nq, keys % 7 == 2
    elif name == "window":
        hidden = keys < more - 3
    elif name == "upper left":
        hidden = keys >= Nq
    else:
        hidden = keys % 5 == 1
        options = {"mask": ~hidden if name == "bool mask" else np.where(hidden, -np.inf, 0).astype(np.float32)}
    expected = check(q, k, v, backend, **options)
    k[:, :, hidden], v[:, :, hidden] = float(bad), -float(bad)
    equal(monotile.attention(q, k, v, return_lse=True, backend=backend, **options), expected)


@pytest.mark.parametrize("name", ["bool mask", "additive mask", "upper left", "mask_mod"])
@FAST
@given(
    Nq=st.sampled_from([1, 3, 20, 70, 130]),
    more=st.sampled_from([1, 30, 64, 129, 600]),
    dtype=st.sampled_from(DTYPES[:2]),
)
def test_hidden_keys_at_the_end_change_no_bit(name: str, Nq: int, more: int, dtype: str, backend: str) -> None:
    q, k, v = qkv(Nq, Nq + more, dtype=dtype)
    k[:, :, Nq:], v[:, :, Nq:] = np.nan, np.nan
    for n in (Nq, Nq + more):
        seen = np.arange(n) < Nq
        options: dict[str, Any] = {
            "mask": seen if name == "bool mask" else np.where(seen, 0, -np.inf).astype(np.float32)
        }
        if name == "upper left":
            options = {"causal": "upper_left"}
        elif name == "mask_mod":
            options = {"mask_mod": lambda b, h, q_idx, kv_idx: kv_idx < Nq}
        found = monotile.attention(q, k[:, :, :n], v[:, :, :n], return_lse=True, backend=backend, **options)
        if n == Nq:
            expected = found
    if ON_GPU and backend == "nvidia" and name == "additive mask":  # seen when sums were fused with products, or not
        for a, b in zip(found, expected, strict=True):
            bit = 2.0**-22 if a.dtype == np.float32 else 2.0**-9  # twice the last one
            np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), rtol=bit, atol=bit)
        return
    equal(found, expected)


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 5.0}], ids=["plain", "options"])
@pytest.mark.parametrize("Nq, Nk", [(1, 3000), (200, 300)])
def test_threads_change_no_bit(Nq: int, Nk: int, options: dict[str, Any]) -> None:
    q, k, v = qkv(Nq, Nk, 32, B=2, Hq=6, Hkv=2)
    results = [monotile.attention(q, k, v, return_lse=True, threads=n, backend="cpu", **options) for n in (1, 2, 3)]
    equal(results[0], results[1])
    equal(results[0], results[2])


def test_threads_change_no_bit_of_a_masked_call() -> None:
    q, k, v = qkv(150, 200, 32, B=2, Hq=4, Hkv=2)
    mask = mask_of((4, 150, 200), "bool")
    results = [monotile.attention(q, k, v, mask=mask, return_lse=True, threads=n, backend="cpu") for n in (1, 2, 3)]
    equal(results[0], results[1])
    equal(results[0], results[2])
