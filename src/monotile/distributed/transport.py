"""Moving bytes between the ranks of a group: torch.distributed's sends and receives, counted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor

from ..errors import RankLost

Messages = Sequence[tuple[int, Tensor]]  # a rank of the group, and memory without gaps


@dataclass
class Traffic:
    """What this process sent."""

    bytes: int = 0
    messages: int = 0


_counting: list[Traffic] = []


@contextlib.contextmanager
def traffic() -> Iterator[Traffic]:
    """Count the bytes that monotile.distributed sends from this process in a region. A gather to all counts once for
    every receiver."""
    found = Traffic()
    _counting.append(found)
    try:
        yield found
    finally:
        _counting.remove(found)


def count(size: int, messages: int = 1) -> None:
    for found in _counting:
        found.bytes += size
        found.messages += messages


@dataclass
class Pending:
    """Messages on their way."""

    group: Any
    works: list[Any] = field(default_factory=list)
    staged: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # received on the host, and for the device
    sent: list[Tensor] = field(default_factory=list)  # memory that must outlive the sends

    def wait(self) -> None:
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            lost(self.group, error)
        for host, tensor in self.staged:
            tensor.copy_(host)


def exchange(group: Any, sends: Messages, receives: Messages, tag: int) -> Pending:
    """Start sending and receiving. Messages of a pair of ranks arrive in the order in which both name them; empty ones
    are left out on both sides. On backends that tell messages by their tag, those of other calls do not match."""
    sends, receives = ([(peer, t) for peer, t in given if t.numel()] for given in (sends, receives))
    found = Pending(group)
    if not sends and not receives:
        return found
    count(sum(t.numel() * t.element_size() for _, t in sends), len(sends))
    if group.stages((sends or receives)[0][1].device):
        sends = [(peer, t.cpu()) for peer, t in sends]
        hosts = [(peer, t.new_empty(t.shape, device="cpu")) for peer, t in receives]
        found.staged = [(host, t) for (_, host), (_, t) in zip(hosts, receives, strict=True)]
        receives = hosts
    found.sent = [t for _, t in sends]
    ops = [(dist.isend, *message) for message in sends] + [(dist.irecv, *message) for message in receives]
    peers = group.global_ranks
    try:
        found.works = dist.batch_isend_irecv([dist.P2POp(op, t, peers[p], group.group, tag) for op, p, t in ops])
    except RuntimeError as error:
        lost(group, error)
    return found


def gather(group: Any, record: Tensor, timeout: Any = None) -> list[Tensor]:
    """A small tensor of every rank, in the order of ranks."""
    count(record.numel() * record.element_size() * len(group.others), len(group.others))
    device = record.device
    record = record.cpu() if group.stages(device) else record
    found = [record.new_empty(record.shape) for _ in range(group.size)]
    try:
        work = dist.all_gather(found, record, group=group.group, async_op=True)
        work.wait() if timeout is None else work.wait(timeout)
    except RuntimeError as error:
        lost(group, error)
    return [t.to(device) for t in found]


def lost(group: Any, error: Exception) -> NoReturn:
    """Raise RankLost for an error of torch.distributed."""
    raise RankLost(
        f"rank {group.rank} of {group.size} got no answer from another rank of its group: it died, or makes another"
        " call than this one. Look for the first error of the other ranks; calls must come in the same order, with the"
        f" same options, on every rank. torch.distributed says: {error}"
    ) from error
