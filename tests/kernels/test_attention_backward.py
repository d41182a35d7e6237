"""attention_backward, with each option and with all of them, against float64; hazards; arrays; mistakes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import monotile
from arrays import Array
from kernels.cases import check_gradients, equal, normal, qkv
from monotile.backends.cpu import target
from monotile.errors import ArgumentRank, ArgumentShape, BadOption, MixedDTypes, MonotileError

FAST = settings(deadline=None, derandomize=True, max_examples=5, suppress_health_check=list(HealthCheck))
DTYPES = ("float32", "float16", "bfloat16")
SIZES = (1, 3, 33, 64, 80, 128, 192, 256, 512, 576)
LENGTHS = st.tuples(st.sampled_from([0, 1, 2, 9, 33, 65, 130]), st.sampled_from([0, 1, 13, 64, 65, 129, 200]))


@pytest.mark.parametrize("D", SIZES)
def test_head_sizes(D: int, backend: str) -> None:
    """Every size, with another for the values or the same, the element types in turn."""
    n = SIZES.index(D)
    Dv = SIZES[(n * 5 + 1) % len(SIZES)] if n % 2 else D
    check_gradients(*qkv(20, 37, D, Dv=Dv, Hq=4, Hkv=2, dtype=DTYPES[n % 3]), backend, causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@FAST
@given(lengths=LENGTHS, B=st.integers(1, 2), Hkv=st.integers(1, 3), G=st.integers(1, 4))
def test_lengths(dtype: str, lengths: tuple[int, int], B: int, Hkv: int, G: int, backend: str) -> None:
    check_gradients(*qkv(*lengths, B=B, Hq=Hkv * G, Hkv=Hkv, dtype=dtype), backend)


def documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx // 11 == kv_idx // 11


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "upper left": {"causal": "upper_left"},
    "window": {"window": (5, 3)},
    "window to the left": {"window": (17, None), "causal": "upper_left"},
    "window to the right": {"window": (None, 0)},
    "softcap": {"softcap": 1.5},
    "negative scale": {"scale": -0.7, "softcap": 4.0},
    "no scale at all": {"scale": 0},
    "documents": {"mask_mod": documents},
    "sinks": {"sinks": normal(4), "causal": True},
}


@pytest.mark.parametrize("name", OPTIONS)
@settings(FAST, max_examples=2)
@given(lengths=LENGTHS, B=st.integers(1, 2))
def test_options(name: str, lengths: tuple[int, int], B: int, backend: str) -> None:
    check_gradients(*qkv(*lengths, B=B, Hq=4, Hkv=2), backend, **OPTIONS[name])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_options_of_narrow_types(dtype: str, backend: str) -> None:
    q, k, v = qkv(40, 70, 24, Hq=4, Hkv=2, dtype=dtype)
    sinks, mask = normal(4, dtype=dtype), normal(4, 40, 70, dtype=dtype)
    check_gradients(q, k, v, backend, causal=True, softcap=5.0, sinks=sinks)
    check_gradients(q, k, v, backend, mask=mask, mask_grad=True)


# ---- masks -----------------------------------------------------------------------------------------------------------


def mask_of(shape: tuple[int, ...], kind: str) -> Array:
    rng = np.random.default_rng(5)
    if kind == "bool":
        return rng.random(shape) < 0.6
    mask = rng.standard_normal(shape, dtype=np.float32)
    mask[rng.random(shape) < 0.3] = -np.inf
    return mask


SHAPES = [(2, 4, 40, 70), (1, 4, 40, 70), (2, 1, 1, 70), (4, 1, 70), (40, 1), (70,), (1, 4, 1, 1), ()]
OF_EACH_KIND = [("float32", shape) for shape in SHAPES] + [("bool", shape) for shape in SHAPES[::3]]


@pytest.mark.parametrize(("kind", "shape"), OF_EACH_KIND, ids=str)
def test_masks_of_every_shape(shape: tuple[int, ...], kind: str, backend: str) -> None:
    """The gradient of a mask has the mask's own shape."""
    q, k, v = qkv(40, 70, B=2, Hq=4, Hkv=2)
    mask = mask_of(shape, kind) if shape else np.asarray(True if kind == "bool" else np.float32(0.5))
    found = check_gradients(q, k, v, backend, mask=mask, mask_grad=kind != "bool", causal=True)
    assert kind == "bool" or (found.dmask is not None and found.dmask.shape == mask.shape)


