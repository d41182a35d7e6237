"""`monotile metal run`: a Metal shader in the runner, with its launch described by a JSON file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .. import metal
from ..backends.metal.runner import build
from ..backends.metal.runner.cost_model import CHIPS, core_clocks, least_us
from .request import BadRequest

Array = np.ndarray[Any, Any]
DTYPES = ("float32", "float16", "bfloat16", "int64", "uint64", "int32", "uint32", "int16", "uint16", "int8", "uint8")
FILLS = ("random", "zeros", "poison", "count")
LAUNCH = {"kernel", "grid", "threads", "buffers", "constants", "threadgroup_memory"}
BUFFER = {"dtype", "shape", "fill", "value", "values", "file", "expect", "tolerance"}


@dataclass(frozen=True)
class ShaderLaunch:
    """What the JSON file describes. `expected` are the results of buffers that have any, with the error allowed."""

    buffers: Mapping[str, Any]
    grid: list[int]
    threads: list[int]
    kernel: str | None = None
    constants: Mapping[int, Any] = field(default_factory=dict)
    threadgroup_memory: Mapping[int | str, int] = field(default_factory=dict)
    expected: Mapping[str, tuple[Array, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class RunOutcome:
    """Findings as (line, message), the line 0 where there is none; counters; and the buffers after the run."""

    findings: list[tuple[int, str]]
    counters: metal.Counters
    buffers: dict[str, Array]
    threadgroups: int


@dataclass(frozen=True)
class RunChoices:
    """The options of the command."""

    kernel: str | None = None
    order: str = "all"
    fast_math: bool = False
    style: str = "text"
    out: Path | None = None


def command(shader: Path, described: Path, choices: RunChoices) -> bool:
    """Run a shader, print what was found, and return True if that is nothing."""
    if choices.order not in ("all", *metal.ORDERS):
        raise BadRequest(f"--order {choices.order} is not known; write all, {', '.join(metal.ORDERS)}")
    if choices.style not in ("text", "github"):
        raise BadRequest(f"--format {choices.style} is not known; write text or github")
    try:
        source = shader.read_text()
    except OSError as error:
        raise BadRequest(f"cannot read {shader}: {error.strerror}; name a .metal file") from None
    launch = read_launch(described)
    orders = metal.ORDERS if choices.order == "all" else (choices.order,)
    try:
        outcome = run(source, choices.kernel, launch, orders, fast_math=choices.fast_math)
    except metal.ShaderError as error:
        message = str(error).replace(f"{build.FILE}:", f"{shader}:")
        if choices.style == "github":
            print("\n".join(_annotations(shader, message)))
        raise metal.ShaderError(message) from None
    for line in lines(shader, source, outcome, choices.style):
        print(line)
    if choices.out is not None:
        choices.out.mkdir(parents=True, exist_ok=True)
        for name, array in outcome.buffers.items():
            np.save(choices.out / f"{name}.npy", array)
    return not outcome.findings


def _annotations(shader: Path, message: str) -> list[str]:
    """The errors of the compiler as annotations of GitHub; the first line of the message if it names no place."""
    places = re.findall(rf"^{re.escape(str(shader))}:(\d+):(?:\d+:)? (?:fatal )?error: (.*)$", message, re.M)
    found = [f"::error file={shader},line={line}::{text}" for line, text in places]
    return found or [f"::error file={shader}::{message.splitlines()[0]}"]


def read_launch(path: Path) -> ShaderLaunch:
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise BadRequest(f"cannot read {path}: {error.strerror}; --buffers names the JSON file of a launch") from None
    except json.JSONDecodeError as error:
        raise BadRequest(f"{path} is no JSON: {error}") from None
    _check_fields(str(path), found, LAUNCH, ("grid", "threads", "buffers"))
    buffers = {name: _buffer(name, each, path.parent) for name, each in found["buffers"].items()}
    expected = {}
    for name, each in found["buffers"].items():
        if "expect" in each:
            expected[name] = _expected(name, each, buffers[name], path.parent)
    constants = {int(index): value for index, value in found.get("constants", {}).items()}
    sides = {name: found[name] if isinstance(found[name], list) else [found[name]] for name in ("grid", "threads")}
    memory = found.get("threadgroup_memory", {})
    return ShaderLaunch(buffers, sides["grid"], sides["threads"], found.get("kernel"), constants, memory, expected)


def _check_fields(where: str, found: Any, known: set[str], needed: Sequence[str]) -> None:
    if not isinstance(found, dict):
        raise BadRequest(f"{where} holds {type(found).__name__}; expected an object with {', '.join(sorted(known))}")
    for name in found.keys() - known:
        raise BadRequest(f"{where} has a field {name!r}; it may have {', '.join(sorted(known))}")
    for name in needed:
        if name not in found:
            raise BadRequest(f"{where} lacks {name!r}; it needs {', '.join(needed)}")


def _buffer(name: str, found: Any, folder: Path) -> Array:
    """Return a buffer's array before the launch."""
    _check_fields(f"buffer {name!r}", found, BUFFER, ())
    if str(found.get("file", "")).endswith(".npy"):
        return _load(name, folder / found["file"])
    dtype = _dtype(name, found)
    if "value" in found or "values" in found:
        return np.atleast_1d(np.array(found.get("value", found.get("values")))).astype(dtype)
    if "file" in found:
        data = np.fromfile(folder / found["file"], dtype)
        return data.reshape(found.get("shape", [data.size]))
    if "shape" not in found:
        raise BadRequest(f"buffer {name!r} has no size: give it a 'shape', a 'file', a 'value' or 'values'")
    return _filled(name, found["shape"], dtype, found.get("fill", "poison"))


