"""The all_to_all method: heads are exchanged for the sequence. A rank computes some query heads over all positions and
gives every rank the rows it has. Key-value heads go to the ranks whose query heads read them, none is repeated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..library import backward as library_backward
from ..library import ops
from .compute import RankPart, RowTensors
from .layouts import Rows, RowSpan, part
from .ring import Gradients
from .schedule import ScorePiece


class Heads(NamedTuple):
    """The heads that one rank computes."""

    queries: RowSpan
    keys: RowSpan

    def width(self, D: int, Dv: int) -> int:
        """Elements of q, k and v for one position."""
        return self.queries.length * D + self.keys.length * (D + Dv)


class HeadRun(NamedTuple):
    """Heads of a rank, counted from its first ones, whose groups are equal: one call of attention."""

    queries: RowSpan
    keys: RowSpan


def heads_of(rank: int, ranks: int, Hq: int, Hkv: int) -> Heads:
    """As many query heads for every rank as for any other, or one more."""
    queries, group = RowSpan(rank * Hq // ranks, (rank + 1) * Hq // ranks), Hq // Hkv
    if not queries.length:
        return Heads(queries, RowSpan(0, 0))
    return Heads(queries, RowSpan(queries.start // group, (queries.stop - 1) // group + 1))


def runs(own: Heads, group: int) -> list[HeadRun]:
    """One run if the rank has all query heads of each key-value head, or one key-value head; else one for each."""
    if own.keys.length == 1 or (own.queries.start % group == 0 and own.queries.stop % group == 0):
        return [HeadRun(RowSpan(0, own.queries.length), RowSpan(0, own.keys.length))] if own.queries.length else []
    found = []
    for head in range(*own.keys):
        shared = own.queries.intersect(RowSpan(head * group, (head + 1) * group))
        first = own.queries.start
        keys = RowSpan(head - own.keys.start, head - own.keys.start + 1)
        found.append(HeadRun(RowSpan(shared.start - first, shared.stop - first), keys))
    return found


class HeadExchange:
    """Who computes which heads, and the two exchanges."""

    def __init__(self, part_: RankPart) -> None:
        self.part, group = part_, part_.group
        Hq, Hkv = part_.q.shape[1], part_.k.shape[1]
        self.heads = [heads_of(rank, group.size, Hq, Hkv) for rank in range(group.size)]
        self.own, self.group_size = self.heads[group.rank], Hq // Hkv if Hkv else 1
        schedule = part_.schedule
        self.length = schedule.sight.length
        self.rows = [part(self.length, group.size, rank, schedule.layout) for rank in range(group.size)]

    def to_heads(self, parts: Sequence[Tensor]) -> Tensor:
        """(n, B, W of rank p) for each rank p becomes (length, B, W of this rank) in the order of positions."""
        group, rows = self.part.group, self.rows[self.part.group.rank]
        own = parts[group.rank]
        whole = own.new_empty((self.length, *own.shape[1:]))
        sends = [(p, parts[p][rows.find(s).rows]) for p in group.others for s in rows.spans]
        receives = [(p, whole[s.rows]) for p in group.others for s in self.rows[p].spans]
        pending = self.part.exchange(sends, receives)
        for span in rows.spans:
            whole[span.rows] = own[rows.find(span).rows]
        pending.wait()
        return whole

    def to_rows(self, whole: Tensor, widths: Sequence[int]) -> list[Tensor]:
        """(length, B, W of this rank) becomes (n, B, W of rank p) from each rank p."""
        group, rows = self.part.group, self.rows[self.part.group.rank]
        found = [whole.new_empty((rows.length, whole.shape[1], width)) for width in widths]
        sends = [(p, whole[s.rows]) for p in group.others for s in self.rows[p].spans]
        receives = [(p, found[p][rows.find(s).rows]) for p in group.others for s in rows.spans]
        pending = self.part.exchange(sends, receives)
        for span in rows.spans:
            found[group.rank][rows.find(span).rows] = whole[span.rows]
        pending.wait()
        return found

    def packed(self) -> list[Tensor]:
        """q, k and v of the heads of each rank."""
        q, k, v = (t.permute(2, 0, 1, 3) for t in (self.part.q, self.part.k, self.part.v))
        found = []
        for heads in self.heads:
            parts = q[:, :, heads.queries.rows], k[:, :, heads.keys.rows], v[:, :, heads.keys.rows]
            found.append(torch.cat([t.flatten(2) for t in parts], dim=2))
        return found

    def unpacked(self, packed: Tensor, heads: Heads) -> list[Tensor]:
        """q, k and v (B, heads, rows, .) of packed ones, as views."""
        (D, Dv), (Hq, H) = self.part.sizes, (heads.queries.length, heads.keys.length)
        shapes = (Hq, D), (H, D), (H, Dv)
        parts = packed.split([h * size for h, size in shapes], dim=2)
        return [t.unflatten(2, shape).permute(1, 2, 0, 3) for t, shape in zip(parts, shapes, strict=True)]

    def calls(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[HeadRun, list[Tensor], dict[str, Any]]]:
        """The calls of attention on this rank: heads, arrays and options."""
        part_, sight = self.part, self.part.schedule.sight
        everywhere = Rows((RowSpan(0, self.length),))
        piece = ScorePiece(everywhere.spans[0], everywhere.spans[0])
        window = None if sight.left is None and sight.right is None else (sight.left, sight.right)
        for run in runs(self.own, self.group_size):
            mods = part_.mods(piece, everywhere, everywhere, self.own.queries.start + run.queries.start)
            first = self.own.queries.start
            chosen = slice(first + run.queries.start, first + run.queries.stop)
            sinks = None if part_.sinks is None else part_.sinks[chosen]
            arrays = [q[:, run.queries.rows], k[:, run.keys.rows], v[:, run.keys.rows]]
            yield run, arrays, {"sinks": sinks, "causal": sight.causal, "window": window, **mods, **part_.options}


def forward(part_: RankPart) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output and logsumexp of this rank's queries; and what the backward pass needs of this rank's heads: q, k and v as
    they came, output and logsumexp."""
    exchange = HeadExchange(part_)
    rows = exchange.to_heads(exchange.packed())
    q, k, v = (t.contiguous() for t in exchange.unpacked(rows, exchange.own))
    B, H, N, _ = q.shape
    o, lse = q.new_empty((B, H, N, v.shape[3])), q.new_empty((B, H, N), dtype=torch.float32)
    for run, arrays, options in exchange.calls(q, k, v):
        o[:, run.queries.rows], lse[:, run.queries.rows] = ops.attention(*arrays, return_lse=True, **options)
    counts = [heads.queries.length for heads in exchange.heads]
    rows_o = exchange.to_rows(o.permute(2, 0, 1, 3).flatten(2).contiguous(), [h * v.shape[3] for h in counts])
    rows_lse = exchange.to_rows(lse.permute(2, 0, 1).contiguous(), counts)
    own_o = torch.cat([t.unflatten(2, (h, v.shape[3])) for t, h in zip(rows_o, counts, strict=True)], dim=2)
    return own_o.permute(1, 2, 0, 3).contiguous(), torch.cat(rows_lse, 2).permute(1, 2, 0).contiguous(), rows, o, lse