@pytest.mark.parametrize("kind", ["bool", "float32"])
def test_blocks_of_a_mask(kind: str, backend: str) -> None:
    """Hidden, mixed and open blocks side by side, different in each head."""
    mask = np.zeros((1, 2, 150, 300), np.float32)
    mask[:, 0, :128, :128] = -np.inf
    mask[:, 0, 140:, 130:] = -np.inf
    mask[:, 1, :, 200:] = -np.inf
    mask[:, 1, 60, 5] = -np.inf
    check_gradients(*qkv(150, 300), backend, mask=mask if kind != "bool" else mask == 0)


def test_a_mask_without_scores_has_gradient_zero(backend: str) -> None:
    for Nq, Nk in ((0, 5), (5, 0)):
        found = check_gradients(*qkv(Nq, Nk), backend, mask=np.zeros((1, 1), np.float32), mask_grad=True)
        assert found.dmask is not None and not found.dmask.any()


# ---- all of them together --------------------------------------------------------------------------------------------

TOGETHER = st.fixed_dictionaries(
    {},
    optional={
        "causal": st.sampled_from([True, "upper_left"]),
        "window": st.tuples(st.sampled_from([None, 0, 3, 40]), st.sampled_from([None, 0, 2])),
        "softcap": st.just(3.0),
        "scale": st.sampled_from([0.3, -1.0]),
        "mask_mod": st.just(documents),
        "sinks": st.just(normal(4, seed=3)),
        "mask": st.sampled_from(["bool", "float32"]),
    },
)
KEPT = st.tuples(*[st.booleans()] * 4)


def together(options: dict[str, Any], lengths: tuple[int, int], kept: tuple[bool, ...], backend: str) -> None:
    options = dict(options)
    if "mask" in options:
        kind = options["mask"]
        shape = tuple(n if keep else 1 for n, keep in zip((2, 4, *lengths), kept, strict=True))
        options |= {"mask": mask_of(shape, kind), "mask_grad": kind != "bool"}
    check_gradients(*qkv(*lengths, 8, B=2, Hq=4, Hkv=2), backend, **options)


@settings(FAST, max_examples=40)
@given(options=TOGETHER, lengths=LENGTHS, kept=KEPT)
def test_options_together_interpreted(options: Any, lengths: tuple[int, int], kept: tuple[bool, ...]) -> None:
    together(options, lengths, kept, "interpreter")


@settings(FAST, max_examples=6)
@given(options=TOGETHER, lengths=LENGTHS, kept=KEPT)
def test_options_together_compiled(options: Any, lengths: tuple[int, int], kept: tuple[bool, ...]) -> None:
    together(options, lengths, kept, "cpu")


# ---- hazards ---------------------------------------------------------------------------------------------------------


def test_large_scores(backend: str) -> None:
    q, k, v = qkv(40, 70)
    check_gradients(20 * q, 20 * k, v, backend)
    check_gradients(q, k, v, backend, scale=300.0, causal=True)


