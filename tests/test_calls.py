"""Prepared calls of the library: what is noticed between two calls alike, and what the table keeps."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import monotile
from arrays import Array
from kernels.cases import qkv
from monotile import errors
from monotile.kernels import reference
from monotile.kernels.attention import attention as attention_kernel
from monotile.kernels.merge import merge as merge_kernel
from monotile.launch import captures
from monotile.library import calls, ops
from monotile.runtime import tensors

FACTOR = 2.0


def scaled_by_a_global(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * FACTOR


@pytest.fixture(autouse=True)
def empty_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    for op in (ops._ATTENTION, ops._PARTIALS, ops.MERGE, ops.MERGE_LSE, ops.MASK_BLOCKS):
        monkeypatch.setattr(op, "calls", {})


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows whenever a call of attention is planned."""
    found: list[str] = []
    plain = ops._ATTENTION.plan

    def counted(*args: Any) -> Any:
        found.append("attention")
        return plain(*args)

    monkeypatch.setattr(ops._ATTENTION, "plan", counted)
    return found


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


# ---- what is the same call -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("Nq", [1, 20])
def test_a_call_alike_is_planned_once(Nq: int, plans: list[str]) -> None:
    for seed in range(3):
        q, k, v = qkv(Nq, 40, Hq=4, Hkv=2, seed=seed)
        close(monotile.attention(q, k, v, causal=True), reference.attention(q, k, v, causal=True)[0])
    assert len(plans) == 1


@pytest.mark.parametrize("Nq", [1, 20])
def test_whatever_differs_is_another_call(Nq: int, plans: list[str]) -> None:
    """Strides, shapes, types, options: each is right after the other."""
    q, k, v = qkv(Nq, 40, Hq=4, Hkv=2)
    turned = np.ascontiguousarray(k.swapaxes(1, 2)).swapaxes(1, 2)
    spread = np.full((*v.shape[:2], 80, 16), np.nan, np.float32)[:, :, ::2]
    spread[...] = v
    half = [x.astype(np.float16) for x in (q, k, v)]
    mask = np.random.default_rng(0).random((Nq, 40)) < 0.5
    for _ in range(2):
        for arrays in ((q, k, v), (q, turned, v), (q, k, spread), (q, k[..., ::-1], v), (q[:, :2], k, v)):
            for options in (
                {},
                {"causal": True},
                {"window": (3, 0)},
                {"window": [3, 0]},
                {"scale": 0.5},
                {"mask": mask},
            ):
                expected = reference.attention(
                    *arrays, **{**options, **{n: tuple(w) for n, w in options.items() if n == "window"}}
                )
                out, lse = monotile.attention(*arrays, return_lse=True, **options)
                close(out, expected[0]), close(lse, expected[1])
        assert monotile.attention(*half).dtype == np.float16
        assert monotile.attention(q[0], k[0], v[0]).shape == q.shape[1:]
    assert len(plans) == 5 * 4 + 2  # the scale is none of the plan's business, and a list is a tuple to it


@pytest.mark.parametrize(
    "right, wrong, error",
    [
        ({"causal": True}, {"causal": 1}, errors.BadOption),
        ({"window": (1, 0)}, {"window": (True, False)}, errors.BadOption),
        ({"softcap": 1.0}, {"softcap": True}, errors.BadOption),
        ({"threads": 1}, {"threads": True}, errors.BadThreadCount),
        ({"threads": 1}, {"threads": 1.0}, errors.BadThreadCount),
        ({"scale": 1.0}, {"scale": True}, errors.BadOption),
        ({"scale": 1.0}, {"scale": float("nan")}, errors.BadOption),
        ({"scale": 1.0}, {"scale": 1e39}, errors.ScalarDoesNotFit),
        ({"backend": "cpu"}, {"backend": "abacus"}, errors.UnknownBackend),
    ],
)
def test_a_mistake_after_a_right_call(right: Any, wrong: Any, error: type[Exception]) -> None:
    """Values that are equal to right ones, or not part of the key."""
    q, k, v = qkv(3, 9)
    expected = monotile.attention(q, k, v, **right)
    for _ in range(2):
        with pytest.raises(error):
            monotile.attention(q, k, v, **wrong)
        np.testing.assert_array_equal(monotile.attention(q, k, v, **right), expected)


