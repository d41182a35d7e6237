"""Places that are looked up: tiles whose position in the next iteration of a loop does not follow from this one's, such
as those behind a table. Their address can be computed one iteration ahead, to be prefetched."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir import ELEMENTWISE, SHAPE_ONLY, Kernel, Op, Value, needed, starts
from ...ir.affine import linear


@dataclass(frozen=True)
class PlaceAhead:
    """How the place of a load, or of the rows of a gather, follows from a loop's counter."""

    counter: Value
    step: int
    scalars: tuple[Op, ...]  # the scalar ops of the loop that its positions are made of, in order
    body: tuple[Op, ...]


def find_place_ahead(load: Op, loop: Op, ops: list[Op], kernel: Kernel) -> PlaceAhead | None:
    """Return how to compute a load's place in the next iteration; None where it moves by a known distance, or depends
    on more than the counter and scalar arithmetic and memory that is only read. `ops`: those of the loop up to the end
    of the load's block."""
    (body,) = loop.blocks
    inside = {result for op in ops for result in op.results}
    forms = [linear(v) for v in load.operands]
    if load not in ops or all(form is not None and not inside.intersection(form.terms) for form in forms):
        return None
    scalars = needed(ops, starts(load))
    for op in scalars:
        plain = op.kind in ELEMENTWISE or op.kind in SHAPE_ONLY or op.kind in ("const", "arange")
        read = op.kind in ("load", "gather") and op.attrs["tensor"].index not in kernel.written
        if (op.result.shape and load.kind == "load") or not (plain or read):
            return None
    if any(v in body.params[1:] for op in (*scalars, load) for v in op.operands):
        return None
    return PlaceAhead(
        body.params[0], loop.attrs["step"], tuple(op for op in scalars if not op.result.shape), tuple(ops)
    )
