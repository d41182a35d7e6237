"""Find the Python source of a function and make source locations (`Loc`) of its syntax nodes."""

from __future__ import annotations

import ast
import linecache
import os
import types
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias

from ..errors import NoSource
from ..ir import Loc

FunctionNode: TypeAlias = ast.FunctionDef | ast.Lambda


@lru_cache(maxsize=64)
def _functions(lines: tuple[str, ...]) -> dict[int, list[FunctionNode]]:
    """Return every function and lambda of a file by its first line, outer functions before inner ones."""
    found: dict[int, list[FunctionNode]] = {}
    for node in ast.walk(ast.parse("".join(lines))):
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            found.setdefault(first, []).append(node)
    return found


def function_node(function: types.FunctionType) -> FunctionNode:
    """Return the syntax tree of a function or lambda, with line numbers of its file."""
    code = function.__code__
    cure = "define the function with def or lambda in a file or a notebook cell"
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, function.__globals__)
    if not lines:
        raise NoSource(f"the source of {code.co_name!r} cannot be read ({code.co_filename})", cure)
    try:
        functions = _functions(tuple(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NoSource(f"the source of {code.co_name!r} does not parse: {error}", cure) from None
    found = [n for n in functions.get(code.co_firstlineno, ()) if _matches(n, code)]
    if len(found) > 1:
        covering = [n for n in found if _covers(n, code)]
        # Of nested lambdas, both cover the inner one's code; outer functions come first.
        found = covering[-1:]
    if not found:
        raise NoSource(f"the source of {code.co_name!r} is not in {code.co_filename}; has the file changed?", cure)
    return found[0]


def _matches(node: FunctionNode, code: types.CodeType) -> bool:
    if isinstance(node, ast.Lambda):
        names = [a.arg for a in node.args.posonlyargs + node.args.args]
        return code.co_name == "<lambda>" and names == _arguments(code)
    return node.name == code.co_name


def _arguments(code: types.CodeType) -> list[str]:
    return list(code.co_varnames[: code.co_argcount])


def _covers(node: FunctionNode, code: types.CodeType) -> bool:
    """Tell lambdas on one line apart by the source positions of their instructions."""
    inside = node.body if isinstance(node, ast.Lambda) else node
    spots = {(line, col) for line, _, col, _ in code.co_positions() if line is not None and col is not None}
    start, end = (inside.lineno, inside.col_offset), (inside.end_lineno or 0, inside.end_col_offset or 0)
    spots = {s for s in spots if s[1] > 0 or s[0] != code.co_firstlineno}
    return all(start <= s <= end for s in spots)


def place(node: ast.AST, file: str) -> Loc:
    """Return the source location of a node."""
    line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
    text = linecache.getline(file, line).rstrip("\n")
    end = getattr(node, "end_col_offset", None)
    if end is None or getattr(node, "end_lineno", line) != line:
        end = len(text)
    # The tree counts columns in UTF-8 bytes; carets are counted in characters.
    column, end = (len(text.encode()[:n].decode(errors="ignore")) for n in (column, end))
    return Loc(os.path.basename(file), line, column, end, text)


def namespace(function: types.FunctionType, numbers: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a function's closure variables by name; `numbers` are values that stand for what some cells hold. Globals
    are looked up when read."""
    cells = function.__closure__ or ()
    captured = {}
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        try:
            captured[name] = numbers.get(id(cell), cell.cell_contents)
        except ValueError:  # a variable that is not bound yet
            continue
    return captured


def as_load(target: ast.expr) -> ast.expr:
    """Return the expression that reads the target of an augmented assignment."""
    if isinstance(target, ast.Name):
        return ast.Name(target.id, ast.Load())
    if isinstance(target, ast.Subscript):
        return ast.Subscript(target.value, target.slice, ast.Load())
    return target
