"""Rows between decode and prefill: few queries over many keys, large groups, MLA, and a sweep over the queries."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from ..library import ops
from .attention import FEW_VISIBLE, AttentionShape, normal, row, sample
from .rows import Array, Row, TimedCall

DTYPES = ("float32", "bfloat16")
SWEEP = (1, 2, 3, 4, 5, 8, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256, 384, 512)


def _shapes() -> Iterator[AttentionShape]:
    for dtype in DTYPES:
        yield from (AttentionShape((32, 8), Nq, 8192, 128, dtype) for Nq in (4, 16, 64))
        yield AttentionShape((64, 1), 1, 16384, 128, dtype)
        yield AttentionShape((128, 1), 1, 4096, 576, dtype, Dv=512)
        yield AttentionShape((4, 4), 9, 65536, 64, dtype)
    for dtype in DTYPES:
        yield from (AttentionShape((32, 8), 1, 16384, 128, dtype, extra=extra) for extra in FEW_VISIBLE)
    yield from (AttentionShape((32, 8), 4, 16384, 128, "float32", extra=extra) for extra in FEW_VISIBLE)


def sweep(
    heads: tuple[int, int], Nk: int, D: int, sizes: tuple[int, ...], rng: np.random.Generator, threads: int
) -> TimedCall:
    """Time calls that differ in their number of queries only. The last query of each call is checked."""
    q, k, v = (normal(rng, "float32", 1, h, n, D) for h, n in ((heads[0], sum(sizes)), (heads[1], Nk), (heads[1], Nk)))
    ends = np.cumsum(sizes)
    parts = (np.ascontiguousarray(part) for part in np.split(q, ends[:-1], axis=2))
    steps = {n: partial(ops.attention, part, k, v, threads=threads) for n, part in zip(sizes, parts, strict=True)}

    def every_call() -> Array:
        return np.concatenate([run() for run in steps.values()], axis=2)

    last = [int(end) - 1 for end in ends]
    return TimedCall(every_call, sample=sample(q, k, v, {}, last), steps=steps)


def _sweep_row(heads: tuple[int, int], Nk: int, D: int) -> Row:
    name = f"attention sweep {heads[0]}/{heads[1]} Nq{SWEEP[0]}-{SWEEP[-1]} D{D} N{Nk} float32"
    tags = {"op": "sweep", "D": D, "N": Nk, "dtype": "float32"}
    return Row(name, lambda rng, threads: sweep(heads, Nk, D, SWEEP, rng, threads), quick=False, tags=tags)


ROWS = (*map(row, _shapes()), _sweep_row((32, 8), 8192, 128))
