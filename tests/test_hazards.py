"""Accidents of hand-written attention kernels. Each test is named for one and runs the shape that showed it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import monotile
from arrays import numpy_type
from kernels.cases import check, check_splits, equal, normal, poisoned, qkv
from monotile.backends.cpu import choices as cpu_choices
from monotile.kernels.attention import attention as attention_kernel
from usable import WITH_METAL, usable

__all__ = ["poisoned"]
pytestmark = pytest.mark.usefixtures("poisoned")
HEADS: dict[str, Any] = {"Hq": 4, "Hkv": 2}


@pytest.fixture(params=usable(*WITH_METAL))
def backend(request: pytest.FixtureRequest) -> str:
    """Here Metal text is run, too."""
    name: str = request.param
    return name


# ---- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("D", [80, 96, 513, 576])
def test_head_size_that_fits_no_vector(D: int, backend: str) -> None:
    """Tail dimensions neither scored nor written; a register array overrun."""
    for Nq in (1, 9):
        check(*qkv(Nq, 33, D), backend)


@pytest.mark.parametrize("Nk", [63, 65, 100, 129])
@pytest.mark.parametrize("Nq", [1, 7, 9, 13])
def test_lengths_off_the_block_with_a_mask(Nq: int, Nk: int, backend: str) -> None:
    """Reads past the mask."""
    check(*qkv(Nq, Nk), backend, mask=np.random.default_rng(0).random((Nq, Nk)) < 0.5)


def test_future_keys_do_not_leak_40x48(backend: str) -> None:
    """The count of tiles that need the causal mask, one too small when the query tile is not aligned."""
    for Nq, Nk in ((40, 48), (34, 16), (35, 48), (50, 64), (63, 160), (200, 208), (131, 256)):
        q, k, v = qkv(Nq, Nk, 64)
        check(q, k, v, backend, causal=True)
        v[..., :] = np.arange(Nk)[:, None]  # with equal scores a row gives the middle of what it sees
        out = monotile.attention(0 * q, k, v, causal=True, backend=backend)
        last = np.arange(Nq) + Nk - Nq
        np.testing.assert_allclose(out[0, 0, :, 5], np.where(last < 0, 0, last / 2), rtol=1e-6)


def test_every_row_sees_its_own_keys_only(backend: str) -> None:
    """Causal by any offset: row i's output is that of the keys up to i, and no other's."""
    q, k, v = qkv(45, 48, Hq=1)
    out = monotile.attention(q, k, v, causal=True, backend=backend)
    for i in (0, 15, 16, 31, 32, 33, 44):
        row = monotile.attention(q[:, :, i : i + 1], k[:, :, : i + 4], v[:, :, : i + 4], backend=backend)
        np.testing.assert_allclose(out[:, :, i], row[:, :, 0], rtol=1e-4, atol=1e-6)


def test_kv_length_100_gives_no_weight_to_keys_past_the_end(backend: str) -> None:
    """A key of zeros past the end has score 0, which is more than these have."""
    q, k, v = qkv(1, 100)
    check(q, -abs(k) * 10, abs(v) + 1, backend, scale=float(np.sign(q.sum())))
    for Nq in (1, 20):
        out = check(abs(normal(1, 2, Nq, 16)), -abs(k), np.ones_like(v), backend)[0]
        np.testing.assert_allclose(out, 1, rtol=1e-6)


@pytest.mark.parametrize("Nk", [31, 33, 1023, 1024, 1025])
def test_kv_lengths_1023_1024_1025_batch_gqa(Nk: int, backend: str) -> None:
    for Nq in (1, 9):
        check(*qkv(Nq, Nk, 64, B=3, **HEADS), backend)


def test_a_first_key_that_nobody_sees(backend: str) -> None:
    check(*qkv(20, 48), backend, mask=np.arange(48) > 0)
    check(*qkv(1, 48), backend, mask=np.arange(48) > 0)


# ---- splits and merging ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [3, 5, 12, 24, 48, 100])
def test_48_splits_drop_nothing(splits: int, backend: str) -> None:
    """A count that is no power of two or no multiple of 32: the last partials were dropped."""
    check_splits(*qkv(1, 4000), splits, backend)


def test_more_splits_than_keys(backend: str) -> None:
    """Groups with nothing to do: NaN, for -inf / 2 is still -inf."""
    for Nk in (1, 2, 31, 100):
        check_splits(*qkv(1, Nk), 128, backend)


def test_no_keys_in_every_way_of_computing(backend: str) -> None:
    """NaN in one kernel and 0 in another."""
    for Nq in (1, 20):
        q, k, v = qkv(Nq, 0)
        assert (monotile.attention(q, k, v, backend=backend) == 0).all()
        out, lse = monotile.merge(*monotile.decode_partials(q, k, v, splits=3, backend=backend), backend=backend)
        assert (out == 0).all() and (lse == -np.inf).all()
    out, lse = monotile.merge(np.ones((3, 0, 8), np.float32), *[np.ones((3, 0), np.float32)] * 2, backend=backend)
    assert (out == 0).all() and (lse == -np.inf).all()


def test_a_split_whose_keys_are_all_masked(backend: str) -> None:
    """In the middle, first and last."""
    for hidden in (slice(64, 128), slice(0, 64), slice(192, 256)):
        mask = np.ones(256, bool)
        mask[hidden] = False
        parts = check_splits(*qkv(1, 256), 4, backend, mask=mask)
        assert (parts.l == 0).any()


def test_narrow_partials_131072_keys(backend: str) -> None:
    """Sums of 131072 values of 40 overflow float16; 70000 keys overflow a float16 l."""
    q, k, v = (
        np.zeros((1, 1, 1, 4), np.float16),
        np.zeros((1, 1, 131072, 4), np.float16),
        np.full((1, 1, 131072, 4), 40, np.float16),
    )
    parts = monotile.decode_partials(q, k, v, splits=1, backend=backend)
    assert parts.l.item() == 131072 and (parts.o == 131072 * 40).all()
    assert (monotile.attention(q, k, v, backend=backend) == 40).all()


def test_a_block_maximum_near_103(backend: str) -> None:
    """m and l in bfloat16: relative error 0.15."""
    q, k, v = qkv(1, 300, dtype="bfloat16")
    q *= 103 / np.abs(q.astype(np.float32) @ k.astype(np.float32).swapaxes(2, 3) / 4).max()
    check_splits(q, k, v, 5, backend)


# ---- widths of numbers -----------------------------------------------------------------------------------------------


def test_1024_equal_scores_with_large_values(backend: str) -> None:
    """An fp16 output accumulator overflows to inf."""
    for Nq in (1, 9):
        for dtype in ("float16", "bfloat16"):
            q, k, v = np.zeros((1, 1, Nq, 8)), np.zeros((1, 1, 1024, 8)), np.full((1, 1, 1024, 8), 70.0)
            out = monotile.attention(*(x.astype(numpy_type(dtype)) for x in (q, k, v)), backend=backend)
            assert (out.astype(np.float32) == 70).all()


def test_the_error_does_not_grow_with_the_keys(backend: str) -> None:
    """Values near 1: from 5e-3 at 256 keys to 5e-2 at 8192 in an fp16 accumulator."""
    for Nk in (256, 8192):
        q, k, v = qkv(9, Nk, dtype="bfloat16")
        v = (1 + 0.01 * v.astype(np.float32)).astype(q.dtype)
        assert np.abs(check(q, k, v, backend)[0].astype(np.float32) - 1).max() < 0.02


def test_scores_below_minus_65504(backend: str) -> None:
    """Padding keys win over real ones."""
    for Nq in (1, 20):
        q, k, v = qkv(Nq, 70)
        plain = check(q, k, v, backend)
        found = monotile.attention(q, k, v, mask=np.full(70, -1e5, np.float32), return_lse=True, backend=backend)
        np.testing.assert_allclose(found[0], plain[0], atol=0.02)
        np.testing.assert_allclose(found[1], plain[1] - 1e5, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_uniform_bias_of_minus_40000(dtype: str, backend: str) -> None:
    """Taken for "masked": output 0."""
    for Nq in (1, 20):
        q, k, v = qkv(Nq, 70)
        found = check(q, k, v, backend, mask=np.full((Nq, 70), -40000, dtype))[0]
        np.testing.assert_allclose(found, monotile.attention(q, k, v, backend=backend), atol=0.01)


def test_query_length_65544(backend: str) -> None:
    """A 16-bit row index wraps, the last 8 rows are never written."""
    q, k, v = qkv(65544, 5, 4, Hq=1)
    check(q, k, v, backend)


def test_more_than_65536_keys(backend: str) -> None:
    check(*qkv(1, 65537 + 64, 4), backend)
    check(*qkv(9, 65537 + 64, 4, Hq=1), backend, window=(3, 0))


def test_more_than_65535_programs(backend: str) -> None:
    if backend in ("interpreter", "metal"):
        pytest.skip("70000 programs, one after the other: minutes")
    for Nq in (1, 9):
        check(*qkv(Nq, 3, 2, B=2, Hq=35000, Hkv=35000), backend)


@pytest.mark.parametrize("Nq", [1, 9])
def test_33_kv_heads_262144_512(Nq: int) -> None:
    """A 32-bit offset wraps at 2^32 elements, and the last head reads the first one's cache."""
    shape = (1, 33, 262144, 512)
    try:  # memory that is never written costs nothing
        k, v = np.zeros(shape, np.float16), np.zeros(shape, np.float16)
    except MemoryError:
        pytest.skip("17 GB of untouched memory are more than this machine gives")
    q = normal(1, 33, Nq, 512, dtype="float16")
    k[0, 0, -64:], v[0, 0, -64:] = 9, 9  # what a wrapped offset finds
    k[0, 32, -64:], v[0, 32, -64:] = normal(64, 512, dtype="float16"), normal(64, 512, dtype="float16", seed=1)
    window = {"window": (20, 0)}  # only the last keys are read
    out = monotile.attention(q, k, v, backend="cpu", **window)
    near = check(q[:, 32:], k[:, 32:, -64:], v[:, 32:, -64:], "interpreter", **window)[0]
    np.testing.assert_allclose(out[0, 32].astype(np.float32), near[0, 0].astype(np.float32), atol=2e-3)
    assert (out[0, 1:32] == 0).all() and (out[0, 0] == 9).all()


