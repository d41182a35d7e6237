"""Random kernels, built as IR, with arguments that expose every wrong access.

Floats are small integers, and a bound is tracked for every value, so that sums are exact in any order and backends must
agree to the last bit. Results of exponentials are kept apart and compared with a tolerance. Every array is a view into
a larger one whose other elements no kernel may read or change.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from monotile.dtypes import bool_, float16, float32, int32, int64
from monotile.ir import Block, Kernel, Op, Tensor, Type, Value, verify
from monotile.ir.builder import Builder

from .arguments import CARRIED, EXACT, HELD, SIDES, STEPS, Program
from .operations import Operations


def program(rng: random.Random) -> Program:
    return Generator(rng).run()


class Generator(Operations):
    def run(self) -> Program:
        pick, chance = self.pick, self.chance
        count = pick((1, 2, 2, 3))
        self.sides = [pick(SIDES) for _ in range(count)]
        self.step = pick((*self.sides, *STEPS))
        self.nan, self.infinite = chance(0.25), chance(0.3)
        self.grid = pick((1, 2, 3)) if chance(0.5) else None
        for n in range(pick((1, 2, 3, 3, 4))):
            self.argument(n, output=False)
        for _ in range(pick((1, 1, 2, 3))):
            self.argument(len(self.arguments), output=True)
        self.scalar_types = [("n", int32), ("f", float32), ("flag", bool_), ("wide", int64)]
        scalars = [self.rng.randint(-5, 70), float(self.rng.randint(-4, 4)), chance(0.5), self.rng.randint(-5, 70)]
        kernel = Kernel("fuzz", tuple(a.tensor for a in self.arguments), tuple(self.scalar_types))
        self.b = Builder(kernel.body)
        self.scope, self.rough = [[]], [[]]
        if self.grid is not None:
            sizes = [self.grid, 1] if chance(0.3) else [self.grid]
            self.pid = self.b.program_id(list(sizes))[0]
            self.keep(self.pid, 4)
        for name, dtype in self.scalar_types:
            if chance(0.3):
                self.keep(self.b.emit("param", (), Type(dtype), name=name).result, 70)
        self.budget = pick((4, 8, 12, 16))
        for _ in range(2):
            self.load()
        if chance(0.3):
            self.attention()
            self.budget = pick((0, 0, 2, 4))
        while self.budget > 0:
            self.statement()
        for argument in self.arguments:
            if argument.output:
                self.store(argument)
        self.b.emit("yield", ())
        verify.check(kernel, "fuzz")
        return Program(kernel, self.arguments, scalars)

    def statement(self) -> None:
        self.budget -= 1
        kinds: list[tuple[int, Callable[[], Any]]] = [
            (5, self.load), (6, self.elementwise), (4, self.reduce), (5, self.dot), (3, self.reshape), (3, self.cast),
            (2, self.where), (1, self.arange), (1, self.gather), (1, self.full), (1, self.roughen), (2, self.scalar),
        ]  # fmt: skip
        if not self.quiet:
            kinds += [(2, self.store), (1, self.scatter)]
        if self.depth < 3:
            kinds += [(4 if self.depth == 0 else 1, self.loop), (2, self.branch)]
        if self.depth < 2:
            kinds.append((1, self.visible_loop))
        total = self.rng.randrange(sum(w for w, _ in kinds))
        for weight, kind in kinds:
            total -= weight
            if total < 0:
                kind()
                return

    # ---- control flow ------------------------------------------------------------------------------------------------

    def block(self, types: tuple[Type, ...], body: Callable[[tuple[Value, ...]], tuple[Value, ...]]) -> Block:
        block, outer = Block(types), self.b.block
        self.b.block = block
        self.scope.append([])
        self.rough.append([])
        self.depth += 1
        ends = body(block.params)
        self.b.emit("yield", ends)
        self.depth -= 1
        self.scope.pop()
        self.rough.pop()
        self.b.block = outer
        return block

    def bounds(self, step: int) -> tuple[Value, Value, int]:
        """Return low, high and the greatest number of iterations."""
        b, iterations = self.b, self.pick((0, 1, 2, 3, 4))
        if self.chance(0.3):
            low = self.value(lambda v: not v.shape and v.dtype is int32 and self.bound[v] <= 4)
            if low is not None:
                return low, b.binary("add", low, iterations * step - self.pick((0, 0, step - 1))), iterations + 1
        start = self.pick((0, 0, 0, 0, 1, -step))
        argument = self.pick(self.arguments)
        axis = self.rng.randrange(argument.tensor.rank)
        length = b.dim(argument.tensor, axis)
        found = argument.view(argument.base).shape[axis]
        if isinstance(length, Value) and (found - start) // step <= 6 and self.chance(0.7):
            return b.const(start, int32), length, max(1, -(-(found - start) // step))
        return (
            b.const(start, int32),
            b.const(start + iterations * step - self.pick((0, 0, step - 1)), int32),
            max(1, iterations),
        )

    def loop(self) -> None:
        step = self.pick((1, self.step))
        low, high, iterations = self.bounds(step)
        inits = []
        for _ in range(self.pick((0, 1, 1, 2, 2, 3))):
            alike = inits[0].type if inits and self.chance(0.6) else None  # those can change places
            value = self.value(
                lambda v, t=alike: v.type == t if t else v.dtype in (float32, int32, bool_) or self.chance(0.1)
            )
            if value is not None and self.chance(0.3):
                value = (
                    self.b.full({"float": 0.0, "int": 0, "bool": False}[value.dtype.kind], value.shape)
                    if value.shape
                    else value
                )
                self.bound.setdefault(value, 4)
            if value is not None:
                inits.append(self.held(value, CARRIED))
        outer_iterations = self.iterations
        self.iterations *= iterations

        def body(params: tuple[Value, ...]) -> tuple[Value, ...]:
            self.keep(params[0], 200)
            for p in params[1:]:
                self.keep(p, CARRIED)
            for _ in range(self.pick((1, 2, 3, 5))):
                self.statement()
            return tuple(self.next_value(p, params) for p in params[1:])

        op = self.control("for", (low, high, *inits), {"step": step}, tuple(v.type for v in inits), body)
        self.iterations = outer_iterations
        for result in op.results:
            self.keep(result, CARRIED)

    def control(
        self, kind: str, operands: tuple[Value, ...], attrs: dict[str, Any], types: tuple[Type, ...], *bodies: Any
    ) -> Op:
        first = (Type(int32), *types) if kind == "for" else ()
        blocks = tuple(self.block(first, body) for body in bodies)
        op = Op(kind, operands, attrs, types, blocks)
        self.b.block.ops.append(op)
        return op

    def next_value(self, param: Value, params: tuple[Value, ...]) -> Value:
        """Make the next carried value: a sum, another carried value, its transpose, a tile of the body, or itself."""
        b, type_ = self.b, param.type
        same = self.values(lambda v: v.type == type_)
        others = [p for p in params[1:] if p.type == type_ and p is not param]
        fresh = [v for v in self.scope[-1] if v.type == type_ and v not in params]
        roll = self.rng.random()
        if roll < 0.1:
            return param
        if roll < 0.25 and others:
            return self.pick(others)
        if roll < 0.35 and len(type_.shape) == 2 and type_.shape[0] == type_.shape[1]:
            return b.trans(param)
        arithmetic = type_.dtype in (float32, int32, int64)
        if roll < 0.45 and arithmetic and len(type_.shape) == 2 and type_.shape[0] == type_.shape[1]:
            return self.exactly(b.binary("sub", b.trans(param), param), 2 * CARRIED, type_)
        if roll < 0.8 and arithmetic and (fresh or same):
            value = self.pick(fresh or same)
            bound = self.bound[value]
            if (bound + 4) * self.iterations < CARRIED and value is not param:
                # The sum may grow past what clamping assumes, but not past what is exact.
                return b.binary("add", param, value) if self.chance(0.6) else b.binary("add", value, param)
            return self.exactly(b.binary("add", param, value), bound + CARRIED, type_)
        if fresh:
            return (
                self.held(self.pick(fresh), CARRIED)
                if type_.dtype is not bool_ and not type_.dtype.is_narrow
                else self.pick(fresh)
            )
        return self.pick(same) if not arithmetic else self.held(self.pick(same), CARRIED)

    def exactly(self, value: Value, bound: int, type_: Type) -> Value:
        self.bound[value] = bound
        return self.held(value, CARRIED)

    def branch(self) -> None:
        condition = self.value(lambda v: not v.shape and v.dtype is bool_)
        if condition is None or self.chance(0.5):
            condition = self.test(())
        chosen = [v for _ in range(self.pick((0, 1, 1, 2))) if (v := self.value()) is not None]
        if self.depth and self.chance(0.5):  # what is carried
            chosen = [v for v in self.values() if isinstance(v.owner, Block) and v.shape][-2:] or chosen
        types = tuple(v.type for v in chosen)
        bounds = [1] * len(types)

        def side(_: tuple[Value, ...]) -> tuple[Value, ...]:
            for _ in range(self.pick((0, 1, 2))):
                self.statement()
            ends = []
            for n, type_ in enumerate(types):
                own = [v for v in self.scope[-1] if v.type == type_]
                end = (
                    self.pick(own)
                    if own and self.chance(0.7)
                    else self.pick(self.values(lambda v, t=type_: v.type == t))
                )
                bounds[n] = max(bounds[n], self.bound[end])
                ends.append(end)
            return tuple(ends)

        op = self.control("if", (condition,), {}, types, side, side)
        for result, bound in zip(op.results, bounds, strict=True):
            self.keep(result, bound)

    def tile(self, shape: tuple[int, int], row: Value, column: Value) -> Value:
        """Load a float32 tile, perhaps transposed."""
        b = self.b
        readable = [a for a in self.arguments if a.tensor.rank == 2 and a.owned is None and not a.approximate]
        readable = [a for a in readable if a.tensor.dtype.is_float]
        if not readable or self.chance(0.05):
            return b.full(1.0, shape)
        whole = [a.tensor for a in readable if a.tensor.unit == 1 and a.tensor.dims[1] in range(shape[1], 1 << 20)]
        if whole and self.chance(0.5):
            return self.looked_up(self.pick(whole), shape, row)
        tensor = self.pick(readable).tensor
        transposed = self.chance(0.3)
        extents, starts = (shape[::-1], (column, row)) if transposed else (shape, (row, column))
        value = b.emit(
            "load", starts, Type(tensor.dtype, extents), tensor=tensor, extents=extents, checked=(True, True)
        ).result
        value = b.trans(value) if transposed else value
        self.bound[value] = HELD
        value = value if self.chance(0.5) else b.cast(value, float32)
        self.bound[value] = HELD
        return self.held(value, 8) if self.chance(0.3) else value

    def looked_up(self, tensor: Tensor, shape: tuple[int, int], row: Value) -> Value:
        """Gather whole rows of a tensor: in another order, or by a table of integers. Some may be outside."""
        b = self.b
        places = b.binary("mod", b.binary("add", b.binary("mul", b.arange(shape[0]), self.pick((1, 3, 5))), row), 7)
        tables = [a.tensor for a in self.arguments if a.tensor.rank == 1 and a.tensor.dtype in (int32, int64)]
        tables = [t for t in tables if not any(a.output and a.tensor is t for a in self.arguments)]
        if tables and self.chance(0.7):
            table = self.pick(tables)
            kind = Type(table.dtype, (shape[0],))
            places = b.emit("gather", (places,), kind, tensor=table).result
        rows, columns = b.expand(places, 1), b.expand(b.arange(shape[1]), 0)
        value = b.emit("gather", (rows, columns), Type(tensor.dtype, shape), tensor=tensor).result
        self.bound[value] = HELD
        return value

    def attention(self) -> None:
        """Build two dots in a loop with carried state, as in attention."""
        b, pick, chance = self.b, self.pick, self.chance
        m, n, d, e = (pick((*self.sides, 16, 32, 48, 64)) for _ in range(4))
        zero = b.const(0, int32)
        first = (
            b.binary("mul", self.pid, m)
            if self.pid is not None and chance(0.7)
            else b.const(pick((0, 0, 3, -2)), int32)
        )
        q = self.tile((m, d), first, zero)
        rows = b.binary("add", b.arange(m), first)
        argument = pick(self.arguments)
        length = b.value(b.dim(argument.tensor, 0), int32)
        found = argument.view(argument.base).shape[0]
        if found // n > 6:
            length = b.const(2 * n, int32)
        causal, hidden, tops = chance(0.5), chance(0.5), chance(0.6)
        inits = [b.full(0.0, (m, e)), b.full(0.0, (m,)), b.full(-8.0, (m,))]
        inits = inits if tops else inits[:2]

        def body(params: tuple[Value, ...]) -> tuple[Value, ...]:
            j, acc, total, *top = params
            s = b.dot(q, b.trans(self.tile((n, d), j, zero)))
            cols = b.binary("add", b.arange(n), j)
            if causal:
                seen = self.in_reach(rows, cols, length)
                if hidden:
                    b.emit("visible", (seen,))
                s = b.where(seen, s, -8.0)
            s = b.binary("min", b.binary("max", s, -8.0), 8.0)
            new = [b.binary("max", top[0], b.reduce("max", s, 1))] if tops else []
            p = b.binary("sub", s, b.expand(new[0], 1)) if tops and not (causal and hidden) else b.binary("add", s, 8.0)
            p = b.cast(p, float16) if chance(0.3) else p
            v = self.tile((n, e), j, zero)
            if v.dtype is not p.dtype:
                v, p = b.cast(v, float32), b.cast(p, float32)
            self.bound[v] = self.bound.get(v, HELD)
            product = b.dot(p, self.held(v, 8))
            total = b.binary("add", total, b.reduce("sum", b.cast(p, float32), 1))
            if tops and chance(0.5) and not (causal and hidden):  # a factor of 1 or 0 for each row
                factor = b.where(b.binary("eq", new[0], top[0]), 1.0, 0.0)
                acc, total = b.binary("mul", acc, b.expand(factor, 1)), b.binary("mul", total, factor)
            if chance(0.2) and not (causal and hidden):
                self.keep(p, 16)
                self.store()
            return (b.binary("add", acc, product), total, *new)

        op = self.control("for", (zero, length, *inits), {"step": n}, tuple(v.type for v in inits), body)
        self.bound.update({op.results[0]: EXACT, op.results[1]: EXACT})
        acc = op.results[0]
        if chance(0.5):
            acc = b.binary("add", acc, b.expand(op.results[1], 1))
        if chance(0.3):
            self.bound[acc] = EXACT
            acc = b.dot(self.held(acc, 64), self.tile((e, pick(self.sides)), zero, zero)) if chance(0.5) else acc
        self.keep(acc, EXACT)
        self.keep(op.results[1], EXACT)

    def in_reach(self, rows: Value, cols: Value, length: Value) -> Value:
        """Make a visibility predicate: causal, sometimes also limited to a length or a window."""
        b = self.b
        i, j = b.expand(rows, 1), b.expand(cols, 0)
        seen = b.binary("le", j, i)
        if self.chance(0.5):
            seen = b.binary("and", seen, b.binary("lt", j, length))
        if self.chance(0.4):
            seen = b.binary("and", seen, b.binary("lt", b.binary("sub", i, self.pick((1, 9, 40))), j))
        return seen

    def visible_loop(self) -> None:
        """Build a loop over blocks with a predicate; hidden positions do not affect the result."""
        b, step = self.b, self.step
        height = self.pick(self.sides)
        argument = self.pick([a for a in self.arguments if not a.approximate])
        if argument.owned is not None or argument.tensor.rank != 2 or argument.tensor.dtype is bool_:
            return
        length = argument.view(argument.base).shape[1]
        if length // step > 6:
            return
        rows = b.binary("add", b.arange(height), b.cast(self.start(height), int32))
        limit = b.dim(argument.tensor, 1)
        start = b.cast(self.start(length), int32)
        two = self.chance(0.5)
        init = b.full(0.0, (height, step) if two else (height,))

        def body(params: tuple[Value, ...]) -> tuple[Value, ...]:
            j, acc = params
            cols = b.binary("add", b.arange(step), j)
            seen = b.binary(self.pick(("le", "lt", "ge", "gt")), b.expand(cols, 0), b.expand(rows, 1))
            if self.chance(0.5):
                low = b.binary("sub", b.expand(rows, 1), self.pick((1, 3, 16)))
                seen = b.binary("and", seen, b.binary(self.pick(("ge", "lt")), b.expand(cols, 0), low))
            if self.chance(0.3):
                seen = b.binary("and", seen, b.expand(b.binary("lt", cols, limit), 0))
            b.emit("visible", (seen,))
            extents = (height, step)
            tile = b.emit(
                "load",
                (start, j),
                Type(argument.tensor.dtype, extents),
                tensor=argument.tensor,
                extents=extents,
                checked=(True, True),
            ).result
            picked = b.where(seen, b.cast(tile, float32), 0.0)
            if two:
                return (b.binary("add", acc, picked),)
            return (b.binary("add", acc, b.reduce("sum", picked, 1)),)

        high = b.value(limit, int32)
        op = self.control("for", (b.const(0, int32), high, init), {"step": step}, (init.type,), body)
        self.keep(op.result, HELD * 65 * 8)
