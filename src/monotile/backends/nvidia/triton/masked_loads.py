"""Loads that leave out the rows which a reduction hides.

`where(tile.max(axis=1)[:, None], x[rows], 0)`, which a dot reads, is written as a load that is masked by the reduction.
As a select, Triton 3.6 computes it in the layout of the dot's operand, and where that is in registers, as with
`mma.sync`, fails an assertion when it brings the rows there. (Columns of a reduction along axis 0 change their layout
before they are expanded, which it can do: such a tile stays a select, and its copy is pipelined.)"""

from __future__ import annotations

from collections.abc import Mapping

from ....ir import Kernel, Op, Value, constant, walk

Uses = Mapping[Value, list[Op]]


def masked_loads(kernel: Kernel, uses: Uses) -> dict[Op, Op]:
    """Return the loads that are written where their rows are selected, by the select."""
    found = {}
    for select in walk(kernel.body):
        load = select.operands[1].op if select.kind == "where" else None
        if load is not None and _alone(load, select, kernel, uses) and _selects_rows(select, uses):
            found[select] = load
    return found


def _selects_rows(select: Op, uses: Uses) -> bool:
    """Return True where rows that a reduction hides become zero for a dot."""
    condition, _, other = select.operands
    return _rows_of_reduction(condition) and _is_zero(other) and _feeds_dot(select.result, uses)


def _alone(load: Op, select: Op, kernel: Kernel, uses: Uses) -> bool:
    """Return True for a load that nothing else reads, of a tensor that the kernel does not write."""
    return (
        load.kind == "load"
        and uses[load.result] == [select]
        and load.result.shape == select.result.shape
        and load.attrs["tensor"].index not in kernel.written
    )


def _rows_of_reduction(condition: Value) -> bool:
    """Return True if a reduction along axis 1 made the condition, one value for each row."""
    expand = _through(condition, "broadcast").op
    if expand is None or expand.kind != "expand" or expand.attrs["position"] != 1:
        return False
    made = expand.operands[0].op
    return made is not None and made.kind == "reduce" and bool(made.attrs["axis"] == 1)


def _is_zero(value: Value) -> bool:
    return constant(_through(value, "broadcast", "expand", "cast")) == 0


def _through(value: Value, *kinds: str) -> Value:
    while value.op is not None and value.op.kind in kinds:
        value = value.op.operands[0]
    return value


def _feeds_dot(value: Value, uses: Uses) -> bool:
    """Return True if a dot reads a tile, as it is or transposed."""
    readers = uses.get(value, ())
    return any(r.kind == "dot" or (r.kind == "trans" and _feeds_dot(r.result, uses)) for r in readers)
