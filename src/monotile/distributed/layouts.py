"""How a sequence is divided among the ranks of a group: which positions a rank has, and taking and joining the parts.

`contiguous`: rank r has the r-th of P chunks. `zigzag`: the sequence has 2 P chunks and rank r has chunks r and
2 P - 1 - r, an early and a late one, so that every rank has the same work under causality. Lengths of chunks differ by
at most 1."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentShape, BadOption
from ..library import torch_calls
from . import groups, transport

LAYOUTS = ("zigzag", "contiguous")


class RowSpan(NamedTuple):
    """Positions, or rows of a buffer, from `start` up to `stop`."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    def intersect(self, other: RowSpan) -> RowSpan:
        start = max(self.start, other.start)
        return RowSpan(start, max(start, min(self.stop, other.stop)))

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


class Rows(NamedTuple):
    """The positions of a buffer's rows: spans in ascending order, one behind the other."""

    spans: tuple[RowSpan, ...]

    @property
    def length(self) -> int:
        return sum(span.length for span in self.spans)

    def find(self, positions: RowSpan) -> RowSpan:
        """The rows whose positions lie in a span."""
        return RowSpan(*(sum(max(0, min(s.stop, at) - s.start) for s in self.spans) for at in positions))

    def within(self, positions: Rows) -> Rows:
        """The rows whose positions are among others, as spans of positions."""
        found = [a.intersect(b) for a in self.spans for b in positions.spans]
        return Rows(tuple(span for span in found if span.length))


def joined(spans: Sequence[RowSpan]) -> Rows:
    """The positions of some spans, each once, in ascending order."""
    found: list[RowSpan] = []
    for span in sorted(span for span in spans if span.length):
        if found and span.start <= found[-1].stop:
            found[-1] = RowSpan(found[-1].start, max(found[-1].stop, span.stop))
        else:
            found.append(span)
    return Rows(tuple(found))


def part(length: int, ranks: int, rank: int, layout: str) -> Rows:
    """The positions that a rank has."""
    count, chunks = (ranks, (rank,)) if layout == "contiguous" else (2 * ranks, (rank, 2 * ranks - 1 - rank))
    return Rows(tuple(RowSpan(c * length // count, (c + 1) * length // count) for c in chunks))


def check_layout(layout: Any) -> None:
    if layout not in LAYOUTS:
        raise BadOption(f"layout is 'zigzag' or 'contiguous', found {layout!r}")


def check_length(length: Any) -> None:
    if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length < 2**31:
        raise BadOption(f"length is a whole number from 0 to 2^31 - 1, found {length!r}")


def whole_length(found: int, rank: int, ranks: int, layout: str, length: int | None) -> int:
    """The length of the whole sequence, of which this rank has `found` positions."""
    if length is None:
        return found * ranks
    check_length(length)
    expected = part(length, ranks, rank, layout).length
    if found != expected:
        raise ArgumentShape(
            f"rank {rank} of {ranks} has {expected} of {length} positions in the {layout} layout, found {found};"
            " divide the sequence with shard, and pass the length of the whole"
        )
    return length


@lru_cache(1024)
def position_table(rows: Rows, device: torch.device) -> Tensor:
    """Positions of rows, int32, made once: mods that read it find their block maps again."""
    parts = [torch.arange(*span, dtype=torch.int32, device=device) for span in rows.spans]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32, device=device)


def positions(length: int, layout: str = "zigzag", *, group: Any = None, device: Any = None) -> Tensor:
    """The positions that this rank's part has in a sequence of `length`, int64: for rotary embeddings and labels."""
    check_layout(layout)
    check_length(length)
    own = groups.resolve(group)
    rows = part(length, own.size, own.rank, layout)
    return position_table(rows, torch.device(device or "cpu")).long()


def shard(x: Tensor, layout: str = "zigzag", *, group: Any = None, dim: int = -2) -> Tensor:
    """This rank's part of a whole sequence along a dimension. Nothing is sent; differentiable."""
    check_layout(layout)
    own = groups.resolve(group)
    spans = part(x.shape[dim], own.size, own.rank, layout).spans
    parts = [x.narrow(dim, span.start, span.length) for span in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def unshard(
    x: Tensor, layout: str = "zigzag", *, group: Any = None, dim: int = -2, length: int | None = None
) -> Tensor:
    """The whole sequence on every rank, from its parts. `length` is that of the whole, needed if parts differ."""
    check_layout(layout)
    torch_calls.refuse_gradients("unshard", x)
    own = groups.resolve(group)
    length = whole_length(x.shape[dim], own.rank, own.size, layout, length)
    rows = x.movedim(dim, 0).contiguous()
    parts = [part(length, own.size, rank, layout) for rank in range(own.size)]
    mine = parts[own.rank]
    key = "unshard", layout, dim % x.dim(), length, tuple(rows.shape[1:]), x.dtype
    own.agree(key, lambda: {"layout": layout, "length": length, "shape": (dim, *rows.shape[1:]), "dtype": x.dtype}, x)
    whole = rows.new_empty((length, *rows.shape[1:]))
    sends = [(peer, rows[mine.find(span).rows]) for peer in own.others for span in mine.spans]
    receives = [(peer, whole[span.rows]) for peer in own.others for span in parts[peer].spans]
    for span in mine.spans:
        whole[span.rows] = rows[mine.find(span).rows]
    transport.exchange(own, sends, receives, groups.tag_of(*key)).wait()
    return whole.movedim(0, dim)