def test_logits_near_300(backend: str) -> None:
    """scale * log2(e) and scaled queries rounded to bfloat16: lse off by 0.58."""
    for Nq in (1, 20):
        q, k, v = qkv(Nq, 70, 64, dtype="bfloat16")
        q = (q.astype(np.float32) * 120).astype(q.dtype)
        lse = check(q, k, v, backend)[1]
        assert lse.max() > 250


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("causal", [False, True])
def test_scores_of_any_size(dtype: str, causal: bool, backend: str) -> None:
    """A score is scaled and the maximum taken off in one instruction: what rounding took off the scaled maximum becomes
    a power of two, and past 1e10 the weights are infinity or 0. Rows of very different size are neighbours here."""
    great = 1e4 if dtype == "float16" else 1e9
    for Nq, Nk in ((1, 70), (130, 150)):
        q, k, v = qkv(Nq, Nk, 64, dtype=dtype)
        size = great ** np.random.default_rng(3).random((1, 1, Nq, 1), np.float32)
        q = (q.astype(np.float32) * size).astype(q.dtype)
        k = (k.astype(np.float32) * (1e2 if dtype == "float16" else 1e6)).astype(q.dtype)
        check(q, k, v, backend, causal=causal)


def test_biases_of_any_size(backend: str) -> None:
    """A bias of 1e4 leaves a score three digits: they must not become fewer."""
    for Nq in (1, 20):
        q, k, v = qkv(Nq, 70, 64)
        sign = np.random.default_rng(4).random((Nq, 70)) < 0.5
        check(q, k, v, backend, mask=np.where(sign, 1e4, -1e4).astype(np.float32))
        check(q, k, v, backend, mask=np.full((Nq, 70), np.finfo(np.float32).min))


