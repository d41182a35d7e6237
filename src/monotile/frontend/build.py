"""Build a kernel's IR from its Python source: statements and control flow. Expressions are in expressions.py.

The kernel's body is executed symbolically, once. A name holds either an IR value (known at run time) or a Python object
(known at compile time). `for` and `if` on run-time values become ops with blocks; names they change become loop-carried
values or results of the branch.
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
from .binding import bind_arguments
from .expressions import ExpressionBuilder
from .objects import Closure, RuntimeRange, describe
from .source import FunctionNode, as_load, function_node, namespace, place
from .unsupported import CURES, TITLES
from .words import MAX_UNROLLED, handler

MAX_DEPTH = 40  # of helper calls
CURE = "write it with assignments, for, if and the words of monotile.language"
ABSENT = object()


class Returned(Exception):
    """Unwinds a helper's body at its `return`, up to the call."""

    def __init__(self, value: Any, loc: Loc | None) -> None:
        self.value, self.loc = value, loc


def build(
    function: types.FunctionType,
    tensors: tuple[ir.Tensor, ...],
    scalars: tuple[tuple[str, DType], ...],
    consts: Mapping[str, Any],
    captured: Mapping[int, ir.Tensor] | None = None,
    numbers: Mapping[Any, str] | None = None,
    globals_read: list[GlobalRead] | None = None,
) -> ir.Kernel:
    """Build the IR of a kernel for given tensors, scalar types and constants. `captured` holds the tensors that stand
    for arrays captured by functions among the constants, by the array's id, and `numbers` the scalars that stand for
    captured numbers, by where these are bound. Globals the kernel depends on are appended to `globals_read`."""
    kernel = ir.Kernel(function.__name__, tensors, scalars, consts=dict(consts))
    builder = Builder(kernel.body)
    builder.captured = dict(captured or {})
    try:
        names = {t.name: t for t in tensors} | dict(consts)
        parameters = _emit_parameters(builder, function, scalars)
        builder.numbers = {place: parameters[name] for place, name in (numbers or {}).items()}
        _run(function, builder, names | parameters)
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


def _emit_parameters(
    builder: Builder, function: types.FunctionType, scalars: tuple[tuple[str, DType], ...]
) -> dict[str, Value]:
    """Emit the run-time scalars of a kernel, which are located at its definition."""
    builder.loc = place(function_node(function), function.__code__.co_filename)
    found = {}
    for name, dtype in scalars:
        found[name] = builder.emit("param", (), Type(dtype), name=name).result
        found[name].hint = name
    return found


def _run(function: types.FunctionType, builder: Builder, names: dict[str, Any]) -> None:
    node = function_node(function)
    if isinstance(node, ast.Lambda):
        raise builder.fail(BadSignature, "a lambda cannot be a kernel", "write a def")
    top = FunctionBuilder(function, builder, names, depth=0)
    top.local = carried.assigned(node.body)
    try:
        top.block(node.body)
    except Returned as returned:
        if returned.value is not None:
            builder.loc = returned.loc
            cure = "store the result in a tensor: out[...] = value"
            raise builder.fail(
                ReturnedValue, f"a kernel returns nothing, found {describe(returned.value)}", cure
            ) from None
    builder.emit("yield", ())


