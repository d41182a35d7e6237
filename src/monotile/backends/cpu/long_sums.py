"""Long sums of floats, in levels.

The error of one chain of additions grows with its length: that of a row's sum with its length over the lanes, so that
narrow vectors round more. Here accumulators are added to those of the next level every `span` of the loop's index and
start at zero again, and each level adds at most LEVEL sums before it does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...ir import Op
from .emit import Emitter, Index, Var

CHUNK = 64  # rows, or steps of a contraction, that are summed in one chain
LEVEL = 16  # register groups along the lanes, or sums of a lower level, that are summed in one chain


def is_float_sum(fold: Op) -> bool:
    return fold.attrs["fold"] == "sum" and fold.operands[0].dtype.is_float


def float_sums(folds: Sequence[Op], accumulators: Sequence[list[Var]]) -> list[Var]:
    """Return the accumulators of the folds that sum floats."""
    found = zip(folds, accumulators, strict=True)
    return [variable for op, variables in found if is_float_sum(op) for variable in variables]


def sum_loop(
    e: Emitter, bounds: tuple[Index, Index, int], step: int, span: int, body: Callable[[Index], None], sums: list[Var]
) -> None:
    """Emit a loop whose body adds to `sums`. `bounds` are its first and last index and the most it may run to, from 0.

    Sums of at most two spans are one chain. Spans begin at multiples of their length wherever the loop begins, so that
    terms which are left out because they are zero change no bit.
    """
    low, high, most = bounds
    if not sums or most <= 2 * span:
        e.loop(low, high, step, body)
        return
    totals = [e.var(variable.type, "zeroinitializer") for variable in sums]

    def one_span(first: Index) -> None:
        begin = first if isinstance(low, int) else e.extreme("smax", first, low)
        end = e.add(first, span)
        e.loop(begin, end if most % span == 0 and high == most else e.extreme("smin", end, high), step, body)
        for variable, total in zip(sums, totals, strict=True):
            e.set(total, e.op(f"fadd {total.type} {e.get(total)}, {e.get(variable)}"))
            e.set(variable, "zeroinitializer")

    start = low // span * span if isinstance(low, int) else e.op(f"and i64 {low}, {-span}")
    sum_loop(e, (start, high, most), span, span * LEVEL, one_span, totals)
    for variable, total in zip(sums, totals, strict=True):
        e.set(variable, e.get(total))
