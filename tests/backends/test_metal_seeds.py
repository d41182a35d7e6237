"""Hand-written Metal kernels in the runner: their results, their counters, and their known mistakes.

The kernels are not part of this repository; these tests look for them in a folder beside it and skip without it.
"""

from __future__ import annotations

import numpy as np
import pytest

from backends import seeds
from backends.seeds import BF16, SEEDS, Array, D, block_map, decode, expected, prefill, randoms, source, train, vector
from monotile import metal

pytestmark = [
    pytest.mark.skipif(metal.why_not() is not None, reason=str(metal.why_not())),
    pytest.mark.skipif(not SEEDS.is_dir(), reason=f"the hand-written kernels are not in {SEEDS}"),
]


# ---- sdpa_decode.metal -----------------------------------------------------------------------------------------------


def test_decode_is_right_and_counted() -> None:
    q, k, v = (randoms(*shape, dtype=np.float32) for shape in ((8, 128), (2, 512, 128), (2, 512, 128)))
    o, report = decode(q, k, v)
    assert report.clean, report
    assert np.abs(o - expected(q[:, None], k, v)[0][:, 0]).max() < 1e-6
    assert (report.counters.device_bytes_read, report.counters.barriers) == (4210688, 8)
    assert report.counters.threadgroup_memory_bytes == 2080


def test_decode_leaves_the_tail_of_an_odd_head_size_unwritten() -> None:
    q, k, v = (randoms(*shape, dtype=np.float32) for shape in ((2, 80), (1, 8, 80), (1, 8, 80)))
    o, _ = decode(q, k, v)
    assert np.isnan(o[:, 64:]).all() and not np.isnan(o[:, :64]).any()


def test_decode_overruns_its_registers() -> None:
    q, k, v = (randoms(*shape, dtype=np.float32) for shape in ((1, 576), (1, 8, 576), (1, 8, 576)))
    _, report = decode(q, k, v)
    assert report.findings[0].kind == "array bounds"


def test_decode_is_nan_when_the_first_key_scores_minus_infinity() -> None:
    q, k, v = np.ones((1, 128), np.float32), randoms(1, 8, 128, dtype=np.float32), randoms(1, 8, 128, dtype=np.float32)
    k[0, 0] = -np.inf
    o, _ = decode(q, k, v)
    assert np.isnan(o).all()


