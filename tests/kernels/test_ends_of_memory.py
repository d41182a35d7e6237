"""Arrays that end where memory ends: a vector behind the end is not asked for, not even with all of its lanes off."""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import monotile
from kernels.cases import equal, qkv

Array = np.ndarray[Any, Any]
KEPT: list[mmap.mmap] = []  # mapped until the end of the process

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="protects pages by Linux's mprotect")


def at_the_end(array: Array) -> Array:
    """A copy whose last byte is the last one of readable memory."""
    size = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + 16 * mmap.PAGESIZE)
    KEPT.append(memory)
    whole = np.frombuffer(memory, np.uint8)
    copy = whole[size - array.nbytes : size].view(array.dtype).reshape(array.shape)
    copy[...] = array
    behind = ctypes.c_void_p(whole.ctypes.data + size)
    assert ctypes.CDLL(None).mprotect(behind, ctypes.c_size_t(16 * mmap.PAGESIZE), 0) == 0
    return copy


def best(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The best time of each call, in rounds that call each of them once."""
    found = dict.fromkeys(calls, np.inf)
    for _ in range(60):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            found[name] = min(found[name], time.perf_counter() - start)
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 129), (1, 130), (3, 257), (20, 150)])
def test_the_end_of_memory_is_as_fast_as_its_middle(queries: int, keys: int, dtype: str) -> None:
    """Masked accesses of pages that are not there take hundreds of cycles: they made short decode 7 times as slow."""
    arrays = qkv(queries, keys, 64, Hq=16, Hkv=4, dtype=dtype)
    ended = [at_the_end(x) for x in arrays]
    equal(monotile.attention(*ended, backend="cpu"), monotile.attention(*arrays, backend="cpu"))
    larger = [np.concatenate([x, x], axis=1)[:, : x.shape[1]] for x in arrays]  # memory goes on behind them
    times = best(
        {
            "middle": lambda: monotile.attention(*larger, backend="cpu", threads=1),
            "end": lambda: monotile.attention(*ended, backend="cpu", threads=1),
        }
    )
    assert times["end"] < 2 * times["middle"]


@pytest.mark.parametrize("keys", [130, 150])
def test_masks_at_the_end_of_memory(keys: int) -> None:
    q, k, v = qkv(1, keys, 64, Hq=16, Hkv=4)
    mask = np.random.default_rng(0).random((1, 1, 1, keys)) < 0.9
    ended = at_the_end(mask)
    equal(monotile.attention(q, k, v, mask=ended, backend="cpu"), monotile.attention(q, k, v, mask=mask, backend="cpu"))
    times = best(
        {
            "middle": lambda: monotile.attention(q, k, v, mask=mask, backend="cpu", threads=1),
            "end": lambda: monotile.attention(q, k, v, mask=ended, backend="cpu", threads=1),
        }
    )
    assert times["end"] < 2 * times["middle"]