# ---- masks and infinities --------------------------------------------------------------------------------------------


def test_first_chunk_all_minus_inf(backend: str) -> None:
    """-inf minus -inf: every output NaN."""
    mask = np.zeros(600, np.float32)
    mask[:530] = -np.inf
    for Nq in (1, 20):
        check(*qkv(Nq, 600), backend, mask=mask)
        check(*qkv(Nq, 600), backend, mask=np.broadcast_to(mask, (Nq, 600)))
    check(*qkv(20, 600), backend, mask_mod=lambda b, h, q_idx, kv_idx: kv_idx >= 530)
    # A score of -inf that is seen: the key itself is infinite.
    q, k, v = abs(normal(1, 1, 9, 8)), normal(1, 1, 200, 8), normal(1, 1, 200, 8)
    k[:, :, 0] = -np.inf
    for n in (1, 9):
        check(q[:, :, :n], k, v, backend)


def test_fully_masked_rows(backend: str) -> None:
    """0 in one way of masking, a uniform softmax in another, NaN in a third."""
    for Nq in (3, 40):
        rows = np.arange(Nq) % 3 == 1
        hidden = rows[:, None] & np.ones(70, bool)
        for mask in (
            ~hidden,
            np.where(hidden, -np.inf, 0).astype(np.float32),
            np.where(hidden, -np.inf, 1).astype(np.float16),
        ):
            out, lse = check(*qkv(Nq, 70), backend, mask=mask)
            assert (out[:, :, rows] == 0).all() and (lse[:, :, rows] == -np.inf).all()
            assert np.isfinite(lse[:, :, ~rows]).all()
        out, lse = check(*qkv(Nq, 70), backend, mask=np.zeros((1, 1), bool))
        assert (out == 0).all() and (lse == -np.inf).all()
    out, lse = check(*qkv(40, 10), backend, causal=True)
    assert (out[:, :, :30] == 0).all() and (lse[:, :, :30] == -np.inf).all()


