"""Python source to IR: statements, control flow and names. Expressions are in expressions.py, subscripts in indexing.py.

A kernel is run symbolically once. Names hold either IR values (known at run time) or ordinary Python objects (known now).
`for` and `if` on run-time values become ops with blocks; what they change is carried through them explicitly.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator, Mapping
from typing import Any

from . import indexing, ir
from .builder import Builder
from .dtypes import DType, bool_, int32
from .errors import CarriedTypeChanged, KernelError, NotAssignable, ReturnedValue, TooDeep, UnsupportedPython, WrongCall
from .expressions import Closure, Expressions, Loop
from .ir import Block, Op, Type, Value
from .source import FunctionNode, function_node, namespace, place

MAX_DEPTH = 40
ABSENT = object()


class Returned(Exception):
    """A helper's `return`, on its way to the call."""

    def __init__(self, value: Any) -> None:
        self.value = value


def build(
    function: types.FunctionType,
    tensors: tuple[ir.Tensor, ...],
    scalars: tuple[tuple[str, DType], ...],
    consts: Mapping[str, Any],
) -> ir.Kernel:
    """The IR of a kernel for given tensors, scalar types and constants."""
    kernel = ir.Kernel(function.__name__, tensors, scalars, consts=dict(consts))
    builder = Builder(kernel.body)
    node = function_node(function)
    assert isinstance(node, ast.FunctionDef)
    builder.loc = place(node, function.__code__.co_filename)
    names: dict[str, Any] = {t.name: t for t in tensors} | dict(consts)
    for name, dtype in scalars:
        value = builder.emit("param", (), Type(dtype), name=name).result
        value.hint = name
        names[name] = value
    scope = Scope(function, builder, names, depth=0)
    try:
        scope.block(node.body)
    except Returned as returned:
        if returned.value is not None:
            cure = "store the result in a tensor: out[...] = value"
            raise builder.fail(ReturnedValue, "a kernel returns nothing", cure) from None
    builder.emit("yield", ())
    return kernel


