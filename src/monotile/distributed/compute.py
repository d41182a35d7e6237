"""A call on this rank: its arrays, its options, and the pieces of attention that are computed here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..library import backward, merging, ops
from ..library.backward import Gradients
from . import mods, transport
from .groups import Group
from .layouts import Rows, RowSpan, position_table
from .schedule import RankSchedule, ScorePiece
from .transport import Messages, Pending

Mod = Callable[..., Any]


@dataclass(frozen=True)
class RankPart:
    """This rank's part of a call of attention: q (B, Hq, n, D), k (B, Hkv, n, D), v (B, Hkv, n, Dv)."""

    group: Group
    schedule: RankSchedule
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    score_mod: Mod | None
    mask_mod: Mod | None
    options: dict[str, Any]  # scale, softcap, backend, threads
    tag: int  # of the messages

    def exchange(self, sends: Messages, receives: Messages) -> Pending:
        return transport.exchange(self.group, sends, receives, self.tag)

    @property
    def sizes(self) -> list[int]:
        """Head sizes of keys and of values."""
        return [self.k.shape[3], self.v.shape[3]]

    def packed_keys(self) -> Tensor:
        """Keys and values as they are sent: (n, B, Hkv, D + Dv), so that a span of positions has no gaps."""
        return pack(self.k, self.v)

    def room(self, rows: int) -> Tensor:
        """Memory for packed keys and values."""
        B, H, _, D = self.k.shape
        return self.k.new_empty((rows, B, H, D + self.v.shape[3]))

    def unpacked(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, Hkv, rows, D or Dv) of packed ones. Copies without gaps between rows: the programs are
        those of a call on one device, and what a copy takes is little beside the scores."""
        k, v = packed.split(self.sizes, dim=3)
        return k.permute(1, 2, 0, 3).contiguous(), v.permute(1, 2, 0, 3).contiguous()

    def mods(self, piece: ScorePiece, queries: Rows, keys: Rows, head: int = 0) -> dict[str, Any]:
        """The caller's functions for a piece whose rows and keys are rows of these positions."""
        device, documents = self.q.device, self.schedule.sight.documents
        mask = None
        if documents is not None:
            i, j = document_table(queries, documents, device), document_table(keys, documents, device)
            mask = mods.same_document(i[piece.queries.rows], j[piece.keys.rows])
        if self.score_mod is None and self.mask_mod is None:
            return {"score_mod": None, "mask_mod": mask}
        i, j = position_table(queries, device), position_table(keys, device)
        places = i[piece.queries.rows], j[piece.keys.rows], head
        own = None if self.mask_mod is None else mods.mask_at(self.mask_mod, *places)
        score = None if self.score_mod is None else mods.score_at(self.score_mod, *places)
        return {"score_mod": score, "mask_mod": mods.both(own, mask)}

    def attend(
        self, piece: ScorePiece, k: Tensor, v: Tensor, rows: Rows, *, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output and logsumexp of a piece with keys and values (B, Hkv, rows, .) at hand."""
        found: tuple[Tensor, Tensor] = ops.attention(
            self.q[:, :, piece.queries.rows], k[:, :, piece.keys.rows], v[:, :, piece.keys.rows], sinks=sinks,
            causal=piece.causal, window=piece.window, return_lse=True, **self.mods(piece, self.schedule.own, rows),
            **self.options,
        )  # fmt: skip
        return found

    def differentiate(
        self, piece: ScorePiece, k: Tensor, v: Tensor, rows: Rows, given: RowTensors, *, sinks: Tensor | None = None
    ) -> Gradients:
        """The gradients of a piece: weights follow from the logsumexp over all keys, so that pieces just add up."""
        chosen = piece.queries.rows
        do, o, lse, dlse = given.do[:, :, chosen], given.o[:, :, chosen], given.lse[:, :, chosen], None
        if given.dlse is not None:
            dlse = given.dlse[:, :, chosen]
        return backward.attention_backward(
            do, self.q[:, :, chosen], k[:, :, piece.keys.rows], v[:, :, piece.keys.rows], o, lse, dlse=dlse,
            sinks=sinks, causal=piece.causal, window=piece.window, **self.mods(piece, self.schedule.own, rows),
            **self.options,
        )  # fmt: skip


@dataclass(frozen=True)
class RowTensors:
    """What the backward pass is given for each query row of this rank."""

    do: Tensor
    o: Tensor
    lse: Tensor
    dlse: Tensor | None


class Joined:
    """The output of rows over all keys met so far, joined by logsumexp in float32."""

    def __init__(self, part: RankPart) -> None:
        B, H, n, _ = part.q.shape
        self.options = {name: part.options[name] for name in ("backend", "threads")}
        self.dtype = part.q.dtype
        self.o = part.q.new_zeros((B, H, n, part.v.shape[3]), dtype=torch.float32)
        self.lse = part.q.new_full((B, H, n), -torch.inf, dtype=torch.float32)

    def put(self, queries: RowSpan, o: Tensor, lse: Tensor) -> None:
        """Set rows that have met no key yet."""
        self.o[:, :, queries.rows], self.lse[:, :, queries.rows] = o, lse

    def add(self, queries: RowSpan, o: Tensor, lse: Tensor) -> None:
        """Add a part over other keys."""
        before = self.o[:, :, queries.rows], self.lse[:, :, queries.rows]
        self.put(queries, *merging.merge_lse((before[0], o.float()), (before[1], lse), **self.options))

    def finish(self) -> tuple[Tensor, Tensor]:
        return self.o.to(self.dtype), self.lse


class KeyGradients:
    """Gradients of packed keys and values, summed in float32 in the order in which they are added."""

    def __init__(self, part: RankPart, rows: int) -> None:
        self.part = part
        self.sums = part.room(rows).float().zero_()

    def add(self, keys: RowSpan, dk: Tensor, dv: Tensor) -> None:
        D, _ = self.part.sizes
        chosen = self.sums[keys.rows]
        chosen[..., :D] += dk.permute(2, 0, 1, 3)
        chosen[..., D:] += dv.permute(2, 0, 1, 3)

    def add_packed(self, keys: RowSpan, packed: Tensor) -> None:
        self.sums[keys.rows] += packed

    def packed(self) -> Tensor:
        """The sums in the element type of the keys."""
        return self.sums.to(self.part.k.dtype)


def pack(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)], dim=3)


@lru_cache(1024)
def document_table(rows: Rows, documents: tuple[int, ...], device: torch.device) -> Tensor:
    """The document that each row is in, int32, made once."""
    starts = torch.tensor(documents[1:], dtype=torch.int32, device=device)
    return torch.searchsorted(starts, position_table(rows, device), right=True, out_int32=True)
