"""Axes: dimensions that meet in any op are one axis, for the whole kernel (a union-find).

Lowering works on axes, so that a transpose or an added dimension costs nothing. An axis is *folded* if some reduce or
dot contracts it; along an axis that nothing folds, every op is pointwise.
"""

from __future__ import annotations

from ...ir import ELEMENTWISE, Kernel, Op, Value, walk


class Axis:
    __slots__ = ("_beside", "_up", "extent", "folded")

    def __init__(self, extent: int) -> None:
        self.extent, self.folded = extent, False
        self._up: Axis | None = None
        self._beside: set[Axis] = set()  # the other dimensions of its tiles

    def root(self) -> Axis:
        axis = self
        while axis._up is not None:
            axis = axis._up
        return axis

    def join(self, other: Axis) -> Axis:
        a, b = self.root(), other.root()
        if a is not b:
            b._up = a
            a.folded |= b.folded
            a._beside = {axis.root() for axis in a._beside | b._beside}
        return a

    def set_beside(self, other: Axis) -> None:
        a, b = self.root(), other.root()
        a._beside.add(b)
        b._beside.add(a)

    def meets(self, other: Axis) -> bool:
        """True if some tile has both axes."""
        a, b = self.root(), other.root()
        return a is not b and any(axis.root() is b for axis in a._beside)

    def __repr__(self) -> str:
        return f"axis({self.extent}{', folded' if self.folded else ''})"


def tile_of(op: Op) -> Value:
    """Return the value whose axes an op runs over: its result, or what it scatters."""
    return op.operands[0] if op.kind == "scatter" else op.result


class Axes:
    """The axis of every dimension of every tile; None for a side of 1, which broadcasts against anything.

    Reductions always join dimensions. Elementwise ops, loops, branches and views (expand, trans, dot operands) join
    them too, unless one tile would then have the same axis twice (`x[:, None] < x[None, :]`, `x.sum(0) + x.sum(1)`):
    there the reader keeps a separate axis and translates positions when it reads. Positions and constants join nothing:
    the same `arange(64)` may count queries in one place and keys in another.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._of: dict[Value, list[Axis | None]] = {}
        self._index_like: dict[Value, bool] = {}
        self._meetings: list[tuple[Axis | None, Axis | None]] = []  # dimensions that meet element by element
        self._views: list[tuple[Axis | None, Axis | None]] = []  # dimensions that meet through a view
        self.dots: dict[Op, tuple[Axis | None, Axis | None, Axis | None]] = {}  # m, k, n of each dot
        for op in walk(kernel.body):
            for block in op.blocks:
                for param in block.params:
                    self._fresh(param)
            for result in op.results:
                self._fresh(result)
            self._visit(op)
        for op in walk(kernel.body):  # initial value, parameter, yield and result of a carried value are alike
            if op.kind == "for":
                (body,) = op.blocks
                for group in zip(op.operands[2:], body.params[1:], body.terminator.operands, op.results, strict=True):
                    self._same(*group)
            elif op.kind == "if":
                ends = (b.terminator.operands for b in op.blocks)
                for group in zip(*ends, op.results, strict=True):
                    self._same(*group)
        self.split = False  # some reader kept a separate axis
        for a, b in self._meetings + self._views:
            if a is not None and b is not None:
                if a.meets(b):
                    self.split = True
                else:
                    a.join(b)
        for _, k, _ in self.dots.values():
            if k is not None:
                k.root().folded = True
        self.dots = {op: tuple(a and a.root() for a in mkn) for op, mkn in self.dots.items()}  # type: ignore[misc]

    def index_like(self, value: Value) -> bool:
        """True for positions, constants and what is computed from them: cheaper to recompute than to store."""
        if not value.shape:
            return True
        if value not in self._index_like:
            op = value.op
            follows = op is not None and (op.kind in ELEMENTWISE or op.kind in ("expand", "trans", "broadcast"))
            self._index_like[value] = value.kind == "arange" or (
                follows and op is not None and all(self.index_like(v) for v in op.operands)
            )
        return self._index_like[value]

    def dims(self, value: Value) -> tuple[Axis | None, ...]:
        return tuple(a.root() if a is not None else None for a in self._of.get(value, ()))

    def of(self, value: Value) -> tuple[Axis, ...]:
        """Return the axes of a value, sides of 1 left out."""
        return tuple(a for a in self.dims(value) if a is not None)

    def aligned(self, op: Op, operand: Value) -> bool:
        """True if the op reads the operand at the position of its own result, along the same axes."""
        mine = list(self.dims(tile_of(op)))
        if op.kind == "trans":
            mine.reverse()
        elif op.kind == "expand":
            mine.pop(op.attrs["position"])
        return all(b is None or a is b for a, b in zip(mine, self.dims(operand), strict=True))

    def alias(self, copy: Value, value: Value) -> None:
        """Give a value made after the analysis the axes of another."""
        self._of[copy] = self._of[value]
        self._index_like[copy] = False

    def _fresh(self, value: Value) -> list[Axis | None]:
        dims: list[Axis | None] = [Axis(n) if n > 1 else None for n in value.shape]
        self._of[value] = dims
        self._pair(dims)
        return dims

    def _pair(self, dims: list[Axis | None]) -> None:
        real = [a for a in dims if a is not None]
        for i, a in enumerate(real):
            for b in real[i + 1 :]:
                a.set_beside(b)

    def _same(self, *values: Value) -> None:
        linked = [v for v in values if not self.index_like(v)]
        for other in linked[1:]:
            self._meetings += zip(self._of[linked[0]], self._of[other], strict=True)

    def _join(self, mine: list[Axis | None], others: list[Axis | None]) -> None:
        for a, b in zip(mine, others, strict=True):
            if a is not None and b is not None:
                a.join(b)

    def _visit(self, op: Op) -> None:
        if op.kind in ELEMENTWISE or op.kind in ("broadcast", "gather", "scatter"):
            for operand in op.operands:
                if operand.shape and not self.index_like(operand):
                    self._meetings += zip(self._of[tile_of(op)], self._of[operand], strict=True)
        elif op.kind in ("expand", "trans") and self.index_like(op.result):
            return
        elif op.kind == "expand":
            dims = list(self._of[op.result])
            dims.pop(op.attrs["position"])
            self._views += zip(dims, self._of[op.operands[0]], strict=True)
        elif op.kind == "trans":
            self._views += zip(self._of[op.result], self._of[op.operands[0]][::-1], strict=True)
        elif op.kind == "reduce":
            dims = list(self._of[op.operands[0]])
            folded = dims.pop(op.attrs["axis"])
            if folded is not None:
                folded.root().folded = True
            self._join(self._of[op.result], dims)
        elif op.kind == "dot":
            m, n = self._of[op.result]
            k = Axis(op.operands[0].shape[1]) if op.operands[0].shape[1] > 1 else None
            self.dots[op] = (m, k, n)
            self._pair([m, k, n])
            self._views += zip([m, k, k, n], self._of[op.operands[0]] + self._of[op.operands[1]], strict=True)
