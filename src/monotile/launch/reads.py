"""What functions read, by where it is bound, to be compared with what is bound there later."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..frontend.functions import ABSENT, attribute

_loaded: dict[int, tuple[types.CodeType, list[str]]] = {}  # code by its id, and the globals that it loads


class Read(NamedTuple):
    """A value that a function reads, with the name it is bound to in a cell, a namespace or an object."""

    value: Any
    name: str
    source: Any

    def now(self) -> Any:
        """Return what is bound there now; ABSENT for nothing."""
        source = self.source
        if type(source) is dict:
            return source.get(self.name, ABSENT)
        if type(source) is types.CellType:
            return content_of(source)
        value = attribute(source, self.name)
        return value.__func__ if isinstance(value, types.MethodType) and value.__self__ is source else value

    @property
    def is_global(self) -> bool:
        return type(self.source) is dict


def reads_of(function: types.FunctionType) -> Iterator[tuple[Any, Read]]:
    """Yield what a function itself reads from its closure, from globals, and from modules among these."""
    for (cell, content), name in zip(cells(function), function.__code__.co_freevars, strict=True):
        yield id(cell), Read(content, name, cell)
    names = function.__globals__
    for name in globals_loaded(function.__code__):
        value = names.get(name, ABSENT)
        yield (id(names), name), Read(value, name, names)
        if isinstance(value, types.ModuleType):
            fields = vars(value)
            for inner in names_in(function.__code__):
                if inner in fields:
                    yield (id(fields), inner), Read(fields[inner], inner, fields)


def globals_loaded(code: types.CodeType) -> list[str]:
    """Return the globals that code, or code nested in it, loads."""
    found = _loaded.get(id(code))
    if found is None:
        names = [i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"]
        for item in code.co_consts:
            if isinstance(item, types.CodeType):
                names += globals_loaded(item)
        found = _loaded[id(code)] = code, list(dict.fromkeys(names))
    return found[1]


def cells(function: types.FunctionType) -> Iterator[tuple[types.CellType, Any]]:
    """Yield the cells of a function's closure with their contents, ABSENT for a variable that is not bound yet."""
    for cell in function.__closure__ or ():
        yield cell, content_of(cell)


def content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names in code and in functions nested in it."""
    yield from code.co_names
    for item in code.co_consts:
        if isinstance(item, types.CodeType):
            yield from names_in(item)