def test_decode_reads_the_first_head_where_the_last_one_is_meant() -> None:
    """A 32-bit offset wraps at 2^32 elements. The second head's keys do not exist, and nothing is reported."""
    q, k, v = (randoms(*shape, dtype=np.float32) for shape in ((2, 128), (1, 8, 128), (1, 8, 128)))
    o, report = decode(q, k, v, kv_heads=2, capacity=2**32 // 128)
    assert report.clean
    assert np.abs(o - expected(q[:, None], k, v)[0][:, 0]).max() < 1e-6


# ---- flash_attn_train_fwd.metal --------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", metal.ORDERS)
def test_training_forward_is_right_and_counted(order: str) -> None:
    q, k, v = randoms(2, 256, 64), randoms(1, 256, 64, seed=1), randoms(1, 256, 64, seed=2)
    o, lse, report = train(q, k, v, order=order)
    assert report.clean, report
    wanted, wanted_lse = expected(q, k, v)
    assert np.abs(o.astype(np.float64) - wanted).max() < 1e-2 and np.abs(lse - wanted_lse).max() < 1e-2
    counters = report.counters
    assert (counters.device_bytes_read, counters.threadgroup_bytes_read) == (1114112, 5308416)
    assert (counters.barriers, counters.multiplies) == (1056, 32768)
    assert counters.threadgroup_memory_bytes == 7680


def test_training_forward_leaks_future_keys() -> None:
    q, k, v = randoms(1, 40, 64), randoms(1, 48, 64, seed=1), randoms(1, 48, 64, seed=2)
    o, _, report = train(q, k, v, causal=True)
    assert report.clean
    assert np.abs(o.astype(np.float64) - expected(q, k, v, causal=True)[0]).max() > 0.1
    v[0, 9:] = np.nan  # row 0 sees keys 0 to 8
    o, _, _ = train(q, k, v, causal=True)
    assert np.isnan(o[0, 0]).all()


def test_training_forward_with_a_barrier_taken_out() -> None:
    """Without a barrier before a read of staged keys or values, the runner reports a race between two lines."""
    text = source("flash_attn_train_fwd.metal")
    fence = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    places = [i for i in range(len(text)) if text.startswith(fence, i)]
    q, k, v = randoms(1, 32, 64), randoms(1, 48, 64, seed=1), randoms(1, 48, 64, seed=2)
    found = []
    for place in places[2:4]:
        cut = text[:place] + " " * len(fence) + text[place + len(fence) :]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(seeds, "source", lambda name, cut=cut: cut)
            found.append({finding.kind for finding in train(q, k, v)[2].findings})
    assert all("race" in kinds for kinds in found), found


def test_training_forward_rounds_its_logits() -> None:
    """Scale and scaled queries are bfloat16: at logits near 300 the logsumexp is off by a half."""
    q, k, v = randoms(1, 32, 64), randoms(1, 64, 64, seed=1), randoms(1, 64, 64, seed=2)
    q = (q.astype(np.float32) * 120).astype(BF16)
    _, lse, report = train(q, k, v)
    exact = expected(q, k, v)[1]
    assert report.clean and exact.max() > 250
    assert 0.3 < np.abs(lse - exact).max() < 3


def test_training_forward_of_a_row_that_sees_nothing() -> None:
    """Its logsumexp is right, but the backward pass that the document gives is not: exp(S - L) is NaN."""
    q, k, v = randoms(1, 32, 64), randoms(1, 16, 64, seed=1), randoms(1, 16, 64, seed=2)
    o, lse, _ = train(q, k, v, causal=True)
    assert (lse[0, :16] == -np.inf).all() and (o[0, :16].astype(np.float32) == 0).all()
    with np.errstate(invalid="ignore"):
        assert np.isnan(np.exp(np.float32(-np.inf) - lse[0, :16])).all()


def test_training_forward_does_not_read_its_softcap() -> None:
    q, k, v = randoms(1, 32, 64), randoms(1, 32, 64, seed=1), randoms(1, 32, 64, seed=2)
    plain, capped = train(q, k, v), train(q, k, v, softcap=0.5)
    assert (plain[0].view(np.uint16) == capped[0].view(np.uint16)).all() and (plain[1] == capped[1]).all()


# ---- flash_attn_ext_dk512.metal --------------------------------------------------------------------------------------


def test_prefill_is_right_and_counted() -> None:
    q, k, v = randoms(2, 64, D), randoms(1, 256, D, seed=1), randoms(1, 256, D, seed=2)
    o, report = prefill(q, k, v)
    assert report.clean, report
    assert np.abs(o.astype(np.float64) - expected(q, k, v)[0]).max() < 1e-2
    counters = report.counters
    assert (counters.device_bytes_read, counters.threadgroup_bytes_read) == (8519680, 6619136)
    assert (counters.barriers, counters.multiplies) == (208, 65536)


def test_prefill_reads_past_the_mask() -> None:
    q, k, v = randoms(1, 12, D), randoms(1, 128, D, seed=1), randoms(1, 128, D, seed=2)
    _, report = prefill(q, k, v, np.zeros((12, 128), np.float16))
    [finding] = report.findings
    assert finding.kind == "out of bounds" and "(mask)" in finding.place


def test_prefill_overflows_its_accumulator() -> None:
    q, k = np.zeros((1, 8, D), BF16), np.zeros((1, 1024, D), BF16)
    o, _ = prefill(q, k, np.full((1, 1024, D), 70, BF16))
    assert np.isinf(o.astype(np.float32)).all()


def test_vector_decode_races_inside_a_simdgroup() -> None:
    q, k, v = randoms(4, 1, D, dtype=np.float32), randoms(1, 512, D, seed=1), randoms(1, 512, D, seed=2)
    o, report = vector(q, k, v, order="descending")
    counters = report.counters
    assert (counters.device_bytes_read, counters.barriers) == (4227072, 20)
    assert {finding.kind for finding in report.findings} == {"race"}
    pairs = {frozenset((finding.line, finding.other_line)) for finding in report.findings}
    text = source("flash_attn_ext_dk512.metal").splitlines()
    named = {text[line - 1].strip() for pair in pairs for line in pair}
    assert {"mqk += sm[NE * cc + ty];", "ss[0] = S;"} <= named
    wanted = expected(q, k, v)[0]
    assert np.abs(o.astype(np.float64) - wanted).max() < 1e-2  # correct only by luck of the order
    o, _ = vector(q, k, v, order="ascending")
    assert not np.abs(o.astype(np.float64) - wanted).max() < 1e-2


def test_vector_decode_reads_keys_past_the_end() -> None:
    q, k, v = randoms(4, 1, D, dtype=np.float32), randoms(1, 100, D, seed=1), randoms(1, 100, D, seed=2)
    _, report = vector(q, k, v)
    assert any(finding.kind == "out of bounds" and "(k)" in finding.place for finding in report.findings)


# Prefill with an additive mask.


def one_row_of_values(keys: int) -> tuple[Array, Array, Array]:
    return randoms(1, 8, D), randoms(1, keys, D, seed=1), randoms(1, keys, D, seed=2)


def test_prefill_prefers_padding_to_scores_below_minus_65504() -> None:
    q, k = np.full((1, 8, D), 100, BF16), np.full((1, 65, D), -100, BF16)
    o, report = prefill(q, k, np.ones((1, 65, D), BF16))
    assert report.clean and (o.astype(np.float32) == 0).all()  # 1 would be right


def test_prefill_takes_a_uniform_bias_for_a_mask() -> None:
    q, k, v = one_row_of_values(64)
    mask = np.full((8, 64), -40000, np.float16)
    blocks = block_map(mask)
    o, _ = prefill(q, k, v, mask, blocks)
    assert (blocks == 0).all() and (o.astype(np.float32) == 0).all()
    assert np.abs(expected(q, k, v)[0]).max() > 0.1  # a bias that all keys share changes nothing


def test_prefill_of_a_masked_row_depends_on_how_and_beside_whom() -> None:
    q, k, v = one_row_of_values(64)
    hidden, low = np.full((8, 64), -np.inf, np.float16), np.full((8, 64), -65504, np.float16)
    beside = low.copy()
    beside[1:] = 0
    rows = [prefill(q, k, v, mask, block_map(mask))[0][0, 0].astype(np.float32) for mask in (hidden, low, beside)]
    assert (rows[0] == 0).all() and (rows[1] == 0).all()
    assert np.abs(rows[2]).max() > 0.1


def test_prefill_wraps_its_row_index() -> None:
    """The last of the 8193 threadgroups of 65544 rows, alone: it writes the first rows."""
    text = source("flash_attn_ext_dk512.metal").replace("tgpig[0] * Q", "(tgpig[0] + 8192) * Q")
    q, k, v = one_row_of_values(64)
    o, report = prefill(q, k, v, text=text)
    assert report.clean  # row 65536 lies far outside of these arrays
    assert np.abs(o.astype(np.float64) - expected(q, k, v)[0]).max() < 1e-2


# Vector decode. Its result depends on the order of threads; this order gives the intended one.

LUCKY_ORDER = {"order": "descending"}


def few(keys: int, heads: int = 1) -> tuple[Array, Array, Array]:
    return randoms(heads, 1, D, dtype=np.float32), randoms(1, keys, D, seed=1), randoms(1, keys, D, seed=2)


def test_vector_decode_of_fewer_keys_than_groups_is_nan() -> None:
    o, _ = vector(*few(32), **LUCKY_ORDER)
    assert np.isnan(o.astype(np.float32)).all()


def test_vector_decode_with_groups_that_are_masked_is_nan() -> None:
    mask = np.zeros((1, 128), np.float16)
    mask[0, 32:64] = mask[0, 96:] = -np.inf  # the keys of groups 1 and 3
    o, _ = vector(*few(128), mask=mask, **LUCKY_ORDER)
    assert np.isnan(o.astype(np.float32)).all()


def test_vector_decode_uses_the_mask_of_the_first_head_for_all() -> None:
    q, k, v = few(128, heads=2)
    mask = np.zeros((2, 1, 128), np.float16)
    mask[0, 0, 1::2], mask[1, 0, ::2] = -1000, -1000
    o, _ = vector(q, k, v, mask=mask, **LUCKY_ORDER)
    found = o.astype(np.float64)
    assert np.abs(found - expected(q, k, v, mask=mask[:1])[0]).max() < 2e-2
    assert np.abs(found - expected(q, k, v, mask=mask)[0])[1].max() > 0.1


def test_vector_decode_drops_the_last_of_three_groups() -> None:
    q, k, v = few(96)
    o, _ = vector(q, k, v, groups=3, **LUCKY_ORDER)
    assert np.abs(o.astype(np.float64) - expected(q, k[:, :64], v[:, :64])[0]).max() < 2e-2
    assert np.abs(o.astype(np.float64) - expected(q, k, v)[0]).max() > 0.1


def test_vector_decode_merges_in_bfloat16() -> None:
    """Sums of two groups that nearly cancel: what is left is the rounding of each."""
    q, k, v = few(64)
    v[0, :32], v[0, 32:], v[0, 63] = 100, -99.5, -96.5
    o, _ = vector(0 * q, k, v, groups=2, **LUCKY_ORDER)
    exact = (3200 - 31 * 99.5 - 96.5) / 64
    assert np.abs(o.astype(np.float64) - exact).max() > 0.1 * exact
