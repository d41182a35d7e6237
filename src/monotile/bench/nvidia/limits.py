"""Measure a GPU's limits in the same run: copy and read bandwidth, and the rate of a matrix product."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..limits import Probe, row_maximum
from .device import CudaTimer

SIDE, BYTES, WIDTHS = 8192, 1 << 31, (4096, 16384)
ROUNDS = 15


@dataclass(frozen=True)
class ProbeSizes:
    """Sizes of the probes; tests use smaller ones."""

    side: int = SIDE
    bytes: int = BYTES
    widths: tuple[int, ...] = WIDTHS


def _probes(device: str, sizes: ProbeSizes) -> Iterator[tuple[str, Probe]]:
    """Yield each probe with its kind of work."""
    import torch

    x = torch.randn(sizes.bytes // 4, device=device)
    y = torch.empty_like(x)
    yield "copy", Probe("copy", lambda: y.copy_(x), 2.0 * sizes.bytes)
    yield "read", Probe("torch.amax", x.amax, float(sizes.bytes))
    yield "read", Probe("torch.sum", x.sum, float(sizes.bytes))
    for width in sizes.widths:
        rows = x.reshape(-1, width)
        out = torch.empty(rows.shape[0], device=device)
        run = partial(row_maximum, rows, out, C=width, backend="nvidia")
        yield "read", Probe(f"maximum of rows of {width}", run, float(sizes.bytes))
    a, b = (torch.randn((sizes.side, sizes.side), device=device, dtype=torch.bfloat16) for _ in range(2))
    yield "flop", Probe(f"{sizes.side}^3 bfloat16 matmul", lambda: a @ b, 2.0 * sizes.side**3)


def measure(gpu: CudaTimer, sizes: ProbeSizes | None = None, rounds: int = ROUNDS) -> dict[str, Any]:
    """Return the median rate of every probe; the best of a kind is the limit."""
    rates: dict[str, dict[str, float]] = {"copy": {}, "read": {}, "flop": {}}
    for kind, probe in _probes(gpu.name, sizes or ProbeSizes()):
        gpu.seconds(probe.run)
        times = gpu.timings([probe.run] * rounds, cold=False)
        rates[kind][probe.name] = probe.work / statistics.median(times)
    gpu.release()
    return {kind: {"best_per_s": max(found.values()), "rates_per_s": found} for kind, found in rates.items()}
