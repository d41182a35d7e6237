"""How many instructions the elementwise work of a nest is: large work is emitted for few points, in a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ...ir import Op, Value

# Instructions of ops that are not one, about. A gather may go element by element.
INSTRUCTIONS = {
    "exp2": 13, "exp": 16, "log2": 22, "log": 22, "tanh": 35, "sigmoid": 22, "erf": 40, "sin": 30, "cos": 30,
    "floordiv": 8, "mod": 8, "lookup": 4, "gather": 16,
}  # fmt: skip
FREE = {"arange", "const", "expand", "trans", "broadcast"}
# Instructions of one iteration of a loop over points: several vectors of a long chain, such as tanh, overlap. Twice as
# many take longer to compile and run no faster (softcap of D 64 and 128, Zen 3).
MOST = 200


def weight(roots: Iterable[Value], made: Callable[[Value], bool]) -> int:
    """Return about how many instructions compute the roots at one point, from values that are not `made` there."""
    seen: set[Op] = set()

    def visit(value: Value) -> int:
        op = value.op
        if op is None or op in seen or not value.shape or not made(value):
            return 0
        seen.add(op)
        own = 0 if op.kind in FREE else INSTRUCTIONS.get(op.kind, 1)
        return own + (0 if op.kind in ("load", "dot") else sum(visit(v) for v in op.operands))

    return sum(visit(root) for root in roots)
