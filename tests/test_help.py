"""What `help()` says of the public functions: every argument, and an example that runs; types that checkers know."""

from __future__ import annotations

import ast
import doctest
import inspect
from pathlib import Path

import numpy as np
import pytest

import monotile

ROOT = Path(__file__).parents[1]
FUNCTIONS = [name for name in monotile.__all__ if inspect.isfunction(getattr(monotile, name))]
STUB = ast.parse((ROOT / "src" / "monotile" / "__init__.pyi").read_text())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_names_every_argument(name: str) -> None:
    function = getattr(monotile, name)
    text = function.__doc__
    listed = text.partition("Args:\n")[2].partition("\n\n")[0]
    assert [p for p in inspect.signature(function).parameters if p not in listed] == []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_example_of_help_runs(name: str) -> None:
    (found,) = doctest.DocTestFinder(recurse=False).find(
        getattr(monotile, name), globs={"np": np, "monotile": monotile}
    )
    assert found.examples
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(found)
    assert not result.failed


def test_the_types_are_those_of_the_functions() -> None:
    """Names of parameters, and what is public."""
    declared: dict[str, set[tuple[str, ...]]] = {}
    for node in STUB.body:
        if isinstance(node, ast.FunctionDef):
            names = tuple(a.arg for a in (*node.args.args, *node.args.kwonlyargs))
            declared.setdefault(node.name, set()).add(names)
    for name, found in declared.items():
        assert found == {tuple(inspect.signature(getattr(monotile, name)).parameters)}, name
    imported = {alias.asname for node in STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    classes = {node.name for node in STUB.body if isinstance(node, ast.ClassDef)}
    assert set(monotile.__all__) <= {*declared, *imported, *classes, "__version__"}