def _filled(name: str, shape: list[int], dtype: np.dtype[Any], fill: str) -> Array:
    if fill not in FILLS:
        raise BadRequest(f"buffer {name!r} has fill {fill!r}; known are {', '.join(FILLS)}")
    if fill == "poison":
        return metal.poisoned(shape, dtype)
    if fill == "zeros":
        return np.zeros(shape, dtype)
    if fill == "count":
        return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    rng = np.random.default_rng(sum(name.encode()))
    drawn = rng.integers(0, 100, shape) if dtype.kind in "iu" else rng.standard_normal(shape)
    return np.asarray(drawn).astype(dtype)


def _dtype(name: str, found: Mapping[str, Any]) -> np.dtype[Any]:
    given = found.get("dtype", "float32")
    if given not in DTYPES:
        raise BadRequest(f"buffer {name!r} has dtype {given!r}; known are {', '.join(DTYPES)}")
    kind: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16 if given == "bfloat16" else given)
    return kind


def _load(name: str, path: Path) -> Array:
    try:
        array: Array = np.load(path)
    except (OSError, ValueError) as error:
        raise BadRequest(f"buffer {name!r}: cannot read {path}: {error}") from None
    return np.ascontiguousarray(array)


def _expected(name: str, found: Mapping[str, Any], array: Array, folder: Path) -> tuple[Array, float]:
    """Return the result that a buffer should hold, from a list or a .npy file, and the error allowed."""
    given = found["expect"]
    wanted = _load(name, folder / given) if isinstance(given, str) else np.array(given)
    if wanted.size != array.size:
        raise BadRequest(f"buffer {name!r} has {array.size} elements, and {wanted.size} are expected of it")
    return wanted.reshape(array.shape), float(found.get("tolerance", 0.0))


def run(source: str, kernel: str | None, launch: ShaderLaunch, orders: Sequence[str], *, fast_math: bool) -> RunOutcome:
    """Run the launch in each order. A correct kernel has no findings and the same bits in all of them."""
    name = kernel or launch.kernel or _only_kernel(source)
    found: dict[tuple[str, int, int], metal.Finding] = {}  # one of a kind and its lines, whatever the order
    results: list[dict[str, Array]] = []
    for order in orders:
        buffers = {buffer: array.copy() for buffer, array in launch.buffers.items()}
        report = metal.run(
            source, name, {_key(n): array for n, array in buffers.items()}, launch.grid, launch.threads, order=order,
            constants=launch.constants, threadgroup_memory={_key(n): v for n, v in launch.threadgroup_memory.items()},
            fast_math=fast_math,
        )  # fmt: skip
        for finding in report.findings:
            found.setdefault((finding.kind, finding.line, finding.other_line), finding)
        results.append(buffers)
    findings = sorted((finding.line, str(finding)) for finding in found.values())
    for order, other in zip(orders[1:], results[1:], strict=True):
        findings += [(0, text) for text in _differences(results[0], other, orders[0], order)]
    for buffer, (wanted, allowed) in launch.expected.items():
        findings += [(0, text) for text in _errors(buffer, results[0][buffer], wanted, allowed)]
    return RunOutcome(findings, report.counters, results[0], math.prod(launch.grid))


def _key(name: int | str) -> int | str:
    return int(name) if isinstance(name, str) and name.isdecimal() else name


def _only_kernel(source: str) -> str:
    names = build.kernel_names(source)
    if len(names) != 1:
        raise BadRequest(f"the shader has the kernels {', '.join(names) or 'none'}; name one with --kernel")
    return names[0]


def _differences(first: Mapping[str, Array], other: Mapping[str, Array], one: str, two: str) -> Iterator[str]:
    for name, array in first.items():
        differ = np.flatnonzero(array.reshape(-1).view(np.uint8) != other[name].reshape(-1).view(np.uint8))
        if differ.size:
            place = differ[0] // array.itemsize
            yield f"order: element {place} of {name} is not the same in {one} and {two} order of threads"


def _errors(name: str, found: Array, wanted: Array, allowed: float) -> Iterator[str]:
    x, y = found.astype(np.float64).reshape(-1), wanted.astype(np.float64).reshape(-1)
    with np.errstate(invalid="ignore"):
        wrong = np.flatnonzero((x != y) & ~(np.abs(x - y) <= allowed))
    if wrong.size:
        place = wrong[0]
        yield f"result: {wrong.size} elements of {name} are wrong; element {place} is {x[place]}, expected {y[place]}"


def lines(shader: Path, source: str, outcome: RunOutcome, style: str) -> Iterator[str]:
    """Findings by line, for a person or as annotations of GitHub, then the counters."""
    text = source.splitlines()
    for line, message in outcome.findings:
        if style == "github":
            place = f",line={line}" if line else ""
            yield f"::error file={shader}{place}::{message}"
            continue
        yield f"{shader}:{line}: {message}" if line else f"{shader}: {message}"
        if 0 < line <= len(text):
            yield f"    {text[line - 1].strip()}"
    for name, value in vars(outcome.counters).items():
        yield f"{name.replace('_', ' '):26} {value}"
    for unit, clocks in core_clocks(outcome.counters).items():
        yield f"{'model: ' + unit:26} {clocks:.0f} clocks of a core"
    buffer_bytes = sum(array.nbytes for array in outcome.buffers.values())
    for generation in dict.fromkeys(name.split()[0] for name in CHIPS):
        chips = [chip for name, chip in CHIPS.items() if name.split()[0] == generation]
        times = [least_us(outcome.counters, chip, max(1, outcome.threadgroups), buffer_bytes) for chip in chips]
        name = f"model: {generation}, Pro, Max"
        yield f"{name:26} at least {', '.join(f'{time:.3g}' for time in times)} us"
    count = len(outcome.findings)
    yield "nothing found" if not count else f"{count} finding{'s' if count > 1 else ''}"
