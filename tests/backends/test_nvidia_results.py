"""Results of the nvidia backend in Triton's interpreter, for kernels that try its corners.

Triton either interprets or compiles in a process. `test_in_tritons_interpreter` runs the tests of this file, those of
the language and those of the library in processes where it interprets.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arrays import Array, numpy_type, poisoned, random, same
from backends.nvidia_kernels import (
    attention_arrays,
    attention_oracle,
    compiled,
    decode,
    fold,
    forward,
    interpreted,
    product,
    repeat_columns,
    scale_rows,
    seen_rows,
)
from monotile import ir
from monotile.backends.nvidia import program
from monotile.backends.nvidia.backend import BACKEND
from monotile.backends.nvidia.schedule import Schedule

ROOT = Path(__file__).parents[2]
# Each with the tests to take: what is left out of the library's is the same on every backend, or takes minutes here.
OPTIONS = "nvidia and (test_options or large_scores or softcap or sinks or masks_of_narrow or head_sizes)"
CASES = "nvidia and (not backward or mask_grad or documents or Dv)"  # a backward case takes seconds
SAMPLE = ("--one-in", "3")
PLACES = {
    "tests/backends/test_nvidia.py tests/backends/test_nvidia_results.py tests/backends/test_nvidia_gpu.py": "",
    "tests/language": "nvidia and not streamed_dots and not panel_sums and not tiles_in_place",  # of the cpu's paths
    "tests/kernels/test_check.py tests/kernels/test_merge.py tests/kernels/test_mask_blocks.py": CASES,
    "tests/kernels/test_attention.py": OPTIONS,
    "tests/kernels/test_mods_of_caches.py": "nvidia and hidden_blocks and not 300",
}


@compiled
@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", PLACES)
def test_in_tritons_interpreter(place: str) -> None:
    wanted = [*place.split(), "-k", PLACES[place], *SAMPLE]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *wanted]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]


@interpreted
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("D", [1, 3, 16, 64, 80, 96])
def test_attention(D: int, dtype: str, causal: bool) -> None:
    args = attention_arrays((1, 4, 2, 37), D, dtype)
    forward(*args, 0.2, BQ=16, BK=16, causal=causal, backend="nvidia")
    expected, lse = attention_oracle(*args[:3], 0.2, causal)
    tolerance = 2e-5 if dtype == "float32" else 2e-3 if dtype == "float16" else 2e-2
    np.testing.assert_allclose(args[3].astype(np.float64), expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(args[4], lse, rtol=1e-5, atol=1e-5)


def launch_with(schedule: Schedule, call: ir.Kernel, arrays: tuple[Array, ...], scalars: list[Any]) -> Any:
    """Run a kernel with this schedule and return the bound launch."""
    made = BACKEND.compile_as(call, schedule)
    words: list[int] = []
    for array in arrays:
        words += [0, *array.shape, *(s // array.itemsize for s in array.strides)]
    bound = made.bind(words + [0] * len(scalars))
    made.launch(bound, arrays, [a.ctypes.data for a in arrays], scalars, None)
    return bound


DESCRIPTORS = Schedule(tensor_descriptors=True)


@interpreted
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("D", "BK"), [(64, 32), (80, 16), (96, 24)])
def test_descriptors(D: int, BK: int, causal: bool) -> None:
    """24 rows are padded to 32, and what follows them in memory is not zero: those tiles have no descriptor."""
    args = attention_arrays((2, 4, 2, 77), D, "float16")
    call = forward.ir(*args, 0.2, BQ=16, BK=BK, causal=causal)
    bound = launch_with(DESCRIPTORS, call, args, [0.2])
    assert len(bound.variant.described) == (3 if BK != 24 else 1)
    expected, _ = attention_oracle(*args[:3], 0.2, causal)
    np.testing.assert_allclose(args[3].astype(np.float64), expected, rtol=2e-3, atol=2e-3)


@interpreted
@pytest.mark.parametrize("schedule", [Schedule(peel=False), Schedule(peel=False, tensor_descriptors=True)])
def test_without_peeling(schedule: Schedule) -> None:
    args = attention_arrays((1, 4, 2, 77), 80, "float16")
    launch_with(schedule, forward.ir(*args, 0.2, BQ=16, BK=32, causal=True), args, [0.2])
    expected, _ = attention_oracle(*args[:3], 0.2, True)
    np.testing.assert_allclose(args[3].astype(np.float64), expected, rtol=2e-3, atol=2e-3)


@interpreted
def test_layouts_without_descriptors() -> None:
    """A stride or an origin that is no multiple of 16 bytes, and an empty tensor: the pointers are used instead."""
    q, k, v, o, lse = attention_arrays((1, 2, 2, 33), 16, "float16")
    odd = np.zeros((1, 2, 33, 19), np.float16)[..., 1:17]
    odd[:] = k
    call = forward.ir(q, odd, v, o, lse, 0.2, BQ=16, BK=16, causal=False)
    bound = launch_with(DESCRIPTORS, call, (q, odd, v, o, lse), [0.2])
    assert bound.without_descriptors is None and len(bound.variant.described) == 0
    shifted = np.zeros((1, 2, 33, 24), np.float16)[..., 1:17]
    shifted[:] = k
    call = forward.ir(q, shifted, v, o, lse, 0.2, BQ=16, BK=16, causal=False)
    bound = launch_with(DESCRIPTORS, call, (q, shifted, v, o, lse), [0.2])
    assert bound.without_descriptors is not None
    expected, _ = attention_oracle(q, k, v, 0.2, False)
    np.testing.assert_allclose(o.astype(np.float64), expected, rtol=2e-3, atol=2e-3)
    nothing = np.zeros((1, 2, 0, 16), np.float16)
    call = forward.ir(q, nothing, nothing, o, lse, 0.2, BQ=16, BK=16, causal=False)
    launch_with(DESCRIPTORS, call, (q, nothing, nothing, o, lse), [0.2])
    assert (o == 0).all() and (lse == -np.inf).all()


@interpreted
@pytest.mark.parametrize("block", [8, 16, 24, 48])
def test_blocks_that_are_no_powers_of_two(block: int) -> None:
    args = attention_arrays((1, 2, 2, 50), 20, "float32")
    forward(*args, 0.2, BQ=block, BK=block, causal=True, backend="nvidia")
    expected, _ = attention_oracle(*args[:3], 0.2, True)
    np.testing.assert_allclose(args[3], expected, rtol=2e-5, atol=2e-5)


@interpreted
@pytest.mark.parametrize("heads", [1, 4])
def test_decode(heads: int) -> None:
    q, k, v = random((2, heads, 80), seed=1), random((2, 300, 80), seed=2), random((2, 300, 80), seed=3)
    o, m, l = poisoned((2, 3, heads, 80)), poisoned((2, 3, heads)), poisoned((2, 3, heads))
    decode(q, k, v, o, m, l, 0.2, BK=32, backend="nvidia")
    weights = np.exp2(m - m.max(axis=1, keepdims=True))
    found = (o * weights[..., None]).sum(axis=1) / (l * weights).sum(axis=1)[..., None]
    expected, _ = attention_oracle(q[:, None].swapaxes(0, 1), k[None], v[None], 0.2, False)
    np.testing.assert_allclose(found, expected[0], rtol=2e-5, atol=2e-5)


@interpreted
@pytest.mark.parametrize("shape", [(3, 5), (1, 17), (17, 1), (20, 33)])
def test_folds_ignore_padding(shape: tuple[int, int]) -> None:
    x, y = -np.abs(random(shape)) - 8, poisoned((3, shape[0]))
    fold(x, y, backend="nvidia")
    tile = x + np.float32(7)
    np.testing.assert_allclose(y[0], tile.sum(axis=1), rtol=1e-5)
    same(y[1:], np.stack([tile.max(axis=1), (-tile).min(axis=1)]))


@interpreted
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 5, 7), (3, 1, 7), (3, 5, 1), (1, 1, 1), (17, 20, 33)])
def test_products_ignore_padding(dtype: str, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a, b, c = random((m, k), dtype, 1), random((k, n), dtype, 2), poisoned((m, n))
    product(a, b, c, backend="nvidia")
    one = np.float32(1)
    wide_a, wide_b = ((x.astype(np.float32) + one).astype(numpy_type(dtype)).astype(np.float64) for x in (a, b))
    np.testing.assert_allclose(c, wide_a @ wide_b, rtol=1e-5, atol=1e-5)


@interpreted
def test_rows_that_are_not_seen_are_not_loaded() -> None:
    """What they hold does not matter, in the last block either."""
    x, y, out = random((70, 20), "float32", 1), random((40, 20), "float32", 2), poisoned((40, 20))
    seen = np.random.default_rng(3).random((70, 40)) < 0.05
    known = [seen[:, :32].any(axis=1), seen[:, 32:].any(axis=1)]
    hidden = ~known[0] & ~known[1]
    x[hidden] = np.nan
    assert hidden.any() and not all(k.all() for k in known)
    seen_rows(x, y, seen, out, backend="nvidia")
    for k, cols in zip(known, (slice(0, 32), slice(32, 40)), strict=True):
        np.testing.assert_allclose(out[cols], y[cols] @ x[k].T @ x[k], rtol=1e-4, atol=1e-3)


@interpreted
@pytest.mark.parametrize(("times", "N"), [(2, 64), (8, 128), (3, 66), (2, 80)])
def test_columns_that_repeat(times: int, N: int) -> None:
    """A tile that is doubled in registers, or a gather where the numbers do not allow it; columns outside are 0."""
    x, y = random((64, N // times + 1)), poisoned((64, N))
    repeat_columns(x, y, M=64, times=times, backend="nvidia")
    same(y, np.repeat(x, times, axis=1)[:, :N])
    repeat_columns(x[:, :-3], y, M=64, times=times, backend="nvidia")
    same(y, np.repeat(np.pad(x[:, :-3], ((0, 0), (0, 3))), times, axis=1)[:, :N])


@interpreted
def test_wide_offsets_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "INT32_SPAN", 0)
    x, y = random((18, 40))[::2], poisoned((9, 40))
    scale_rows(x, y, backend="nvidia")
    same(y, x * 2)
