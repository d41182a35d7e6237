"""Leading dimensions of attention's arrays: any number, broadcast to each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import monotile
from monotile import errors

Lead = tuple[int, ...]
RNG = np.random.default_rng(0)
# The leading dimensions of q, k, v and the mask; the last case has keys and values that are copied.
CASES: list[tuple[Lead, Lead, Lead, Lead | None]] = [
    ((3,), (1,), (3,), None),
    ((), (3,), (1,), (3,)),
    ((2, 3), (2, 3), (2, 3), (1, 1)),
    ((2, 3), (3,), (), (2, 1)),
    ((1, 3), (2, 1), (2, 3), (3,)),
]


def array(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def formula(q: Any, k: Any, v: Any, mask: Any) -> Any:
    k, v = (np.repeat(a.astype(np.float64), q.shape[-3] // a.shape[-3], -3) for a in (k, v))
    s = q @ np.swapaxes(k, -1, -2) * q.shape[-1] ** -0.5 + (0 if mask is None else mask)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v


def given(case: tuple[Lead, Lead, Lead, Lead | None]) -> tuple[Any, Any, Any, Any]:
    of_q, of_k, of_v, of_mask = case
    mask = None if of_mask is None else array(*of_mask, 4, 5, 7)
    return array(*of_q, 4, 5, 8), array(*of_k, 2, 7, 8), array(*of_v, 2, 7, 8), mask


@pytest.mark.parametrize("case", CASES, ids=str)
def test_they_are_broadcast(case: tuple[Lead, Lead, Lead, Lead | None]) -> None:
    q, k, v, mask = given(case)
    expected = formula(q, k, v, mask)
    o, lse = monotile.attention(q, k, v, mask=mask, return_lse=True)
    assert o.shape == expected.shape and lse.shape == expected.shape[:-1]
    np.testing.assert_allclose(o, expected, rtol=2e-5, atol=2e-5)
    spread = np.swapaxes(np.swapaxes(k, -1, -2).copy(), -1, -2)  # its last stride is not 1
    np.testing.assert_array_equal(monotile.attention(q, spread, v, mask=mask, return_lse=True)[0], o)


@pytest.mark.parametrize("case", CASES[:4], ids=str)
@pytest.mark.parametrize("queries", [2, 40])
def test_they_are_broadcast_where_heads_lie_behind_positions(
    case: tuple[Lead, Lead, Lead, Lead | None], queries: int
) -> None:
    """The rows of few queries are copied then, under their own number of dimensions."""
    of_q, of_k, of_v, _ = case
    q = np.swapaxes(array(*of_q, queries, 4, 8), -2, -3)
    k, v = (np.swapaxes(array(*lead, 7, 2, 8), -2, -3) for lead in (of_k, of_v))
    np.testing.assert_allclose(monotile.attention(q, k, v), formula(q, k, v, None), rtol=2e-5, atol=2e-5)


FORMATS = [("int8", "aura3"), ("int4_zero_point", None), (None, "fp8_e5m2")]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_those_of_quantised_keys_and_values(
    case: tuple[Lead, Lead, Lead, Lead | None], formats: tuple[str | None, str | None]
) -> None:
    """They are broadcast as those of plain arrays are, also where a field has to be copied."""
    q, k, v, mask = given(case)
    K, V = (x if f is None else monotile.quantize(x, f) for x, f in zip((k, v), formats, strict=True))
    expected = formula(q, *(x if f is None else x.dequantize() for x, f in zip((K, V), formats, strict=True)), mask)
    o, lse = monotile.attention(q, K, V, mask=mask, return_lse=True)
    assert o.shape == expected.shape and lse.shape == expected.shape[:-1]
    np.testing.assert_allclose(o, expected, rtol=3e-5, atol=3e-5)
    parts = monotile.decode_partials(q, K, V, mask=mask, splits=3)
    np.testing.assert_allclose(monotile.merge(*parts)[0], o, rtol=2e-5, atol=2e-5)
    if isinstance(K, monotile.Quantized):  # whose fields do not lie evenly
        codes, scales = (np.swapaxes(np.swapaxes(x, -1, -2).copy(), -1, -2) for x in (K.codes, K.scales))
        spread = K.with_fields({"codes": codes, "scales": scales})
        np.testing.assert_array_equal(monotile.attention(q, spread, V, mask=mask), o)


def test_their_gradients_are_summed() -> None:
    torch = pytest.importorskip("torch")
    for case in (CASES[0], CASES[4]):
        q, k, v, mask = (torch.tensor(a, requires_grad=True) if a is not None else None for a in given(case))
        found = monotile.attention(q, k, v, mask=mask)
        wide = (a.repeat_interleave(2, -3) for a in (k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(q, *wide, attn_mask=mask)
        inputs = [a for a in (q, k, v, mask) if a is not None]
        pairs = (torch.autograd.grad((o**2).sum(), inputs) for o in (found, expected))
        for a, b in zip(*pairs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_and_gradients_of_them(case: tuple[Lead, Lead, Lead, Lead | None]) -> None:
    """Parts merge to attention's output; gradients have the shapes of what they are gradients of."""
    q, k, v, mask = given(case)
    o, lse = monotile.attention(q, k, v, mask=mask, return_lse=True)
    parts = monotile.decode_partials(q, k, v, mask=mask, splits=3)
    np.testing.assert_allclose(monotile.merge(*parts)[0], o, rtol=2e-5, atol=2e-5)
    found = monotile.attention_backward(np.ones_like(o), q, k, v, o, lse, mask=mask)
    lead, B = o.shape[:-3], int(np.prod(o.shape[:-3]))

    def one_batch(a: Any) -> Any:
        return np.broadcast_to(a, (*lead, *a.shape[-3:])).reshape(B, *a.shape[-3:])

    whole = None if mask is None else one_batch(mask)
    rows = o.reshape(B, *o.shape[-3:]), lse.reshape(B, *lse.shape[-2:])
    wide = monotile.attention_backward(np.ones_like(rows[0]), *map(one_batch, (q, k, v)), *rows, mask=whole)
    for array_, got, all_ in zip((q, k, v), found, wide, strict=False):
        assert got.shape == array_.shape
        apart = all_.reshape(*lead, *all_.shape[1:])
        sides = (1,) * (len(lead) + 3 - array_.ndim) + array_.shape
        axes = tuple(n for n in range(len(lead)) if sides[n] != apart.shape[n])
        np.testing.assert_allclose(got, apart.sum(axes, keepdims=True).reshape(got.shape), rtol=1e-4, atol=1e-5)