def test_do_of_a_row_without_keys_reaches_nothing(backend: str) -> None:
    """Whatever it holds, with sinks and without."""
    q, k, v = qkv(9, 20)
    mask, sinks = np.ones((9, 20), bool), normal(q.shape[1], seed=5)
    mask[3:5] = False
    for options in ({"mask": mask}, {"mask": mask, "sinks": sinks}):
        o, lse = monotile.attention(q, k, v, return_lse=True, backend=backend, **options)
        do = normal(*o.shape, seed=7)
        do[:, :, 3:5] = 0.0
        expected = monotile.attention_backward(do, q, k, v, o, lse, backend=backend, **options)
        do[:, :, 3], do[:, :, 4] = np.nan, np.inf
        found = monotile.attention_backward(do, q, k, v, o, lse, backend=backend, **options)
        for name in ("dq", "dk", "dv", "dsinks"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("bias", [1e4, -1e4])
def test_large_biases(bias: float, backend: str) -> None:
    """A bias of a whole row changes no weight, and biases that differ leave one key."""
    q, k, v = qkv(40, 70)
    mask = np.where(np.arange(40) % 2, np.float32(bias), 0).astype(np.float32)[:, None]
    check_gradients(q, k, v, backend, mask=mask, mask_grad=True)
    one = np.where(np.arange(70) == 9, bias, 0).astype(np.float32)
    check_gradients(q, k, v, backend, mask=one, mask_grad=bias < 0)
    if bias > 0:  # one key has all the weight: the mask's gradient is a difference of equal terms
        o, lse = monotile.attention(q, k, v, mask=one, return_lse=True, backend=backend)
        do = normal(*o.shape, seed=7)
        found = monotile.attention_backward(do, q, k, v, o, lse, mask=one, mask_grad=True, backend=backend).dmask
        assert np.abs(found).max() <= 2.0**-22 * np.abs(do * o).sum()


def test_rows_that_see_no_key(backend: str) -> None:
    """Their own gradient is 0, and what q and do hold there reaches nothing."""
    q, k, v = qkv(40, 70)
    o, lse = monotile.attention(q, k, v, return_lse=True, backend=backend)
    blind = np.arange(40) % 7 == 2
    for options in (
        {"mask": ~blind[:, None]}, {"mask": np.where(blind, -np.inf, 0).astype(np.float32)[:, None]},
        {"mask_mod": lambda b, h, i, j: i % 7 != 2},
    ):  # fmt: skip
        do = normal(*q.shape, seed=9)
        o, lse = monotile.attention(q, k, v, return_lse=True, backend=backend, **options)
        expected = monotile.attention_backward(do, q, k, v, o, lse, backend=backend, **options)
        assert (lse[:, :, blind] == -np.inf).all() and not expected.dq[:, :, blind].any()
        dirty, rows = q.copy(), do.copy()
        dirty[:, :, blind], rows[:, :, blind] = np.nan, np.inf
        found = monotile.attention_backward(rows, dirty, k, v, o, lse, backend=backend, **options)
        equal(tuple(found)[:3], tuple(expected)[:3])
    # More queries than keys: the first rows see nothing by position.
    found = check_gradients(*qkv(90, 30), backend, causal=True)
    assert not found.dq[:, :, :60].any()


HIDING = {"bool mask": {}, "additive mask": {}, "mask_mod": {}, "upper left": {"causal": "upper_left"}}


@pytest.mark.parametrize("name", HIDING)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_a_hidden_key_holds_never_matters(name: str, bad: float, backend: str) -> None:
    q, k, v = qkv(70, 200)
    keys = np.arange(200)
    hidden = keys >= 70 if name == "upper left" else keys % 5 == 1
    options: dict[str, Any] = dict(HIDING[name])
    if name == "mask_mod":
        options = {"mask_mod": lambda b, h, i, j: (j % 5 != 1) | (i >= 70)}  # rows that are not there would see them
    elif name.endswith("mask"):
        options = {"mask": ~hidden if name == "bool mask" else np.where(hidden, -np.inf, 0).astype(np.float32)}
    o, lse = monotile.attention(q, k, v, return_lse=True, backend=backend, **options)
    do = normal(*q.shape, seed=9)
    expected = monotile.attention_backward(do, q, k, v, o, lse, backend=backend, **options)
    assert not expected.dk[:, :, hidden].any() and not expected.dv[:, :, hidden].any()
    k[:, :, hidden], v[:, :, hidden] = bad, -bad
    equal(tuple(monotile.attention_backward(do, q, k, v, o, lse, backend=backend, **options))[:3], tuple(expected)[:3])


def test_arrays_with_any_strides(backend: str) -> None:
    """Transposed, reversed, parts of larger arrays, and a last dimension that is not contiguous."""
    q, k, v = qkv(40, 70, 24, Hq=4, Hkv=2)
    do = normal(*q.shape, seed=9)
    o, lse = monotile.attention(q, k, v, causal=True, return_lse=True, backend=backend)
    expected = monotile.attention_backward(do, q, k, v, o, lse, causal=True, backend=backend)

    def spread(x: Array) -> Array:
        wide = np.full((*x.shape[:2], x.shape[2] + 3, x.shape[3]), np.nan, x.dtype)
        wide[:, :, : x.shape[2]] = x
        return wide[:, :, : x.shape[2]]

    heads_last = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (do, q, k, v, o)]
    columns = [np.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3) for x in (do, q, k, v, o)]
    reverse = [x[:, :, ::-1].copy()[:, :, ::-1] for x in (do, q, k, v, o)]
    for arrays in (heads_last, columns, reverse, [spread(x) for x in (do, q, k, v, o)]):
        rows = np.asfortranarray(lse)
        found = monotile.attention_backward(*arrays, rows, causal=True, backend=backend)  # type: ignore[misc]
        for a, b in zip(found[:3], expected[:3], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_arrays_without_a_batch(backend: str) -> None:
    q, k, v = qkv(20, 40, Hq=4, Hkv=2)
    o, lse = monotile.attention(q, k, v, return_lse=True, backend=backend)
    expected = monotile.attention_backward(o, q, k, v, o, lse, dlse=lse, backend=backend)
    found = monotile.attention_backward(o[0], q[0], k[0], v[0], o[0], lse[0], dlse=lse[0], backend=backend)
    equal(tuple(found)[:3], tuple(x[0] for x in expected[:3]))


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 5.0}], ids=["plain", "options"])
@pytest.mark.parametrize("Hkv", [1, 2])
def test_threads_change_no_bit(Hkv: int, options: dict[str, Any]) -> None:
    q, k, v = qkv(200, 300, 32, Hq=4, Hkv=Hkv)
    o, lse = monotile.attention(q, k, v, return_lse=True, **options)
    results = [monotile.attention_backward(o, q, k, v, o, lse, threads=n, backend="cpu", **options) for n in (1, 2, 3)]
    for other in results[1:]:
        equal(tuple(results[0])[:3], tuple(other)[:3])


