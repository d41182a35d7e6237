"""Parse a command line's description of a kernel or function: constants, shapes and dtypes; find kernels in files."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import dtypes
from ..dtypes import DType
from ..errors import MonotileError
from ..launch.kernel import Kernel

WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}
WORDS |= {word: word for word in ("lower_right", "upper_left")}


class BadRequest(MonotileError):
    """A command line that names something that does not exist."""


@dataclass(frozen=True)
class Request:
    """Constants, options and scalars by name, shapes and dtypes by tensor."""

    values: Mapping[str, Any] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: Mapping[str, DType] = field(default_factory=dict)  # "" is for all others


def parse(words: Sequence[str], shape: Sequence[str] | None, dtype: Sequence[str] | None) -> Request:
    return Request(parse_values(words), parse_shapes(shape or ()), parse_dtypes(dtype or ()))


def parse_values(words: Sequence[str]) -> dict[str, Any]:
    """`--BM 128 --BN=64 --causal` as constants and options; a name without a value is True."""
    values, rest = {}, list(words)
    while rest:
        name = rest.pop(0)
        if not name.startswith("--") or not (name.partition("=")[0][2:]).isidentifier():
            raise BadRequest(f"{name!r} is not an option; constants are given as --NAME=VALUE")
        name, given, text = name[2:].partition("=")
        if not given:
            flag = not rest or rest[0].startswith("--")
            if flag and name not in FLAGS:
                raise BadRequest(f"--{name} has no value; write --{name}=VALUE")
            text = "true" if flag else rest.pop(0)
        values[name] = parse_value(name, text)
    return values


FLAGS = ("causal", "return_lse", "negative", "mask_grad", "mask", "sinks")  # the last two are arrays


def parse_value(name: str, text: str) -> Any:
    """An int, float, bool, None, dtype, or a function or tuple that a file or module holds."""
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if text in dtypes.BY_NAME:
        return dtypes.BY_NAME[text]
    if ":" in text:
        return find(text, (types.FunctionType, tuple), "constant")
    kinds = "an int, float, True, False, None, a dtype, or file.py:NAME of a function or tuple"
    raise BadRequest(f"--{name}={text} is not a constant; write {kinds}")


def parse_shapes(items: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """`a=64x128` for each tensor."""
    shapes = {}
    for item in items:
        name, _, text = item.partition("=")
        sides = text.split("x")
        if not name or not all(s.isascii() and s.isdecimal() for s in sides):
            raise BadRequest(f"--shape {item} is not a shape; write --shape {name or 'a'}=64x128")
        shapes[name] = tuple(map(int, sides))
    return shapes


def parse_dtypes(items: Sequence[str]) -> dict[str, DType]:
    """`float16` for every tensor, `a=float16` for one."""
    found = {}
    for item in items:
        name, _, text = item.rpartition("=")
        if text not in dtypes.BY_NAME:
            raise BadRequest(f"--dtype {item}: monotile has {', '.join(dtypes.BY_NAME)}")
        found[name] = dtypes.BY_NAME[text]
    return found


# ---- kernels and functions in files ----------------------------------------------------------------------------------


def find(place: str, kinds: tuple[type, ...] = (Kernel,), title: str = "kernel") -> Any:
    """The object that `path/to/file.py:name` or `package.module:name` names; the name may be left out where there is
    one only."""
    file, _, name = place.partition(":") if place[1:3] != ":\\" else _split_drive(place)
    module = _load(file)
    found = {n: item for n, item in vars(module).items() if isinstance(item, kinds)}
    if not name and len(found) == 1:
        return next(iter(found.values()))
    if name not in found:
        listing = ", ".join(found) or "none"
        said = f"{file} has no {title} {name!r}" if name else f"{file} has {len(found)} {title}s"
        raise BadRequest(f"{said}; it has {listing}: write {file}:NAME")
    return found[name]


def _split_drive(place: str) -> tuple[str, str, str]:
    head, colon, name = place[2:].partition(":")
    return place[:2] + head, colon, name


def _load(file: str) -> types.ModuleType:
    if not file.endswith(".py"):
        try:
            return importlib.import_module(file)
        except ModuleNotFoundError as error:
            raise BadRequest(f"{error}; write path/to/file.py:NAME or package.module:NAME") from None
        except (TypeError, ValueError):
            raise BadRequest(f"{file!r} is neither a file nor a module; write path/to/file.py:NAME") from None
    path = Path(file).resolve()
    if not path.is_file():
        raise BadRequest(f"there is no file {file}; write path/to/file.py:NAME or package.module:NAME")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # as when the file is run, so that its own imports work
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module
