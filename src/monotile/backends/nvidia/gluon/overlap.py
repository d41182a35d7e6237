"""A turn of a loop in three parts, so that one turn's products run beside another's arithmetic.

*Early* products need nothing that the loop carries: they can start before the turn before them is over. *Late* products
only add to something that is carried and that nothing else in the turn looks at, apart from scaling it first: they can
finish during the next turn. The *middle* is everything else. A loop is then run as

    early(0), middle(0)
    for t: early(t) and late(t - 1) at once, middle(t) as soon as the early ones are done
    late(last)
"""

from __future__ import annotations

from dataclasses import dataclass

from ....ir import Op, Value, needed, uses


@dataclass
class Late:
    product: Op
    scaled: Value  # what the product is added to
    carried: int  # which of the carried values the sum is


@dataclass
class Turn:
    before: list[Op]  # what early products need
    early: list[Op]
    middle: list[Op]
    scaling: list[Op]  # what is done to a carried sum before a late product is added
    late: list[Late]


def split(loop: Op) -> Turn | None:
    """The parts of a loop's body; None where they cannot be told apart."""
    (body,) = loop.blocks
    if any(op.blocks for op in body.ops):
        return None
    late = _late(loop)
    sums = {item.carried for item in late}
    products = [op for op in body.ops if op.kind == "dot"]
    early = [op for op in products if all(op is not item.product for item in late)]
    needs = _needs(loop)
    if not early or not late or any(needs[op.result] for op in early):
        return None
    added = {id(op) for item in late for op in uses(body)[item.product.result]}
    scaling = [op for op in body.ops if op.results and id(op) not in added and needs[op.results[0]] & sums]
    before = needed(body.ops, (v for op in early for v in op.operands))
    special = {id(op) for op in (*before, *early, *scaling, *(item.product for item in late))} | added
    middle = [op for op in body.ops[:-1] if id(op) not in special]
    readers = uses(body)
    inside = {id(op) for op in scaling} | added
    hidden = all(id(reader) in inside for op in scaling for v in op.results for reader in readers.get(v, ()))
    raw = all(id(reader) in inside for p in sums for reader in readers.get(body.params[1 + p], ()))
    clean = not any(needs[v] & sums for item in late for v in item.product.operands)
    return Turn(before, early, middle, scaling, late) if hidden and raw and clean else None


def _late(loop: Op) -> list[Late]:
    (body,) = loop.blocks
    readers, leaving = uses(body), body.terminator.operands
    found = []
    for op in body.ops:
        if op.kind != "dot" or len(readers.get(op.result, ())) != 1:
            continue
        (add,) = readers[op.result]
        if add.kind != "add" or leaving.count(add.result) != 1 or len(readers[add.result]) != 1:
            continue
        other = add.operands[1] if add.operands[0] is op.result else add.operands[0]
        if other is not op.result and other.shape == op.result.shape == add.result.shape:
            found.append(Late(op, other, leaving.index(add.result)))
    return found


def _needs(loop: Op) -> dict[Value, set[int]]:
    """Which carried values each value of the body comes from; -1 stands for a product of this turn."""
    (body,) = loop.blocks
    found: dict[Value, set[int]] = {p: {n} for n, p in enumerate(body.params[1:])}
    for op in body.ops:
        came = set().union(*(found.get(v, set()) for v in op.operands), *([{-1}] if op.kind == "dot" else []))
        found.update(dict.fromkeys(op.results, came))
    for op in body.ops:
        if op.kind == "dot":  # by itself a product does not count
            found[op.result] = set().union(*(found.get(v, set()) for v in op.operands))
    return found
