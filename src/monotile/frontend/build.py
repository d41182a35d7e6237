"""Python source to IR: statements, control flow and names. Expressions: expressions.py, subscripts: indexing.py.
A kernel is run symbolically once. Names hold either IR values (known at run time) or Python objects (known now).
`for` and `if` on run-time values become ops with blocks; what they change is carried through them explicitly.
"""

from __future__ import annotations

import ast
import itertools
import types
from collections.abc import Callable, Mapping
from typing import Any

from .. import ir
from ..dtypes import DType, bool_, int32
from ..errors import (
    AssertionFailed,
    BadSignature,
    BadStep,
    CarriedTypeChanged,
    EarlyReturn,
    InternalError,
    KernelError,
    MonotileError,
    NoSource,
    NotAssignable,
    NotIterable,
    ReturnedValue,
    TooDeep,
    UnpackMismatch,
    UnsupportedPython,
    WrongCall,
)
from ..ir import Block, Loc, Op, Type, Value
from ..ir.builder import Builder, GlobalRead
from . import carried, indexing
from .expressions import Expressions
from .objects import Closure, Loop, describe
from .source import FunctionNode, as_load, function_node, namespace, place
from .unsupported import CURES, TITLES
from .words import MAX_UNROLLED, handler

MAX_DEPTH = 40
CURE = "write it with assignments, for, if and the words of monotile.language"
ABSENT = object()


class Returned(Exception):
    """A helper's `return`, on its way to the call."""

    def __init__(self, value: Any, loc: Loc | None) -> None:
        self.value, self.loc = value, loc


def build(
    function: types.FunctionType,
    tensors: tuple[ir.Tensor, ...],
    scalars: tuple[tuple[str, DType], ...],
    consts: Mapping[str, Any],
    captured: Mapping[int, ir.Tensor] | None = None,
    globals_read: list[GlobalRead] | None = None,
) -> ir.Kernel:
    """Build the IR of a kernel for given tensors, scalar types and constants. `captured` holds the tensors that stand
    for arrays captured by functions among the constants, by the array's id. Globals the kernel depends on are appended
    to `globals_read`."""
    kernel = ir.Kernel(function.__name__, tensors, scalars, consts=dict(consts))
    builder = Builder(kernel.body)
    builder.captured = dict(captured or {})
    try:
        _run(function, builder, {t.name: t for t in tensors} | dict(consts), scalars)
    except MonotileError:
        raise
    except RecursionError:
        found = "helper calls or expressions are nested too deeply"
        raise builder.fail(TooDeep, found, "remove the recursion, or name the parts of the expression") from None
    except Exception as error:
        where = f"{builder.loc.file}, line {builder.loc.line}" if builder.loc else function.__name__
        raise InternalError(f"monotile could not compile {where}: {type(error).__name__}: {error}") from error
    if globals_read is not None:
        globals_read += builder.globals_read
    return kernel


def _run(
    function: types.FunctionType, builder: Builder, names: dict[str, Any], scalars: tuple[tuple[str, DType], ...]
) -> None:
    node = function_node(function)
    builder.loc = place(node, function.__code__.co_filename)
    if isinstance(node, ast.Lambda):
        raise builder.fail(BadSignature, "a lambda cannot be a kernel", "write a def")
    for name, dtype in scalars:
        value = builder.emit("param", (), Type(dtype), name=name).result
        value.hint = name
        names[name] = value
    scope = Scope(function, builder, names, depth=0)
    scope.local = carried.assigned(node.body)
    try:
        scope.block(node.body)
    except Returned as returned:
        if returned.value is not None:
            builder.loc = returned.loc
            cure = "store the result in a tensor: out[...] = value"
            raise builder.fail(
                ReturnedValue, f"a kernel returns nothing, found {describe(returned.value)}", cure
            ) from None
    builder.emit("yield", ())