def test_minus_65504_is_a_number(backend: str) -> None:
    """A row biased by it everywhere is the row without it, not a masked one."""
    q, k, v = qkv(20, 40)
    mask = np.zeros((20, 40), np.float16)
    mask[::2] = -65504
    found = check(q, k, v, backend, mask=mask)[0]
    np.testing.assert_allclose(found, monotile.attention(q, k, v, backend=backend), atol=0.02)


def test_a_row_does_not_depend_on_masked_rows_beside_it(backend: str) -> None:
    q, k, v = qkv(40, 70)
    mask = np.random.default_rng(0).random((40, 70)) < 0.6
    expected = monotile.attention(q, k, v, mask=mask, backend=backend)
    mask[1::2] = False
    found = monotile.attention(q, k, v, mask=mask, backend=backend)
    equal(found[:, :, ::2], expected[:, :, ::2])
    assert (found[:, :, 1::2] == 0).all()


def test_a_mask_per_head_and_per_batch(backend: str) -> None:
    """Head 0's was applied to all."""
    for Nq in (1, 20):
        for shape in ((1, 4, Nq, 50), (2, 1, Nq, 50), (2, 4, 1, 50)):
            check(*qkv(Nq, 50, B=2, **HEADS), backend, mask=np.random.default_rng(0).random(shape) < 0.5)


