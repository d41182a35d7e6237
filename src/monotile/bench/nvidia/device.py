"""Every CUDA call of the benchmark: events, graphs, flushing the L2 cache."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

from ...errors import MonotileError

FLUSH_BYTES = 1 << 29  # several times the L2 cache; reading it also gives the host time to run ahead


class CudaTimer:
    """The current CUDA device. Tests substitute a class with the same methods."""

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
        """Free cached memory: the next row may need all of it."""
        gc.collect()
        self.torch.cuda.empty_cache()

    def flush(self) -> None:
        """Evict the L2 cache by reading: dirty lines would be written back during the next timing."""
        self.flusher.amax()

    def graph(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Capture a call in a CUDA graph. What it allocates stays allocated."""
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
        """Time one call from an idle GPU to an idle GPU, host time included."""
        self.synchronize()
        begin = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - begin

    def timings(self, calls: list[Callable[[], Any]], *, cold: bool) -> list[float]:
        """Return each call's GPU seconds. All are enqueued before any event is read: the GPU never idles."""
        event = self.torch.cuda.Event
        pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in calls]
        for run, (begin, end) in zip(calls, pairs, strict=True):
            if cold:
                self.flush()
            begin.record()
            run()
            end.record()
        self.synchronize()
        return [begin.elapsed_time(end) * 1e-3 for begin, end in pairs]
