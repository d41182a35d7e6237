"""Facts about GPUs: those that torch sees, and others that are described by their architecture alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

# Multiprocessors of a usual card of each architecture: for explaining what a call would run on a card that is not here.
DESCRIBED = {"sm_80": 108, "sm_86": 84, "sm_89": 128, "sm_90": 132, "sm_100": 148, "sm_120": 170}


@dataclass(frozen=True)
class Gpu:
    name: str
    architecture: str  # like "sm_90"
    multiprocessors: int = 0


UNKNOWN = Gpu("an unknown GPU", "", 1)


@cache
def gpu(device: str) -> Gpu:
    """The GPU that a device names: torch is asked about "cuda:1", "sm_90" is described, nothing is known of
    others (Triton's interpreter on CPU arrays)."""
    if device in DESCRIBED:
        return Gpu(f"a GPU of {device}", device, DESCRIBED[device])
    if not device.startswith("cuda"):
        return UNKNOWN
    import torch

    found = torch.cuda.get_device_properties(device)
    return Gpu(found.name, f"sm_{found.major}{found.minor}", int(found.multi_processor_count))


# ---- what launches ask torch and Triton, looked up once --------------------------------------------------------------


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
    current = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)  # a fifth of the time
    return Runtime(current, stream, torch.cuda.device, triton.set_allocator, multiprocessors)


@cache
def multiprocessors(device: int | None) -> int:
    """Count the multiprocessors of a GPU, or of the current one."""
    return gpu("cuda" if device is None else f"cuda:{device}").multiprocessors
