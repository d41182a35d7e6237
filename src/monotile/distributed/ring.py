"""The ring method: at step t a rank computes with the keys of rank r - t, while those of rank r - t - 1 are on their
way. Each rank's keys come from itself, so that only rows that the receiver sees are sent; two buffers are in use."""

from __future__ import annotations

import torch
from torch import Tensor

from .compute import Joined, KeyGradients, RankPart, RowTensors
from .layouts import Rows
from .transport import Pending

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]


class Rotation:
    """The keys of all other ranks, one after the other."""

    def __init__(self, part: RankPart) -> None:
        self.part = part
        self.packed = part.packed_keys() if part.group.size > 1 else None
        self.next = self._start(1)

    def _start(self, step: int) -> tuple[Pending, Tensor, Rows] | None:
        part, schedule = self.part, self.part.schedule
        if step >= part.group.size or self.packed is None:
            return None
        source, target = (part.group.rank - step) % part.group.size, (part.group.rank + step) % part.group.size
        rows = schedule.received(source)
        buffer = part.room(rows.length)
        sends = [(target, self.packed[schedule.own.find(span).rows]) for span in schedule.sent(target).spans]
        receives = [(source, buffer[rows.find(span).rows]) for span in rows.spans]
        return part.exchange(sends, receives), buffer, rows

    def take(self, step: int) -> tuple[Tensor, Tensor, Rows]:
        """The keys, values and positions of a step, with those of the next one sent for."""
        assert self.next is not None
        pending, buffer, rows = self.next
        pending.wait()
        self.next = self._start(step + 1)
        return *self.part.unpacked(buffer), rows


def forward(part: RankPart) -> tuple[Tensor, Tensor]:
    """Output and logsumexp of this rank's queries."""
    rotation, joined, own = Rotation(part), Joined(part), part.schedule.own
    for piece in part.schedule.pieces(own):
        joined.put(piece.queries, *part.attend(piece, part.k, part.v, own, sinks=part.sinks))
    for step in range(1, part.group.size):
        k, v, rows = rotation.take(step)
        for piece in part.schedule.pieces(rows):
            joined.add(piece.queries, *part.attend(piece, k, v, rows))
    return joined.finish()


def backward(part: RankPart, given: RowTensors) -> Gradients:
    """Gradients of this rank's q, k, v and sinks. Keys rotate as in the forward pass; their gradients go back to their
    rank, which adds them up in the order of steps."""
    schedule, group, own = part.schedule, part.group, part.schedule.own
    rotation = Rotation(part)
    dq = torch.zeros_like(part.q, dtype=torch.float32)
    dkeys = KeyGradients(part, own.length)
    dsinks = None if part.sinks is None else torch.zeros_like(part.sinks, dtype=torch.float32)
    for piece in schedule.pieces(own):
        found = part.differentiate(piece, part.k, part.v, own, given, sinks=part.sinks)
        dq[:, :, piece.queries.rows] += found.dq
        dkeys.add(piece.keys, found.dk, found.dv)
        if dsinks is not None:
            dsinks += found.dsinks
    returned: list[tuple[Pending, Rows, Tensor]] = []
    for step in range(1, group.size):
        k, v, rows = rotation.take(step)
        sums = KeyGradients(part, rows.length)
        for piece in schedule.pieces(rows):
            found = part.differentiate(piece, k, v, rows, given)
            dq[:, :, piece.queries.rows] += found.dq
            sums.add(piece.keys, found.dk, found.dv)
        returned.append(_send_back(part, step, rows, sums))
        if len(returned) > 1:
            _receive(dkeys, own, *returned.pop(0))
    for last in returned:
        _receive(dkeys, own, *last)
    dk, dv = part.unpacked(dkeys.packed())
    return dq.to(part.q.dtype), dk, dv, None if dsinks is None or part.sinks is None else dsinks.to(part.sinks.dtype)


def _send_back(part: RankPart, step: int, rows: Rows, sums: KeyGradients) -> tuple[Pending, Rows, Tensor]:
    """Send the gradients of a step's keys to their rank, and receive those of this rank's keys from the other side."""
    source, target = (part.group.rank - step) % part.group.size, (part.group.rank + step) % part.group.size
    back = part.schedule.sent(target)
    buffer, packed = part.room(back.length), sums.packed()
    sends = [(source, packed[rows.find(span).rows]) for span in rows.spans]
    receives = [(target, buffer[back.find(span).rows]) for span in back.spans]
    return part.exchange(sends, receives), back, buffer


def _receive(dkeys: KeyGradients, own: Rows, pending: Pending, rows: Rows, buffer: Tensor) -> None:
    pending.wait()
    for span in rows.spans:
        dkeys.add_packed(own.find(span), buffer[rows.find(span).rows])
