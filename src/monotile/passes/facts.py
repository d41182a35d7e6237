"""Small facts about scalars that the passes rely on."""

from __future__ import annotations

from collections.abc import Mapping

from ..ir import Block, Kernel, Op, Value, constant, walk
from ..ir.affine import Linear, linear


def loop_of(kernel: Kernel) -> dict[Block, Op]:
    """Each loop, by its body."""
    return {op.blocks[0]: op for op in walk(kernel.body) if op.kind == "for"}


def loop_starts(kernel: Kernel) -> dict[Block, Value]:
    """The first value of each loop's counter, by the loop's body."""
    return {body: loop.operands[0] for body, loop in loop_of(kernel).items()}


def nonnegative(form: Linear | None, starts: Mapping[Block, Value]) -> bool:
    """Whether a sum of integer scalars, taken without wrapping, is known to be 0 or more."""
    if form is None or form.iotas:
        return False
    return form.const >= 0 and all(factor > 0 and _atom(v, starts) for v, factor in form.terms.items())


def _atom(value: Value, starts: Mapping[Block, Value]) -> bool:
    owner = value.owner
    if isinstance(owner, Block):  # a loop's counter only grows
        return value is owner.params[0] and owner in starts and nonnegative(linear(starts[owner]), starts)
    if owner.kind in ("dim", "program_id"):
        return True
    forms = [linear(v) for v in owner.operands]
    parts = [nonnegative(form, starts) and not _may_wrap(form) for form in forms]
    if owner.kind == "max":
        return any(parts)
    return owner.kind in ("floordiv", "mod", "min") and all(parts)


def _may_wrap(form: Linear | None) -> bool:
    """Whether a sum may be beyond int32: lengths leave a margin of 2^16, and not more."""
    if form is None or len(form.terms) > 1 or any(factor != 1 for factor in form.terms.values()):
        return True
    return form.const >= 2**16 and bool(form.terms)


def never_nan(value: Value, loops: Mapping[Block, Op], assumed: frozenset[Value] = frozenset()) -> bool:
    """Whether a float is known to be a number. What a loop carries is one if it begins as one and stays one. A fold is
    not taken for one: it is where `nan_matters` is asked, and two folds could each rely on the other."""
    known = constant(value)
    if known is not None or value in assumed:
        return known is None or known == known
    owner = value.owner
    if isinstance(owner, Block):
        if owner not in loops or value is owner.params[0]:
            return False
        n, assumed = owner.params.index(value), assumed | {value}
        came = loops[owner].operands[1 + n], owner.terminator.operands[n - 1]
        return all(never_nan(v, loops, assumed) for v in came)
    if owner.kind in ("for", "if"):
        n = owner.results.index(value)
        if owner.kind == "for":
            return never_nan(owner.blocks[0].params[1 + n], loops, assumed)
        return all(never_nan(block.terminator.operands[n], loops, assumed) for block in owner.blocks)
    parts = [never_nan(v, loops, assumed) for v in owner.operands] if owner.kind in NUMBERS else [False]
    return any(parts) if owner.kind in ("max", "min") else all(parts)


def nan_matters(fold: Op, uses: Mapping[Value, list[Op]], loops: Mapping[Block, Op]) -> bool:
    """Whether something notices that a fold of nothing but NaN gave NaN instead of -inf or inf. An extreme of it and a
    number does not."""
    kind: str = fold.attrs["fold"]
    for reader in uses.get(fold.result, []):
        others = [v for v in reader.operands if v is not fold.result]
        if reader.kind != kind or not others or not all(never_nan(v, loops) for v in others):
            return kind != "sum"
    return False


NUMBERS = ("max", "min", "neg", "abs", "expand", "trans", "broadcast")  # ops that make no NaN of numbers
