"""A mask_mod on ragged and paged keys: results, blocks that it hides, and what lies in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import monotile
from arrays import Array
from kernels.cases import equal, normal
from kernels.test_row_groups import unreadable
from monotile.kernels import reference_caches
from monotile.library import registry
from usable import IN_MEMORY, ON_GPU, WITH_METAL, usable

ON_ALL = pytest.mark.parametrize("backend", usable(*WITH_METAL))
HIDDEN = 200, 500  # keys that the mods below hide from all
LENGTHS = [(300, 700), (0, 40), (17, 600), (130, 130), (90, 0)]  # queries and keys


def documents(b: Any, h: Any, i: Any, j: Any) -> Any:
    """The first keys to early rows, the last ones to late rows."""
    return ((j < 200) & (i < 150)) | ((j >= 500) & (i >= 150 - 10 * b))


def of_heads(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Other keys for each head; nothing for head 3."""
    return ((j < 130 + 20 * h) | (j >= 500 + 50 * h)) & (h < 3)


def some(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (j < 200) | (j >= 500)


MODS = {mod.__name__: mod for mod in (documents, of_heads, some)}
POSITIONS: dict[str, dict[str, Any]] = {
    "alone": {}, "causal": {"causal": True}, "upper_left": {"causal": "upper_left"}, "window": {"window": (250, 20)}
}  # fmt: skip


def ragged(D: int = 16, lengths: list[tuple[int, int]] = LENGTHS) -> dict[str, Any]:
    ends = [np.cumsum([0, *side]).astype(np.int32) for side in zip(*lengths, strict=True)]
    q, k, v = normal(ends[0][-1], 4, D), normal(ends[1][-1], 2, D, seed=1), normal(ends[1][-1], 2, D, seed=2)
    return {"q": q, "k": k, "v": v, "q_offsets": ends[0], "k_offsets": ends[1]}


def paged(page: int, queries: int, D: int = 16, lengths: tuple[int, ...] = (700, 0, 520, 130)) -> dict[str, Any]:
    most = -(-max(lengths) // page)
    pages = most * len(lengths)
    table = np.random.default_rng(0).permutation(pages).astype(np.int32).reshape(len(lengths), most)
    k, v = (normal(pages, page, 2, D, seed=n) for n in (1, 2))
    q = normal(len(lengths), 4, queries, D)
    return {"q": q, "k_pages": k, "v_pages": v, "page_table": table, "lengths": np.array(lengths, np.int32)}


def agrees(found: Any, name: str, inputs: dict[str, Any]) -> None:
    compute = getattr(reference_caches, name)
    exact, naive = compute(**inputs), compute(**inputs, compute=np.float32)
    for part, *of in zip(("out", "lse"), found, exact, naive, strict=True):
        verdict = registry.judge(part, *of)
        assert verdict.ok, f"{part}: the error is {verdict.error}, {verdict.allowed} is allowed"


@ON_ALL
@pytest.mark.parametrize("mod", MODS)
@pytest.mark.parametrize("positions", POSITIONS)
def test_ragged(mod: str, positions: str, backend: str) -> None:
    """Many rows, and few with balanced splits; hidden keys hold anything."""
    for lengths in (LENGTHS, [(1, 700), (3, 130), (0, 9), (2, 1300)]):
        inputs = ragged(lengths=lengths) | {"mask_mod": MODS[mod], **POSITIONS[positions]}
        found = monotile.attention_varlen(**inputs, return_lse=True, backend=backend)
        agrees(found, "attention_varlen", inputs)
        for start, end in zip(inputs["k_offsets"], inputs["k_offsets"][1:], strict=False):
            hidden = slice(min(start + HIDDEN[0], end), min(start + HIDDEN[1], end))
            inputs["k"][hidden], inputs["v"][hidden] = np.nan, np.inf
        equal(monotile.attention_varlen(**inputs, return_lse=True, backend=backend), found)


@ON_ALL
@pytest.mark.parametrize("mod", MODS)
@pytest.mark.parametrize("page", [1, 3, 16, 128])
@pytest.mark.parametrize("queries", [1, 7, 150])
def test_paged(mod: str, page: int, queries: int, backend: str) -> None:
    for positions in ("causal", "window"):
        inputs = paged(page, queries) | {"mask_mod": MODS[mod], **POSITIONS[positions]}
        found = monotile.attention_paged(**inputs, return_lse=True, backend=backend)
        agrees(found, "attention_paged", inputs)
        for b, length in enumerate(inputs["lengths"]):
            hidden = np.arange(min(HIDDEN[0], length), min(HIDDEN[1], length))
            places = inputs["page_table"][b, hidden // page], hidden % page
            inputs["k_pages"][places], inputs["v_pages"][places] = np.nan, np.inf
        equal(monotile.attention_paged(**inputs, return_lse=True, backend=backend), found)


@ON_ALL
@pytest.mark.parametrize("positions", POSITIONS)
def test_gradients(positions: str, backend: str) -> None:
    """Keys that a mask_mod hides have gradients of zero, whatever they hold."""
    inputs = ragged(lengths=[(300, 700), (40, 520)]) | {"mask_mod": documents, **POSITIONS[positions]}
    o, lse = monotile.attention_varlen(**inputs, return_lse=True, backend=backend)
    given = {"do": normal(*o.shape, seed=5), "o": o, "lse": lse, "dlse": normal(*lse.shape, seed=6), **inputs}
    found = monotile.attention_varlen_backward(**given, backend=backend)
    exact = reference_caches.attention_varlen_backward(**given)
    naive = reference_caches.attention_varlen_backward(**given, compute=np.float32)
    for name in exact:
        verdict = registry.judge(name, getattr(found, name), exact[name], naive[name])
        assert verdict.ok, f"{name}: the error is {verdict.error}, {verdict.allowed} is allowed"
    hidden = slice(*HIDDEN)
    given["k"][hidden], given["v"][hidden] = np.nan, np.inf
    again = monotile.attention_varlen_backward(**given, backend=backend)
    equal(again[:3], found[:3])
    assert not found.dk[hidden].any() and not found.dv[hidden].any()


def late(b: Any, h: Any, i: Any, j: Any) -> Any:
    return j >= 900


@pytest.mark.skipif(ON_GPU, reason="about this machine's memory")
@pytest.mark.parametrize("backend", [name for name in reversed(usable(*IN_MEMORY)) if name != "interpreter"])
@pytest.mark.parametrize("queries", [1, 300])
def test_hidden_blocks_are_not_read(queries: int, backend: str) -> None:
    """Keys and values that the mask_mod hides lie on pages of memory that may not be read at all."""
    inputs = ragged(32, [(queries, 1000)]) | {"mask_mod": late}
    guarded: dict[str, Array] = {name: unreadable(inputs[name], 768) for name in ("k", "v")}
    found = monotile.attention_varlen(**inputs | guarded, backend=backend)
    equal(found, monotile.attention_varlen(**inputs, backend=backend))
    for page in (16, 10):
        inputs = paged(page, queries, 32, (1000,)) | {"mask_mod": late}
        count = inputs["page_table"].shape[1]
        inputs["page_table"] = np.arange(count, dtype=np.int32)[None]
        guarded = {name: unreadable(inputs[name], 768 // page) for name in ("k_pages", "v_pages")}
        found = monotile.attention_paged(**inputs | guarded, backend=backend)
        equal(found, monotile.attention_paged(**inputs, backend=backend))
