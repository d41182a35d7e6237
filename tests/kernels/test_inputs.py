"""Mistakes in a call of the library: an error of monotile's own that says what was found, or the empty answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import monotile
from kernels.cases import normal, qkv
from monotile import errors

Q, K, V = qkv(4, 6, 8, B=2, Hq=4, Hkv=2)
X = normal(2, 3, 4, 8)


class Stranger:
    """Says that it is an array, and is none."""

    def __dlpack__(self, **_: Any) -> int:
        return 1

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def no_source() -> Any:
    names: dict[str, Any] = {}
    exec("def same(score, b, h, q_idx, kv_idx):\n    return score\n", names)
    return names["same"]


ARRAYS: dict[str, tuple[Any, Any, Any, type[Exception]]] = {
    "heads that do not divide": (Q[:, :3], K, V, errors.HeadsDoNotDivide),
    "fewer query heads than key heads": (Q[:, :1], K, V, errors.HeadsDoNotDivide),
    "no key heads": (Q, K[:, :0], V[:, :0], errors.HeadsDoNotDivide),
    "head sizes that differ": (Q, K[..., :7], V, errors.HeadSize),
    "head size 0": (Q[..., :0], K[..., :0], V, errors.HeadSize),
    "value head size 0": (Q, K, V[..., :0], errors.HeadSize),
    "head size 577": (np.zeros((1, 1, 2, 577), np.float32),) * 3 + (errors.HeadSize,),
    "value head size 577": (X, X, np.zeros((2, 3, 4, 577), np.float32), errors.HeadSize),
    "batches that differ": (np.concatenate([Q, Q]), K, V, errors.LengthsDiffer),
    "heads of k and v that differ": (Q, K, V[:, :1], errors.LengthsDiffer),
    "lengths of k and v that differ": (Q, K, V[:, :, :5], errors.LengthsDiffer),
    "rank 2": (Q[0, 0], K[0, 0], V[0, 0], errors.ArgumentRank),
    "rank 1": (Q[0, 0, 0], K, V, errors.ArgumentRank),
    "rank 0": (Q, np.array(1, np.float32), V, errors.ArgumentRank),
    "mixed element types": (Q, K.astype(np.float16), V, errors.MixedDTypes),
    "integers": (*(x.astype(np.int32) for x in (Q, K, V)), errors.MixedDTypes),
    "bools": (*(x > 0 for x in (Q, K, V)), errors.MixedDTypes),
    "float64": (*(x.astype(np.float64) for x in (Q, K, V)), errors.ArgumentDType),
    "complex": (*(x.astype(np.complex64) for x in (Q, K, V)), errors.ArgumentDType),
    "objects": (*(x.astype(object) for x in (Q, K, V)), errors.ArgumentDType),
    "foreign byte order": (*(x.astype(">f4") for x in (Q, K, V)), errors.ArgumentDType),
    "a list": (Q.tolist(), K, V, errors.ArgumentKind),
    "a list as k": (Q, K.tolist(), V, errors.ArgumentKind),
    "a number": (1.0, K, V, errors.ArgumentKind),
    "None": (Q, None, V, errors.ArgumentKind),
    "a string": ("q", K, V, errors.ArgumentKind),
    "a masked array": (np.ma.masked_array(Q), K, V, errors.ArgumentKind),
    "no array at all": (Stranger(), K, V, errors.ArgumentKind),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(name: str) -> None:
    q, k, v, error = ARRAYS[name]
    for call in (monotile.attention, monotile.decode_partials):
        with pytest.raises(error) as found:
            call(q, k, v)
        assert isinstance(found.value, monotile.MonotileError) and len(str(found.value)) > 20


def test_unaligned_arrays() -> None:
    raw = np.zeros(X.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(X.shape)
    with pytest.raises(errors.ArgumentAlignment):
        monotile.attention(raw, X, X)


OPTIONS: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "a mask that does not broadcast": ({"mask": np.ones((5, 6), bool)}, errors.MaskShape),
    "a mask of another batch": ({"mask": np.ones((3, 1, 4, 6), bool)}, errors.MaskShape),
    "a mask of key heads": ({"mask": np.ones((2, 4, 6), bool)}, errors.MaskShape),
    "a mask of rank 5": ({"mask": np.ones((1, 1, 1, 4, 6), bool)}, errors.MaskShape),
    "a mask of no keys": ({"mask": np.ones((4, 0), bool)}, errors.MaskShape),
    "a mask of integers": ({"mask": np.ones((4, 6), np.int32)}, errors.MixedDTypes),
    "a mask of float64": ({"mask": np.ones((4, 6))}, errors.ArgumentDType),
    "a mask that is a list": ({"mask": [[True] * 6] * 4}, errors.ArgumentKind),
    "a mask that is True": ({"mask": True}, errors.ArgumentKind),
    "a scale of NaN": ({"scale": float("nan")}, errors.BadOption),
    "an infinite scale": ({"scale": float("inf")}, errors.BadOption),
    "a scale beyond float32": ({"scale": 1e300}, errors.ScalarDoesNotFit),
    "a scale too large to work with": ({"scale": -2.2e38}, errors.BadOption),
    "a scale that is a string": ({"scale": "1"}, errors.BadOption),
    "a scale that is True": ({"scale": True}, errors.BadOption),
    "a scale that is complex": ({"scale": 1j}, errors.BadOption),
    "a scale for each head": ({"scale": np.ones(4)}, errors.BadOption),
    "a negative softcap": ({"softcap": -1.0}, errors.BadOption),
    "a softcap of NaN": ({"softcap": float("nan")}, errors.BadOption),
    "a softcap too small to divide by": ({"softcap": 1e-40}, errors.BadOption),
    "a causal that is a number": ({"causal": 1}, errors.BadOption),
    "a causal that is another word": ({"causal": "left"}, errors.BadOption),
    "a causal that is an array": ({"causal": np.array([True])}, errors.BadOption),
    "a causal that is None": ({"causal": None}, errors.BadOption),
    "a window of one side": ({"window": (3,)}, errors.BadOption),
    "a window that is a number": ({"window": 3}, errors.BadOption),
    "a negative window": ({"window": (-2, 0)}, errors.BadOption),
    "a window of floats": ({"window": (1.0, 0)}, errors.BadOption),
    "a score_mod that is no function": ({"score_mod": 3}, errors.BadOption),
    "a score_mod that is built in": ({"score_mod": abs}, errors.BadOption),
    "a score_mod of one argument": ({"score_mod": lambda score: score}, errors.WrongCall),
    "a score_mod that gives nothing": ({"score_mod": lambda score, b, h, q_idx, kv_idx: None}, errors.WrongCall),
    "a score_mod that calls NumPy": ({"score_mod": lambda s, b, h, q_idx, kv_idx: np.sinh(s)}, errors.NotCallable),
    "a score_mod without a source": ({"score_mod": no_source()}, errors.NoSource),
    "a mask_mod of numbers": ({"mask_mod": lambda b, h, q_idx, kv_idx: q_idx * 1.0}, errors.WrongCall),
    "a mask_mod that captures a list": ({"mask_mod": lambda b, h, q_idx, kv_idx, a=[1]: kv_idx > 0}, errors.ConstError),
    "an unknown backend": ({"backend": "abacus"}, errors.UnknownBackend),
    "no threads": ({"threads": 0}, errors.BadThreadCount),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    options, error = OPTIONS[name]
    for call in (monotile.attention, monotile.decode_partials):
        with pytest.raises(error) as found:
            call(Q, K, V, **options)
        assert isinstance(found.value, monotile.MonotileError) and len(str(found.value)) > 20


@pytest.mark.parametrize(
    "sinks, error",
    [
        (normal(2), errors.ArgumentShape),
        (normal(4, 1), errors.ArgumentShape),
        (np.float32(1), errors.ArgumentKind),
        (np.ones(4, np.int32), errors.MixedDTypes),
        (np.ones(4), errors.ArgumentDType),
        ([1.0] * 4, errors.ArgumentKind),
    ],
)
def test_sinks(sinks: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        monotile.attention(Q, K, V, sinks=sinks)


@pytest.mark.parametrize("splits", [0, -1, 2.0, True, "3", 2**40, float("nan"), np.ones(2)])
def test_splits(splits: Any) -> None:
    with pytest.raises(errors.BadOption):
        monotile.decode_partials(Q, K, V, splits=splits)


@pytest.mark.parametrize(
    "o, m, l, dtype, error",
    [
        (X, X[..., 0], X[..., :2, 0], "float32", errors.ArgumentShape),
        (X, X, X, "float32", errors.ArgumentShape),
        (X[0, 0, 0], X[0, 0, 0, 0], X[0, 0, 0, 0], "float32", errors.MonotileError),
        (X.astype(np.float16), X[..., 0], X[..., 0], "float32", errors.MixedDTypes),
        (X, X[..., 0].astype(np.float16), X[..., 0], "float32", errors.MixedDTypes),
        (X, X[..., 0], X[..., 0].astype(np.int32), "float32", errors.MixedDTypes),
        (X[..., :0], X[..., 0], X[..., 0], "float32", errors.HeadSize),
        (np.zeros((1, 577), np.float32), X[0, 0, :1, 0], X[0, 0, :1, 0], "float32", errors.HeadSize),
        (X, X[..., 0], X[..., 0], "float64", errors.BadOption),
        (X, X[..., 0], X[..., 0], np.int32, errors.BadOption),
        (X, X[..., 0], X[..., 0], None, errors.BadOption),
        (X, X[..., 0], X[..., 0], "nothing", errors.BadOption),
        (X, X[..., 0], X[..., 0], {"a": 1}, errors.BadOption),
        (X, X[..., 0], [1.0], "float32", errors.ArgumentKind),
        (None, X[..., 0], X[..., 0], "float32", errors.ArgumentKind),
    ],
)
def test_merge(o: Any, m: Any, l: Any, dtype: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        monotile.merge(o, m, l, dtype=dtype)


@pytest.mark.parametrize(
    "outs, lses, error",
    [
        ([], [], errors.ArgumentKind),
        ([X, X[:1]], [X[..., 0], X[..., 0]], errors.ArgumentShape),
        ([X, X.astype(np.float16)], [X[..., 0], X[..., 0]], errors.ArgumentShape),
        ([X, X], [X[..., 0]], errors.ArgumentShape),
        ([X, X], [], errors.ArgumentShape),
        ([X, 3], [X[..., 0], X[..., 0]], errors.ArgumentKind),
        (X.astype(np.int32), X[..., 0], errors.MixedDTypes),
        (X, X[..., 0].astype(np.float16), errors.MixedDTypes),
        (X[0, 0, 0], X[0, 0, 0, 0], errors.MonotileError),
        ([X[0, 0, 0, 0]], [X[0, 0, 0, 0]], errors.MonotileError),
    ],
)
def test_merge_lse(outs: Any, lses: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        monotile.merge_lse(outs, lses)


@pytest.mark.parametrize(
    "mask, blocks, error",
    [
        (np.ones(4, bool), (1, 1), errors.ArgumentRank),
        (np.ones((1, 1, 1, 4, 4), bool), (1, 1), errors.ArgumentRank),
        (np.ones((4, 4), np.int32), (1, 1), errors.MixedDTypes),
        (np.ones((4, 4)), (1, 1), errors.ArgumentDType),
        (np.ones((4, 4), bool), (0, 1), errors.BadOption),
        (np.ones((4, 4), bool), (1, -1), errors.BadOption),
        (np.ones((4, 4), bool), (1, 2.0), errors.BadOption),
        (np.ones((4, 4), bool), (1, 10**6), errors.MonotileError),
        (True, (1, 1), errors.ArgumentKind),
    ],
)
def test_mask_blocks(mask: Any, blocks: tuple[Any, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        monotile.mask_blocks(mask, *blocks)


@pytest.mark.parametrize("arguments", [(-1, 1), (1.0, 1), (1, -1), (1, True), (1, 1, "abacus"), (1, 1, None)])
def test_recommended_splits(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(errors.BadOption):
        monotile.recommended_splits(*arguments)


# ---- where nothing is an answer --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, q, k",
    [
        ("an empty batch", (0, 4, 5, 8), (0, 2, 6, 8)),
        ("no heads", (2, 0, 5, 8), (2, 0, 6, 8)),
        ("no query heads", (2, 0, 5, 8), (2, 3, 6, 8)),
        ("no queries", (2, 4, 0, 8), (2, 2, 6, 8)),
        ("nothing at all", (0, 0, 0, 8), (0, 0, 0, 8)),
    ],
)
def test_empty_answers(name: str, q: tuple[int, ...], k: tuple[int, ...], backend: str) -> None:
    q_, k_ = np.ones(q, np.float16), np.ones(k, np.float16)
    out, lse = monotile.attention(q_, k_, k_, causal=True, return_lse=True, backend=backend)
    assert out.shape == q and out.dtype == np.float16 and lse.shape == q[:3] and lse.dtype == np.float32
    parts = monotile.decode_partials(q_, k_, k_, splits=3, backend=backend)
    assert [p.shape for p in parts] == [(*q[:3], 3, 8), (*q[:3], 3), (*q[:3], 3)]
    out, lse = monotile.merge(*parts, backend=backend)
    assert out.shape == q and lse.shape == q[:3]


def test_no_keys(backend: str) -> None:
    """Rows that see nothing: 0 and -inf, with every option."""
    for Nq in (2, 20):
        q, k, v = qkv(Nq, 0)
        for options in ({}, {"causal": True}, {"window": (3, 0)}, {"mask": np.ones((Nq, 0), bool)}):
            out, lse = monotile.attention(q, k, v, return_lse=True, backend=backend, **options)
            assert (out == 0).all() and (lse == -np.inf).all()


def test_nothing_of_the_inputs_is_written(backend: str) -> None:
    """Inputs may be read-only, and stay as they were."""
    given = [*qkv(20, 30), np.random.default_rng(0).random((20, 30)) < 0.5, normal(2)]
    before = [x.copy() for x in given]
    for x in given:
        x.setflags(write=False)
    q, k, v, mask, sinks = given
    for n in (3, 20):
        monotile.attention(q[:, :, :n], k, v, mask=mask[:n], sinks=sinks, return_lse=True, backend=backend)
    for x, y in zip(given, before, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", ["abacus", ["cpu"], ""])
def test_an_unknown_backend_is_refused_for_empty_arrays_too(name: Any) -> None:
    empty = Q[:, :, :0]
    parts, sums = np.ones((0, 2, 8), np.float32), np.ones((0, 2), np.float32)
    for call in (
        lambda: monotile.attention(empty, K, V, backend=name),
        lambda: monotile.attention(empty, K, V, backend=name, threads=1),
        lambda: monotile.decode_partials(empty, K, V, backend=name),
        lambda: monotile.merge(parts, sums, sums, backend=name),
        lambda: monotile.merge_lse(parts, sums, backend=name),
        lambda: monotile.mask_blocks(np.ones((0, 5), bool), 8, 8, backend=name),
    ):
        with pytest.raises(errors.UnknownBackend):
            call()
