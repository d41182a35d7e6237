"""What `monotile tune` measured on this machine's GPU, for the calls that follow.

The results lie in the cache directory as JSON, a file for each kind of GPU. They count for the GPU, the Triton and the
monotile they were measured with, and are read once in a process; a file that is damaged or of others is as good as
absent. They change how fast a call is, never what it computes.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from ...runtime import cache as store
from ...runtime import machine
from .choices import Choice

FORMAT = 2


@dataclass(frozen=True)
class Key:
    """What a choice is for."""

    kernel: str
    head_size: int
    dtype: str


@dataclass(frozen=True)
class Gpu:
    name: str
    architecture: str

    @property
    def path(self) -> Path:
        return store.directory() / "tuned" / f"{machine.slug(self.name, self.architecture)}.json"


def lookup(kernel: str, head_size: int, dtype: str, device: str) -> Choice | None:
    """What was measured for this kernel on a CUDA device ("cuda", "cuda:1"); None where nothing was."""
    if not device.startswith("cuda"):
        return None
    return _read(_gpu(device)).get(Key(kernel, head_size, dtype))


@cache
def _gpu(device: str) -> Gpu:
    import torch

    found = torch.cuda.get_device_properties(device)
    return Gpu(found.name, f"sm_{found.major}{found.minor}")


def forget() -> None:
    """The next lookup reads the files again."""
    _read.cache_clear()


@cache
def _read(gpu: Gpu) -> dict[Key, Choice]:
    try:
        found = json.loads(gpu.path.read_text())
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
    """What must be as it was: another compiler may need more shared memory, or another choice."""
    return {
        "format": FORMAT,
        "gpu": gpu.name,
        "architecture": gpu.architecture,
        "triton": metadata.version("triton"),
        "monotile": store.compiler_fingerprint(),
    }


def _parsed(entry: dict[str, Any]) -> tuple[Key, Choice]:
    from .schedule import Schedule

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
    """Adds to what is known of this GPU. Readers see the old file or the new one; only this user may read it."""
    merged = {**_read(gpu), **choices}
    entries = [
        {**asdict(key), "blocks": dict(choice.blocks), "schedule": asdict(choice.schedule)}
        for key, choice in merged.items()
    ]
    path = gpu.path
    path.parent.mkdir(mode=0o700, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".new-", dir=path.parent)  # mode 0600
    try:
        with open(handle, "w") as file:
            json.dump({**_facts(gpu), "choices": entries}, file, indent=1)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    forget()
    return path
