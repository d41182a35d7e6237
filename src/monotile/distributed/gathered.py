"""The all_gather method, and windows of every method that sends keys: all keys that this rank's queries see come first,
in the order of their positions, and a span of queries is one call of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from .compute import KeyGradients, RankPart, RowTensors
from .ring import Gradients


def forward(part: RankPart) -> tuple[Tensor, Tensor]:
    """Output and logsumexp of this rank's queries."""
    B, H, n, _ = part.q.shape
    o = part.q.new_zeros((B, H, n, part.v.shape[3]))
    lse = part.q.new_full((B, H, n), -torch.inf, dtype=torch.float32)
    k, v = part.unpacked(gather_keys(part))
    rows = part.schedule.needed
    for piece in part.schedule.pieces(rows):
        chosen = (slice(None), slice(None), piece.queries.rows)
        o[chosen], lse[chosen] = part.attend(piece, k, v, rows, sinks=part.sinks)
    return o, lse


def gather_keys(part: RankPart) -> Tensor:
    """Packed keys and values of `needed` positions."""
    schedule, group = part.schedule, part.group
    own, needed = schedule.own, schedule.needed
    packed, buffer = part.packed_keys(), part.room(needed.length)
    sends = [(p, packed[own.find(s).rows]) for p in group.others for s in schedule.sent(p).spans]
    receives = [(p, buffer[needed.find(s).rows]) for p in group.others for s in schedule.received(p).spans]
    pending = part.exchange(sends, receives)
    for span in schedule.received(group.rank).spans:
        buffer[needed.find(span).rows] = packed[own.find(span).rows]
    pending.wait()
    return buffer


def backward(part: RankPart, given: RowTensors) -> Gradients:
    """Gradients of this rank's q, k, v and sinks. Keys are gathered again; their gradients go back to their ranks,
    which add them up in the order of ranks."""
    schedule, needed = part.schedule, part.schedule.needed
    k, v = part.unpacked(gather_keys(part))
    dq = torch.zeros_like(part.q)
    sums = KeyGradients(part, needed.length)
    dsinks = None if part.sinks is None else torch.zeros_like(part.sinks, dtype=torch.float32)
    for piece in schedule.pieces(needed):
        found = part.differentiate(piece, k, v, needed, given, sinks=part.sinks)
        dq[:, :, piece.queries.rows] = found.dq
        sums.add(piece.keys, found.dk, found.dv)
        if dsinks is not None:
            dsinks += found.dsinks
    dkeys = _return_gradients(part, sums)
    dk, dv = part.unpacked(dkeys.packed())
    return dq, dk, dv, None if dsinks is None or part.sinks is None else dsinks.to(part.sinks.dtype)


def _return_gradients(part: RankPart, sums: KeyGradients) -> KeyGradients:
    """The gradients of this rank's keys, from all ranks that computed with them."""
    schedule, group = part.schedule, part.group
    own, needed = schedule.own, schedule.needed
    packed = sums.packed()
    sends = [(p, packed[needed.find(s).rows]) for p in group.others for s in schedule.received(p).spans]
    back = {p: schedule.sent(p) for p in group.others}
    buffers = {p: part.room(rows.length) for p, rows in back.items()}
    receives = [(p, buffers[p][rows.find(s).rows]) for p, rows in back.items() for s in rows.spans]
    pending = part.exchange(sends, receives)
    found = KeyGradients(part, own.length)
    for span in schedule.received(group.rank).spans:
        found.add_packed(own.find(span), sums.sums[needed.find(span).rows])
    pending.wait()
    for p in sorted(back):
        for span in back[p].spans:
            found.add_packed(own.find(span), buffers[p][back[p].find(span).rows])
    return found
