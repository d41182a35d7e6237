"""Evaluate the expressions of a kernel: names, operators, attributes, subscripts and calls."""

from __future__ import annotations

import ast
import builtins
import inspect
import operator
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import ir
from ..dtypes import DType, bool_
from ..errors import (
    BadIndex,
    BadOperand,
    ConstantFailed,
    KernelError,
    NameOutOfScope,
    NotCallable,
    ShapeNotConstant,
    TruthOfTile,
    UnknownAttribute,
    UnknownName,
    UnsupportedPython,
    WrongCall,
)
from ..ir import Value, bits, composed
from ..ir.builder import Builder
from . import cures, functions, indexing, library_words, vocabulary
from .objects import Closure, Method, RuntimeRange, TransformedFunction, describe
from .operators import BINARY, COMPARE, is_too_large
from .source import FunctionNode, place
from .unsupported import CURES, TITLES

PLAIN = (int, float, str, type(None), DType)
REDUCTIONS = ("sum", "max", "min", "argmax", "argmin", "cumsum")  # as methods of a tile

OMITTED_CURE = "if this is an argument that was left out of the call: pass it, or test `is not None` first"


class ExpressionBuilder(ABC):
    """Evaluate expressions: on compile-time values now, as Python does; on run-time values by building IR."""

    file: str = ""

    def __init__(
        self, builder: Builder, names: dict[str, Any], captured: dict[str, Any], globals_: dict[str, Any]
    ) -> None:
        self.builder, self.names, self.captured, self.globals = builder, names, captured, globals_
        self.local: set[str] = set()  # names this function assigns somewhere, which hide outer ones
        self.called: ast.expr | None = None  # the function of the innermost call that is being evaluated
        self.ended: dict[str, str] = {}  # names whose scope has ended, and where they were defined

    def locate(self, node: ast.AST) -> None:
        self.builder.loc = place(node, self.file)

    def fail(self, kind: type[KernelError], found: str, cure: str) -> KernelError:
        return self.builder.fail(kind, found, cure)

    @abstractmethod
    def inline(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute a helper's body in place of the call."""

    @abstractmethod
    def word_handler(self, function: Any) -> Callable[..., Any] | None:
        """Return the function that builds a word or method of the language, or None for other callables."""

    def eval(self, node: ast.expr) -> Any:
        handler: Callable[[Any], Any] | None = getattr(self, f"visit_{type(node).__name__}", None)
        if handler is None:
            self.locate(node)
            kind = type(node).__name__
            found = f"{TITLES.get(kind, kind)} is not part of the kernel language"
            raise self.fail(
                UnsupportedPython, found, CURES.get(kind, "use the operators and words of monotile.language")
            )
        return handler(node)

    def call_python(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a Python function on compile-time values. What it raises is reported as a mistake in the constants."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            text = str(error) or type(error).__name__
            raise self.fail(ConstantFailed, f"this fails at compile time: {text}", "correct the constants") from None

    # ---- names and literals ------------------------------------------------------------------------------------------

    def visit_Constant(self, node: ast.Constant) -> Any:
        return node.value

    def visit_Tuple(self, node: ast.Tuple | ast.List) -> Any:
        return tuple([self.eval(e) for e in node.elts])

    visit_List = visit_Tuple

    def visit_Lambda(self, node: ast.Lambda) -> Closure:
        return self.closure(node)

    def closure(self, node: FunctionNode) -> Closure:
        defaults = tuple([self.eval(d) for d in node.args.defaults])
        pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        return Closure(node, self, defaults, {p.arg: self.eval(d) for p, d in pairs if d is not None})

    def visit_Name(self, node: ast.Name) -> Any:
        name = node.id
        if name in self.names:
            return self.names[name]
        if name not in self.local:
            for names in (self.captured, self.globals, vars(builtins)):
                if name in names:
                    return self.read_outer(names, name)
        self.locate(node)
        if name in self.ended:
            cure = f"give {name!r} a value before it, of the type it gets there"
            raise self.fail(NameOutOfScope, f"{name!r} is only defined inside {self.ended[name]}", cure)
        cure = "define it before this line"
        if name not in self.local:
            known = (*self.names, *self.captured, *self.globals)
            cure = cures.unknown_name(name, known, called=node is self.called)
        raise self.fail(UnknownName, f"{name!r} is not defined here", cure)

    def read_outer(self, names: dict[str, Any], name: str) -> Any:
        """Read a name from outside the kernel. Globals that may be rebound are recorded in `globals_read`."""
        value = names[name]
        argument = self.argument(value, (id(names), name))
        if argument is not value:
            return argument
        fixed = isinstance(value, types.ModuleType | types.BuiltinFunctionType | type | DType)
        if not fixed and names is not self.captured and getattr(value, "__module__", None) != vocabulary.__name__:
            self.builder.globals_read.append((names, name, value))
        return value

    def argument(self, value: Any, place: Any) -> Any:
        """Return the tensor or scalar that stands for a captured array or number, or else the value itself. `place` is
        where a number is bound."""
        numbers, arrays = self.builder.numbers, self.builder.captured
        if place in numbers:
            return numbers[place]
        if id(value) in numbers:
            return numbers[id(value)]
        if id(value) not in arrays:
            return value
        tensor = arrays[id(value)]
        return tensor if value.ndim else indexing.load(self.builder, tensor, 0)  # a number for all programs

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        owner, name = self.eval(node.value), node.attr
        self.locate(node)
        if isinstance(owner, ir.Tensor):
            if name == "shape":
                return tuple([indexing.length(self.builder, owner, n) for n in range(owner.rank)])
            if name in ("dtype", "ndim"):
                return owner.dtype if name == "dtype" else owner.rank
        elif isinstance(owner, Value):
            if name == "T":
                return self.builder.trans(owner)
            if name in ("shape", "dtype", "ndim", "device"):  # torch.tensor(0.0, device=score.device)
                return {"shape": owner.shape, "dtype": owner.dtype, "ndim": len(owner.shape), "device": None}[name]
            if name in REDUCTIONS or name in library_words.METHODS:
                return Method(name, owner)
        elif isinstance(owner, types.ModuleType) and name in vars(owner):
            return self.read_outer(vars(owner), name)
        elif (isinstance(owner, tuple) and (name in getattr(owner, "_fields", ()) or name == "_replace")) or (
            isinstance(owner, types.ModuleType | type | DType) and self.call_python(hasattr, owner, name)
        ):
            return self.call_python(getattr, owner, name)
        elif functions.is_object(owner) and (value := functions.attribute(owner, name)) is not functions.ABSENT:
            return self.argument(value, (id(owner), name))
        cure = (
            "tensors have .shape, .dtype and .ndim; tiles also .T, .astype, .sum, .max, .argmax and methods like .abs"
        )
        if owner is None:
            cure = OMITTED_CURE
        elif isinstance(owner, types.ModuleType):
            cure = cures.unknown_word(name)
        raise self.fail(UnknownAttribute, f"{describe(owner)} has no {name!r} in the kernel language", cure)

    # ---- operators ---------------------------------------------------------------------------------------------------

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        left, right = self.eval(node.left), self.eval(node.right)
        self.locate(node)
        kind, plain = BINARY[type(node.op)]
        if not isinstance(left, Value) and not isinstance(right, Value):
            return self.constant_arithmetic(plain, left, right)
        if isinstance(node.op, ast.Pow) and isinstance(left, Value) and not isinstance(right, Value):
            return composed.power(self.builder, left, self.number(right))
        if isinstance(node.op, ast.Pow) and not isinstance(left, Value):
            return composed.power_of(self.builder, self.number(left), right)
        if kind is None:
            found = f"{TITLES[type(node.op).__name__]} on run-time values is not part of the kernel language"
            raise self.fail(UnsupportedPython, found, CURES[type(node.op).__name__])
        return self.builder.binary(kind, self.number(left), self.number(right))

    def constant_arithmetic(self, plain: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        """Evaluate an operator on compile-time numbers, tuples and strings as Python does."""
        left, right = (x if isinstance(x, tuple | str) else self.number(x) for x in (left, right))
        if is_too_large(plain, left, right):
            raise self.fail(ConstantFailed, "this compile-time value is too large", "use smaller constants")
        return self.call_python(plain, left, right)

    def number(self, item: Any) -> Any:
        """Check an operand of arithmetic: a tile, a run-time scalar or a Python number."""
        if isinstance(item, Value | int | float):
            return item
        if isinstance(item, np.generic) and item.dtype.kind in "biuf":
            return item.item()
        if getattr(item, "ndim", None) == 0 and not isinstance(item, ir.Tensor):  # torch.tensor(2.0), np.array(2.0)
            found = self.call_python(lambda: item.item())
            if isinstance(found, int | float):
                return found
        cure = "use tiles or numbers here"
        if isinstance(item, ir.Tensor):
            cure = f"load a tile first: {item.name}[rows]"
        elif item is None:
            cure = "test it with 'is None' and keep it out of arithmetic"
        raise self.fail(BadOperand, f"{describe(item)} where a tile or a number is needed", cure)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        if isinstance(node.op, ast.Not):
            test = self.condition(node.operand)
            self.locate(node)
            return self.builder.unary("not", test) if isinstance(test, Value) else not test
        item = self.eval(node.operand)
        self.locate(node)
        item = self.number(item)
        if isinstance(node.op, ast.UAdd):
            return item
        if isinstance(item, Value):
            return self.builder.unary("neg" if isinstance(node.op, ast.USub) else "not", item)
        if isinstance(node.op, ast.USub):
            return -item
        return not item if isinstance(item, bool) else self.call_python(operator.invert, item)

    def visit_Compare(self, node: ast.Compare) -> Any:
        sides = [self.eval(e) for e in (node.left, *node.comparators)]
        self.locate(node)
        result: Any = True
        for op, left, right in zip(node.ops, sides, sides[1:], strict=False):
            test = self.compare(op, left, right)
            if isinstance(test, Value) and isinstance(result, Value):
                result = self.builder.binary("and", result, test)
            elif isinstance(test, Value):
                result = test if result else False
            else:
                test = self.call_python(bool, test)
                result = (result if test else False) if isinstance(result, Value) else result and test
        return result

    def compare(self, op: ast.cmpop, left: Any, right: Any) -> Any:
        if isinstance(op, ast.Is | ast.IsNot):
            alike = isinstance(left, PLAIN) and type(left) is type(right) and left == right
            return (left is right or alike) == isinstance(op, ast.Is)
        if isinstance(op, ast.In | ast.NotIn):
            values = right if isinstance(right, tuple) else ()
            if any(isinstance(x, Value | ir.Tensor) for x in (left, right, *values)):
                raise self.fail(UnsupportedPython, "'in' on run-time values", "compare: (x == a) | (x == b)")
            return self.call_python(operator.contains, right, left) == isinstance(op, ast.In)
        kind, plain = COMPARE[type(op)]
        if any(isinstance(x, Value | ir.Tensor | Method | RuntimeRange) for x in (left, right)):
            return self.builder.binary(kind, self.number(left), self.number(right))
        return self.call_python(plain, left, right)

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        """`and` / `or`: a compile-time operand short-circuits, as in Python; run-time scalars become & or |."""
        stop = isinstance(node.op, ast.Or)  # the value that short-circuits
        result: Value | None = None
        item: Any = None
        for part in node.values:
            item = self.eval(part)
            test = self.condition_of(item, part)
            if not isinstance(test, Value):
                if test == stop:
                    return item if result is None else stop
            elif result is None:
                result = test
            else:
                result = self.builder.binary("or" if stop else "and", result, test)
        return item if result is None else result

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        test = self.condition(node.test)
        if not isinstance(test, Value):
            return self.eval(node.body if test else node.orelse)
        yes, no = self.eval(node.body), self.eval(node.orelse)
        self.locate(node)
        return self.builder.where(test, self.number(yes), self.number(no))

    def condition(self, node: ast.expr) -> Any:
        return self.condition_of(self.eval(node), node)

    def condition_of(self, test: Any, node: ast.expr) -> Any:
        """Convert an operand to a condition: a compile-time bool, or a run-time bool scalar."""
        self.locate(node)
        if isinstance(test, ir.Tensor | Method | RuntimeRange) or (isinstance(test, Value) and test.shape):
            cure = "use where(condition, a, b), combine tiles with & and |, or reduce first: .max(axis=0)"
            raise self.fail(TruthOfTile, f"{describe(test)} is neither true nor false", cure)
        if not isinstance(test, Value):
            return self.call_python(bool, test)
        return test if test.dtype is bool_ else self.builder.binary("ne", test, 0)

    # ---- subscripts --------------------------------------------------------------------------------------------------

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        owner = self.eval(node.value)
        subscript = self.subscript(node.slice)
        self.locate(node)
        if isinstance(owner, ir.Tensor):
            return indexing.read(self.builder, owner, subscript)
        if isinstance(owner, Value):
            return self.index_tile(owner, subscript)
        if functions.is_fixed_table(owner):
            owner = tuple(owner.tolist())
        if not isinstance(owner, tuple):
            cure = "index tensors, tiles and tuples; pass tables in as tensors"
            if owner is None:
                cure = OMITTED_CURE
            elif isinstance(owner, np.ndarray):
                cure = "pass it in as a tensor; a table of one dimension, if read-only: table.setflags(write=False)"
            raise self.fail(BadIndex, f"{describe(owner)} cannot be indexed in a kernel", cure)
        parts = (subscript.start, subscript.stop, subscript.step) if isinstance(subscript, slice) else (subscript,)
        if isinstance(subscript, Value):
            return bits.lookup(self.builder, owner, subscript)
        if any(isinstance(part, Value) for part in parts):
            raise self.fail(ShapeNotConstant, "a tuple is indexed by a run-time value", "use a constant position")
        try:
            return owner[subscript]
        except Exception:
            found = f"a tuple of {len(owner)} has no item {describe(subscript)}"
            if isinstance(subscript, int) and abs(subscript) < 10**9:
                found = f"a tuple of {len(owner)} has no item {subscript}"
            raise self.fail(BadIndex, found, f"use a position from 0 to {len(owner) - 1}") from None

    def subscript(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Tuple):
            return tuple([self.subscript(e) for e in node.elts])
        if isinstance(node, ast.Slice):
            parts = [None if p is None else self.eval(p) for p in (node.lower, node.upper, node.step)]
            return slice(*parts)
        return self.eval(node)

    def index_tile(self, tile: Value, subscript: Any) -> Value:
        """Lower `x[:, None]` and `x[None, :]`."""
        items = subscript if isinstance(subscript, tuple) else (subscript,)
        whole = [isinstance(i, slice) and i.start is None and i.stop is None and i.step is None for i in items]
        if any(i is not None and not w for i, w in zip(items, whole, strict=True)) or sum(whole) != len(tile.shape):
            cure = "tiles take x[:, None] and x[None, :]; to take part of a tensor, index the tensor"
            raise self.fail(BadIndex, f"this subscript of {describe(tile)} is not supported", cure)
        for position, item in enumerate(items):
            if item is None:
                tile = self.builder.expand(tile, position)
        return tile

    # ---- calls -------------------------------------------------------------------------------------------------------

    def visit_Call(self, node: ast.Call) -> Any:
        self.called = node.func
        function = self.eval(node.func)
        args: list[Any] = []
        for a in node.args:
            if not isinstance(a, ast.Starred):
                args.append(self.eval(a))
                continue
            items = self.eval(a.value)
            if not isinstance(items, tuple):
                self.locate(a)
                raise self.fail(UnsupportedPython, f"* before {describe(items)}", "only a tuple can be spread with *")
            args += items
        if any(k.arg is None for k in node.keywords):
            self.locate(node)
            raise self.fail(UnsupportedPython, "** in a call is not part of the kernel language", "name every argument")
        kwargs = {str(k.arg): self.eval(k.value) for k in node.keywords}
        self.locate(node)
        return self.call(function, tuple(args), kwargs)

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handler = self.word_handler(function)
        if handler is not None:
            return self.call_word(_title(function), handler, args, kwargs)
        runtime = any(
            isinstance(x, Value | ir.Tensor | Closure | TransformedFunction | RuntimeRange | Method)
            for x in (*args, *kwargs.values())
        )
        meaning = library_words.word_of(function, runtime=runtime)
        if meaning is not None:
            return self.call_word(function.__name__, meaning, args, kwargs)
        of_library = runtime and library_words.is_of_library(function)
        if isinstance(function, types.FunctionType | Closure) and not of_library:
            return self.inline(function, args, kwargs)
        if functions.is_function(function) and not of_library:
            return self.call(*functions.unwrapped(function, args, kwargs, self.argument))
        if isinstance(function, Value | ir.Tensor | RuntimeRange | vocabulary.Tensor) or not callable(function):
            cure = "call words, helper functions and plain Python functions; index with [...]"
            raise self.fail(NotCallable, f"{describe(function)} cannot be called", cure)
        name = getattr(function, "__name__", type(function).__name__)
        if type(function).__name__ == "Kernel":
            raise self.fail(
                NotCallable, f"the kernel {name!r} cannot be called from a kernel", "make it a plain function"
            )
        of_tuple = isinstance(getattr(function, "__self__", None), tuple)
        builds_tuple = isinstance(function, type) and issubclass(function, tuple)
        if runtime and not of_tuple and not builds_tuple:
            found = f"{name!r} cannot be called with run-time values in a kernel"
            raise self.fail(NotCallable, found, cures.unsupported_function(name))
        return self.call_python(function, *args, **kwargs)

    def call_word(self, name: str, handler: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        signature = inspect.signature(handler)
        try:
            signature.bind(self, *args, **kwargs)
        except TypeError as error:
            shown = ", ".join([str(p.replace(annotation=p.empty)) for p in list(signature.parameters.values())[1:]])
            raise self.fail(WrongCall, f"{name}: {error}", cures.wrong_arguments(name, shown, kwargs)) from None
        return handler(self, *args, **kwargs)


def _title(function: Any) -> str:
    """Return the name of a word or method as it is written before its arguments."""
    if isinstance(function, TransformedFunction):
        return f"{function.name}(function)"
    return f".{function.name}" if isinstance(function, Method) else str(function.__name__)
