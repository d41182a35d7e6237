"""Groups of ranks, and the agreement of their calls: the first call with given shapes and options compares them on all
ranks before anything else is sent."""

from __future__ import annotations

import hashlib
import types
import zlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ArgumentKind, MonotileError, RanksDiffer
from ..frontend.functions import code_of, is_function
from ..launch.captures import captures
from . import transport

FIELDS = 32  # of the record that ranks compare: more than any function has
MAX_AGREED = 4096  # calls that a group remembers; every rank forgets them at the same call
PATIENCE = timedelta(seconds=5)  # how long a rank that refuses a call waits to say so to the others


class Group:
    """A process group, as this package needs it."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.name: str = group.group_name
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.others = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._agreed: set[Any] = set()

    @cached_property
    def global_ranks(self) -> list[int]:
        found: list[int] = dist.get_process_group_ranks(self.group)
        return found

    def stages(self, device: torch.device) -> bool:
        """True if tensors of a device go through this machine's memory: Gloo sends no others."""
        return device.type != "cpu" and self._backends.get(device.type) == "gloo"

    @cached_property
    def _backends(self) -> dict[str, str]:
        config = dist.get_backend_config(self.group)
        return dict(pair.split(":") for pair in str(config).split(","))

    def agree(self, key: Any, fields: Callable[[], Mapping[str, Any]], like: Tensor) -> None:
        """Compare the fields of a call on all ranks if it is the first with this key; raise RanksDiffer where they
        differ, on every rank. `like` is a tensor on the device that the group sends from."""
        if self.size == 1 or key in self._agreed:
            return
        texts = {name: fingerprint_text(value) for name, value in fields().items()}
        records = self._records([_number(name + text) for name, text in texts.items()], like, None)
        self._raise_difference(texts, records)
        if len(self._agreed) >= MAX_AGREED:
            self._agreed.clear()
        self._agreed.add(key)

    def refuse(self, like: Tensor) -> None:
        """Tell ranks that wait to compare a call that this rank refuses it."""
        if self.size > 1:
            try:
                self._records([0], like, PATIENCE)
            except MonotileError:
                return  # they are elsewhere: they find this rank gone, or their group's timeout ends

    def _records(self, numbers: list[int], like: Tensor, timeout: timedelta | None) -> list[list[int]]:
        record = torch.tensor(numbers + [0] * (FIELDS - len(numbers)), dtype=torch.int64, device=like.device)
        return [found.tolist() for found in transport.gather(self, record, timeout)]

    def _raise_difference(self, texts: Mapping[str, str], records: list[list[int]]) -> None:
        refused = [rank for rank, record in enumerate(records) if record[0] == 0]
        if refused:
            raise RanksDiffer(f"rank {refused[0]} refused this call; nothing was sent: its own error says why")
        if all(record == records[0] for record in records):
            return
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, dict(texts), group=self.group)
        differ = [name for name in every[0] if any(other.get(name) != every[0][name] for other in every)]
        shown = "; ".join(f"{name}: {_by_rank([other.get(name) for other in every])}" for name in differ)
        raise RanksDiffer(f"ranks make different calls, and nothing was sent: {shown}; pass the same on every rank")


def _by_rank(values: list[str | None]) -> str:
    ranks: dict[str | None, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {'rank' if len(on) == 1 else 'ranks'} {str(on)[1:-1]}" for value, on in ranks.items())


def tag_of(*facts: Any) -> int:
    """A tag of messages that is the same in every process for calls alike."""
    return zlib.crc32(repr(facts).encode()) & 0x3FFFFFFF


def _number(text: str) -> int:
    """A hash of a text that is the same in every process, and not 0."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1 | 1


def fingerprint_text(value: Any) -> str:
    """A text that is equal in different processes for values that mean the same. A function is compared by its code and
    by the arrays and numbers that it captures."""
    if not is_function(value):
        return str(value)
    digest = hashlib.sha256(repr(_code(code_of(value))).encode())
    for cell in getattr(value, "__closure__", None) or ():
        if is_function(cell.cell_contents):
            digest.update(fingerprint_text(cell.cell_contents).encode())
    found = captures((value,)).beside(())
    digest.update(repr(list(found.numbers.values())).encode())
    for array in found.arrays.values():
        host = array.detach().cpu().contiguous() if isinstance(array, Tensor) else array
        digest.update(f"{host.shape} {host.dtype}".encode())
        digest.update(bytes(host.view(-1).view(torch.uint8).numpy()) if isinstance(host, Tensor) else host.tobytes())
    return f"{getattr(value, '__name__', type(value).__name__)} ({digest.hexdigest()[:8]})"


def _code(code: types.CodeType | None) -> tuple[Any, ...]:
    if code is None:
        return ()
    constants = tuple(_code(c) if isinstance(c, types.CodeType) else c for c in code.co_consts)
    return code.co_code, constants, code.co_names, code.co_varnames


_groups: dict[str, Group] = {}  # by name; a new group takes the place of one that was destroyed


def resolve(group: Any) -> Group:
    """A process group, a DeviceMesh of one dimension, a group's name, or None for all ranks."""
    if not dist.is_initialized():
        raise MonotileError(
            "there is no process group; call torch.distributed.init_process_group, and start the program with torchrun"
        )
    if group is None:
        group = dist.group.WORLD
    elif isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)
    elif hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim != 1:
            names = group.mesh_dim_names
            raise ArgumentKind(f"the mesh has {group.ndim} dimensions {names}; pass one of them, as mesh['name']")
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentKind(f"group is a ProcessGroup, a DeviceMesh of one dimension or None, found {group!r}")
    found = _groups.get(group.group_name)
    if found is None or found.group is not group:
        found = _groups[group.group_name] = Group(group)
    return found
