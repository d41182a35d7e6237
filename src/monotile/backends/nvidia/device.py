"""Facts and functions of torch and Triton that launches need, looked up once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple


class Runtime(NamedTuple):
    current_device: Callable[[], int]
    current_stream: Callable[[int], int]
    device: Callable[[int], Any]  # a context in which that device is the current one
    set_allocator: Callable[[Any], None]
    multiprocessors: Callable[[int | None], int]  # of a device, or of the current one


@cache
def runtime() -> Runtime:
    import torch
    import triton
    from triton.runtime import driver

    stream = driver.active.get_current_stream
    return Runtime(torch.cuda.current_device, stream, torch.cuda.device, triton.set_allocator, multiprocessors)


@cache
def multiprocessors(device: int | str | None) -> int:
    """Count the multiprocessors of a GPU."""
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def architecture(device: str) -> str:
    """Name the architecture of a CUDA device, like "sm_90"."""
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