class Scope(Expressions):
    """The symbolic execution of one function body."""

    def __init__(self, function: types.FunctionType, builder: Builder, names: dict[str, Any], depth: int) -> None:
        super().__init__(builder, names, namespace(function), function.__globals__)
        self.function, self.file, self.depth = function, function.__code__.co_filename, depth

    # ---- statements --------------------------------------------------------------------------------------------------

    def block(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self.at(statement)
            kind = type(statement).__name__
            handler = getattr(self, f"do_{kind}", None)
            if handler is None:
                found = f"{TITLES.get(kind, kind)} is not part of the kernel language"
                raise self.fail(UnsupportedPython, found, CURES.get(kind, CURE))
            handler(statement)

    def do_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring says nothing to the compiler
            self.eval(node.value)

    def do_Pass(self, node: ast.Pass) -> None:
        pass

    def do_Assert(self, node: ast.Assert) -> None:
        test = self.eval(node.test)
        self.at(node.test)
        if isinstance(test, Value):
            cure = "assert on Const parameters only; check arguments before the call"
            raise self.fail(UnsupportedPython, "assert on a run-time value", cure)
        if not self.truth_of(test, node.test):
            message = self.message(node.msg) if node.msg is not None else "the kernel's assertion does not hold"
            self.at(node.test)
            raise self.fail(AssertionFailed, message, "change the Const parameters it speaks of")

    def message(self, node: ast.expr) -> str:
        """The text of an assert; here, and only here, f-strings are read."""
        if isinstance(node, ast.JoinedStr):
            return "".join([self.message(part) for part in node.values])
        if isinstance(node, ast.FormattedValue):
            item = self.eval(node.value)
            form = self.message(node.format_spec) if node.format_spec is not None else ""
            if isinstance(item, Value | ir.Tensor | tuple):
                return describe(item)
            return str(self.now(format, repr(item) if node.conversion == ord("r") else item, form))
        return str(self.now(str, self.eval(node)))

    def do_Assign(self, node: ast.Assign) -> None:
        value = self.eval(node.value)
        for target in node.targets:
            self.assign(target, value)

    def do_AugAssign(self, node: ast.AugAssign) -> None:
        load = ast.copy_location(as_load(node.target), node.target)
        value = self.eval(ast.copy_location(ast.BinOp(load, node.op, node.value), node))
        self.assign(node.target, value)

    def assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            if isinstance(value, Value) and not value.hint:
                value.hint = target.id
            self.names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            self.unpack(target, value)
        elif isinstance(target, ast.Subscript):
            tensor = self.eval(target.value)
            subscript = self.subscript(target.slice)
            self.at(target)
            if not isinstance(tensor, ir.Tensor):
                found = f"only tensors can be written through a subscript, not {describe(tensor)}"
                raise self.fail(NotAssignable, found, "build tiles with where() and give them a new name")
            if not isinstance(value, Value | int | float):
                raise self.fail(NotAssignable, f"{describe(value)} cannot be stored", "store a tile or a number")
            indexing.store(self.builder, tensor, subscript, value)
        else:
            self.at(target)
            raise self.fail(NotAssignable, "this cannot be assigned to", "assign to a name or to a tensor's slice")

    def unpack(self, target: ast.Tuple | ast.List, value: Any) -> None:
        for part in target.elts:
            if isinstance(part, ast.Starred):
                self.at(part)
                raise self.fail(UnsupportedPython, "'*' among the names of an assignment", "name every item")
        self.at(target)
        if not isinstance(value, tuple) or len(value) != len(target.elts):
            found = f"{len(target.elts)} name(s) for {describe(value)}"
            raise self.fail(UnpackMismatch, found, "give as many names as there are values")
        for part, item in zip(target.elts, value, strict=True):
            self.assign(part, item)

    def do_Return(self, node: ast.Return) -> None:
        value = self.eval(node.value) if node.value is not None else None
        raise Returned(value, place(node, self.file))

    def do_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.decorator_list:
            self.at(node.decorator_list[0])
            raise self.fail(
                UnsupportedPython, "a decorator inside a kernel", "define the helper at the top of the file"
            )
        self.names[node.name] = self.closure(node)

    # ---- branches ----------------------------------------------------------------------------------------------------

    def do_If(self, node: ast.If) -> None:
        test = self.truth(node.test)
        if not isinstance(test, Value):
            self.block(node.body if test else node.orelse)
            return
        before = self.names
        then, yes = self.branch(node.body, before)
        other, no = self.branch(node.orelse, before)
        self.at(node)
        changed = [n for n in yes if yes[n] is not no.get(n, ABSENT)]
        self.lose((yes.keys() ^ no.keys()), f"one branch of the if on line {node.lineno}")
        self.names = {n: v for n, v in yes.items() if n in no}
        pairs = {}
        for name in sorted(n for n in changed if n in no):
            pairs[name] = carried.join(self.builder, name, (yes[name], no[name]), (then, other))
        types_ = tuple(t for a, _ in pairs.values() for t in a.types)
        op = Op("if", (test,), {}, types_, (then, other), self.builder.loc)
        for block, side in ((then, 0), (other, 1)):
            block.ops.append(
                Op("yield", tuple(v for p in pairs.values() for v in p[side].values), loc=self.builder.loc)
            )
        self.builder.block.ops.append(op)
        results = iter(op.results)
        for name, (a, _) in pairs.items():
            self.names[name] = a.rebuild(results)

    def branch(self, body: list[ast.stmt], before: dict[str, Any]) -> tuple[Block, dict[str, Any]]:
        block = Block()
        self.names = dict(before)
        self.inside(block, body, "an if on a run-time value")
        after, self.names = self.names, before
        return block, after

    def inside(self, block: Block, body: list[ast.stmt], what: str) -> None:
        """Run statements into another block; a `return` there could not be compiled."""
        outer, self.builder.block = self.builder.block, block
        try:
            self.block(body)
        except Returned as returned:
            self.builder.loc = returned.loc
            cure = "assign to a name there and return it at the end"
            raise self.fail(EarlyReturn, f"return inside {what}", cure) from None
        finally:
            self.builder.block = outer

    def lose(self, names: set[str], where: str) -> None:
        """Names that end here, remembered for the message when one is read later."""
        self.lost.update(dict.fromkeys(names, where))

    # ---- loops -------------------------------------------------------------------------------------------------------

    def do_For(self, node: ast.For) -> None:
        if node.orelse:
            raise self.fail(UnsupportedPython, "for ... else", "move the else part after the loop")
        over = self.eval(node.iter)
        self.at(node.iter)
        if isinstance(over, Loop):
            self.loop(node, over)
        elif isinstance(over, tuple | list | range | enumerate | zip | reversed):
            items = self.now(tuple, itertools.islice(over, MAX_UNROLLED + 1))
            if len(items) > MAX_UNROLLED:
                raise self.fail(BadStep, f"a loop of more than {MAX_UNROLLED} written-out rounds", "use range")
            for item in items:
                self.assign(node.target, item)
                self.block(node.body)
        else:
            found = f"for cannot run over {describe(over)}"
            raise self.fail(NotIterable, found, "use range(...), blocks(...), static_range(...) or a tuple")

    def loop(self, node: ast.For, over: Loop) -> None:
        if not isinstance(node.target, ast.Name):
            self.at(node.target)
            raise self.fail(UnsupportedPython, "a run-time loop has one loop variable", "unpack inside the loop")
        outer = self.builder.block
        only = carried.only_loop_variables(node.body) | {node.target.id}
        before = {n: v for n, v in self.names.items() if n not in only}
        inits = {n: carried.enter(self.builder, before[n]) for n in sorted(carried.assigned(node.body)) if n in before}
        flat = tuple(v for init in inits.values() for v in init.values)
        body = Block((Type(int32), *(v.type for v in flat)))
        for param, value in zip(body.params[1:], flat, strict=True):
            param.hint = value.hint
        body.params[0].hint = node.target.id
        params = iter(body.params[1:])
        self.names = before | {n: init.rebuild(params) for n, init in inits.items()} | {node.target.id: body.params[0]}
        self.builder.block = body
        try:
            self.mark_visible(over, body.params[0])
            self.inside(body, node.body, "a run-time loop")
            self.at(node)
            yields = tuple(v for n, init in inits.items() for v in self.leave(n, init).values)
        finally:
            self.builder.block = outer
        body.ops.append(Op("yield", yields, loc=self.builder.loc))
        types_ = tuple(v.type for v in flat)
        op = Op("for", (over.low, over.high, *flat), {"step": over.step}, types_, (body,), self.builder.loc)
        outer.ops.append(op)
        results = iter(op.results)
        self.lose((self.names.keys() - before.keys()) | only, f"the loop on line {node.lineno}")
        self.names = before | {n: init.rebuild(results) for n, init in inits.items()}

    def leave(self, name: str, init: carried.Carried) -> carried.Carried:
        if name not in self.names:
            found = f"{name!r} enters this loop as {init} and is a loop variable inside it"
            raise self.fail(CarriedTypeChanged, found, "use another name for the loop variable")
        return carried.leave(self.builder, name, self.names[name], init)

    def mark_visible(self, over: Loop, start: Value) -> None:
        if over.visible is None:
            return
        b = self.builder
        seen = self.call(over.visible, (b.binary("add", start, b.arange(over.step)),), {})
        if seen is True:
            return
        if not (isinstance(seen, Value) and seen.dtype is bool_) and seen is not False:
            found = f"visible gave {describe(seen)}"
            raise self.fail(WrongCall, found, "give a function from a tile of positions to a bool tile")
        tile = b.value(seen)
        b.emit("visible", (tile if tile.shape else b.broadcast(tile, (over.step,)),))

    # ---- calls of helpers --------------------------------------------------------------------------------------------

    def word_handler(self, function: Any) -> Callable[..., Any] | None:
        return handler(function)

    def inline(self, function: types.FunctionType | Closure, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A helper's body, run in place of the call."""
        caller = self.builder.loc
        if self.depth >= MAX_DEPTH:
            raise self.fail(TooDeep, f"helper calls are nested more than {MAX_DEPTH} deep", "remove the recursion")
        if isinstance(function, Closure):
            node, home = function.node, function.scope
            assert isinstance(home, Scope)
            names, owner = home.names, home.function
            defaults, keyword = function.defaults, function.keyword_defaults
        else:
            node, names, owner = self.source(function), {}, function
            defaults, keyword = function.__defaults__ or (), function.__kwdefaults__ or {}
        bound = self.bind(node, args, kwargs, defaults, keyword)
        local = carried.assigned(node.body) if isinstance(node, ast.FunctionDef) else set()
        scope = Scope(owner, self.builder, {n: v for n, v in names.items() if n not in local} | bound, self.depth + 1)
        scope.local = local | bound.keys()
        if isinstance(function, Closure):
            scope.local |= function.scope.local
            scope.lost = dict(function.scope.lost)
        try:
            if isinstance(node, ast.Lambda):
                return scope.eval(node.body)
            scope.block(node.body)
        except Returned as returned:
            return returned.value
        except KernelError as error:
            if caller is not None:
                error.calls.append(caller)
            raise
        finally:
            self.builder.loc = caller
        return None

    def source(self, function: types.FunctionType) -> FunctionNode:
        try:
            return function_node(function)
        except NoSource as error:
            raise self.fail(NoSource, error.found, error.cure) from None

    def bind(
        self,
        node: FunctionNode,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        defaults: tuple[Any, ...],
        keyword_defaults: dict[str, Any],
    ) -> dict[str, Any]:
        a = node.args
        title = getattr(node, "name", "lambda")
        if a.vararg or a.kwarg:
            raise self.fail(UnsupportedPython, f"{title}() takes *args or **kwargs", "name every parameter")
        positional = [p.arg for p in a.posonlyargs + a.args]
        every = positional + [p.arg for p in a.kwonlyargs]
        cure = f"write {title}({', '.join(every)})"
        named = every[len(a.posonlyargs) :]
        wrong = [n for n in kwargs if n not in named or n in positional[: len(args)]]
        if len(args) > len(positional) or wrong:
            extra = f"the argument {wrong[0]!r}" if wrong else f"{len(args)} positional arguments"
            raise self.fail(WrongCall, f"{title}() does not take {extra}", cure)
        fallback = dict(zip(positional[len(positional) - len(defaults) :], defaults, strict=True)) | keyword_defaults
        bound = fallback | dict(zip(positional, args, strict=False)) | kwargs
        missing = [n for n in every if n not in bound]
        if missing:
            raise self.fail(WrongCall, f"{title}() is missing {', '.join(missing)}", cure)
        return bound
