"""Hand-written Metal kernels in the runner: they run, their counters are known, and their known accidents are found.

The kernels are not part of this repository; these tests look for them in a folder beside it and skip without it.
"""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from monotile import metal

SEEDS = Path(__file__).parents[3] / "shared" / "seeds"
BF16 = ml_dtypes.bfloat16
pytestmark = [
    pytest.mark.skipif(metal.why_not() is not None, reason=str(metal.why_not())),
    pytest.mark.skipif(not SEEDS.is_dir(), reason=f"the hand-written kernels are not in {SEEDS}"),
]
Array = np.ndarray[Any, Any]


@cache
def source(name: str) -> str:
    return (SEEDS / name).read_text()


def randoms(*shape: int, dtype: Any = BF16, seed: int = 0) -> Array:
    return np.random.default_rng((seed, *shape)).standard_normal(shape, dtype=np.float32).astype(dtype)


def expected(q: Array, k: Array, v: Array, causal: bool = False) -> tuple[Array, Array]:
    """Attention and its logsumexp in float64; q (H, Nq, D), k and v (Hkv, Nk, D)."""
    heads = np.arange(len(q)) * len(k) // len(q)
    scores = np.einsum("hqd,hkd->hqk", q.astype(np.float64), k[heads].astype(np.float64)) * q.shape[-1] ** -0.5
    rows, keys = scores.shape[1:]
    if causal:
        scores = np.where(np.arange(rows)[:, None] + keys - rows >= np.arange(keys), scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    return np.einsum("hqk,hkd->hqd", weights / total, v[heads].astype(np.float64)), (top + np.log(total))[..., 0]


# ---- sdpa_decode.metal -----------------------------------------------------------------------------------------------


def decode(q: Array, k: Array, v: Array, groups: int = 4) -> tuple[Array, metal.Report]:
    (heads, d), (kv_heads, keys, _) = q.shape, k.shape
    o = metal.poisoned((heads, d), np.float32)
    params = struct.pack("5IfI", heads, kv_heads, d, keys, keys, d**-0.5, groups)
    shared = {"shmem": 4 * groups * (d + 2)}
    buffers = {"Q": q, "K": k, "V": v, "O": o, "p": params}
    text = source("sdpa_decode.metal")
    return o, metal.run(text, "sdpa_decode", buffers, heads, groups * 32, threadgroup_memory=shared)


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


# ---- flash_attn_train_fwd.metal --------------------------------------------------------------------------------------


def train(q: Array, k: Array, v: Array, causal: bool = False, **options: Any) -> tuple[Array, Array, metal.Report]:
    (heads, rows, d), (kv_heads, keys, _) = q.shape, k.shape
    o, lse = metal.poisoned(q.shape, BF16), metal.poisoned((heads, rows), np.float32)
    head = (1, heads, d, rows, keys, heads // kv_heads, d**-0.5, 0.0, -(-rows // 32), -(-keys // 16))
    strides = [step for h, n in ((heads, rows), (kv_heads, keys)) for step in (h * n * d, n * d, d)]
    params = struct.pack(
        "6i2f7i4x12q",
        *head, rows // 32, keys // 16, rows % 32, keys % 16, keys - rows,
        *strides, *strides[3:], *strides[:3],
    )  # fmt: skip
    report = metal.run(
        source("flash_attn_train_fwd.metal"),
        f"flash_attn_train_fwd_bf16_d{d}",
        {"Q": q, "K": k, "V": v, "O": o, "params": params, "L_out": lse},
        (-(-rows // 32), heads),
        (32, 4),
        constants={200: rows % 32 == 0, 201: keys % 16 == 0, 300: False, 301: causal},
        **options,
    )
    return o, lse, report


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
    """Every barrier before a read of staged keys or values matters, and the runner says between which lines."""
    text = source("flash_attn_train_fwd.metal")
    fence = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    places = [i for i in range(len(text)) if text.startswith(fence, i)]
    q, k, v = randoms(1, 32, 64), randoms(1, 48, 64, seed=1), randoms(1, 48, 64, seed=2)
    found = []
    for place in places[2:4]:
        cut = text[:place] + " " * len(fence) + text[place + len(fence) :]
        source.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "source", lambda name, cut=cut: cut)
            found.append({finding.kind for finding in train(q, k, v)[2].findings})
    assert all("race" in kinds for kinds in found), found


# ---- flash_attn_ext_dk512.metal --------------------------------------------------------------------------------------

D = 512


def arguments(rows: int, keys: int, heads: int, kv_heads: int, query_bytes: int = 2) -> bytes:
    q = [D * query_bytes, rows * D * query_bytes, heads * rows * D * query_bytes]
    kv = [D * 2, keys * D * 2, kv_heads * keys * D * 2]
    mask = [keys * 2, keys * rows * 2, keys * rows * 2]
    return struct.pack(
        "3i4x3Q4i3Qi4x3Q3i4x3Q3i4fif",
        rows, heads, 1, *q, keys, kv_heads, 1, D, *kv, D, *kv, rows, 1, 1, *mask, rows, heads, 1,
        D**-0.5, 0.0, 0.0, 0.0, 0, 0.0,
    )  # fmt: skip


def prefill(q: Array, k: Array, v: Array, mask: Array | None = None) -> tuple[Array, metal.Report]:
    (heads, rows, _), (kv_heads, keys, _) = q.shape, k.shape
    o = metal.poisoned(q.shape, BF16)
    buffers: dict[str, Any] = {"args": arguments(rows, keys, heads, kv_heads), "q": q, "k": k, "v": v, "dst": o}
    if mask is not None:
        buffers |= {"mask": mask, "blk": np.ones(-(-rows // 8) * -(-keys // 64), np.int8)}
    name = "kernel_flash_attn_ext_bf16_dk512_dv512"
    constants = {300: mask is not None, 304: False}
    shared = {"shmem_f16": 28672}
    text = source("flash_attn_ext_dk512.metal")
    return o, metal.run(
        text, name, buffers, (-(-rows // 8), heads), (32, 8), constants=constants, threadgroup_memory=shared
    )


def vector(q: Array, k: Array, v: Array, groups: int = 4, **options: Any) -> tuple[Array, metal.Report]:
    (heads, _, _), (kv_heads, keys, _) = q.shape, k.shape
    o = metal.poisoned(q.shape, BF16)
    args = arguments(1, keys, heads, kv_heads, query_bytes=4)
    buffers = {"args": args, "q": q, "k": k, "v": v, "mask": q, "dst": o}  # its sign for "no mask" is mask == q
    name = "kernel_flash_attn_ext_vec_bf16_dk512_dv512"
    shared = {"shmem_f16": 2 * (D + groups * (128 + D))}
    text = source("flash_attn_ext_dk512.metal")
    return o, metal.run(text, name, buffers, (1, heads), (32, groups), threadgroup_memory=shared, **options)


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
    assert np.abs(o.astype(np.float64) - wanted).max() < 1e-2  # right by luck of the order
    o, _ = vector(q, k, v, order="ascending")
    assert not np.abs(o.astype(np.float64) - wanted).max() < 1e-2


def test_vector_decode_reads_keys_past_the_end() -> None:
    q, k, v = randoms(4, 1, D, dtype=np.float32), randoms(1, 100, D, seed=1), randoms(1, 100, D, seed=2)
    _, report = vector(q, k, v)
    assert any(finding.kind == "out of bounds" and "(k)" in finding.place for finding in report.findings)
