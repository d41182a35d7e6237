"""The definition of attention on ragged and paged keys: each sequence as if it were alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .reference import attention, attention_backward

Array = np.ndarray[Any, Any]


def attention_varlen(
    q: Array, k: Array, v: Array, q_offsets: Array, k_offsets: Array, **options: Any
) -> tuple[Array, Array]:
    """Output (Tq, Hq, Dv) and natural logsumexp (Hq, Tq)."""
    out, lse = np.zeros((*q.shape[:2], v.shape[2])), np.zeros((q.shape[1], q.shape[0]))
    for s in range(len(q_offsets) - 1):
        rows, keys = slice(*q_offsets[s : s + 2]), slice(*k_offsets[s : s + 2])
        part = (a[n].swapaxes(0, 1)[None] for a, n in ((q, rows), (k, keys), (v, keys)))
        found, sums = attention(*part, **_in_sequence(s, options))
        out[rows], lse[:, rows] = found[0].swapaxes(0, 1), sums[0]
    return out, lse


def attention_varlen_backward(
    do: Array, q: Array, k: Array, v: Array, o: Array, lse: Array, q_offsets: Array, k_offsets: Array, *,
    dlse: Array | None = None, compute: type = np.float64, **options: Any,
) -> dict[str, Array]:  # fmt: skip
    """The gradients by name, from the output (Tq, Hq, Dv) and its logsumexp (Hq, Tq)."""
    found = {name: np.zeros(x.shape, compute) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    if options.get("sinks") is not None:
        found["dsinks"] = np.zeros(q.shape[1], compute)
    for s in range(len(q_offsets) - 1):
        rows, keys = slice(*q_offsets[s : s + 2]), slice(*k_offsets[s : s + 2])
        part = (a[n].swapaxes(0, 1)[None] for a, n in ((do, rows), (q, rows), (k, keys), (v, keys), (o, rows)))
        sums = {"lse": lse[None, :, rows], "dlse": None if dlse is None else dlse[None, :, rows]}
        alone = attention_backward(*part, **sums, **_in_sequence(s, options), compute=compute)
        for name, where in (("dq", rows), ("dk", keys), ("dv", keys)):
            found[name][where] = alone[name][0].swapaxes(0, 1)
        if "dsinks" in alone:
            found["dsinks"] += alone["dsinks"]
    return found


def attention_paged(
    q: Array, k_pages: Array, v_pages: Array, page_table: Array, lengths: Array, *, q_offsets: Array | None = None,
    causal: bool | str = True, **options: Any,
) -> tuple[Array, Array]:  # fmt: skip
    """Output (B, Hq, Nq, Dv) and natural logsumexp (B, Hq, Nq); with offsets (Tq, Hq, Dv) and (Hq, Tq)."""
    places = [np.arange(length) for length in lengths]
    at = [(page_table[b, j // k_pages.shape[1]], j % k_pages.shape[1]) for b, j in enumerate(places)]
    if q_offsets is not None:
        k, v = (np.concatenate([a[:0, 0], *(a[where] for where in at)]) for a in (k_pages, v_pages))
        return attention_varlen(q, k, v, q_offsets, np.cumsum([0, *lengths]), causal=causal, **options)
    out, lse = np.zeros((*q.shape[:3], v_pages.shape[3])), np.zeros(q.shape[:3])
    for b, where in enumerate(at):
        keys, values = (a[where].swapaxes(0, 1)[None] for a in (k_pages, v_pages))
        found, sums = attention(q[b : b + 1], keys, values, causal=causal, **_in_sequence(b, options))
        out[b], lse[b] = found[0], sums[0]
    return out, lse


def paged_append(
    k_pages: Array, v_pages: Array, page_table: Array, lengths: Array, k_new: Array, v_new: Array
) -> dict[str, Array]:
    """The pages with new tokens; one whose position has no page is left out."""
    found = {"k_pages": k_pages.copy(), "v_pages": v_pages.copy()}
    (pages, size), (B, _, N, _) = k_pages.shape[:2], k_new.shape
    for b, i in np.ndindex(B, N):
        index, within = divmod(int(lengths[b]) + i, size)
        page = page_table[b, index] if 0 <= index < page_table.shape[1] else -1
        if 0 <= page < pages:
            found["k_pages"][page, within], found["v_pages"][page, within] = k_new[b, :, i], v_new[b, :, i]
    return found


def _in_sequence(s: int, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a call on one sequence: functions see its number as the batch."""

    def score_mod(of: Callable[..., Any]) -> Callable[..., Any]:
        return lambda score, b, *place: of(score, b + s, *place)

    def mask_mod(of: Callable[..., Any]) -> Callable[..., Any]:
        return lambda b, *place: of(b + s, *place)

    wrap = {"score_mod": score_mod, "mask_mod": mask_mod}
    return {n: wrap[n](value) if n in wrap and value is not None else value for n, value in options.items()}
