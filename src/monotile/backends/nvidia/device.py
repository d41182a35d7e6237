"""Facts about GPUs: those that torch sees, and others that are described by their architecture alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

# Multiprocessors of a usual card of each architecture: for choosing what a call would run on a card that is not here.
DESCRIBED = {"sm_80": 108, "sm_86": 84, "sm_89": 128, "sm_90": 132, "sm_100": 148, "sm_120": 170}
# Shared memory of one CTA, by compute capability.
SHARED_KIB = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
LEAST_SHARED_KIB = 64
MEASURED = "sm_90"  # whose schedules were measured
MMA_SYNC = ("sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_120", "sm_121")  # operands of products lie in registers


@dataclass(frozen=True)
class Gpu:
    """What kernels are chosen by."""

    name: str
    architecture: str  # like "sm_90"
    multiprocessors: int = 0
    shared_bytes: int = 227 * 1024  # of one CTA

    @property
    def capability(self) -> int:
        """90 of "sm_90"; 0 of an unknown one."""
        number = self.architecture.removeprefix("sm_")
        return int(number) if number.isdecimal() else 0


UNKNOWN = Gpu("an unknown GPU", "", 1)


def shared_bytes(capability: int) -> int:
    """Return the shared memory of one CTA on GPUs of a compute capability."""
    return SHARED_KIB.get(capability, LEAST_SHARED_KIB) * 1024


def described(architecture: str) -> Gpu:
    """Return a GPU of an architecture that need not be here; an unknown one has the least of everything."""
    number = architecture.removeprefix("sm_")
    count = DESCRIBED.get(architecture, min(DESCRIBED.values()))
    known = number.isdecimal() and number != architecture
    return Gpu(f"a GPU of {architecture}", architecture, count, shared_bytes(int(number) if known else 0))


HOPPER = described("sm_90")  # that schedules were measured on


@cache
def gpu(device: str) -> Gpu:
    """The GPU that a device names: torch is asked about "cuda:1", "sm_90" is described, nothing is known of
    others (Triton's interpreter on CPU arrays)."""
    if device in DESCRIBED:
        return described(device)
    if not device.startswith("cuda"):
        return UNKNOWN
    import torch

    found = torch.cuda.get_device_properties(device)
    capability = 10 * found.major + found.minor
    shared = getattr(found, "shared_memory_per_block_optin", 0) or shared_bytes(capability)
    return Gpu(found.name, f"sm_{capability}", int(found.multi_processor_count), int(shared))


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
