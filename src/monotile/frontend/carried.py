"""What a run-time loop or branch carries: the content of a name as a list of values and the tuples around them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from ..errors import CarriedTypeChanged, KernelError
from ..ir import Block, Type, Value
from ..ir.builder import Builder
from .objects import describe

VALUE = object()  # stands in a tree where a value was
NUMBERS = (bool, int, float)


class Carried:
    """One name's content. What is neither a value nor a tuple stays in the tree and must not change."""

    def __init__(self, tree: Any, values: list[Value]) -> None:
        self.tree, self.values = tree, values

    @property
    def types(self) -> list[Type]:
        return [v.type for v in self.values]

    def rebuild(self, source: Iterator[Value]) -> Any:
        def make(tree: Any) -> Any:
            if tree is VALUE:
                return next(source)
            return _retuple(tree, [make(t) for t in tree]) if isinstance(tree, tuple) else tree

        return make(self.tree)

    def __str__(self) -> str:
        return show(self.rebuild(iter(self.values)))


def show(item: Any) -> str:
    """The type of what a name holds, for a message."""
    if isinstance(item, tuple):
        return f"({', '.join([show(i) for i in item])})"
    if isinstance(item, Value):
        return str(item.type)
    return f"the number {item}" if isinstance(item, float) else describe(item)


def enter(builder: Builder, item: Any) -> Carried:
    """What a loop starts with: numbers become values, since they may change."""
    values: list[Value] = []

    def go(item: Any) -> Any:
        if isinstance(item, Value | bool | int | float):
            values.append(builder.value(item))
            return VALUE
        return _retuple(item, [go(part) for part in item]) if isinstance(item, tuple) else item

    return Carried(go(item), values)


def leave(builder: Builder, name: str, item: Any, entered: Carried) -> Carried:
    """What the loop's body ends with, which must have the types it started with."""
    values: list[Value] = []
    wanted = iter(entered.values)

    def go(item: Any, tree: Any) -> bool:
        if tree is VALUE:
            twin = next(wanted)
            if not isinstance(item, Value | bool | int | float):
                return False
            values.append(_like(builder, item, twin.type))
            return values[-1].type == twin.type
        if isinstance(tree, tuple):
            return _same_outline(item, tree) and all(go(i, t) for i, t in zip(item, tree, strict=True))
        return same(item, tree)

    try:
        fits = go(item, entered.tree)
    except KernelError:  # a number that does not promote with what it replaces
        fits = False
    if not fits:
        found = f"{name!r} enters this loop as {entered} and leaves it as {show(item)}"
        raise builder.fail(CarriedTypeChanged, found, "cast or reshape it, or use another name for the new thing")
    return Carried(entered.tree, values)


def join(builder: Builder, name: str, sides: tuple[Any, Any], blocks: tuple[Block, Block]) -> tuple[Carried, Carried]:
    """What two branches make of a name. Numbers that are equal on both sides stay numbers."""
    values: tuple[list[Value], list[Value]] = ([], [])

    def go(a: Any, b: Any) -> Any:
        if isinstance(a, NUMBERS) and isinstance(b, NUMBERS) and same(a, b):
            return a
        if isinstance(a, Value | bool | int | float) and isinstance(b, Value | bool | int | float):
            like = {type(a), type(b)} == {int, float}  # two numbers: the int is a float, too
            for item, other, block, out in ((a, b, blocks[0], values[0]), (b, a, blocks[1], values[1])):
                outer, builder.block = builder.block, block
                try:
                    wanted = other.type if isinstance(other, Value) else None
                    out.append(_like(builder, float(item) if like else item, wanted))  # type: ignore[arg-type]
                finally:
                    builder.block = outer
            if values[0][-1].type != values[1][-1].type:
                raise different
            return VALUE
        if isinstance(a, tuple) and _same_outline(b, a):
            return _retuple(a, [go(x, y) for x, y in zip(a, b, strict=True)])
        if not same(a, b):
            raise different
        return a

    found = f"{name!r} is {show(sides[0])} in one branch of this if and {show(sides[1])} in the other"
    cure = "give it one type in both, or use different names"
    different = builder.fail(CarriedTypeChanged, found, cure)
    try:
        tree = go(*sides)
    except (KernelError, OverflowError):
        raise different from None
    return Carried(tree, values[0]), Carried(tree, values[1])


def _like(builder: Builder, item: Any, wanted: Type | None) -> Value:
    """A number takes the type of the scalar it stands for."""
    return builder.value(item, wanted.dtype if wanted is not None and not wanted.shape else None)


def _same_outline(item: Any, tree: tuple[Any, ...]) -> bool:
    return isinstance(item, tuple) and type(item) is type(tree) and len(item) == len(tree)


def _retuple(like: tuple[Any, ...], parts: list[Any]) -> Any:
    """Parts as a tuple of the same kind, named or not."""
    return type(like)._make(parts) if hasattr(like, "_make") else tuple(parts)


def same(a: Any, b: Any) -> bool:
    """Whether two compile-time things are interchangeable."""
    if a is b:
        return True
    return type(a) is type(b) and isinstance(a, bool | int | float | str) and repr(a) == repr(b)


# ---- which names a body assigns --------------------------------------------------------------------------------------


def assigned(body: list[ast.stmt]) -> set[str]:
    """Names some statement in the body assigns, at any depth but not inside nested functions."""
    names, targets = _stores(body)
    return names | targets


def only_loop_variables(body: list[ast.stmt]) -> set[str]:
    """Names the body assigns as loop variables and in no other way."""
    names, targets = _stores(body)
    return targets - names


def _stores(body: list[ast.stmt]) -> tuple[set[str], set[str]]:
    names: set[str] = set()
    targets: set[str] = set()
    stack: list[ast.AST] = list(body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.For) and isinstance(node.target, ast.Name):
            targets.add(node.target.id)
            stack += [node.iter, *node.body, *node.orelse]
        elif not isinstance(node, ast.Lambda):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            stack.extend(ast.iter_child_nodes(node))
    return names, targets
