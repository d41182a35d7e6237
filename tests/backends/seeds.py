"""Calls of the hand-written Metal kernels in the runner, as their own hosts make them.

The kernels are not part of this repository; they lie in a folder beside it, or are not there.
"""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from monotile import metal

SEEDS = Path(__file__).parents[3] / "shared" / "seeds"
BF16 = ml_dtypes.bfloat16
Array = np.ndarray[Any, Any]
D = 512  # of flash_attn_ext_dk512.metal


@cache
def source(name: str) -> str:
    return (SEEDS / name).read_text()


def randoms(*shape: int, dtype: Any = BF16, seed: int = 0) -> Array:
    return np.random.default_rng((seed, *shape)).standard_normal(shape, dtype=np.float32).astype(dtype)


def expected(q: Array, k: Array, v: Array, causal: bool = False, mask: Array | float = 0.0) -> tuple[Array, Array]:
    """Attention and its logsumexp in float64; q (H, Nq, D), k and v (Hkv, Nk, D); the mask is added to the scores."""
    heads = np.arange(len(q)) * len(k) // len(q)
    scores = np.einsum("hqd,hkd->hqk", q.astype(np.float64), k[heads].astype(np.float64)) * q.shape[-1] ** -0.5
    rows, keys = scores.shape[1:]
    if causal:
        scores = np.where(np.arange(rows)[:, None] + keys - rows >= np.arange(keys), scores, -np.inf)
    scores = scores + np.asarray(mask, np.float64)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    return np.einsum("hqk,hkd->hqd", weights / total, v[heads].astype(np.float64)), (top + np.log(total))[..., 0]


# ---- sdpa_decode.metal -----------------------------------------------------------------------------------------------


def decode(
    q: Array, k: Array, v: Array, groups: int = 4, kv_heads: int | None = None, capacity: int | None = None
) -> tuple[Array, metal.Report]:
    """`kv_heads` and `capacity` may be more than the arrays hold."""
    (heads, d), (own, keys, _) = q.shape, k.shape
    o = metal.poisoned((heads, d), np.float32)
    params = struct.pack("5IfI", heads, kv_heads or own, d, keys, capacity or keys, d**-0.5, groups)
    shared = {"shmem": 4 * groups * (d + 2)}
    buffers = {"Q": q, "K": k, "V": v, "O": o, "p": params}
    text = source("sdpa_decode.metal")
    return o, metal.run(text, "sdpa_decode", buffers, heads, groups * 32, threadgroup_memory=shared)


# ---- flash_attn_train_fwd.metal --------------------------------------------------------------------------------------


def train(
    q: Array, k: Array, v: Array, causal: bool = False, softcap: float = 0.0, **options: Any
) -> tuple[Array, Array, metal.Report]:
    (heads, rows, d), (kv_heads, keys, _) = q.shape, k.shape
    o, lse = metal.poisoned(q.shape, BF16), metal.poisoned((heads, rows), np.float32)
    head = (1, heads, d, rows, keys, heads // kv_heads, d**-0.5, softcap, -(-rows // 32), -(-keys // 16))
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


# ---- flash_attn_ext_dk512.metal --------------------------------------------------------------------------------------


def arguments(rows: int, keys: int, heads: int, kv_heads: int, query_bytes: int = 2) -> bytes:
    q = [D * query_bytes, rows * D * query_bytes, heads * rows * D * query_bytes]
    kv = [D * 2, keys * D * 2, kv_heads * keys * D * 2]
    mask = [keys * 2, keys * rows * 2, keys * rows * 2]
    return struct.pack(
        "3i4x3Q4i3Qi4x3Q3i4x3Q3i4fif",
        rows, heads, 1, *q, keys, kv_heads, 1, D, *kv, D, *kv, rows, 1, 1, *mask, rows, heads, 1,
        D**-0.5, 0.0, 0.0, 0.0, 0, 0.0,
    )  # fmt: skip


def block_map(mask: Array) -> Array:
    """What the kernel that runs before prefill says of each block of a mask (queries, keys)."""
    rows, keys = mask.shape
    found = np.full((-(-rows // 8), -(-keys // 64)), 77, np.int8)
    args = struct.pack("5i4x3Q", rows, keys, rows, 1, 1, keys * 2, mask.nbytes, mask.nbytes)
    text, grid = source("flash_attn_ext_dk512.metal"), (found.shape[1], found.shape[0])
    metal.run(text, "kernel_flash_attn_ext_blk", {"args": args, "mask": mask, "dst": found}, grid, 32)
    return found


def prefill(
    q: Array, k: Array, v: Array, mask: Array | None = None, blocks: Array | None = None, **options: Any
) -> tuple[Array, metal.Report]:
    """Keys beyond the last 64 that fill a block come in a padded copy, as from the kernel that makes it."""
    (heads, rows, _), (kv_heads, keys, _) = q.shape, k.shape
    o = metal.poisoned(q.shape, BF16)
    buffers: dict[str, Any] = {"args": arguments(rows, keys, heads, kv_heads), "q": q, "k": k, "v": v, "dst": o}
    if mask is not None:
        every = np.ones(-(-rows // 8) * -(-keys // 64), np.int8)
        buffers |= {"mask": mask, "blk": every if blocks is None else blocks}
    rest = keys % 64
    if rest and mask is None:
        assert kv_heads == 1
        tail = np.zeros((2, 64, D), BF16)
        tail[0, :rest], tail[1, :rest] = k[0, keys - rest :], v[0, keys - rest :]
        buffers["pad"] = tail
    name = "kernel_flash_attn_ext_bf16_dk512_dv512"
    constants = {300: mask is not None, 304: "pad" in buffers}
    shared = {"shmem_f16": 28672}
    text = options.pop("text", source("flash_attn_ext_dk512.metal"))
    grid = options.pop("grid", (-(-rows // 8), heads))
    return o, metal.run(text, name, buffers, grid, (32, 8), constants=constants, threadgroup_memory=shared, **options)


def vector(
    q: Array, k: Array, v: Array, groups: int = 4, mask: Array | None = None, **options: Any
) -> tuple[Array, metal.Report]:
    (heads, _, _), (kv_heads, keys, _) = q.shape, k.shape
    o = metal.poisoned(q.shape, BF16)
    args = arguments(1, keys, heads, kv_heads, query_bytes=4)
    given = q if mask is None else mask  # its sign for "no mask" is mask == q
    buffers = {"args": args, "q": q, "k": k, "v": v, "mask": given, "dst": o}
    name = "kernel_flash_attn_ext_vec_bf16_dk512_dv512"
    shared = {"shmem_f16": 2 * (D + groups * (128 + D))}
    text = source("flash_attn_ext_dk512.metal")
    return o, metal.run(text, name, buffers, (1, heads), (32, groups), threadgroup_memory=shared, **options)
