"""Expressions of a kernel: names, operators, attributes, subscripts and calls."""

from __future__ import annotations

import ast
import builtins
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import indexing, ir
from .builder import Builder
from .dtypes import DType, bool_
from .errors import BadIndex, KernelError, ShapeNotConstant, TruthOfTile, UnknownName, UnsupportedPython, WrongCall
from .ir import Value
from .source import FunctionNode, place

BINARY = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.FloorDiv: "floordiv", ast.Mod: "mod",
    ast.BitAnd: "and", ast.BitOr: "or",
}  # fmt: skip
COMPARE = {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne"}
PLAIN = (int, float, bool, str, type(None), DType)


@dataclass
class Loop:
    """What a `for` runs over when its bounds are known only at run time."""

    low: Value
    high: Value
    step: int
    visible: Any = None


@dataclass
class Closure:
    """A function or lambda written inside a kernel."""

    node: FunctionNode
    scope: Expressions


@dataclass
class Method:
    """A word reached through a dot: `x.sum`, `x.astype`."""

    name: str
    owner: Any


class Expressions:
    file: str = ""

    def __init__(
        self, builder: Builder, names: dict[str, Any], captured: dict[str, Any], globals_: dict[str, Any]
    ) -> None:
        self.builder, self.names, self.captured, self.globals = builder, names, captured, globals_

    def at(self, node: ast.AST) -> None:
        self.builder.loc = place(node, self.file)

    def fail(self, kind: type[KernelError], found: str, cure: str) -> KernelError:
        return self.builder.fail(kind, found, cure)

    def inline(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError  # frontend.Scope, which knows statements

    def eval(self, node: ast.expr) -> Any:
        handler: Callable[[Any], Any] | None = getattr(self, f"on_{type(node).__name__}", None)
        if handler is None:
            self.at(node)
            found = f"'{type(node).__name__}' expressions are not part of the kernel language"
            raise self.fail(UnsupportedPython, found, "use the operators and words of monotile.language")
        return handler(node)

    # ---- names and literals --------------------------------------------------------------------------------------------

    def on_Constant(self, node: ast.Constant) -> Any:
        return node.value

    def on_Tuple(self, node: ast.Tuple) -> Any:
        return tuple(self.eval(e) for e in node.elts)

    on_List = on_Tuple

    def on_Lambda(self, node: ast.Lambda) -> Closure:
        return Closure(node, self)

    def on_Name(self, node: ast.Name) -> Any:
        for names in (self.names, self.captured, self.globals, vars(builtins)):
            if node.id in names:
                return names[node.id]
        self.at(node)
        cure = "define it before this line; a name made inside a loop or branch does not leave it"
        raise self.fail(UnknownName, f"{node.id!r} is not defined here", cure)

    def on_Attribute(self, node: ast.Attribute) -> Any:
        owner, name = self.eval(node.value), node.attr
        if isinstance(owner, ir.Tensor):
            if name == "shape":
                return tuple(self.dim(owner, n) for n in range(owner.rank))
            if name in ("dtype", "ndim"):
                return owner.dtype if name == "dtype" else owner.rank
        elif isinstance(owner, Value):
            if name == "T":
                self.at(node)
                return self.builder.trans(owner)
            if name in ("shape", "dtype", "ndim"):
                return {"shape": owner.shape, "dtype": owner.dtype, "ndim": len(owner.shape)}[name]
            if name in ("astype", "sum", "max", "min"):
                return Method(name, owner)
        elif isinstance(owner, tuple) and (name in getattr(owner, "_fields", ()) or name == "_replace"):
            return getattr(owner, name)
        elif isinstance(owner, types.ModuleType | type | DType) and hasattr(owner, name):
            return getattr(owner, name)
        self.at(node)
        what = f"tensor {owner.name!r}" if isinstance(owner, ir.Tensor) else type(owner).__name__.lower()
        cure = "tensors have .shape, .dtype and .ndim; tiles also .T, .astype, .sum, .max and .min"
        raise self.fail(UnknownName, f"a {what} has no {name!r} in the kernel language", cure)

    def dim(self, tensor: ir.Tensor, n: int) -> Any:
        from .dtypes import int32

        length = tensor.dims[n]
        if isinstance(length, int):
            return length
        value = self.builder.emit("dim", (), ir.Type(int32), tensor=tensor, axis=n).result
        value.hint = f"{tensor.name}_{n}"
        return value

    # ---- operators -----------------------------------------------------------------------------------------------------

    def on_BinOp(self, node: ast.BinOp) -> Any:
        left, right = self.eval(node.left), self.eval(node.right)
        self.at(node)
        if not isinstance(left, Value) and not isinstance(right, Value):
            return self.constant(node, left, right)
        kind = BINARY.get(type(node.op))
        if kind is None:
            found = f"the operator {type(node.op).__name__} is not part of the kernel language"
            raise self.fail(UnsupportedPython, found, "for powers multiply, or use exp2(y * log2(x)); for a @ b use dot(a, b)")
        return self.builder.binary(kind, self.number(left), self.number(right))

    def constant(self, node: ast.BinOp, left: Any, right: Any) -> Any:
        """Arithmetic on compile-time values is Python's own."""
        tree = ast.Expression(ast.BinOp(ast.Name("a", ast.Load()), node.op, ast.Name("b", ast.Load())))
        try:
            return eval(compile(ast.fix_missing_locations(tree), "<const>", "eval"), {}, {"a": left, "b": right})
        except (TypeError, ZeroDivisionError, ValueError, OverflowError) as error:
            raise self.fail(WrongCall, f"this compile-time value fails: {error}", "correct the constants") from None

    def number(self, item: Any) -> Any:
        if isinstance(item, Value | int | float):
            return item
        found = f"{item.name!r} is a tensor" if isinstance(item, ir.Tensor) else f"{type(item).__name__} in arithmetic"
        raise self.fail(WrongCall, found, "load a tile first: t[rows]" if isinstance(item, ir.Tensor) else "use tiles or numbers")

    def on_UnaryOp(self, node: ast.UnaryOp) -> Any:
        if isinstance(node.op, ast.Not):
            test = self.truth(node.operand)
            return self.builder.unary("not", test) if isinstance(test, Value) else not test
        item = self.eval(node.operand)
        self.at(node)
        if not isinstance(item, Value):
            if isinstance(node.op, ast.Invert):
                return not item if isinstance(item, bool) else ~item
            return -self.number(item) if isinstance(node.op, ast.USub) else item
        if isinstance(node.op, ast.UAdd):
            return item
        return self.builder.unary("neg" if isinstance(node.op, ast.USub) else "not", item)

    def on_Compare(self, node: ast.Compare) -> Any:
        sides = [self.eval(e) for e in (node.left, *node.comparators)]
        result: Any = True
        for op, left, right in zip(node.ops, sides, sides[1:], strict=False):
            self.at(node)
            test = self.compare(op, left, right)
            if isinstance(test, Value) and isinstance(result, Value):
                result = self.builder.binary("and", result, test)
            elif isinstance(test, Value):
                result = test if result else False
            else:
                result = (result if test else False) if isinstance(result, Value) else result and test
        return result

    def compare(self, op: ast.cmpop, left: Any, right: Any) -> Any:
        if isinstance(op, ast.Is | ast.IsNot):
            same = left is right or (isinstance(left, PLAIN) and isinstance(right, PLAIN) and left == right)
            return same if isinstance(op, ast.Is) else not same
        if isinstance(op, ast.In | ast.NotIn):
            if isinstance(left, Value) or not isinstance(right, tuple):
                raise self.fail(UnsupportedPython, "'in' on run-time values", "compare: (x == a) | (x == b)")
            return (left in right) == isinstance(op, ast.In)
        if isinstance(left, Value) or isinstance(right, Value):
            return self.builder.binary(COMPARE[type(op)], self.number(left), self.number(right))
        kind = COMPARE[type(op)]
        if kind in ("eq", "ne"):
            return (left == right) == (kind == "eq")
        return {"lt": left < right, "le": left <= right, "gt": left > right, "ge": left >= right}[kind]

    def on_BoolOp(self, node: ast.BoolOp) -> Any:
        """`and` / `or`: a compile-time side decides at once; two run-time scalars become & or |."""
        stop = isinstance(node.op, ast.Or)
        result: Any = not stop
        for part in node.values:
            test = self.truth(part)
            if not isinstance(test, Value):
                if bool(test) == stop:
                    return stop
                continue
            result = self.builder.binary("or" if stop else "and", result, test) if isinstance(result, Value) else test
        return result

    def on_IfExp(self, node: ast.IfExp) -> Any:
        test = self.truth(node.test)
        if not isinstance(test, Value):
            return self.eval(node.body if test else node.orelse)
        yes, no = self.eval(node.body), self.eval(node.orelse)
        self.at(node)
        return self.builder.where(test, self.number(yes), self.number(no))

    def truth(self, node: ast.expr) -> Any:
        """What an `if` tests: a compile-time truth, or a run-time bool scalar."""
        test = self.eval(node)
        self.at(node)
        if not isinstance(test, Value):
            return bool(test)
        if test.shape:
            cure = "use where(condition, a, b), combine tiles with & and |, or reduce first: .max(axis=0)"
            raise self.fail(TruthOfTile, f"a tile {test.type} is neither true nor false", cure)
        return test if test.dtype is bool_ else self.builder.binary("ne", test, 0)

    # ---- subscripts ----------------------------------------------------------------------------------------------------

    def on_Subscript(self, node: ast.Subscript) -> Any:
        owner = self.eval(node.value)
        subscript = self.subscript(node.slice)
        self.at(node)
        if isinstance(owner, ir.Tensor):
            return indexing.load(self.builder, owner, subscript)
        if isinstance(owner, tuple):
            if isinstance(subscript, int | slice) and not isinstance(subscript, Value):
                try:
                    return owner[subscript]
                except IndexError:
                    raise self.fail(BadIndex, f"a tuple of {len(owner)} has no item {subscript}", "count from 0") from None
            raise self.fail(ShapeNotConstant, "a tuple is indexed by a run-time value", "use a constant position")
        if isinstance(owner, Value):
            return self.reshape(owner, subscript)
        raise self.fail(BadIndex, f"{type(owner).__name__} cannot be indexed in a kernel", "index tensors, tiles and tuples")

    def subscript(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Tuple):
            return tuple(self.subscript(e) for e in node.elts)
        if isinstance(node, ast.Slice):
            parts = [None if p is None else self.eval(p) for p in (node.lower, node.upper, node.step)]
            return slice(*parts)
        return self.eval(node)

    def reshape(self, tile: Value, subscript: Any) -> Value:
        """`x[:, None]` and `x[None, :]`."""
        items = subscript if isinstance(subscript, tuple) else (subscript,)
        whole = [i for i in items if i == slice(None)]
        if any(i is not None and i != slice(None) for i in items) or len(whole) != len(tile.shape):
            cure = "tiles take x[:, None] and x[None, :]; to take part of a tensor, index the tensor"
            raise self.fail(BadIndex, f"this subscript of a tile {tile.type} is not supported", cure)
        for position, item in enumerate(items):
            if item is None:
                tile = self.builder.expand(tile, position)
        return tile

    # ---- calls ---------------------------------------------------------------------------------------------------------

    def on_Call(self, node: ast.Call) -> Any:
        function = self.eval(node.func)
        args: list[Any] = []
        for a in node.args:
            args.extend(self.eval(a.value)) if isinstance(a, ast.Starred) else args.append(self.eval(a))
        if any(k.arg is None for k in node.keywords):
            self.at(node)
            raise self.fail(UnsupportedPython, "** in a call", "name every argument")
        kwargs = {str(k.arg): self.eval(k.value) for k in node.keywords}
        self.at(node)
        return self.call(function, tuple(args), kwargs)

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from .words import WORDS, method

        handler = WORDS.get(function) if isinstance(function, types.FunctionType | types.BuiltinFunctionType | type) else None
        if handler is not None:
            try:
                return handler(self, *args, **kwargs)
            except TypeError as error:
                name = getattr(function, "__name__", "this word")
                raise self.fail(WrongCall, f"{name}: {error}", "see the word's arguments in docs/language.md") from error
        if isinstance(function, Method):
            return method(self, function, args, kwargs)
        if isinstance(function, types.FunctionType | Closure):
            return self.inline(function, args, kwargs)
        if isinstance(function, type) and issubclass(function, tuple) and hasattr(function, "_fields"):
            return self.python(function, args, kwargs)
        if isinstance(getattr(function, "__self__", None), tuple) and function.__name__ == "_replace":
            return self.python(function, args, kwargs)
        plain = all(not isinstance(x, Value | ir.Tensor) for x in (*args, *kwargs.values()))
        if callable(function) and plain:
            return self.python(function, args, kwargs)
        found = f"{getattr(function, '__name__', function)!r} cannot be called with run-time values in a kernel"
        raise self.fail(WrongCall, found, "use the words of monotile.language, or a plain Python helper function")

    def python(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An ordinary call at compile time."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise self.fail(WrongCall, f"this call fails at compile time: {error}", "correct the constants") from error