def test_those_that_do_not_fit() -> None:
    q = array(2, 4, 5, 8)
    with pytest.raises(errors.LengthsDiffer, match=r"batch sizes do not broadcast.*q \(2, 4, 5, 8\), k \(3, 4, 5, 8\)"):
        monotile.attention(q, array(3, 4, 5, 8), q)
    with pytest.raises(errors.MaskShape, match=r"mask \(3, 1, 5, 5\) does not broadcast to the scores \(2, 4, 5, 5\)"):
        monotile.attention(q, q, q, mask=array(3, 1, 5, 5))
    other = monotile.quantize(array(3, 4, 5, 8), "int8")
    with pytest.raises(errors.LengthsDiffer, match=r"batch sizes do not broadcast.*k \(3, 4, 5, 8\)"):
        monotile.attention(q, other, other)
    with pytest.raises(errors.ArgumentRank, match=r"'k' has shape \(5, 8\)"):
        monotile.attention(q, monotile.quantize(array(5, 8), "int8"), q)
    q, mask = array(2, 3, 4, 5, 8), array(2, 1, 4, 5, 5)
    o, lse = monotile.attention(q, q, q, mask=mask, return_lse=True)
    with pytest.raises(errors.BadOption, match="gradient is not summed"):
        monotile.attention_backward(o, q, q, q, o, lse, mask=mask, mask_grad=True)
