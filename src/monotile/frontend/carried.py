"""State carried through run-time loops and branches: names flattened to IR values and the tuples around them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from ..errors import CarriedTypeChanged, KernelError
from ..ir import Block, Type, Value
from ..ir.builder import Builder
from .objects import describe

VALUE = object()  # placeholder of an IR value in a structure
NUMBERS = (bool, int, float)


class Flattened:
    """The content of a name: its IR values, and a structure of nested tuples that holds everything else, which must not
    change."""

    def __init__(self, structure: Any, values: list[Value]) -> None:
        self.structure, self.values = structure, values

    @property
    def types(self) -> list[Type]:
        return [v.type for v in self.values]

    def unflatten(self, source: Iterator[Value]) -> Any:
        """Rebuild the content with other values."""

        def make(structure: Any) -> Any:
            if structure is VALUE:
                return next(source)
            return (
                _rebuild_tuple(structure, [make(part) for part in structure])
                if isinstance(structure, tuple)
                else structure
            )

        return make(self.structure)

    def __str__(self) -> str:
        return show(self.unflatten(iter(self.values)))


def show(item: Any) -> str:
    """Format the type of what a name holds for a message."""
    if isinstance(item, tuple):
        return f"({', '.join([show(i) for i in item])})"
    if isinstance(item, Value):
        return str(item.type)
    return f"the number {item}" if isinstance(item, float) else describe(item)


def enter_loop(builder: Builder, item: Any) -> Flattened:
    """Flatten a name's initial value for a loop. Numbers become IR values, since iterations may change them."""
    values: list[Value] = []

    def go(item: Any) -> Any:
        if isinstance(item, Value | bool | int | float):
            values.append(builder.value(item))
            return VALUE
        return _rebuild_tuple(item, [go(part) for part in item]) if isinstance(item, tuple) else item

    return Flattened(go(item), values)


def leave_loop(builder: Builder, name: str, item: Any, entered: Flattened) -> Flattened:
    """Flatten a name's value at the end of the loop's body; its types must be those it entered with."""
    values: list[Value] = []
    wanted = iter(entered.values)

    def go(item: Any, structure: Any) -> bool:
        if structure is VALUE:
            twin = next(wanted)
            if not isinstance(item, Value | bool | int | float):
                return False
            values.append(_to_value(builder, item, twin.type))
            return values[-1].type == twin.type
        if isinstance(structure, tuple):
            return _same_structure(item, structure) and all(go(i, t) for i, t in zip(item, structure, strict=True))
        return interchangeable(item, structure)

    try:
        fits = go(item, entered.structure)
    except KernelError:  # a number that does not promote with what it replaces
        fits = False
    if not fits:
        found = f"{name!r} enters this loop as {entered} and leaves it as {show(item)}"
        raise builder.fail(CarriedTypeChanged, found, "cast or reshape it, or use another name for the new thing")
    return Flattened(entered.structure, values)


def join_branches(
    builder: Builder, name: str, sides: tuple[Any, Any], blocks: tuple[Block, Block]
) -> tuple[Flattened, Flattened]:
    """Flatten a name's values at the end of two branches. Numbers that are equal in both stay numbers."""
    values: tuple[list[Value], list[Value]] = ([], [])

    def go(a: Any, b: Any) -> Any:
        if isinstance(a, NUMBERS) and isinstance(b, NUMBERS) and interchangeable(a, b):
            return a
        if isinstance(a, Value | bool | int | float) and isinstance(b, Value | bool | int | float):
            as_float = {type(a), type(b)} == {int, float}
            for item, other, block, out in ((a, b, blocks[0], values[0]), (b, a, blocks[1], values[1])):
                outer, builder.block = builder.block, block
                try:
                    wanted = other.type if isinstance(other, Value) else None
                    out.append(_to_value(builder, float(item) if as_float else item, wanted))  # type: ignore[arg-type]
                finally:
                    builder.block = outer
            if values[0][-1].type != values[1][-1].type:
                raise different
            return VALUE
        if isinstance(a, tuple) and _same_structure(b, a):
            return _rebuild_tuple(a, [go(x, y) for x, y in zip(a, b, strict=True)])
        if not interchangeable(a, b):
            raise different
        return a

    found = f"{name!r} is {show(sides[0])} in one branch of this if and {show(sides[1])} in the other"
    cure = "give it one type in both, or use different names"
    different = builder.fail(CarriedTypeChanged, found, cure)
    try:
        structure = go(*sides)
    except (KernelError, OverflowError):
        raise different from None
    return Flattened(structure, values[0]), Flattened(structure, values[1])


def _to_value(builder: Builder, item: Any, wanted: Type | None) -> Value:
    """Convert a number to a value of the wanted scalar type."""
    return builder.value(item, wanted.dtype if wanted is not None and not wanted.shape else None)


def _same_structure(item: Any, structure: tuple[Any, ...]) -> bool:
    return isinstance(item, tuple) and type(item) is type(structure) and len(item) == len(structure)


def _rebuild_tuple(like: tuple[Any, ...], parts: list[Any]) -> Any:
    """Make a tuple, or a named tuple, of the same type from new items."""
    return type(like)._make(parts) if hasattr(like, "_make") else tuple(parts)


def interchangeable(a: Any, b: Any) -> bool:
    """Return True for the same object and for equal numbers or strings of one type."""
    if a is b:
        return True
    return type(a) is type(b) and isinstance(a, bool | int | float | str) and repr(a) == repr(b)


# ---- names a body assigns --------------------------------------------------------------------------------------------


def assigned(body: list[ast.stmt]) -> set[str]:
    """Return the names assigned by statements of the body, at any depth but not inside nested functions."""
    names, targets = _stores(body)
    return names | targets


def only_loop_variables(body: list[ast.stmt]) -> set[str]:
    """Return the names assigned only as loop variables."""
    names, targets = _stores(body)
    return targets - names


def _stores(body: list[ast.stmt]) -> tuple[set[str], set[str]]:
    """Return the names assigned by statements, and those that are loop variables."""
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
