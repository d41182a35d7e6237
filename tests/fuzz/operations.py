"""Random operations on the values in scope."""

from __future__ import annotations

import math

from monotile import dtypes, ir
from monotile.dtypes import FP8, DType, bfloat16, bool_, float16, float32, int8, int32, int64, uint8, uint32
from monotile.ir import Value, composed

from .arguments import EXACT, HELD, Arguments


class Operations(Arguments):
    # ---- bounds ------------------------------------------------------------------------------------------------------

    def held(self, value: Value, limit: int = HELD) -> Value:
        """Return the value, clamped if it may exceed the limit."""
        if value.dtype is bool_ or self.bound[value] <= limit:
            return value
        if value.dtype.is_narrow:
            value = self.b.cast(value, dtypes.computed(value.dtype))
        number = float(limit) if value.dtype.is_float else limit
        value = self.b.binary("min", self.b.binary("max", value, 0 if value.dtype is uint32 else -number), number)
        self.bound[value] = limit
        return value

    def converted(self, value: Value, dtype: DType) -> Value:
        bound = self.bound[value]
        value = self.b.cast(value, dtype)
        self.bound[value] = 1 if dtype is bool_ else 255 if dtype is uint8 else max(1, bound)
        return value

    def plain(self, value: Value) -> Value:
        """Cast to the type in which arithmetic happens."""
        return self.converted(value, int32 if value.dtype is uint32 else dtypes.computed(value.dtype))

    # ---- statements --------------------------------------------------------------------------------------------------

    def shape_fits(self, a: tuple[int, ...], b: tuple[int, ...]) -> bool:
        return all(x == y or 1 in (x, y) for x, y in zip(a[::-1], b[::-1], strict=False))

    def partner(self, value: Value) -> Value:
        other = self.value(lambda v: self.shape_fits(v.shape, value.shape))
        assert other is not None
        other = self.plain(other)
        return other if other.dtype.kind == value.dtype.kind else self.converted(other, value.dtype)

    def elementwise(self) -> None:
        b, x = self.b, self.value()
        if x is None:
            return
        x = self.plain(x)
        limit = self.bound[x]
        if x.dtype is bool_:
            y = self.partner(x)
            kind = self.pick(("and", "or", "not", "eq", "ne"))
            self.keep(b.unary("not", x) if kind == "not" else b.binary(kind, x, y), 1)
            return
        roll = self.rng.random()
        if roll < 0.1:
            self.keep(b.unary(self.pick(("neg", "abs")), x), limit)
            return
        if roll < 0.2:
            if self.infinite and x.dtype is float32 and self.chance(0.4):
                self.keep(b.binary("div", x, self.pick((0.5, -0.5))), 2 * limit)
                return
            self.keep(b.binary(self.pick(("add", "sub", "mul")), x, self.pick((0, 1, 2, 3))), 3 * limit + 3)
            return
        if roll < 0.23:
            power = self.pick((0, 2, 3, 4))
            x = self.held(x, 8)
            self.keep(composed.power(b, x, power), 8**power)
            return
        if roll < 0.3 and x.dtype.is_int and self.chance(0.5):
            self.bits(x)
            return
        y = self.partner(x)
        if roll < 0.3:
            self.keep(b.binary(self.pick(("lt", "le", "eq", "ne")), x, y), 1)
            return
        kind = self.pick(("add", "add", "sub", "mul", "max", "min") + (() if x.dtype.is_float else ("floordiv", "mod")))
        if (limit * self.bound[y] if kind == "mul" else limit + self.bound[y]) > EXACT:
            x, y = self.held(x), self.held(y)
        if kind in ("floordiv", "mod") and ir.constant(y) == 0:
            return
        limit, other = self.bound[x], self.bound[y]
        bound = {"mul": limit * other, "add": limit + other, "sub": limit + other}.get(kind, max(limit, other))
        self.keep(b.binary(kind, x, y), bound)

    def bits(self, x: Value) -> None:
        """Shift an integer, by any count, or combine its bits with those of another, perhaps as uint32."""
        b, other = self.b, self.partner(x)
        if x.dtype is not other.dtype:
            other = self.converted(other, x.dtype)
        unsigned = x.dtype is int32 and self.chance(0.5)
        if unsigned:
            x, other = b.cast(x, uint32), b.cast(other, uint32)
        kind = self.pick(("and", "or", "xor", "shl", "shr"))
        value = b.binary(kind, x, self.pick((1, 3, other)) if kind in ("shl", "shr") else other)
        if unsigned:
            value = b.binary(self.pick(("max", "min", "floordiv")), value, other)
            value = b.cast(value, int32)
        self.keep(b.binary("and", value, HELD - 1), HELD)

    def where(self) -> None:
        x = self.value(lambda v: bool(v.shape))
        if x is None:
            return
        x = self.plain(x)
        y = self.partner(x)
        if self.chance(0.5):
            test: Value | None = self.test(self.pick((x.shape, y.shape)))
        else:
            test = self.value(
                lambda v: v.dtype is bool_ and self.shape_fits(v.shape, x.shape) and self.shape_fits(v.shape, y.shape)
            )
        if test is None or not self.shape_fits(x.shape, y.shape):
            return
        number = self.chance(0.3) and x.dtype is not bool_
        bound = max(self.bound[x], self.bound[y])
        other: Value | float = 0 if number else y
        if self.infinite and x.dtype is float32 and self.chance(0.6):
            other = self.pick((math.inf, -math.inf))
        sides = (other, x) if isinstance(other, float) and self.chance(0.3) else (x, other)
        self.keep(self.b.where(test, *sides), bound)

    def test(self, shape: tuple[int, ...]) -> Value:
        """Compare positions."""
        b = self.b
        if not shape:
            return b.binary("lt", self.start(7), self.start(9))
        along = self.rng.randrange(len(shape))
        positions = b.binary("add", b.arange(shape[along]), self.start(shape[along]))
        if len(shape) == 1:
            return b.binary(self.pick(("lt", "le", "gt", "ge")), positions, self.start(shape[0]))
        left = b.expand(positions, 1 - along)
        right = b.expand(b.binary("add", b.arange(shape[1 - along]), self.pick((0, 1, -2, 5))), along)
        right = right if self.chance(0.6) else self.start(shape[along])
        if isinstance(right, Value) and right.dtype is int64:
            left = b.cast(left, int64)
        return b.binary(self.pick(("lt", "le", "gt", "ge")), left, right)

    def cast(self) -> None:
        x = self.value()
        if x is None:
            return
        dtype = self.pick((float32, float32, float16, bfloat16, *FP8, int32, int32, int64, int8, uint8, bool_))
        if dtype in (float16, bfloat16, *FP8):
            x = self.held(x, 1 << 8 if dtype in FP8 else 1 << 12)
        bound = self.bound[x]
        value = self.converted(x, dtype)
        self.keep(value, 1 if dtype is bool_ else 255 if dtype in (uint8, int8) else 2 * bound)

    def reshape(self) -> None:
        x = self.value(lambda v: bool(v.shape))
        if x is None:
            return
        if self.chance(0.25):
            count = math.prod(x.shape)
            sides = self.pick([(count,), *((n, count // n) for n in (1, 2, 3, 8, x.shape[-1]) if count % n == 0)])
            self.keep(composed.reshape(self.b, x, sides), self.bound[x])
        elif len(x.shape) == 2:
            self.keep(self.b.trans(x), self.bound[x])
        elif self.chance(0.3):
            side = self.pick(self.sides)
            self.keep(self.b.broadcast(self.b.expand(x, 0), (side, x.shape[0])), self.bound[x])
        else:
            self.keep(self.b.expand(x, self.pick((0, 1))), self.bound[x])

    def reduce(self) -> None:
        x = self.value(lambda v: bool(v.shape))
        if x is None:
            return
        x = self.plain(x)
        axis = self.rng.randrange(len(x.shape))
        fold = self.pick(("max", "min") if x.dtype is bool_ else ("sum", "sum", "max", "min"))
        if fold == "sum" and self.bound[x] * x.shape[axis] > EXACT:
            x = self.held(x)
        if self.chance(0.15):
            fold = self.pick(("max", "min"))
            self.keep(composed.position_of_extremum(self.b, fold, x, axis), x.shape[axis])
            return
        if fold == "sum" and self.chance(0.3):
            self.keep(self.b.cumsum(x, axis), self.bound[x] * x.shape[axis])
            return
        self.keep(self.b.reduce(fold, x, axis), self.bound[x] * (x.shape[axis] if fold == "sum" else 1))

    def dot(self) -> None:
        """Multiply tiles in scope, perhaps a tile with itself; another tile may be added."""
        b = self.b
        if self.chance(0.2):
            self.integer_dot()
            return
        x = self.value(lambda v: len(v.shape) == 2 and v.dtype is not bool_)
        if x is None:
            return
        x = self.held(x)
        if not x.dtype.is_float:
            x = self.converted(x, float32)
        moved = self.chance(0.3)
        if moved:
            x = self.moved(x)
        if self.chance(0.4):
            x, original = b.trans(x), x
            self.bound[x] = self.bound[original]
        k = x.shape[1]
        y = self.value(lambda v: len(v.shape) == 2 and k in v.shape and v.dtype is not bool_)
        if y is None or self.chance(0.15):
            y = b.trans(x)
            self.bound[y] = self.bound[x]
        y = self.held(y)
        if not y.dtype.is_float:
            y = self.converted(y, x.dtype)
        if not moved and self.chance(0.3):
            y = self.moved(y)
        if y.shape[0] != k or (y.shape[0] == y.shape[1] and self.chance(0.3)):
            y, original = b.trans(y), y
            self.bound[y] = self.bound[original]
        bound = self.bound[x] * self.bound[y] * k
        result = self.keep(b.dot(x, y), bound)
        if self.chance(0.4):
            other = self.value(
                lambda v: v is not result and v.dtype is float32 and self.shape_fits(v.shape, result.shape)
            )
            if other is not None and self.bound[other] + bound < EXACT:
                sides = (result, other) if self.chance(0.5) else (other, result)
                self.keep(b.binary("add", *sides), self.bound[other] + bound)

    def moved(self, x: Value) -> Value:
        """Make a tile of the same shape whose elements come from others: running sums, a reshape and back, or the tile
        with its greatest or least of each row or column added."""
        b, axis = self.b, self.rng.randrange(2)
        x = self.held(self.converted(x, float32), 8)
        kind = self.pick(("scan", "scan", "reshape", "reduce"))
        if kind == "scan":
            value, bound = b.cumsum(x, axis), 8 * x.shape[axis]
        elif kind == "reshape":
            value, bound = composed.reshape(b, composed.reshape(b, x, (math.prod(x.shape),)), x.shape), 8
        else:
            value, bound = b.binary("add", b.expand(b.reduce(self.pick(("max", "min")), x, axis), axis), x), 16
        self.bound[value] = bound
        return value

    def integer_dot(self) -> None:
        """Multiply tiles of int8 and uint8; one that is not is cast, which keeps its low bits."""
        b, kinds = self.b, (int8, uint8)
        x = self.value(lambda v: len(v.shape) == 2 and v.dtype in kinds) or self.value(lambda v: len(v.shape) == 2)
        if x is None:
            return
        x = b.trans(x) if self.chance(0.3) else x
        y = self.value(lambda v: len(v.shape) == 2 and x.shape[1] in v.shape)
        y = b.trans(x) if y is None or self.chance(0.2) else y
        y = y if y.shape[0] == x.shape[1] else b.trans(y)
        x, y = (v if v.dtype in kinds else b.cast(v, self.pick(kinds)) for v in (x, y))
        self.keep(b.dot(x, y), 255 * 255 * x.shape[1])

    def arange(self) -> None:
        value = self.b.binary("add", self.b.arange(self.pick(self.sides)), self.start(9))
        self.keep(value, 1 << 10)

    def full(self) -> None:
        shape = tuple(self.pick(self.sides) for _ in range(self.pick((1, 2))))
        scalar = self.value(lambda v: not v.shape)
        if scalar is not None and self.chance(0.5):
            self.keep(self.b.full(scalar, shape), self.bound[scalar])
        else:
            numbers = (0.0, 1.0, 0, 3, True, *((math.inf, -math.inf) if self.infinite else ()))
            self.keep(self.b.full(self.pick(numbers), shape), 3)

    def scalar(self) -> None:
        a = self.value(lambda v: not v.shape)
        dimension = self.pick(self.arguments)
        if a is None or self.chance(0.2):
            length = self.b.dim(dimension.tensor, self.rng.randrange(dimension.tensor.rank))
            if isinstance(length, Value):
                self.bound[length] = 200
                self.scope[0].append(length)
            return
        a = self.plain(a)
        c = self.value(lambda v: not v.shape)
        assert c is not None
        c = self.plain(c)
        if a.dtype.kind == c.dtype.kind and a.dtype is not bool_:
            a, c = self.held(a), self.held(c)
            self.keep(self.b.binary(self.pick(("add", "sub", "mul", "min", "max")), a, c), HELD * HELD)

    def roughen(self) -> None:
        x = self.value(lambda v: v.dtype is float32 and len(v.shape) > 0)
        if x is None:
            return
        value = self.b.binary("mul", self.held(x, 8), 0.25)
        kinds: tuple[str, ...] = ("exp", "exp2", "tanh", "sigmoid", "erf", "sin", "cos")
        if self.infinite:
            kinds += ("sqrt", "log", "log2", "reciprocal")
            value = self.b.where(self.test(value.shape), value, self.pick((math.inf, -math.inf)))
        value = self.b.unary(self.pick(kinds), value)
        if self.chance(0.5) and len(value.shape) == 2:
            top = self.b.reduce(self.pick(("sum", "max")), value, self.rng.randrange(2))
            if self.chance(0.5) or top.shape[0] == value.shape[-1]:
                value = top
        self.rough[-1].append(value)
