"""What is known of a GPU: of one that torch sees, or of one that is described by its architecture alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

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
