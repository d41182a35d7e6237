"""`monotile inspect`: finds a kernel by name, makes arguments for it, and gives the text of one stage. `monotile emit`
finds and makes them here, too."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import backends, dtypes, ir
from ..errors import MonotileError
from ..launch.kernel import Kernel
from ..launch.signature import Parameter
from . import catalogue
from .catalogue import Request as Request

DEFAULT_LENGTH = 64
WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}
WORDS |= {word: word for word in ("lower_right", "upper_left")}


class BadRequest(MonotileError):
    """A command line that names something that does not exist."""


# ---- reading the command line ----------------------------------------------------------------------------------------


def parse_values(words: Sequence[str]) -> dict[str, Any]:
    """`--BM 128 --BN=64` as constants."""
    values, rest = {}, list(words)
    while rest:
        name = rest.pop(0)
        if not name.startswith("--") or not (name.partition("=")[0][2:]).isidentifier():
            raise BadRequest(f"{name!r} is not an option; constants are given as --NAME=VALUE")
        name, given, text = name[2:].partition("=")
        if not given:
            if not rest:
                raise BadRequest(f"--{name} has no value; write --{name}=VALUE")
            text = rest.pop(0)
        values[name] = parse_value(name, text)
    return values


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


def parse_dtypes(items: Sequence[str]) -> dict[str, dtypes.DType]:
    """`float16` for every tensor, `a=float16` for one."""
    found = {}
    for item in items:
        name, _, text = item.rpartition("=")
        if text not in dtypes.BY_NAME:
            raise BadRequest(f"--dtype {item}: monotile has {', '.join(dtypes.BY_NAME)}")
        found[name] = dtypes.BY_NAME[text]
    return found


# ---- finding the kernel ----------------------------------------------------------------------------------------------


def find(place: str, kinds: tuple[type, ...] = (Kernel,), title: str = "kernel") -> Any:
    """The object that `path/to/file.py:name` or `package.module:name` names; the name may be left out where there is
    one kernel only. A kernel that comes with monotile is found by its name alone."""
    if Kernel in kinds and place in catalogue.kernels():
        return catalogue.kernels()[place]
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
            own = f"a kernel of monotile ({', '.join(catalogue.kernels())})"
            raise BadRequest(f"{error}; write path/to/file.py:NAME, package.module:NAME or {own}") from None
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


# ---- arguments and stages --------------------------------------------------------------------------------------------


def arguments(kernel: Kernel, request: Request) -> tuple[list[Any], dict[str, Any]]:
    """Arrays and scalars in order, and constants by name."""
    names = {p.name for p in kernel.parameters}
    for name in [*request.shapes, *filter(None, request.dtypes)]:
        if name not in names:
            raise BadRequest(f"{kernel.name} has no tensor {name!r}; its parameters are {', '.join(sorted(names))}")
    consts = {n: v for n, v in request.values.items() if n not in names}
    lengths: dict[str, int] = {}
    for parameter in kernel.parameters:
        for dim, length in zip(parameter.dims or (), request.shapes.get(parameter.name, ()), strict=False):
            if isinstance(dim, str):
                lengths.setdefault(dim, length)
    for name in kernel.const_names:
        value = consts.get(name, kernel.defaults.get(name))
        if type(value) is int:
            lengths.setdefault(name, value)
    return [_argument(kernel, p, request, lengths) for p in kernel.parameters], consts


def _argument(kernel: Kernel, parameter: Parameter, request: Request, lengths: Mapping[str, int]) -> Any:
    name, shape = parameter.name, request.shapes.get(parameter.name)
    if name in request.values:  # a scalar, or None for a tensor that may be absent
        return request.values[name]
    if shape is None and parameter.dims is not None:
        sides = [d if isinstance(d, int) else lengths.get(d, DEFAULT_LENGTH) for d in parameter.dims]
        shape = tuple(sides)
    if shape is not None:
        dtype = request.dtypes.get(name, request.dtypes.get("", dtypes.float32))
        return np.empty(shape, dtypes.to_numpy(dtype))
    if parameter.dtype is None:
        cure = f"--shape {name}=64x64 for a tensor, --{name}=1 for a scalar"
        raise BadRequest(f"the signature of {kernel.name} does not say what {name!r} is; give {cure}")
    return {"float": 1.0, "int": 1, "bool": True}[parameter.dtype.kind]


def source(kernel: Kernel) -> str:
    """The kernel's Python source with the line numbers of its file."""
    lines, first = inspect.getsourcelines(kernel.function)
    width = len(str(first + len(lines)))
    return "".join(f"{first + n:{width}}  {line.rstrip()}\n" for n, line in enumerate(lines))


def specialised(kernel: Kernel, request: Request, backend: str) -> ir.Kernel:
    """The kernel for arguments as the command line describes them."""
    args, consts = arguments(kernel, catalogue.completed(kernel, request, backend))
    return kernel.ir(*args, **consts)


def text(kernel: Kernel, stage: str, request: Request, backend: str = "cpu") -> str:
    """What the compiler makes of the kernel at one stage. The backend need not be able to run here."""
    if stage == "source":
        return source(kernel)
    stages = backends.get(backend).stages(specialised(kernel, request, backend))
    if stage not in stages:
        raise BadRequest(f"backend {backend!r} has no stage {stage!r}; it has source, {', '.join(stages)}")
    try:
        return stages[stage]()
    except ModuleNotFoundError as error:
        raise BadRequest(f"the stage {stage!r} needs {error.name}; run: pip install {error.name}") from None
