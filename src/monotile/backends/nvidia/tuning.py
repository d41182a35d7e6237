"""The store of what `monotile tune` measured on this machine's GPU.

Results are JSON files in the cache directory, one for each kind of GPU. They hold for the GPU, the Triton and the
monotile they were measured with, and are read once per process; a file that is damaged, or of another GPU, Triton or
monotile, is ignored. They change how fast a call is, never what it computes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from ...runtime import cache, machine
from ..choices import Choice
from .device import Gpu, gpu
from .schedule import Schedule

FORMAT = 2


@dataclass(frozen=True)
class Key:
    """The kernel and operands that a choice was measured for."""

    kernel: str
    head_size: int
    dtype: str


def path(gpu: Gpu) -> Path:
    """The file of one kind of GPU."""
    return cache.directory() / "tuned" / f"{machine.slug(gpu.name, gpu.architecture)}.json"


def lookup(kernel: str, head_size: int, dtype: str, device: str) -> Choice | None:
    """Return what was measured for this kernel on a CUDA device ("cuda", "cuda:1"), or None."""
    if not device.startswith("cuda"):
        return None
    return _read(gpu(device)).get(Key(kernel, head_size, dtype))


def forget() -> None:
    """Make the next lookup read the files again."""
    _read.cache_clear()


@functools.cache
def _read(gpu: Gpu) -> dict[Key, Choice]:
    try:
        found = json.loads(path(gpu).read_text())
    except (OSError, ValueError):
        return {}
    facts = _facts(gpu)
    if not isinstance(found, dict) or {name: found.get(name) for name in facts} != facts:
        return {}
    try:
        return dict(_parsed(entry) for entry in found["choices"])
    except (KeyError, TypeError, ValueError):
        return {}


def _facts(gpu: Gpu) -> dict[str, Any]:
    """The facts that must match: another compiler may need more shared memory, or another choice."""
    return {
        "format": FORMAT,
        "gpu": gpu.name,
        "architecture": gpu.architecture,
        "triton": metadata.version("triton"),
        "monotile": cache.compiler_fingerprint(),
    }


def _parsed(entry: dict[str, Any]) -> tuple[Key, Choice]:
    kinds = {field.name: type(field.default) for field in fields(Schedule)}
    words, blocks = entry["schedule"], entry["blocks"]
    if not isinstance(words, dict) or not isinstance(blocks, dict):
        raise TypeError("a schedule and blocks are objects")
    if any(type(value) is not kinds.get(name) for name, value in words.items()):
        raise ValueError("a schedule has fields of other types")
    if not blocks or any(type(size) is not int or size < 1 for size in blocks.values()):
        raise ValueError("a block's size is a positive whole number")
    return Key(str(entry["kernel"]), int(entry["head_size"]), str(entry["dtype"])), Choice(blocks, Schedule(**words))


def save(gpu: Gpu, choices: Mapping[Key, Choice]) -> Path:
    """Add choices for this GPU. Readers see the old file or the new one; only this user may read it."""
    merged = {**_read(gpu), **choices}
    entries = [
        {**asdict(key), "blocks": dict(choice.blocks), "schedule": asdict(choice.schedule)}
        for key, choice in merged.items()
    ]
    target = path(gpu)
    target.parent.mkdir(mode=0o700, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".new-", dir=target.parent)  # mode 0600
    try:
        with open(handle, "w") as file:
            json.dump({**_facts(gpu), "choices": entries}, file, indent=1)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    forget()
    return target