class Scope(Expressions):
    """The symbolic execution of one function body."""

    def __init__(self, function: types.FunctionType, builder: Builder, names: dict[str, Any], depth: int) -> None:
        super().__init__(builder, names, namespace(function), function.__globals__)
        self.function, self.file, self.depth = function, function.__code__.co_filename, depth

    # ---- statements ----------------------------------------------------------------------------------------------------

    def block(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self.at(statement)
            handler = getattr(self, f"do_{type(statement).__name__}", None)
            if handler is None:
                word = type(statement).__name__.lower()
                raise self.fail(UnsupportedPython, f"'{word}' is not part of the kernel language", CURES.get(word, CURE))
            handler(statement)

    def do_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring says nothing to the compiler
            self.eval(node.value)

    def do_Pass(self, node: ast.Pass) -> None:
        pass

    def do_Assert(self, node: ast.Assert) -> None:
        test = self.eval(node.test)
        if isinstance(test, Value):
            raise self.fail(UnsupportedPython, "assert on a run-time value", "assert on Const parameters only")
        if not test:
            message = self.eval(node.msg) if node.msg else "the kernel's assertion does not hold"
            raise self.fail(WrongCall, str(message), "change the Const parameters it speaks of")

    def do_Assign(self, node: ast.Assign) -> None:
        value = self.eval(node.value)
        for target in node.targets:
            self.assign(target, value)

    def do_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, self.eval(node.value))

    def do_AugAssign(self, node: ast.AugAssign) -> None:
        load = ast.copy_location(_as_load(node.target), node.target)
        value = self.eval(ast.copy_location(ast.BinOp(load, node.op, node.value), node))
        self.assign(node.target, value)

    def assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            if isinstance(value, Value) and not value.hint:
                value.hint = target.id
            self.names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            self.at(target)
            if not isinstance(value, tuple) or len(value) != len(target.elts):
                found = f"{len(target.elts)} names for {len(value) if isinstance(value, tuple) else 'one'} value(s)"
                raise self.fail(NotAssignable, found, "give as many names as there are values")
            for part, item in zip(target.elts, value, strict=True):
                self.assign(part, item)
        elif isinstance(target, ast.Subscript):
            tensor = self.eval(target.value)
            self.at(target)
            if not isinstance(tensor, ir.Tensor):
                found = f"only tensors can be written through a subscript, not {describe(tensor)}"
                raise self.fail(NotAssignable, found, "build tiles with where() and give them a new name")
            if not isinstance(value, Value | int | float):
                raise self.fail(NotAssignable, f"{describe(value)} cannot be stored", "store a tile or a number")
            indexing.store(self.builder, tensor, self.subscript(target.slice), value)
        else:
            self.at(target)
            raise self.fail(NotAssignable, "this cannot be assigned to", "assign to a name or to a tensor's slice")

    def do_Return(self, node: ast.Return) -> None:
        raise Returned(self.eval(node.value) if node.value is not None else None)

    def do_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.names[node.name] = Closure(node, self)

    # ---- branches ------------------------------------------------------------------------------------------------------

    def do_If(self, node: ast.If) -> None:
        test = self.truth(node.test)
        if not isinstance(test, Value):
            self.block(node.body if test else node.orelse)
            return
        before = dict(self.names)
        then, yes = self.branch(node.body, before)
        other, no = self.branch(node.orelse, before)
        self.at(node)
        changed = [n for n in yes.keys() | no.keys() if yes.get(n, ABSENT) is not no.get(n, ABSENT)]
        merged = sorted(n for n in changed if n in yes and n in no)
        self.names = {n: v for n, v in yes.items() if n in no}
        left, right = Flat(self, then), Flat(self, other)
        pairs = [(n, left.take(n, yes[n]), right.take(n, no[n])) for n in merged]
        for name, a, b in pairs:
            self.same_types(name, a, b, "the two branches of this if")
        types_ = tuple(v.type for _, a, _ in pairs for v in a.values)
        op = Op("if", (test,), {}, types_, (then, other), self.builder.loc)
        for block, side in ((then, 1), (other, 2)):
            block.ops.append(Op("yield", tuple(v for p in pairs for v in p[side].values), loc=self.builder.loc))
        self.builder.block.ops.append(op)
        results = iter(op.results)
        for name, a, _ in pairs:
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
        except Returned:
            raise self.fail(UnsupportedPython, f"return inside {what}", "assign to a name there, return it at the end") from None
        finally:
            self.builder.block = outer

    # ---- loops ---------------------------------------------------------------------------------------------------------

    def do_For(self, node: ast.For) -> None:
        if node.orelse:
            raise self.fail(UnsupportedPython, "for ... else", "move the else part after the loop")
        over = self.eval(node.iter)
        if isinstance(over, Loop):
            self.loop(node, over)
        elif isinstance(over, tuple | range):
            for item in over:
                self.assign(node.target, item)
                self.block(node.body)
        else:
            self.at(node.iter)
            found = f"for cannot run over {describe(over)}"
            raise self.fail(UnsupportedPython, found, "use range(...), blocks(...), static_range(...) or a tuple")

    def loop(self, node: ast.For, over: Loop) -> None:
        if not isinstance(node.target, ast.Name):
            raise self.fail(UnsupportedPython, "a loop variable must be one name", "unpack inside the loop")
        before = dict(self.names)
        carried = sorted(n for n in assigned(node.body) if n in before and n != node.target.id)
        entry = Flat(self, self.builder.block)
        inits = [entry.take(n, before[n]) for n in carried]
        flat = tuple(v for i in inits for v in i.values)
        body = Block((Type(int32), *(v.type for v in flat)))
        for param, value in zip(body.params[1:], flat, strict=True):
            param.hint = value.hint
        body.params[0].hint = node.target.id
        params = iter(body.params[1:])
        self.names[node.target.id] = body.params[0]
        for name, init in zip(carried, inits, strict=True):
            self.names[name] = init.rebuild(params)
        outer, self.builder.block = self.builder.block, body
        try:
            self.mark_visible(over, body.params[0])
        finally:
            self.builder.block = outer
        self.inside(body, node.body, "a run-time loop")
        self.at(node)
        leaving = Flat(self, body)
        yields = [leaving.take(n, self.names[n], init) for n, init in zip(carried, inits, strict=True)]
        for name, a, b in zip(carried, inits, yields, strict=True):
            self.same_types(name, a, b, "this loop")
        body.ops.append(Op("yield", tuple(v for y in yields for v in y.values), loc=self.builder.loc))
        op = Op("for", (over.low, over.high, *flat), {"step": over.step}, tuple(v.type for v in flat), (body,), self.builder.loc)
        self.builder.block.ops.append(op)
        results = iter(op.results)
        self.names = before | {n: i.rebuild(results) for n, i in zip(carried, inits, strict=True)}

    def mark_visible(self, over: Loop, start: Value) -> None:
        if over.visible is None:
            return
        b = self.builder
        seen = self.call(over.visible, (b.binary("add", start, b.arange(over.step)),), {})
        if isinstance(seen, Value) and seen.dtype is bool_:
            b.emit("visible", (seen,))
        elif seen is not True:
            found = f"visible gave {describe(seen)}"
            raise self.fail(WrongCall, found, "give a function from positions to a bool tile")

    def same_types(self, name: str, a: Flattened, b: Flattened, where: str) -> None:
        if a.shape_of_tree != b.shape_of_tree or [v.type for v in a.values] != [v.type for v in b.values]:
            found = f"{name!r} enters {where} as {a} and leaves it as {b}"
            if where != "this loop":
                found = f"{name!r} is {a} in one of {where} and {b} in the other"
            raise self.fail(CarriedTypeChanged, found, "cast or reshape it, or use another name for the new thing")

    # ---- calls of helpers ----------------------------------------------------------------------------------------------

    def inline(self, function: types.FunctionType | Closure, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A helper's body, run in place of the call."""
        if self.depth >= MAX_DEPTH:
            raise self.fail(TooDeep, f"helper calls are nested more than {MAX_DEPTH} deep", "remove the recursion")
        if isinstance(function, Closure):
            node, home = function.node, function.scope
            assert isinstance(home, Scope)
            names, owner = dict(home.names), home.function
        else:
            node, names, owner = function_node(function), {}, function
        bound = self.bind(function, node, args, kwargs)
        scope = Scope(owner, self.builder, names | bound, self.depth + 1)
        caller = self.builder.loc
        try:
            if isinstance(node, ast.Lambda):
                return scope.eval(node.body)
            scope.block(node.body)
        except Returned as returned:
            return returned.value
        finally:
            self.builder.loc = caller
        return None

    def bind(self, function: Any, node: FunctionNode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        a = node.args
        title = getattr(node, "name", "lambda")
        if a.vararg or a.kwarg:
            raise self.fail(UnsupportedPython, f"{title}() takes *args or **kwargs", "name every parameter")
        positional = [p.arg for p in a.posonlyargs + a.args]
        every = positional + [p.arg for p in a.kwonlyargs]
        bound = dict(zip(positional, args, strict=False)) | kwargs
        unknown = [n for n in kwargs if n not in every]
        if len(args) > len(positional) or unknown or any(n in positional[: len(args)] for n in kwargs):
            raise self.fail(WrongCall, f"{title}({', '.join(every)}) got other arguments", "give just these arguments")
        if isinstance(function, Closure):
            defaults = [function.scope.eval(d) for d in a.defaults]
            keyword = {p.arg: function.scope.eval(d) for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True) if d}
        else:
            defaults, keyword = list(function.__defaults__ or ()), function.__kwdefaults__ or {}
        fallback = dict(zip(positional[len(positional) - len(defaults) :], defaults, strict=True)) | keyword
        missing = [n for n in every if n not in bound and n not in fallback]
        if missing:
            raise self.fail(WrongCall, f"{title}() is missing {', '.join(missing)}", "give these arguments")
        return fallback | bound


# ---- what a loop or branch carries -------------------------------------------------------------------------------------


class Flattened:
    """A name's content as a list of values and the tuple structure around them."""

    def __init__(self, tree: Any, values: list[Value]) -> None:
        self.tree, self.values = tree, values

    @property
    def shape_of_tree(self) -> Any:
        def outline(tree: Any) -> Any:
            return (type(tree), [outline(t) for t in tree]) if isinstance(tree, tuple) else tree if tree is not VALUE else VALUE

        return outline(self.tree)

    def rebuild(self, source: Iterator[Value]) -> Any:
        def make(tree: Any) -> Any:
            if tree is VALUE:
                return next(source)
            if isinstance(tree, tuple):
                parts = [make(t) for t in tree]
                return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
            return tree

        return make(self.tree)

    def __str__(self) -> str:
        return ", ".join(str(v.type) for v in self.values) or repr(self.tree)


VALUE = object()


class Flat:
    """Flattens what names hold; numbers become values, in the block where that must happen."""

    def __init__(self, scope: Scope, block: Block) -> None:
        self.scope, self.block = scope, block

    def take(self, name: str, item: Any, like: Flattened | None = None) -> Flattened:
        values: list[Value] = []
        wanted = iter(like.values if like else ())
        builder = self.scope.builder
        outer, builder.block = builder.block, self.block

        def go(item: Any) -> Any:
            if isinstance(item, Value):
                values.append(item)
                next(wanted, None)
                return VALUE
            if isinstance(item, bool | int | float):
                twin = next(wanted, None)
                values.append(builder.value(item, twin.dtype if twin is not None and not twin.shape else None))
                return VALUE
            if isinstance(item, tuple):
                parts = [go(part) for part in item]
                return type(item)(*parts) if hasattr(item, "_fields") else tuple(parts)
            return item

        try:
            return Flattened(go(item), values)
        except KernelError:
            raise self.scope.fail(CarriedTypeChanged, f"{name!r} changes its type here", "keep its type") from None
        finally:
            builder.block = outer


def assigned(body: list[ast.stmt]) -> set[str]:
    """Names some statement in the body assigns, at any depth but not inside nested functions."""
    found: set[str] = set()
    stack: list[ast.AST] = list(body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif not isinstance(node, ast.Lambda):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            stack.extend(ast.iter_child_nodes(node))
    return found


def _as_load(target: ast.expr) -> ast.expr:
    if isinstance(target, ast.Name):
        return ast.Name(target.id, ast.Load())
    if isinstance(target, ast.Subscript):
        return ast.Subscript(target.value, target.slice, ast.Load())
    return target


def describe(item: Any) -> str:
    if isinstance(item, Value):
        return f"a {'tile' if item.shape else 'scalar'} {item.type}"
    if isinstance(item, ir.Tensor):
        return f"the tensor {item.name!r}"
    return f"{item!r} ({type(item).__name__})"


CURE = "write it with assignments, for, if and the words of monotile.language"
CURES = {
    "while": "use for j in range(low, high, step)",
    "try": "kernels raise nothing; bounds are checked by the language",
    "with": "remove it; a kernel has no resources to manage",
    "import": "import at the top of the file",
    "importfrom": "import at the top of the file",
    "classdef": "define named tuples at the top of the file",
    "break": "put the rest of the loop body under an if, or shorten the range",
    "continue": "put the rest of the loop body under an if",
    "global": "pass the value in and store results in tensors",
    "nonlocal": "return the new value and assign it where the helper is called",
    "delete": "remove it; values end with the kernel",
    "raise": "check arguments before the kernel is called",
}