def test_softcap_is_read(backend: str) -> None:
    """It was in the parameter block and never used."""
    for Nq in (1, 20):
        q, k, v = qkv(Nq, 50)
        capped = check(q * 9, k, v, backend, softcap=2.0)[0]
        assert np.abs(capped - monotile.attention(q * 9, k, v, backend=backend)).max() > 0.1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_garbage_in_unused_cache_slots(bad: float, backend: str) -> None:
    """0 * NaN reaches the sum: past the end of the cache, behind a padding mask, before a window, after the
    diagonal."""
    for Nq in (1, 20):
        q, k, v = qkv(Nq, 100, B=2)
        k[0, :, 60:], v[0, :, 60:] = bad, bad
        assert np.isfinite(monotile.attention(q[:1], k[:1, :, :60], v[:1, :, :60], backend=backend)).all()
        padding = (np.arange(100) < np.array([60, 100])[:, None])[:, None, None, :]
        for mask in (padding, np.where(padding, 0, -np.inf).astype(np.float32)):
            assert np.isfinite(monotile.attention(q, k, v, mask=mask, backend=backend)).all()
        assert np.isfinite(monotile.attention(q, k, v, causal="upper_left", backend=backend)).all()


def test_what_is_seen_is_not_hidden(backend: str) -> None:
    """A NaN that a row sees stays visible as NaN."""
    for Nq in (1, 20):
        q, k, v = qkv(Nq, 50)
        v[0, 0, 7, 3] = np.nan
        out, lse = monotile.attention(q, k, v, return_lse=True, backend=backend)
        assert np.isnan(out[..., 3]).all() and np.isfinite(out[..., :3]).all() and np.isfinite(lse).all()
        k[0, 0, 7, 3] = np.nan
        out, lse = monotile.attention(q, k, v, return_lse=True, backend=backend)
        assert np.isnan(out).all() and np.isnan(lse).all()


# ---- around the kernels ----------------------------------------------------------------------------------------------


def test_lse_is_a_natural_logarithm(backend: str) -> None:
    """Everywhere: by the forward kernel, by split decode, after merging."""
    for Nq in (1, 20):
        q, k, v = (
            np.zeros((1, 1, Nq, 4), np.float32),
            np.ones((1, 1, 1000, 4), np.float32),
            np.ones((1, 1, 1000, 4), np.float32),
        )
        lse = monotile.attention(q, k, v, return_lse=True, backend=backend)[1]
        np.testing.assert_allclose(lse, np.log(1000), rtol=1e-6)
        parts = monotile.decode_partials(q + 1, k, v, splits=3, scale=0.5, backend=backend)
        np.testing.assert_allclose(parts.m, 2.0, rtol=1e-6)
        np.testing.assert_allclose(monotile.merge(*parts, backend=backend)[1], np.log(1000) + 2, rtol=1e-6)


def test_a_new_length_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the lengths, batches and heads, with a mask and without. Rows may be packed and keys split, and on two
    cores there are four sizes of row blocks: once each of these has been compiled, no length needs another program."""
    monkeypatch.setattr(cpu_choices, "cores", lambda: 2)

    def run(Nq: int, Nk: int, B: int = 1, Hq: int = 2) -> None:
        q, k, v = qkv(Nq, Nk, B=B, Hq=Hq)
        monotile.attention(q, k, v, causal=True, backend="cpu")
        monotile.attention(q, k, v, mask=np.ones((Nq, Nk), bool), backend="cpu")

    for Nk in (130, 4096):
        for Nq in (1, 140, 600, 1100, 1280, 2100, 3100):
            run(Nq, Nk)
    run(140, 250, B=3)
    before = len(attention_kernel._programs)
    for Nk in (131, 257, 1000, 2049):
        run(140, Nk), run(1, Nk), run(1000 + Nk, 150)
    run(140, 300, B=3), run(1, 300, B=2)
    assert len(attention_kernel._programs) == before


def test_memory_grows_with_the_length_only() -> None:
    """No buffer of queries times keys, for groups, masks, float32 or D above 256 either."""
    import tracemalloc

    for D, options in ((16, {}), (16, {"mask": np.ones((1, 2048), bool)}), (288, {"causal": True})):
        q, k, v = qkv(2048, 2048, D, **HEADS)
        run: dict[str, Any] = {"window": (64, 0), "backend": "cpu", "threads": 1, **options}
        monotile.attention(q[:, :, :1000], k, v, **run)  # compiling takes memory of its own
        tracemalloc.start()
        out = monotile.attention(q, k, v, **run)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2 * out.nbytes + 2048 * 2048
