"""attention_paged with q_offsets: the rows of all sequences one after the other, and their keys in pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import monotile
from arrays import numpy_type
from kernels.cases import equal, normal
from kernels.test_caches import run_guarded
from kernels.test_row_groups import unreadable
from monotile import errors
from monotile.kernels import reference_caches
from monotile.library import registry
from usable import ON_GPU, WITH_METAL, usable

ON_ALL = pytest.mark.parametrize("backend", usable(*WITH_METAL))
# Queries and keys of each sequence: empty ones, more queries than keys, none at all.
FEW = [(1, 700), (3, 2), (0, 40), (1, 0), (2, 1500)]
MANY = [(130, 300), (0, 7), (300, 120), (17, 777), (5, 0)]
MIXED = [(1, 900), (200, 200), (1, 30), (64, 640)]  # decode beside chunks of prompts


def rows_and_pages(
    lengths: list[tuple[int, int]], page: int, *, D: int = 16, Dv: int = 16, dtype: str = "float32", behind: int = 0
) -> dict[str, Any]:
    """A call, whose unused table entries are no pages and whose unused positions hold NaN."""
    queries, keys = (np.array(side, np.int32) for side in zip(*lengths, strict=True))
    most = -(-int(keys.max()) // page) + 1
    used = np.arange(most) * page < keys[:, None]
    rng = np.random.default_rng(0)
    table = rng.choice(np.array([-1, 2**31 - 1, -(2**31)], np.int32), used.shape)
    table[used] = rng.permutation(int(used.sum()) + 3)[: used.sum()]
    pages = []
    for n, size in enumerate((D, Dv)):
        found = np.full((int(used.sum()) + 3, page, 2, size), np.nan, numpy_type(dtype))
        for b, count in enumerate(keys):
            j = np.arange(count)
            found[table[b, j // page], j % page] = normal(int(count), 2, size, dtype=dtype, seed=7 * b + n)
        pages.append(found)
    offsets = np.cumsum([0, *queries]).astype(np.int32)
    q = normal(int(offsets[-1]) + behind, 4, D, dtype=dtype)
    return {
        "q": q, "k_pages": pages[0], "v_pages": pages[1], "page_table": table, "lengths": keys, "q_offsets": offsets
    }  # fmt: skip


def check(inputs: dict[str, Any], backend: str | None) -> Any:
    found = monotile.attention_paged(**inputs, return_lse=True, backend=backend)
    exact = reference_caches.attention_paged(**inputs)
    naive = reference_caches.attention_paged(**inputs, compute=np.float32)
    naive = naive[0].astype(inputs["q"].dtype), naive[1]
    rows = inputs["q_offsets"][-1]
    for name, a, b, c in zip(("out", "lse"), found, exact, naive, strict=True):
        a, b, c = (x[..., :rows] if name == "lse" else x[:rows] for x in (a, b, c))
        verdict = registry.judge(name, a, b, c)
        assert verdict.ok, f"{name}: the error is {verdict.error}, {verdict.allowed} is allowed"
    assert not found[0][rows:].any() and (found[1][:, rows:] == -np.inf).all()
    return found


def odd_keys(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (j % 3 == b % 3) | (j >= 40 * h + i)


def bent(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score * 0.5 + (i - j) * 0.01 * (b + 1) - h


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "not causal": {"causal": False}, "upper_left": {"causal": "upper_left"},
    "window": {"window": (100, 3)}, "softcap, sinks": {"softcap": 5.0, "sinks": normal(4)},
    "mods": {"score_mod": bent, "mask_mod": odd_keys}, "negative scale": {"scale": -0.3, "window": (70, None)},
}  # fmt: skip


@ON_ALL
@pytest.mark.parametrize("lengths", [FEW, MANY, MIXED], ids=["few", "many", "mixed"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, lengths: list[tuple[int, int]], backend: str) -> None:
    check(rows_and_pages(lengths, 16) | OPTIONS[name], backend)


@ON_ALL
@pytest.mark.parametrize("lengths", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("page", [1, 3, 16, 48, 256])
def test_sizes_of_pages(page: int, lengths: list[tuple[int, int]], backend: str) -> None:
    """Against attention_varlen on gathered keys, too."""
    inputs = rows_and_pages(lengths, page, Dv=24, behind=5)
    found = check(inputs, backend)
    j = [np.arange(count) for count in inputs["lengths"]]
    at = [(inputs["page_table"][b, n // page], n % page) for b, n in enumerate(j)]
    k, v = (np.concatenate([inputs[name][where] for where in at]) for name in ("k_pages", "v_pages"))
    offsets = inputs["q_offsets"], np.cumsum([0, *inputs["lengths"]]).astype(np.int32)
    o, lse = monotile.attention_varlen(inputs["q"], k, v, *offsets, causal=True, return_lse=True, backend=backend)
    np.testing.assert_allclose(found[0], o, atol=3e-6)
    np.testing.assert_allclose(found[1], lse, atol=3e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("lengths", [FEW, MANY], ids=["few", "many"])
def test_sixteen_bits(lengths: list[tuple[int, int]], dtype: str, backend: str) -> None:
    check(rows_and_pages(lengths, 16, D=64, Dv=64, dtype=dtype), backend)


@ON_ALL
@pytest.mark.parametrize("format", ["int8", "int4", "aura4"])
def test_quantized_pages(format: str, backend: str) -> None:
    for lengths in (FEW, MANY):
        inputs = rows_and_pages(lengths, 16, D=64, Dv=64)
        pages = [np.nan_to_num(inputs[name]) for name in ("k_pages", "v_pages")]
        stored = [monotile.quantize(x, format) for x in pages]
        plain = dict(zip(("k_pages", "v_pages"), (x.dequantize() for x in stored), strict=True))
        codes = dict(zip(("k_pages", "v_pages"), stored, strict=True))
        found = monotile.attention_paged(**inputs | codes, backend=backend)
        np.testing.assert_allclose(found, monotile.attention_paged(**inputs | plain, backend=backend), atol=2e-5)


def test_one_sequence_of_each_batch_is_the_dense_form() -> None:
    """With as many queries of every sequence, rows are those of (B, Hq, Nq, D)."""
    for count in (1, 5, 70):
        inputs = rows_and_pages([(count, 300), (count, 90), (count, 120)], 16)
        o, lse = monotile.attention_paged(**inputs, return_lse=True)
        q = inputs.pop("q").reshape(3, count, 4, 16).swapaxes(1, 2)
        del inputs["q_offsets"]
        dense = monotile.attention_paged(q, **inputs, return_lse=True)
        np.testing.assert_allclose(o.reshape(3, count, 4, 16).swapaxes(1, 2), dense[0], atol=2e-6)
        np.testing.assert_allclose(lse.reshape(4, 3, count).swapaxes(0, 1), dense[1], atol=2e-6)


def test_views_in_any_order_of_memory(backend: str) -> None:
    inputs = rows_and_pages(MANY, 16, D=32, Dv=32)
    expected = check(inputs, backend)
    views = {name: np.repeat(inputs[name], 2, axis=1)[:, ::2] for name in ("q", "k_pages", "v_pages")}
    views |= {name: np.repeat(inputs[name], 2)[::2] for name in ("lengths", "q_offsets")}
    views["q_offsets"] = views["q_offsets"].astype(np.int64)
    equal(monotile.attention_paged(**inputs | views, return_lse=True, backend=backend), expected)


def test_values_in_the_columns_of_keys(backend: str) -> None:
    for lengths in (FEW, MANY):
        inputs = rows_and_pages(lengths, 16, D=24)
        inputs["v_pages"] = inputs["k_pages"][..., :16]
        check(inputs, backend)


@pytest.mark.skipif(ON_GPU, reason="about this machine's memory")
@pytest.mark.parametrize("queries", [(1, 3), (200, 90)])
def test_other_pages_are_not_read(queries: tuple[int, int]) -> None:
    """Pages of sequences without queries, and those that table entries past the end name, may not be read."""
    pages, table = normal(24, 16, 2, 64), np.array([[20, 23, 3], [1, 0, 2], [22, 21, 5]], np.int32)
    inputs: dict[str, Any] = {"q": normal(sum(queries), 4, 64), "page_table": table}
    inputs |= {"lengths": np.array([32, 48, 20], np.int32)}
    inputs |= {"q_offsets": np.array([0, queries[0], queries[0], sum(queries)], np.int32)}
    guarded = unreadable(pages, 16)
    equal(
        monotile.attention_paged(k_pages=guarded, v_pages=guarded, **inputs, backend="cpu"),
        monotile.attention_paged(k_pages=pages, v_pages=pages, **inputs, backend="cpu"),
    )


@pytest.mark.parametrize("backend", [b for b in usable(*WITH_METAL) if b != "interpreter"])
def test_wrong_contents_do_no_harm(backend: str) -> None:
    for lengths in (FEW, MANY):
        inputs = rows_and_pages(lengths, 16)
        B = len(lengths)
        for offsets in ([5, 3, 1, -4, 90, 2], [0, 2**31 - 1, -(2**31), 17, 4, 4], [-1] * (B + 1), [999] * (B + 1)):
            wrong = inputs | {"q_offsets": np.array(offsets, np.int32)}
            run_guarded(monotile.attention_paged, wrong, return_lse=True, backend=backend)
            with pytest.raises(errors.BadOffsets, match="q_offsets"):
                monotile.attention_paged(**wrong, check=True, backend=backend)
        wrong = inputs | {"lengths": np.array([2**31 - 1, -5, 9999, -(2**31), 3], np.int32)}
        run_guarded(monotile.attention_paged, wrong, return_lse=True, backend=backend)
        with pytest.raises(errors.BadPages, match=r"lengths\[0\]"):
            monotile.attention_paged(**wrong, check=True, backend=backend)
        monotile.attention_paged(**inputs, check=True, backend=backend)


Q, PAGES, TABLE = np.zeros((6, 2, 8), np.float32), np.zeros((2, 4, 2, 8), np.float32), np.zeros((2, 3), np.int32)
ENDS = np.array([0, 2, 6], np.int32)
MISTAKES = [
    ({"q": Q[None]}, errors.ArgumentRank, "with q_offsets attention_paged takes .positions of all sequences"),
    ({"q_offsets": None}, errors.ArgumentRank, "with their q_offsets"),
    ({"q_offsets": ENDS.astype(np.float32)}, errors.MixedDTypes, "int32 or int64"),
    ({"q_offsets": ENDS[None]}, errors.ArgumentShape, "B [+] 1"),
    ({"q_offsets": ENDS[:1]}, errors.ArgumentShape, "no sequence"),
    ({"q_offsets": ENDS[:2]}, errors.ArgumentShape, "'page_table' must have shape .* for B = 1 sequences of q_offsets"),
    ({"lengths": TABLE[0]}, errors.ArgumentShape, "'lengths' must have shape .B,. for B = 2 sequences"),
    ({"page_table": TABLE.astype(np.int64)}, errors.MixedDTypes, "int32"),
    ({"k_pages": PAGES[..., :4]}, errors.HeadSize, "head size"),
    ({"sinks": np.zeros(3, np.float32)}, errors.ArgumentShape, "sinks"),
]


@pytest.mark.parametrize(("given", "error", "said"), MISTAKES)
def test_mistakes(given: dict[str, Any], error: type[Exception], said: str) -> None:
    lengths = np.zeros(2, np.int32)
    call = {"q": Q, "k_pages": PAGES, "v_pages": PAGES, "page_table": TABLE, "lengths": lengths, "q_offsets": ENDS}
    with pytest.raises(error, match=said):
        monotile.attention_paged(**call | given)
