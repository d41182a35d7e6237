"""Analyses of loops and NaNs that passes and backends share."""

from __future__ import annotations

from collections.abc import Mapping

from ..ir import Block, Kernel, Op, Value, constant, walk


def loop_of(kernel: Kernel) -> dict[Block, Op]:
    """Return every loop of the kernel by its body."""
    return {op.blocks[0]: op for op in walk(kernel.body) if op.kind == "for"}


def never_nan(value: Value, loops: Mapping[Block, Op], assumed: frozenset[Value] = frozenset()) -> bool:
    """Prove that a float value is never NaN. A loop-carried value is proved by induction from its initial value. A
    reduction is never assumed NaN-free: `nan_matters` asks about reductions, and two could each rely on the other."""
    known = constant(value)
    if known is not None or value in assumed:
        return known is None or known == known
    owner = value.owner
    if isinstance(owner, Block):
        if owner not in loops or value is owner.params[0]:
            return False
        n, assumed = owner.params.index(value), assumed | {value}
        initial, carried = loops[owner].operands[1 + n], owner.terminator.operands[n - 1]
        return all(never_nan(v, loops, assumed) for v in (initial, carried))
    if owner.kind in ("for", "if"):
        n = owner.results.index(value)
        if owner.kind == "for":
            return never_nan(owner.blocks[0].params[1 + n], loops, assumed)
        return all(never_nan(block.terminator.operands[n], loops, assumed) for block in owner.blocks)
    parts = [never_nan(v, loops, assumed) for v in owner.operands] if owner.kind in NAN_FREE else [False]
    return any(parts) if owner.kind in ("max", "min") else all(parts)


def nan_matters(fold: Op, uses: Mapping[Value, list[Op]], loops: Mapping[Block, Op]) -> bool:
    """Return False if no reader can tell that a max or min over nothing but NaN gave NaN instead of -inf or inf. A
    further max (or min) with a value that is never NaN cannot tell."""
    kind: str = fold.attrs["fold"]
    for reader in uses.get(fold.result, []):
        others = [v for v in reader.operands if v is not fold.result]
        if reader.kind != kind or not others or not all(never_nan(v, loops) for v in others):
            return kind != "sum"
    return False


NAN_FREE = ("max", "min", "neg", "abs", "expand", "trans", "broadcast")  # ops that give no NaN for operands without NaN