class FunctionBuilder(ExpressionBuilder):
    """Execute one function body symbolically and build its IR."""

    def __init__(self, function: types.FunctionType, builder: Builder, names: dict[str, Any], depth: int) -> None:
        super().__init__(builder, names, namespace(function, builder.numbers), function.__globals__)
        self.function, self.file, self.depth = function, function.__code__.co_filename, depth

    # ---- statements --------------------------------------------------------------------------------------------------

    def block(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self.locate(statement)
            kind = type(statement).__name__
            handler = getattr(self, f"visit_{kind}", None)
            if handler is None:
                found = f"{TITLES.get(kind, kind)} is not part of the kernel language"
                raise self.fail(UnsupportedPython, found, CURES.get(kind, CURE))
            handler(statement)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.eval(node.value)

    def visit_Pass(self, node: ast.Pass) -> None:
        pass

    def visit_Assert(self, node: ast.Assert) -> None:
        test = self.eval(node.test)
        self.locate(node.test)
        if isinstance(test, Value):
            cure = "assert on Const parameters only; check arguments before the call"
            raise self.fail(UnsupportedPython, "assert on a run-time value", cure)
        if not self.condition_of(test, node.test):
            message = self.assert_message(node.msg) if node.msg is not None else "the kernel's assertion does not hold"
            self.locate(node.test)
            raise self.fail(AssertionFailed, message, "change the Const parameters it speaks of")

    def assert_message(self, node: ast.expr) -> str:
        """Evaluate the message of an assert, the only place where f-strings are allowed."""
        if isinstance(node, ast.JoinedStr):
            return "".join([self.assert_message(part) for part in node.values])
        if isinstance(node, ast.FormattedValue):
            item = self.eval(node.value)
            form = self.assert_message(node.format_spec) if node.format_spec is not None else ""
            if isinstance(item, Value | ir.Tensor | tuple):
                return describe(item)
            return str(self.call_python(format, repr(item) if node.conversion == ord("r") else item, form))
        return str(self.call_python(str, self.eval(node)))

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self.eval(node.value)
        for target in node.targets:
            self.assign(target, value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
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
            self.locate(target)
            if not isinstance(tensor, ir.Tensor):
                found = f"only tensors can be written through a subscript, not {describe(tensor)}"
                raise self.fail(NotAssignable, found, "build tiles with where() and give them a new name")
            if not isinstance(value, Value | int | float):
                raise self.fail(NotAssignable, f"{describe(value)} cannot be stored", "store a tile or a number")
            indexing.store(self.builder, tensor, subscript, value)
        else:
            self.locate(target)
            raise self.fail(NotAssignable, "this cannot be assigned to", "assign to a name or to a tensor's slice")

    def unpack(self, target: ast.Tuple | ast.List, value: Any) -> None:
        for part in target.elts:
            if isinstance(part, ast.Starred):
                self.locate(part)
                raise self.fail(UnsupportedPython, "'*' among the names of an assignment", "name every item")
        self.locate(target)
        if not isinstance(value, tuple) or len(value) != len(target.elts):
            found = f"{len(target.elts)} name(s) for {describe(value)}"
            raise self.fail(UnpackMismatch, found, "give as many names as there are values")
        for part, item in zip(target.elts, value, strict=True):
            self.assign(part, item)

    def visit_Return(self, node: ast.Return) -> None:
        value = self.eval(node.value) if node.value is not None else None
        raise Returned(value, place(node, self.file))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.decorator_list:
            self.locate(node.decorator_list[0])
            raise self.fail(
                UnsupportedPython, "a decorator inside a kernel", "define the helper at the top of the file"
            )
        self.names[node.name] = self.closure(node)

    # ---- branches ----------------------------------------------------------------------------------------------------

    def visit_If(self, node: ast.If) -> None:
        """Take one branch at compile time, or build an `if` op whose results are the names the branches change."""
        test = self.condition(node.test)
        if not isinstance(test, Value):
            self.block(node.body if test else node.orelse)
            return
        before = self.names
        then, yes = self.run_branch(node.body, before)
        other, no = self.run_branch(node.orelse, before)
        self.locate(node)
        changed = [n for n in yes if yes[n] is not no.get(n, ABSENT)]
        self.end_names((yes.keys() ^ no.keys()), f"one branch of the if on line {node.lineno}")
        self.names = {n: v for n, v in yes.items() if n in no}
        pairs = {}
        for name in sorted(n for n in changed if n in no):
            pairs[name] = carried.join_branches(self.builder, name, (yes[name], no[name]), (then, other))
        types_ = tuple(t for a, _ in pairs.values() for t in a.types)
        op = Op("if", (test,), {}, types_, (then, other), self.builder.loc)
        for block, side in ((then, 0), (other, 1)):
            block.ops.append(
                Op("yield", tuple(v for p in pairs.values() for v in p[side].values), loc=self.builder.loc)
            )
        self.builder.block.ops.append(op)
        results = iter(op.results)
        for name, (a, _) in pairs.items():
            self.names[name] = a.unflatten(results)

    def run_branch(self, body: list[ast.stmt], before: dict[str, Any]) -> tuple[Block, dict[str, Any]]:
        block = Block()
        self.names = dict(before)
        self.run_in_block(block, body, "an if on a run-time value")
        after, self.names = self.names, before
        return block, after

    def run_in_block(self, block: Block, body: list[ast.stmt], what: str) -> None:
        """Execute statements with another block as the current one. A `return` inside it is an error."""
        outer, self.builder.block = self.builder.block, block
        try:
            self.block(body)
        except Returned as returned:
            self.builder.loc = returned.loc
            cure = "assign to a name there and return it at the end"
            raise self.fail(EarlyReturn, f"return inside {what}", cure) from None
        finally:
            self.builder.block = outer

    def end_names(self, names: set[str], where: str) -> None:
        """Record names whose scope ends here, for the error message if one is read later."""
        self.ended.update(dict.fromkeys(names, where))

    # ---- loops -------------------------------------------------------------------------------------------------------

    def visit_For(self, node: ast.For) -> None:
        if node.orelse:
            raise self.fail(UnsupportedPython, "for ... else", "move the else part after the loop")
        over = self.eval(node.iter)
        self.locate(node.iter)
        if isinstance(over, RuntimeRange):
            self.runtime_loop(node, over)
        elif isinstance(over, tuple | list | range | enumerate | zip | reversed):
            items = self.call_python(tuple, itertools.islice(over, MAX_UNROLLED + 1))
            if len(items) > MAX_UNROLLED:
                raise self.fail(BadStep, f"a loop of more than {MAX_UNROLLED} unrolled iterations", "use range")
            for item in items:
                self.assign(node.target, item)
                self.block(node.body)
        else:
            found = f"for cannot run over {describe(over)}"
            raise self.fail(NotIterable, found, "use range(...), blocks(...), static_range(...) or a tuple")

    def runtime_loop(self, node: ast.For, over: RuntimeRange) -> None:
        """Build a `for` op. Names assigned before the loop and inside it are carried from iteration to iteration."""
        if not isinstance(node.target, ast.Name):
            self.locate(node.target)
            raise self.fail(UnsupportedPython, "a run-time loop has one loop variable", "unpack inside the loop")
        outer = self.builder.block
        only = carried.only_loop_variables(node.body) | {node.target.id}
        before = {n: v for n, v in self.names.items() if n not in only}
        inits = {
            n: carried.enter_loop(self.builder, before[n]) for n in sorted(carried.assigned(node.body)) if n in before
        }
        flat = tuple(v for init in inits.values() for v in init.values)
        body = Block((Type(int32), *(v.type for v in flat)))
        for param, value in zip(body.params[1:], flat, strict=True):
            param.hint = value.hint
        body.params[0].hint = node.target.id
        params = iter(body.params[1:])
        self.names = (
            before | {n: init.unflatten(params) for n, init in inits.items()} | {node.target.id: body.params[0]}
        )
        self.builder.block = body
        try:
            self.mark_visible(over, body.params[0])
            self.run_in_block(body, node.body, "a run-time loop")
            self.locate(node)
            yields = tuple(v for n, init in inits.items() for v in self.leave_loop(n, init).values)
        finally:
            self.builder.block = outer
        body.ops.append(Op("yield", yields, loc=self.builder.loc))
        types_ = tuple(v.type for v in flat)
        op = Op("for", (over.low, over.high, *flat), {"step": over.step}, types_, (body,), self.builder.loc)
        outer.ops.append(op)
        results = iter(op.results)
        self.end_names((self.names.keys() - before.keys()) | only, f"the loop on line {node.lineno}")
        self.names = before | {n: init.unflatten(results) for n, init in inits.items()}

    def leave_loop(self, name: str, init: carried.Flattened) -> carried.Flattened:
        if name not in self.names:
            found = f"{name!r} enters this loop as {init} and is a loop variable inside it"
            raise self.fail(CarriedTypeChanged, found, "use another name for the loop variable")
        return carried.leave_loop(self.builder, name, self.names[name], init)

    def mark_visible(self, over: RuntimeRange, start: Value) -> None:
        """Emit the `visible` mark of a loop over blocks(length, step, visible)."""
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
        """Execute a helper's body in place of the call."""
        caller = self.builder.loc
        if self.depth >= MAX_DEPTH:
            raise self.fail(TooDeep, f"helper calls are nested more than {MAX_DEPTH} deep", "remove the recursion")
        if isinstance(function, Closure):
            node, enclosing = function.node, function.enclosing
            assert isinstance(enclosing, FunctionBuilder)
            names, owner = enclosing.names, enclosing.function
            defaults, keyword = function.defaults, function.keyword_defaults
        else:
            node, names, owner = self.source(function), {}, function
            defaults, keyword = function.__defaults__ or (), function.__kwdefaults__ or {}
        bound = bind_arguments(self.builder, node, args, kwargs, (defaults, keyword))
        local = carried.assigned(node.body) if isinstance(node, ast.FunctionDef) else set()
        callee = FunctionBuilder(
            owner, self.builder, {n: v for n, v in names.items() if n not in local} | bound, self.depth + 1
        )
        callee.local = local | bound.keys()
        if isinstance(function, Closure):
            callee.local |= function.enclosing.local
            callee.ended = dict(function.enclosing.ended)
        try:
            if isinstance(node, ast.Lambda):
                return callee.eval(node.body)
            callee.block(node.body)
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
