"""Inputs and formulas of the registered cases of ragged and paged attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..kernels import reference_caches

Array = np.ndarray[Any, Any]
Inputs = dict[str, Any]
Results = dict[str, Array]
PAGES = (16, 5, 1)  # positions of a page, by the rest of Nk divided by 3


def _lengths(rng: np.random.Generator, count: int, usual: int) -> Array:
    """Lengths of sequences from 0 to twice the usual one; the second is empty, the last longest."""
    found = rng.integers(0, 2 * usual + 1, count)
    found[1:2], found[-1:] = 0, 2 * usual
    return found


def _normal(rng: np.random.Generator, dtype: np.dtype[Any], *shape: int) -> Array:
    return rng.standard_normal(shape, dtype=np.float32).astype(dtype)


def ragged(rng: np.random.Generator, s: Any, dtype: np.dtype[Any]) -> Inputs:
    """B sequences one after the other, of about Nq rows and Nk keys each."""
    ends = [np.cumsum([0, *_lengths(rng, s.B, usual)]).astype(kind) for usual, kind in ((s.Nq, "i4"), (s.Nk, "i8"))]
    q = _normal(rng, dtype, ends[0][-1], s.Hq, s.D)
    k, v = (_normal(rng, dtype, ends[1][-1], s.Hkv, size) for size in (s.D, s.Dv))
    return {"q": q, "k": k, "v": v, "q_offsets": ends[0], "k_offsets": ends[1]}


def ragged_gradients(rng: np.random.Generator, s: Any, dtype: np.dtype[Any]) -> Inputs:
    """The same, with gradients of output and logsumexp."""
    found = ragged(rng, s, dtype)
    rows = found["q"].shape[0]
    do, dlse = _normal(rng, dtype, rows, s.Hq, s.Dv), _normal(rng, np.dtype(np.float32), s.Hq, rows)
    return found | {"do": do, "dlse": dlse}


def paged(rng: np.random.Generator, s: Any, dtype: np.dtype[Any]) -> Inputs:
    """B sequences of up to Nk keys in shuffled pages. Positions and table entries that no sequence has are poisoned."""
    page, lengths = PAGES[s.Nk % 3], _lengths(rng, s.B, s.Nk // 2).astype(np.int32)
    most = -(-s.Nk // page) + 1
    used = np.arange(most) * page < lengths[:, None]
    table = rng.choice(np.array([-1, 2**31 - 1], np.int32), (s.B, most))
    pages = rng.permutation(int(used.sum()) + 2)
    table[used] = pages[: used.sum()]
    k, v = (np.full((len(pages), page, s.Hkv, size), np.nan, dtype) for size in (s.D, s.Dv))
    for b, length in enumerate(lengths):
        places = np.arange(length)
        for array in (k, v):
            array[table[b, places // page], places % page] = _normal(rng, dtype, length, *array.shape[2:])
    q = _normal(rng, dtype, s.B, s.Hq, s.Nq, s.D)
    return {"q": q, "k_pages": k, "v_pages": v, "page_table": table, "lengths": lengths}


def paged_rows(rng: np.random.Generator, s: Any, dtype: np.dtype[Any]) -> Inputs:
    """The same keys, and of each sequence about Nq queries, one sequence after the other."""
    found = paged(rng, s, dtype)
    ends = np.cumsum([0, *_lengths(rng, s.B, s.Nq)[::-1]]).astype("i4")
    return found | {"q": _normal(rng, dtype, ends[-1], s.Hq, s.D), "q_offsets": ends}


def appended(rng: np.random.Generator, s: Any, dtype: np.dtype[Any]) -> Inputs:
    """Nq new tokens of each of B sequences; some of them have no page, or no place in the table."""
    found = paged(rng, s, dtype)
    new = {name: _normal(rng, dtype, s.B, s.Hkv, s.Nq, size) for name, size in (("k_new", s.D), ("v_new", s.Dv))}
    return {name: array for name, array in found.items() if name != "q"} | new


def run_append(function: Callable[..., None], inputs: Inputs, **run: Any) -> Results:
    """Append to copies of the pages."""
    names = "k_pages", "v_pages"
    copies = {name: _copied(inputs[name]) for name in names}
    function(**inputs | copies, **run)
    return copies


def _copied(array: Any) -> Any:
    return array.copy() if isinstance(array, np.ndarray) else array.clone()


def exact_append(inputs: Inputs) -> Results:
    return reference_caches.paged_append(**inputs)


def formula(name: str, compute: type) -> Callable[[Inputs], Results]:
    """In float64; or in float32 with sums term by term, the output rounded to q's type."""

    def attention(inputs: Inputs) -> Results:
        out, lse = getattr(reference_caches, name)(**inputs, compute=compute)
        return {"out": out.astype(inputs["q"].dtype) if compute is np.float32 else out, "lse": lse}

    return attention
