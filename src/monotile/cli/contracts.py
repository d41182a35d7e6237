"""What the library's kernels ask of their arguments beyond their shapes, for the manifest of `monotile emit`."""

from __future__ import annotations

from typing import Any

from ..ir import Kernel as KernelIR
from ..kernels import attention, mask_blocks, merge, visibility
from ..launch.kernel import Kernel

CASES = ("HIDDEN", "PARTIAL", "FULL", "COVERED")


def contract(kernel: Kernel, form: KernelIR) -> dict[str, Any]:
    """The relations that must hold between lengths and scalars, and the meaning of codes in tensors."""
    present = {tensor.name for tensor in form.tensors}
    found: list[str] = []
    if kernel is attention.attention:
        found = _attention(form, present)
    elif kernel is mask_blocks.mask_blocks:
        found = [_blocks("MQ", "Nq", form.consts["BQ"]), _blocks("MK", "Nk", form.consts["BK"])]
    elif kernel is merge.merge and "sinks" in present:
        found = ["queries >= 1", "R % (H * queries) == 0"]
    made: dict[str, Any] = {"relations": found}
    if "block_map" in present:
        made["codes"] = {"block_map": {str(getattr(visibility, name)): name.lower() for name in CASES}}
    return made


def _attention(form: KernelIR, present: set[str]) -> list[str]:
    consts = form.consts
    heads_of = "H * (R // queries)" if consts["packed"] else "H"
    found = ["H == Hkv", "queries >= 1", "R % queries == 0"] if consts["packed"] else ["H % Hkv == 0"]
    if present & {"mask", "sinks"}:
        found.append(f"Hq == {heads_of}")
    if "mask" in present:
        found.append("Nq == queries" if consts["packed"] else "Nq == R")
    if "block_map" in present:
        found += [_blocks("MR", "R", consts["BR"]), _blocks("MK", "Nk", consts["BK"])]
    if "split_o" in present:
        if consts["options"].left is None:  # a window may begin after the first keys
            found.append("first_block <= 0")
        found.append(f"first_block + S * blocks_per_split >= (Nk + {consts['BK'] - 1}) // {consts['BK']}")
    found.append("scale <= 0" if consts["options"].negative else "scale >= 0")
    return found


def _blocks(count: str, length: str, size: int) -> str:
    return f"{count} == ({length} + {size - 1}) // {size}"
