"""Choices: block sizes, splits and schedules of the library's kernels on one backend. They decide how fast a call is,
never what it computes, but for rounding.

A row's result depends on the row block's kind, on the block of keys (`BK`) and on where splits begin. All of these
follow from the shape of the call and the machine, never from what arrays hold or from how many threads a call asks for.
A number of splits that the caller fixes fixes the other two as well: a row's bits then do not depend on other rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..dtypes import DType, bool_

KEYS_PER_SPLIT = 512  # measured on CPUs: outweighs a part's output, small enough to share among cores
WHOLE_PAGE = 16  # keys of a page, from which on blocks of its size are worth it
ROW_BLOCKS = (1, 2, 4, 8)  # of few rows


@dataclass(frozen=True)
class AttentionProblem:
    """The facts of a call that block sizes and schedules are chosen by."""

    device: str  # "cpu", "cuda:0", "mps", or an architecture such as "sm_90"
    dtype: DType
    batch: int
    query_heads: int
    kv_heads: int
    queries: int
    keys: int
    head_size: int  # the larger of D and Dv
    causal: str | None = None
    left: int | None = None
    right: int | None = None
    softcap: float | None = None
    mask: DType | None = None
    mask_mod: bool = False
    values_in_keys: bool = False  # values are the first columns of the keys, and read with them
    value_size: int = 0  # Dv
    source: str = "dense"  # of the keys; "ragged": views of sequences; "paged": pages behind a table
    quantized: bool = False  # keys or values are stored in fewer bits

    @property
    def group(self) -> int:
        """Query heads that read one KV head."""
        return self.query_heads // max(1, self.kv_heads)

    @property
    def rows(self) -> int:
        """Query rows that read one KV head."""
        return self.group * self.queries

    @property
    def visible_range(self) -> tuple[int, int]:
        """First key that some query sees by its position, and one past the last."""
        shift, first, end = self.keys - self.queries, 0, self.keys
        if self.left is not None:
            first = max(0, shift - self.left)
        if self.causal == "upper_left":
            end = min(end, self.queries)
        if self.right is not None:
            end = min(end, self.queries + shift + self.right)
        return min(first, end), end

    @property
    def key_bytes(self) -> int:
        """Bytes of visible keys and values, about."""
        tensors = 1 if self.values_in_keys else 2
        return tensors * self.batch * self.kv_heads * self.visible_keys * self.head_size * self.dtype.bytes

    @property
    def visible_keys(self) -> int:
        first, end = self.visible_range
        return end - first

    def packs(self, rows: int) -> bool:
        """True if packing makes fewer blocks of `rows` rows, each of which reads all keys that some row of it sees.
        Packed rows skip no key by position that another row of the block sees: half the queries' own positions, where
        they are causal."""
        packed, apart = cdiv(self.rows, rows), self.group * cdiv(self.queries, rows)
        skipped = self.queries / 2 if self.has_positions else 0
        return packed * self.visible_keys < apart * (self.visible_keys - skipped)

    @property
    def has_positions(self) -> bool:
        """True if causality or a window hides keys by position."""
        return any(option is not None for option in (self.causal, self.left, self.right))

    @property
    def has_block_map(self) -> bool:
        """True if blocks of keys are skipped that a mask or a mask_mod hides; of dense keys alone."""
        return self.source == "dense" and (self.mask is not None or self.mask_mod)

    @property
    def has_additive_mask(self) -> bool:
        return self.mask is not None and self.mask is not bool_

    @property
    def zeroes_values(self) -> bool:
        """True if a block may hold keys that no row sees, whose values are zeroed in a copy of the tile."""
        hidden_at_the_start = self.left is not None or self.causal == "upper_left"
        return hidden_at_the_start or self.mask is not None or self.mask_mod


@dataclass(frozen=True)
class Choice:
    """Block sizes by the name of the kernel's constant, the backend's schedule (None: its own rule), and why."""

    blocks: Mapping[str, int | None]
    schedule: Any = None
    why: str = field(default="", compare=False)


@dataclass(frozen=True)
class AttentionChoice(Choice):
    """The choice for the attention kernel: rows of a program (BR), its keys, and how a call is divided."""

    time: float = field(default=0.0, compare=False)  # by the machine's model, in its unit
    splits: int = 0  # 0: the keys are not split
    first_block: int = 0  # of BK keys, with which the first split begins
    blocks_per_split: int = 0

    @property
    def packed(self) -> bool:
        return bool(self.blocks["packed"])

    @property
    def row_block(self) -> int:
        return self.blocks["BR"] or 0

    def unpacked(self) -> AttentionChoice:
        """This choice for rows of one query head, over all keys."""
        return replace(self, blocks={**self.blocks, "packed": False}, splits=0, first_block=0, blocks_per_split=0)

    def in_splits(self, splits: int, keys_per_split: int) -> AttentionChoice:
        """This choice with a number of splits of all keys, of whole blocks."""
        return replace(self, splits=splits, blocks_per_split=max(1, cdiv(keys_per_split, self.key_block)))

    def divided(self, problem: AttentionProblem, per_split: int) -> AttentionChoice:
        """This choice with `per_split` blocks of visible keys in a split; as it is where one would do, or one and the
        block that a window cuts."""
        low, end = problem.visible_range
        first = low // self.key_block
        blocks = cdiv(end, self.key_block) - first
        if blocks <= per_split + (low % self.key_block > 0):
            return self
        return replace(self, splits=cdiv(blocks, per_split), first_block=first, blocks_per_split=per_split)

    @property
    def key_block(self) -> int:
        return self.blocks["BK"] or 0


@dataclass(frozen=True)
class BackwardBlocks(Choice):
    """Rows (BR) and keys (BK) of a tile of scores in a kernel of the backward pass, whose rows are never packed."""

    packed = False
    row_block = property(lambda self: self.blocks["BR"])
    key_block = property(lambda self: self.blocks["BK"])


@dataclass(frozen=True)
class BackwardChoice:
    """Tiles of the kernel that owns queries, and of the one that owns keys. None for rows: the kernel that owns keys
    adds up the gradients of the queries too. `apart`: dk and dv in launches of their own, where their sums do not fit a
    program's registers together."""

    rows: BackwardBlocks | None
    keys: BackwardBlocks
    apart: bool = False


