"""Binding the arguments of a helper call to its parameters, as Python does."""

from __future__ import annotations

from typing import Any

from ..errors import UnsupportedPython, WrongCall
from ..ir.builder import Builder
from .source import FunctionNode


def bind_arguments(
    builder: Builder,
    node: FunctionNode,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    defaults: tuple[tuple[Any, ...], dict[str, Any]],
) -> dict[str, Any]:
    """Return the value of every parameter of a helper; `defaults` are those of its last positional parameters and those
    of its keyword-only ones."""
    parameters = node.args
    title = getattr(node, "name", "lambda")
    if parameters.vararg or parameters.kwarg:
        raise builder.fail(UnsupportedPython, f"{title}() takes *args or **kwargs", "name every parameter")
    positional = [p.arg for p in parameters.posonlyargs + parameters.args]
    every = positional + [p.arg for p in parameters.kwonlyargs]
    cure = f"write {title}({', '.join(every)})"
    named = every[len(parameters.posonlyargs) :]
    wrong = [n for n in kwargs if n not in named or n in positional[: len(args)]]
    if len(args) > len(positional) or wrong:
        extra = f"the argument {wrong[0]!r}" if wrong else f"{len(args)} positional arguments"
        raise builder.fail(WrongCall, f"{title}() does not take {extra}", cure)
    of_positional, of_keyword_only = defaults
    with_default = positional[len(positional) - len(of_positional) :]
    fallback = dict(zip(with_default, of_positional, strict=True)) | of_keyword_only
    bound = fallback | dict(zip(positional, args, strict=False)) | kwargs
    missing = [n for n in every if n not in bound]
    if missing:
        raise builder.fail(WrongCall, f"{title}() is missing {', '.join(missing)}", cure)
    return bound