def test_alignment_is_looked_at_in_every_call() -> None:
    q, k, v = qkv(3, 9)
    monotile.attention(q, k, v)
    odd = np.zeros(k.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(k.shape)
    with pytest.raises(errors.ArgumentAlignment, match="'k' is not aligned"):
        monotile.attention(q, odd, v)


# ---- functions of the caller -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("Nq", [1, 20])
def test_a_changed_global_is_noticed(Nq: int, monkeypatch: pytest.MonkeyPatch, plans: list[str]) -> None:
    """A global number is a constant until it is bound to another one, and then an argument."""
    q, k, v = qkv(Nq, 30)
    monkeypatch.setattr(captures, "_rebound", set())
    for factor in (2.0, 2.0, -1.0, 2.0, 3.0):
        monkeypatch.setattr(sys.modules[__name__], "FACTOR", factor)
        expected = reference.attention(q, k, v, scale=0.25 * factor)[0]
        close(monotile.attention(q, k, v, scale=0.25, score_mod=scaled_by_a_global), expected)
    assert len(plans) == 2


@pytest.mark.parametrize("Nq", [1, 20])
def test_captured_values_and_arrays(Nq: int, plans: list[str]) -> None:
    """Captured numbers and the contents of captured arrays are read in every call, and no part of its key."""
    q, k, v = qkv(Nq, 30)

    def attend(slopes: Array, factor: float) -> Any:
        biased = lambda score, b, h, q_idx, kv_idx: score + slopes[h] * factor * kv_idx  # noqa: E731
        return monotile.attention(q, k, v, score_mod=biased)

    def expected(slopes: Array, factor: float) -> Any:
        biased = lambda score, b, h, q_idx, kv_idx: score + slopes[h] * factor * kv_idx  # noqa: E731
        return reference.attention(q, k, v, score_mod=biased)[0]

    slopes = np.array([0.1, 0.2], np.float32)
    for _ in range(3):
        slopes += 0.1
        close(attend(slopes, 1.0), expected(slopes, 1.0))
        close(attend(slopes[::-1].copy(), 1.0), expected(slopes[::-1], 1.0))
    assert len(plans) == 1
    close(attend(slopes, -0.5), expected(slopes, -0.5))
    close(attend(slopes.repeat(2)[::2], -0.5), expected(slopes, -0.5))
    assert len(plans) == 2


def test_one_array_captured_twice() -> None:
    """Functions that are alike but for which array is which."""
    q, k, v = qkv(20, 30)
    plain = monotile.attention(q, k, v, return_lse=True)[1]

    def biased(x: Array, y: Array, z: Array) -> Any:
        return lambda score, b, h, q_idx, kv_idx: score + (x[h] + 10.0 * y[h] + 100.0 * z[h])

    one, two = np.array([1, 2], np.float32), np.array([3, 4], np.float32)
    for x, y, z in ((one, two, one), (one, two, two), (two, one, two), (one, one, one)):
        lse = monotile.attention(q, k, v, score_mod=biased(x, y, z), return_lse=True)[1]
        np.testing.assert_allclose((lse - plain)[0, :, 0], x + 10 * y + 100 * z, rtol=1e-5)


@pytest.mark.parametrize("Nq", [1, 20])
def test_masks_and_sinks_are_read_in_every_call(Nq: int, plans: list[str]) -> None:
    q, k, v = qkv(Nq, 300)
    mask, sinks = np.ones((Nq, 300), bool), np.zeros(2, np.float32)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        mask[...], sinks[...] = rng.random((Nq, 300)) < 0.5, rng.standard_normal(2)
        expected = reference.attention(q, k, v, mask=mask, sinks=sinks)[0]
        close(monotile.attention(q, k, v, mask=mask, sinks=sinks), expected)
    assert len(plans) == 1


# ---- the table -------------------------------------------------------------------------------------------------------


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_PREPARED", 8)
    for n in range(1, 40):
        q, k, v = qkv(1, n)
        monotile.attention(q, k, v)
        assert len(ops._ATTENTION.calls) <= 8


def test_a_call_that_fails_leaves_nothing() -> None:
    q, k, v = qkv(3, 9)
    for _ in range(2):
        with pytest.raises(errors.LengthsDiffer):
            monotile.attention(q, k, v[:, :, :5])
        with pytest.raises(errors.ConstError):
            monotile.attention(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx, a=[1]: kv_idx > 0)
    assert not ops._ATTENTION.calls


def test_no_array_is_kept() -> None:
    class Noted(np.ndarray[Any, Any]):
        """Of an array itself there are no weak references."""

    q, k, v = (x.view(Noted) for x in qkv(3, 600))
    slopes = np.ones(2, np.float32).view(Noted)
    mask = np.ones((3, 600), bool).view(Noted)
    biased = lambda score, b, h, q_idx, kv_idx: score + slopes[h]  # noqa: E731
    out = monotile.attention(q, k, v, mask=mask, score_mod=biased)
    kept = [weakref.ref(x) for x in (q, k, v, slopes, mask)]
    assert len(ops._ATTENTION.calls) == 1 and out.shape == q.shape
    del q, k, v, slopes, mask, biased
    gc.collect()
    assert [ref() for ref in kept] == [None] * 5


def test_threads_share_a_prepared_call() -> None:
    """Each call has results and temporaries of its own."""
    inputs = [qkv(2, 1500, seed=seed) for seed in range(4)]
    expected = [monotile.attention(*given) for given in inputs]
    wrong: list[int] = []

    def work(n: int) -> None:
        for _ in range(40):
            if not np.array_equal(monotile.attention(*inputs[n]), expected[n]):
                wrong.append(n)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong and len(ops._ATTENTION.calls) == 1


def test_results_are_new_memory() -> None:
    q, k, v = qkv(1, 1000)
    first = monotile.attention(q, k, v)
    before = first.copy()
    second = monotile.attention(q + 1, k, v)
    assert not np.shares_memory(first, second)
    np.testing.assert_array_equal(first, before)


# ---- one launch ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_one_split_has_the_bits_of_a_merge(dtype: str, backend: str) -> None:
    """Also where a row sees nothing, and with sinks."""
    q, k, v = qkv(3, 200, Hq=4, Hkv=2, dtype=dtype)
    mask = np.random.default_rng(0).random((3, 200)) < 0.5
    mask[1] = False
    for sinks in (None, np.array([-1.0, 0.0, 3.0, -np.inf], np.float32)):
        options = {"mask": mask, "scale": 0.3, "backend": backend}
        out, lse = monotile.attention(q, k, v, sinks=sinks, return_lse=True, **options)
        parts = [np.asarray(x) for x in monotile.decode_partials(q, k, v, splits=1, **options)]
        merged, total = np.empty((12, 16), out.dtype), np.empty(12, np.float32)
        flat = (x.reshape(12, *x.shape[3:]) for x in parts)
        merge_kernel(*flat, sinks, merged, total, 3, BS=64, backend=backend)
        np.testing.assert_array_equal(out.reshape(12, 16).view(np.uint8), merged.view(np.uint8))
        np.testing.assert_array_equal(lse.reshape(12).view(np.uint8), total.view(np.uint8))


def test_few_keys_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that outgrows one split needs one other program, however far it grows."""
    launched: list[str] = []
    programs: list[int] = []
    plain = calls.CallBuilder.launch

    def counted(self: Any, kernel: Any, *args: Any, **options: Any) -> None:
        launched.append(kernel.name)
        plain(self, kernel, *args, **options)

    monkeypatch.setattr(calls.CallBuilder, "launch", counted)
    monkeypatch.setattr(attention_kernel, "_programs", {})
    monkeypatch.setattr(attention_kernel, "_templates", {})
    whole, split = ["attention"], ["attention", "merge"]
    for Nk, names in ((0, whole), (1, whole), (512, whole), (513, split), (1100, split), (9000, split)):
        launched.clear()
        ops.FUNCTIONS["attention"].families.clear()
        q, k, v = qkv(1, Nk, Hq=4, Hkv=2)
        close(monotile.attention(q, k, v), reference.attention(q, k, v)[0])
        assert launched == names
        programs.append(len(attention_kernel._programs))
    assert programs[:3] == programs[:1] * 3 and programs[3:] == [programs[0] + 1] * 3


# ---- views -----------------------------------------------------------------------------------------------------------


def test_reshaped_views_agree_with_numpy() -> None:
    """The same strides where NumPy needs no copy, and None where it does."""
    base = np.arange(2 * 3 * 4 * 5, dtype=np.float32)
    sources = [base.reshape(2, 3, 4, 5), base.reshape(6, 20), base.reshape(2, 1, 60)]
    sources += [s.swapaxes(0, -1) for s in sources] + [s[::-1] for s in sources] + [s[..., ::2] for s in sources]
    sources += [np.broadcast_to(base[:5], (3, 4, 5)), np.broadcast_to(base[:4, None], (4, 6)), base[:0].reshape(0, 3)]
    copied = 0
    for source in sources:
        view, n = tensors.read("x", source), source.size
        for shape in (
            (n,),
            (1, n),
            (n, 1),
            (2, n // 2),
            (n // 2, 2),
            (3, 1, n // 3),
            (2, 3, n // 6),
            (n // 4, 2, 1, 2),
        ):
            if np.prod(shape) != n:
                continue
            found, expected = view.reshaped(shape), source.reshape(shape)
            if n and not np.shares_memory(source, expected):
                assert found is None
                copied += 1
                continue
            assert found is not None
            steps = tuple(s * 4 for s in found.strides)
            np.testing.assert_array_equal(np.lib.stride_tricks.as_strided(source, shape, steps), expected)
    assert copied > 10