def backward(part_: RankPart, given: RowTensors, kept: tuple[Tensor, Tensor, Tensor]) -> Gradients:
    """Gradients of this rank's q, k, v and sinks, from what the forward pass kept. Those of key-value heads that
    several ranks read are added up in the order of ranks."""
    exchange, (rows, o, lse) = HeadExchange(part_), kept
    counts = [heads.queries for heads in exchange.heads]
    do = exchange.to_heads([given.do[:, h.rows].permute(2, 0, 1, 3).flatten(2).contiguous() for h in counts])
    do = do.unflatten(2, (o.shape[1], o.shape[3])).permute(1, 2, 0, 3).contiguous()
    dlse = None
    if given.dlse is not None:
        dlse = exchange.to_heads([given.dlse[:, h.rows].permute(2, 0, 1).contiguous() for h in counts])
        dlse = dlse.permute(1, 2, 0).contiguous()
    gradients = torch.zeros_like(rows)
    sums = exchange.unpacked(gradients, exchange.own)
    dsinks = None if part_.sinks is None else torch.zeros_like(part_.sinks)
    for run, arrays, options in exchange.calls(*(t.contiguous() for t in exchange.unpacked(rows, exchange.own))):
        chosen = run.queries.rows
        given_rows = [*arrays, o[:, chosen], lse[:, chosen]]
        options["dlse"] = None if dlse is None else dlse[:, chosen]
        found = library_backward.attention_backward(do[:, chosen], *given_rows, **options)
        for total, part_found, heads in zip(sums, found[:3], (run.queries, run.keys, run.keys), strict=True):
            total[:, heads.rows] = part_found
        if dsinks is not None:
            first = exchange.own.queries.start
            dsinks[first + run.queries.start : first + run.queries.stop] = found.dsinks
    dq, dk, dv = _add_heads(exchange, gradients)
    return dq, dk, dv, dsinks


def _add_heads(exchange: HeadExchange, gradients: Tensor) -> tuple[Tensor, ...]:
    """The gradients of this rank's rows, of all heads."""
    part_ = exchange.part
    back = exchange.to_rows(gradients, [heads.width(*part_.sizes) for heads in exchange.heads])
    totals = [torch.zeros_like(t, dtype=torch.float32) for t in (part_.q, part_.k, part_.v)]
    for heads, packed in zip(exchange.heads, back, strict=True):
        for total, found, span in zip(
            totals, exchange.unpacked(packed, heads), (heads.queries, heads.keys, heads.keys), strict=True
        ):
            total[:, span.rows] += found
    return tuple(total.to(part_.q.dtype) for total in totals)