class Choices:
    """The interface, with the answers of a backend that has no preference."""

    def attention(self, problem: AttentionProblem, keys_per_split: int | None = None) -> AttentionChoice:
        """BR, BK and `packed` of the attention kernel, and its splits. Where the caller splits the keys, a row must be
        computed alike whatever the other rows: BK and the kind of row block follow from head size and keys alone."""
        fixed = keys_per_split is not None
        few = problem.rows <= ROW_BLOCKS[-1]
        if fixed or few:
            rows, keys = row_block(problem.rows), 64
        else:
            rows = next((rows for rows in (32, 64, 128) if problem.rows <= rows), 128)
            keys = 64 if problem.head_size > 256 else 128
        chosen = AttentionChoice({"BR": rows, "BK": keys, "packed": few or fixed or problem.packs(rows)})
        return chosen.divided(problem, KEYS_PER_SPLIT // keys) if few and not fixed else chosen

    def page_block(self, page: int, dense: AttentionChoice, *, quantized: bool = False) -> int:
        """Keys of a block where keys are in pages, and `dense` is best for dense ones. A block that divides the page is
        read like dense keys, another one by looking up each key."""
        whole, block = page & -page, dense.key_block  # the greatest power of two that divides it
        return min(whole, block) if whole >= WHOLE_PAGE and block % min(whole, block) == 0 else block

    def balance(self, problem: AttentionProblem) -> tuple[int, int]:
        """Programs that keep the device busy where lengths of sequences are not known, and the least keys of one."""
        return 64, KEYS_PER_SPLIT

    def attention_backward(self, problem: AttentionProblem) -> BackwardChoice:
        """BR and BK of the kernels of the backward pass, and whether queries have a kernel of their own."""
        blocks = BackwardBlocks({"BR": 32, "BK": 32})
        return BackwardChoice(blocks, blocks)

    def marks_covered(self, problem: AttentionProblem) -> bool:
        """True if the block map of a mask shall tell COVERED blocks from PARTIAL ones."""
        return False

    def covers(self, problem: AttentionProblem) -> bool:
        """True if the block map of a mask_mod shall tell blocks whose keys are all visible to some row of the head."""
        return False

    def keys_of_a_choice(self, problem: AttentionProblem, choice: AttentionChoice) -> int:
        """Return how many keys, from one more than a multiple of them on, have the same choice for certain."""
        return 1

    def by_mod(self, problem: AttentionProblem, choice: Choice | None) -> str | None:
        """Return what programs find by the mask_mod before they read keys, where no map is made: the "cases" of blocks,
        of which hidden ones are skipped, or the "range" of visible ones. `choice` is that of attention; None for
        gradients, which know cases only."""
        return "cases" if problem.mask_mod and not problem.has_block_map else None

    def merge(self, parts: int, rows: int, device: str, *, after_split: bool = False) -> Choice:
        """BS (parts of a row taken at once) and SPAN (columns of a row in one program) of a merge. Results depend on
        BS, which follows from the number of parts alone."""
        return Choice({"BS": 64, "SPAN": None})

    def rotation(self, rows: int) -> Choice:
        """BR (rows) and SPAN (columns) of a program that multiplies `rows` rows of each head by one matrix."""
        return Choice({"BR": row_block(rows, (1, 16)), "SPAN": None})

    def mask_blocks(self, BQ: int, BK: int, device: str) -> Choice:
        """STRIP (rows read at a time) and SPAN (columns in one program) of the block map of a mask."""
        return Choice({"STRIP": BQ, "SPAN": None})

    def mod_blocks(self, rows: int, device: str) -> Choice:
        """SPAN (blocks in one program) of the block map of a mask_mod, for blocks of `rows` rows."""
        return Choice({"SPAN": 16})

    def threads(self, flops: int, bytes_: int) -> int | None:
        """How many threads some work is worth; None where the backend has none. Results never depend on it."""
        return None


def row_block(rows: int, sizes: tuple[int, ...] = ROW_BLOCKS) -> int:
    """The smallest block that holds all rows, else the largest."""
    return next((size for size in sizes if rows <= size), sizes[-1])


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
