"""quantize and dequantize, and attention on quantised keys and values against attention on what they stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import monotile
from monotile.dtypes import BY_NAME, to_numpy
from monotile.errors import BadOption, MonotileError
from monotile.kernels import reference
from monotile.library import registry, rotations
from monotile.library.aura import levels, rotation
from monotile.library.formats import FINITE, FORMATS
from monotile.library.quantized import Quantized

from .cases import qkv


def exact(x: Any) -> Any:
    """The numbers that quantised fields stand for, in float32."""
    return replace(x, dtype="float32").dequantize() if isinstance(x, Quantized) else x


def check(q: Any, K: Any, V: Any, backend: str, **options: Any) -> None:
    """The error rule: at most twice the error of plain attention in the same type, plus a little."""
    found = monotile.attention(q, K, V, backend=backend, **options)
    plain = [x.dequantize() if isinstance(x, Quantized) else x for x in (K, V)]
    naive = monotile.attention(q, *plain, backend="interpreter", **options)
    wanted, _ = reference.attention(q, exact(K), exact(V), **options)
    error, allowed = (np.abs(x.astype(np.float64) - wanted).max() for x in (found, naive))
    assert found.dtype == q.dtype and error <= 2 * allowed + 1e-6


@pytest.mark.parametrize("format", FORMATS)
def test_a_format_keeps_what_its_bits_can(format: str) -> None:
    x = np.random.default_rng(1).standard_normal((2, 3, 40, 80)).astype(np.float32)
    error = np.sqrt(np.square(monotile.quantize(x, format).dequantize() - x).mean())
    bound = {"int8": 0.008, "int4": 0.14, "int4_zero_point": 0.12, "fp8_e4m3": 0.03, "fp8_e5m2": 0.06, "aura2": 0.36,
             "aura3": 0.2, "aura4": 0.105, "aura6": 0.028, "aura8": 0.0075}  # fmt: skip
    assert error < bound[format]
    zeros = monotile.quantize(np.zeros((4, 33), np.float32), format).dequantize()
    assert np.abs(zeros).max() == 0.0


def test_groups_have_scales_of_their_own() -> None:
    x = np.ones((3, 64), np.float32)
    x[:, 16:] *= 1000.0
    found = monotile.quantize(x, "int4", group=16)
    assert found.scales.shape == (3, 4) and found.codes.shape == (3, 32)
    np.testing.assert_allclose(found.dequantize(), x, rtol=1e-6)


def test_the_rotation_is_orthogonal_and_the_levels_are_even() -> None:
    for size in (1, 2, 64, 80, 96, 576):
        np.testing.assert_allclose(rotation(size) @ rotation(size).T, np.eye(size), atol=1e-6)
    table = np.array(levels(128, 2)) * np.sqrt(128)
    np.testing.assert_allclose(table, [-1.51, -0.4528, 0.4528, 1.51], atol=0.01)  # Lloyd and Max, for a normal variable
    assert np.array_equal(table, -table[::-1])


CASES = [("int8", None), ("int4", 16), ("int4_zero_point", None), ("fp8_e4m3", 16), ("fp8_e5m2", None), ("aura3", None),
         ("aura4", None)]  # fmt: skip


@pytest.mark.parametrize(("format", "group"), CASES)
def test_attention_on_quantised_keys_and_values(backend: str, format: str, group: int | None) -> None:
    dtype = {"int8": "bfloat16", "fp8_e5m2": "float16", "aura4": "bfloat16"}.get(format, "float32")
    q, k, v = qkv(3, 37, 48, Dv=32, Hq=4, Hkv=2, dtype=dtype)
    K, V = (monotile.quantize(x, format, group=group) for x in (k, v))
    check(q, K, V, backend, causal=True)


PAIRS = [("int4", "aura3"), ("aura6", "fp8_e4m3"), ("fp8_e5m2", "aura8"), ("int8", "int4_zero_point")]


@pytest.mark.parametrize(("keys", "values"), PAIRS)
def test_whole_blocks_are_streamed_in_bfloat16(keys: str, values: str) -> None:
    """Blocks of 128 keys and a rest: pair products of codes where the processor has them."""
    for heads in (1, 4):
        q, k, v = qkv(1, 150, 80, Dv=64, Hq=heads, Hkv=1, dtype="bfloat16")
        check(
            q,
            monotile.quantize(k, keys),
            monotile.quantize(v, values, group=16 if values[:4] == "int4" else None),
            "cpu",
        )


def test_one_of_the_two_may_be_plain_and_formats_may_differ(backend: str) -> None:
    q, k, v = qkv(1, 70, 33, Hq=4, Hkv=1)
    check(q, monotile.quantize(k, "int4"), v, backend)
    check(q, k, monotile.quantize(v, "aura2"), backend, softcap=5.0)
    check(q, monotile.quantize(k, "aura8"), monotile.quantize(v, "int8"), backend, window=(20, 0))


def pages_of(page: int, dtype: str, seed: int = 0) -> tuple[Any, ...]:
    """Two sequences of 0 and 37 keys in shuffled pages, and a table whose other entries are none."""
    rng = np.random.default_rng(seed)
    used = -(-37 // page)
    table = np.full((2, used + 1), 2**31 - 1, np.int32)
    table[1, :used] = rng.permutation(used + 2)[:used]
    q, k, v = (rng.standard_normal(s, dtype=np.float32) for s in ((2, 4, 1, 48), *[(used + 2, page, 2, 48)] * 2))
    return *(x.astype(to_numpy(BY_NAME[dtype])) for x in (q, k, v)), table, np.array([0, 37], np.int32)


@pytest.mark.parametrize(("page", "keys", "values"), [(16, "int8", "aura4"), (5, "aura3", "int4"), (16, None, "int4")])
def test_quantised_pages(backend: str, page: int, keys: str | None, values: str) -> None:
    q, k, v, table, lengths = pages_of(page, "bfloat16" if page == 16 else "float32")
    K, V = monotile.quantize(k, keys) if keys else k, monotile.quantize(v, values)
    found = monotile.attention_paged(q, K, V, table, lengths, check=True, backend=backend)
    plain = (x.dequantize() if isinstance(x, Quantized) else x for x in (K, V))
    wanted = monotile.attention_paged(q, *plain, table, lengths, backend="interpreter").astype(np.float32)
    assert found.dtype == q.dtype and not found[0].any()
    np.testing.assert_allclose(found.astype(np.float32), wanted, atol=0.03 if page == 16 else 1e-5)


# Entries that are no page; the product of one with its page, in 32 bits, would be a position of some page.
NO_PAGES = {16: (-1, 3, 2**28, -(2**31), 1 - 2**28), 5: (-1, 3, 858993460, 2**31 - 1, -858993458)}


@pytest.mark.parametrize("keys_are_plain", [False, True])
def test_what_is_no_page_reads_as_zeros(backend: str, keys_are_plain: bool) -> None:
    for page, entries in NO_PAGES.items():
        k = np.random.default_rng(0).standard_normal((3, page, 1, 16), dtype=np.float32)
        K, V = monotile.quantize(k, "int8"), monotile.quantize(k, "int4_zero_point", group=8)
        table, lengths = np.array(entries, np.int32)[:, None], np.full(len(entries), page, np.int32)
        q, pages = np.ones((len(table), 1, 1, 16), np.float32), (k if keys_are_plain else K, V)
        o, lse = monotile.attention_paged(q, *pages, table, lengths, return_lse=True, backend=backend)
        assert not o.any() and np.allclose(lse, np.log(page))


@pytest.mark.parametrize(("keys", "values"), [("int4_zero_point", "aura3"), (None, "fp8_e4m3")])
def test_tokens_are_quantised_as_their_pages(backend: str, keys: str | None, values: str) -> None:
    _, k, v, table, lengths = pages_of(5, "float32")
    pages = [monotile.quantize(x, format) if format else x.copy() for x, format in ((k, keys), (v, values))]
    before = [exact(x).copy() for x in pages]
    new = [np.random.default_rng(n).standard_normal((2, 2, 2, 48), dtype=np.float32) for n in range(2)]
    there = [registry.on_device(x, backend) for x in (*pages, table, lengths, *new)]
    monotile.paged_append(*there, backend=backend)
    for x, wanted, tokens, format in zip(there, before, new, (keys, values), strict=False):
        tokens = monotile.quantize(tokens, format).dequantize() if format else tokens
        for i, place in enumerate((37, 38)):  # the first sequence has no page
            wanted[table[1, place // 5], place % 5] = tokens[1, :, i]
        found = registry.from_device(exact(x))  # libraries round norms and rotations of their own
        np.testing.assert_allclose(found, wanted, atol=1e-5 if format and format.startswith("aura") else 0)


LENGTHS = {"few queries": ([1, 1, 0, 2], [40, 0, 7, 150]), "many queries": ([70, 0, 33], [90, 5, 33])}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    ("keys", "values"), [("int8", "aura4"), ("aura3", None), (None, "int4_zero_point"), ("int4", "fp8_e5m2")]
)
def test_sequences_in_a_row(backend: str, keys: str | None, values: str | None, lengths: str) -> None:
    """As attention on what they stand for; behind the last offset the scales are NaN, and nothing sees them."""
    rng = np.random.default_rng(3)
    q_offsets, k_offsets = (np.cumsum([0, *n]).astype(np.int32) for n in LENGTHS[lengths])
    q, k, v = (rng.standard_normal((n[-1] + 3, h, 48), dtype=np.float32)
               for n, h in ((q_offsets, 4), (k_offsets, 2), (k_offsets, 2)))  # fmt: skip
    K, V = (
        x if f is None else monotile.quantize(x, f, group=16 if f == "int4" else None)
        for x, f in ((k, keys), (v, values))
    )
    plain = [exact(x).copy() for x in (K, V)]
    for x in (K, V):
        if isinstance(x, Quantized):
            x.scales[k_offsets[-1] :] = np.nan
    options: Any = {"causal": True, "window": (60, 0), "sinks": np.ones(4, np.float32), "return_lse": True}
    found = monotile.attention_varlen(q, K, V, q_offsets, k_offsets, backend=backend, **options)
    wanted = monotile.attention_varlen(q, *plain, q_offsets, k_offsets, backend="interpreter", **options)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


def test_mistakes_of_sequences_in_a_row() -> None:
    q, offsets = np.ones((6, 2, 16), np.float32), np.array([0, 6], np.int32)
    K = monotile.quantize(q, "int8")
    with pytest.raises(MonotileError, match=r"'k' has shape \(1, 6, 2, 16\); attention_varlen takes"):
        monotile.attention_varlen(q, monotile.quantize(q[None], "int8"), K, offsets, offsets)
    with pytest.raises(MonotileError, match="'k_offsets' goes from 0 to 5"):
        monotile.attention_varlen(q, K, K, offsets, np.array([0, 5], np.int32), check=True)
    with pytest.raises(MonotileError, match="'k' is not an array monotile can read: 'Quantized'"):
        monotile.attention_varlen_backward(q, q, K, K, q, np.zeros((2, 6), np.float32), offsets, offsets)
    torch = pytest.importorskip("torch")
    t, at = torch.ones(6, 2, 16), torch.tensor([0, 6])
    K = monotile.quantize(t, "int8")
    with pytest.raises(MonotileError, match="attention_varlen on Quantized keys and values has no gradient"):
        monotile.attention_varlen(t.requires_grad_(), K, K, at, at)


def test_partials_of_quantised_keys_merge_to_attention(backend: str) -> None:
    q, k, v = qkv(1, 300, 32, Hq=2, Hkv=1)
    K, V = monotile.quantize(k, "int8"), monotile.quantize(v, "aura4")
    parts = monotile.decode_partials(q, K, V, splits=3, backend=backend)
    o, _ = monotile.merge(*parts, backend=backend)
    np.testing.assert_allclose(o, monotile.attention(q, K, V, backend=backend), atol=2e-6)


def test_unseen_keys_never_matter(backend: str) -> None:
    """Behind the last visible key the scales are NaN."""
    q, k, v = qkv(2, 40, 32, Hq=2, Hkv=1)
    seen = np.arange(40) < 25
    mask = np.broadcast_to(seen, (1, 1, 2, 40))
    K, V = monotile.quantize(k, "int8"), monotile.quantize(v, "int8")
    wanted = monotile.attention(q, K, V, mask=mask, backend=backend)
    for x in (K, V):
        x.scales[:, :, 25:] = np.nan
    assert np.array_equal(monotile.attention(q, K, V, mask=mask, backend=backend), wanted)


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(1, 2, n, 32, dtype=torch.bfloat16) for n in (1, 50, 50))
    for format in ("int8", "fp8_e4m3", "aura4"):
        K, V = monotile.quantize(k, format), monotile.quantize(v, format)
        found = monotile.attention(q, K, V)
        wanted = monotile.attention(q, K.dequantize(), V.dequantize())
        assert found.dtype == q.dtype and (found.float() - wanted.float()).abs().max() < 0.02
    x = torch.randn(3, 20, 48)
    for format in FORMATS:
        found, wanted = monotile.quantize(x, format), monotile.quantize(x.numpy(), format)
        assert found.codes.view(torch.uint8).numpy().tobytes() == wanted.codes.tobytes()
        exactly = 1e-5 if format.startswith("aura") else 0.0  # a rotation is a sum, of whose order BLAS decides
        np.testing.assert_allclose(found.dequantize(), wanted.dequantize(), rtol=0.0, atol=exactly)
    with pytest.raises(monotile.MonotileError, match="no gradient"):
        monotile.attention(q.requires_grad_(), K, V)


def test_a_rotation_is_copied_to_its_device_once() -> None:
    """A copy to a GPU in every call waits for it, and a graph cannot capture it."""
    torch = pytest.importorskip("torch")
    q, k = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 20, 16)
    K = monotile.quantize(k, "aura2")
    monotile.attention(q, K, K)
    before = rotations._tensor.cache_info()
    monotile.attention(q, K, K)
    after = rotations._tensor.cache_info()
    assert (after.misses, after.hits) == (before.misses, before.hits + 2)


def test_nan_without_a_check_harms_its_own_row_alone() -> None:
    x = np.ones((4, 16), np.float32)
    x[1, 3] = np.nan
    for format in FORMATS:
        found = monotile.quantize(x, format).dequantize()
        np.testing.assert_allclose(found[[0, 2, 3]], monotile.quantize(x[[0, 2, 3]], format).dequantize())
    with pytest.raises(BadOption):
        monotile.quantize(x, "int8", check=True)


@pytest.mark.parametrize("format", FORMATS)
def test_no_rows(format: str) -> None:
    x = np.zeros((1, 1, 0, 16), np.float32)
    assert monotile.quantize(x, format).dequantize().shape == x.shape


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("format", FORMATS)
def test_the_largest_numbers_stay_finite(format: str, dtype: str) -> None:
    """Or, where a norm of aura has no place in float32, are refused."""
    kind = to_numpy(BY_NAME[dtype])
    most = FINITE[dtype]
    for pair in ((most, -most), (most, most), (0.0, -most), (most / 2, -most)):
        x = np.array([pair * 8], np.float32).astype(kind)
        if format.startswith("aura") and dtype != "float16":
            with pytest.raises(BadOption, match="norm"):
                monotile.quantize(x, format)
        else:
            found = monotile.quantize(x, format).dequantize()
            assert found.dtype == kind and np.isfinite(found.astype(np.float32)).all()


def test_a_group_of_another_integer_type() -> None:
    assert monotile.quantize(np.ones((2, 8), np.float32), "int8", group=np.int64(4)).scales.shape == (2, 2)