@pytest.mark.parametrize("unit", target.runnable()[1:])
def test_vector_units(unit: str) -> None:
    """One kernel (two KV heads) and two kernels (one), on the vector units of this machine that are not its own."""
    for Hkv in (1, 2):
        for options in ({"causal": True}, {"mask": mask_of((4, 70, 150), "bool")}):
            check_gradients(*qkv(70, 150, 40, Hq=4, Hkv=Hkv), f"cpu:{unit}", **options)


# ---- mistakes --------------------------------------------------------------------------------------------------------


def test_mistakes() -> None:
    q, k, v = qkv(20, 40, Hq=4, Hkv=2, Dv=8)
    o, lse = monotile.attention(q, k, v, return_lse=True)
    bias = np.zeros((20, 40), np.float32)
    wrong: list[tuple[type[MonotileError], str, dict[str, Any]]] = [
        (ArgumentShape, r"'do' has shape \(1, 4, 20, 16\); the output .* has shape \(1, 4, 20, 8\)", {"do": q}),
        (ArgumentRank, "'o' has shape", {"o": o[0]}),
        (ArgumentShape, "'lse' has shape .* the logsumexp", {"lse": lse[:, :, :3]}),
        (ArgumentRank, "'dlse' has shape", {"dlse": o}),
        (MixedDTypes, "'do' is int32; the output and its gradient have q's element type", {"do": o.astype(np.int32)}),
        (MixedDTypes, "'o' is float16", {"o": o.astype(np.float16)}),
        (MixedDTypes, "'lse' is float16; the logsumexp is float32", {"lse": lse.astype(np.float16)}),
        (BadOption, "a bool mask has no gradient", {"mask": bias == 0, "mask_grad": True}),
        (BadOption, "mask_grad asks for the gradient of a mask, but there is none", {"mask_grad": True}),
        (BadOption, "mask_grad is True or False, found 1", {"mask": bias, "mask_grad": 1}),
    ]
    for error, message, change in wrong:
        given = {"do": o, "q": q, "k": k, "v": v, "o": o, "lse": lse, **change}
        with pytest.raises(error, match=message):
            monotile.attention_backward(**given)
