"""Balanced splits of a call whose lengths are in memory: the plan before the attention kernel, the merge behind it."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..backends.choices import AttentionChoice, AttentionProblem, Choice, cdiv
from ..dtypes import float32, int32
from ..kernels import balance as plans
from ..kernels.merge import merge_slots as merge_slots_kernel
from ..kernels.scores import Options
from .calls import ArrayRef, CallBuilder
from .merging import Partials

FEW_ROWS = 64  # query rows of a KV head, up to which keys are split whatever else there is to do
LONG = 8  # shortest splits, beyond which a sequence may keep one program busy while the others are done


class Lengths(NamedTuple):
    """Where the lengths of a call's sequences are. `queries` and `keys` count those of all sequences where they have
    offsets; else the queries of each sequence, and the most keys that one may have by `lengths`."""

    queries: int
    keys: int
    row_blocks: int  # of a row group in all sequences, at most
    q_offsets: ArrayRef | None = None
    k_offsets: ArrayRef | None = None
    lengths: ArrayRef | None = None


class Balanced(NamedTuple):
    """The plan of a call, and the states that its programs write, as the attention kernel takes them."""

    plan: ArrayRef
    state: Partials

    @property
    def arguments(self) -> tuple[ArrayRef, ...]:
        return self.plan, *self.state


NOT_BALANCED = (None,) * 4  # the same arguments, in a call without a plan


def is_balanced(
    builder: CallBuilder, problem: AttentionProblem, choice: AttentionChoice, *, ragged_rows: bool = False
) -> bool:
    """True if a call gets balanced splits: where keys are split anyway, since programs are few, and for few rows where
    a sequence may be long. Packed rows of ragged sequences do not lie evenly in memory: a merge puts them in place."""
    if choice.splits or problem.rows > FEW_ROWS:
        return choice.splits > 0
    _, least = builder.choices.balance(problem)
    return ragged_rows or problem.keys > LONG * least


def add_balance(
    builder: CallBuilder, of: Lengths, problem: AttentionProblem, choice: AttentionChoice, options: Options
) -> Balanced:
    """Add the plan of a call, and allocate the states of its slots."""
    groups = problem.kv_heads if choice.packed else problem.query_heads
    programs, least = builder.choices.balance(problem)
    wanted, BR = cdiv(programs, groups), choice.row_block
    offsets = of.q_offsets
    sequences = problem.batch if offsets is None else offsets.shape[0]
    plan = builder.temporary((4, sequences), int32)
    heads = problem.query_heads // groups
    scalars = heads, of.queries, of.keys, wanted, max(1, least // choice.key_block)
    blocks = Choice({"BR": BR, "BK": choice.key_block})
    builder.launch(
        plans.balance, plan, offsets, of.k_offsets, of.lengths, *scalars, choice=blocks, threads=1, options=options
    )
    slots, Dv = wanted + of.row_blocks, problem.value_size
    o = builder.temporary((groups, slots, BR, Dv), float32).permuted(0, 2, 1, 3)
    m, l = (builder.temporary((groups, slots, BR), float32).permuted(0, 2, 1) for _ in range(2))
    return Balanced(plan, Partials(o, m, l))


def add_merge_slots(
    builder: CallBuilder, of: Balanced, q_offsets: ArrayRef | None, sinks: ArrayRef | None,
    target: tuple[ArrayRef, ArrayRef | None], choice: AttentionChoice,
) -> None:  # fmt: skip
    """Add the merge of a call's states into its output (B, H, N, Dv) and logsumexp (B, H, N)."""
    out, lse = target
    rows = math.prod(out.shape[:3])
    merging = builder.choices.merge(plans.SEQUENCES // 4, rows, builder.device, after_split=True)
    threads = builder.threads_for(0, 8 * rows * out.shape[3])
    consts = {"BR": choice.row_block, "packed": choice.packed}
    args = *of.state, of.plan, q_offsets, sinks, out, lse
    builder.launch(merge_slots_kernel, *args, choice=merging, threads=threads, **consts)
