"""The calls of CUDA that a benchmark needs: events, graphs, a cold cache. Nothing else in the benchmark makes any."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

from ...errors import MonotileError

FLUSH_BYTES = 1 << 29  # several times the second-level cache; reading it also gives the host time to get ahead


class Gpu:
    """The current CUDA device. Tests have another with the same functions."""

    name = "cuda"

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise MonotileError("torch sees no NVIDIA GPU; run this benchmark on a machine that has one")
        self.torch = torch
        self.flusher = torch.zeros(FLUSH_BYTES // 4, device="cuda")

    def describe(self) -> dict[str, Any]:
        found = self.torch.cuda.get_device_properties(self.torch.cuda.current_device())
        return {
            "name": found.name,
            "architecture": f"sm_{found.major}{found.minor}",
            "multiprocessors": found.multi_processor_count,
            "memory_bytes": found.total_memory,
            "shared_bytes": found.shared_memory_per_block_optin,
            "cuda": self.torch.version.cuda,
            "cudnn": self.torch.backends.cudnn.version(),
        }

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()

    def release(self) -> None:
        """Gives back what is no longer used: the next row may need all of it."""
        gc.collect()
        self.torch.cuda.empty_cache()

    def flush(self) -> None:
        """Fills the second-level cache with something else. It is read, not written: lines that have to be written back
        would be part of the next timing."""
        self.flusher.amax()

    def graph(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """The same work as one launch. What the call allocates stays where it is."""
        torch = self.torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        found = torch.cuda.CUDAGraph()
        with torch.cuda.graph(found):
            result = run()

        def replay() -> Any:
            found.replay()
            return result

        return replay

    def seconds(self, run: Callable[[], Any]) -> float:
        """One call, from an idle GPU to an idle GPU, with the host's part."""
        self.synchronize()
        begin = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - begin

    def timings(self, turns: list[Callable[[], Any]], *, cold: bool) -> list[float]:
        """GPU seconds of each turn. All are enqueued before any is looked at, so that the GPU never waits for the
        host."""
        event = self.torch.cuda.Event
        pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in turns]
        for run, (begin, end) in zip(turns, pairs, strict=True):
            if cold:
                self.flush()
            begin.record()
            run()
            end.record()
        self.synchronize()
        return [begin.elapsed_time(end) * 1e-3 for begin, end in pairs]
