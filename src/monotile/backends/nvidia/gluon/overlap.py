"""Software pipelining of a loop body in three parts, so that the dots of one iteration run beside the arithmetic of
another.

*Early* dots need nothing that the loop carries: they can start before the iteration before them is over. *Late* dots
only add to a carried accumulator that nothing else in the iteration reads, apart from scaling it first: they can finish
during the next iteration. The *middle* is everything else. A loop then runs as

    early(0), middle(0)
    for t: early(t) and late(t - 1) at once, middle(t) as soon as the early ones are done
    late(last)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ....ir import Op, Value, needed, uses
from ....ir.matchers import accumulation


@dataclass
class EarlyDot:
    dot: Op
    result: Value  # of the dot, or of the sum of early dots that it ends
    addend: Value | None = None  # the sum of the dots before it in such a sum


@dataclass
class LateDot:
    dot: Op
    addend: Value  # the scaled accumulator that the dot is added to
    carried: int  # the number of the accumulator among the carried values


@dataclass
class SplitBody:
    operands: list[Op]  # ops that early dots need
    early: list[EarlyDot]
    middle: list[Op]
    scaling: list[Op]  # ops on an accumulator before a late dot is added
    late: list[LateDot]


def split(loop: Op) -> SplitBody | None:
    """Split a loop's body; None where the parts cannot be separated."""
    (body,) = loop.blocks
    if any(op.blocks for op in body.ops):
        return None
    late = _late_dots(loop)
    accumulators = {item.carried for item in late}
    dots = [op for op in body.ops if op.kind == "dot"]
    first = [op for op in dots if all(op is not item.dot for item in late)]
    sources = _sources(loop)
    if not first or not late or any(sources[op.result] for op in first):
        return None
    readers = uses(body)
    early = _early_dots(body.ops, first, readers)
    adds = {id(op) for item in late for op in readers[item.dot.result]}
    scaling = [op for op in body.ops if op.results and id(op) not in adds and sources[op.results[0]] & accumulators]
    operands = needed(body.ops, (v for op in first for v in op.operands))
    elsewhere = {id(op) for op in (*operands, *first, *scaling, *(item.dot for item in late))} | adds
    elsewhere |= {id(item.result.op) for item in early}
    middle = [op for op in body.ops[:-1] if id(op) not in elsewhere]
    inside = {id(op) for op in scaling} | adds
    # Nothing else may read a scaled accumulator, nor the carried one, and no late dot may multiply one.
    scaled_private = all(id(reader) in inside for op in scaling for v in op.results for reader in readers.get(v, ()))
    carried_private = all(id(reader) in inside for p in accumulators for reader in readers.get(body.params[1 + p], ()))
    independent = not any(sources[v] & accumulators for item in late for v in item.dot.operands)
    if not (scaled_private and carried_private and independent):
        return None
    return SplitBody(operands, early, middle, scaling, late)


def _early_dots(ops: list[Op], dots: list[Op], readers: Mapping[Value, list[Op]]) -> list[EarlyDot]:
    """Return early dots in order; those that are only added up start from the sum of the ones before."""
    found, sums = {op: EarlyDot(op, op.result) for op in dots}, {op.result for op in dots}
    for add in ops:
        match = accumulation(add, ops, readers)
        if match is None or match.dot not in found or match.addend not in sums or readers[match.addend] != [add]:
            continue
        if match.addend.shape == add.result.shape:
            found[match.dot] = EarlyDot(match.dot, add.result, match.addend)
            sums = sums - {match.addend, match.dot.result} | {add.result}
    order = {op.result: n for n, op in enumerate(ops) if len(op.results) == 1}
    return sorted(found.values(), key=lambda item: order[item.result])


def _late_dots(loop: Op) -> list[LateDot]:
    (body,) = loop.blocks
    readers, leaving = uses(body), body.terminator.operands
    found = []
    for add in body.ops:
        match = accumulation(add, body.ops, readers)
        if match is None or leaving.count(add.result) != 1 or len(readers[add.result]) != 1:
            continue
        if match.addend.shape == add.result.shape:
            found.append(LateDot(match.dot, match.addend, leaving.index(add.result)))
    return found


def _sources(loop: Op) -> dict[Value, set[int]]:
    """Return the carried values that each value of the body is computed from; -1 stands for a dot of this iteration."""
    (body,) = loop.blocks
    found: dict[Value, set[int]] = {p: {n} for n, p in enumerate(body.params[1:])}
    for op in body.ops:
        came = set().union(*(found.get(v, set()) for v in op.operands), *([{-1}] if op.kind == "dot" else []))
        found.update(dict.fromkeys(op.results, came))
    for op in body.ops:
        if op.kind == "dot":  # a dot does not count for itself
            found[op.result] = set().union(*(found.get(v, set()) for v in op.operands))
    return found
