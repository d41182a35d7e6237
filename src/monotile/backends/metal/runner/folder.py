"""Launch a chain of an emitted folder in the runner. Nothing is known here but what the manifest says."""

from __future__ import annotations

import ast
import json
import math
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from . import launch as runner
from .report import LaunchError, Report

Array = np.ndarray[Any, Any]
Names = dict[str, Any]
BINARY: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
COMPARE: dict[type[ast.cmpop], Any] = {ast.Eq: operator.eq, ast.GtE: operator.ge, ast.LtE: operator.le}
CALLS = {"min": min, "max": max}


class ChainResult(NamedTuple):
    outputs: dict[str, Array]  # what the chain writes, its temporaries too
    reports: dict[str, Report]  # by kernel


def run_chain(
    folder: Path | str, arrays: Mapping[str, Array], numbers: Mapping[str, Any], *, chain: str | None = None,
    **options: Any,
) -> ChainResult:  # fmt: skip
    """Run a chain of `folder` (the only one, if none is named) on the arrays of its inputs. `numbers` are its scalars,
    and lengths that no input has. `options` are those of `run`; memory that the chain writes starts as NaN."""
    folder = Path(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    steps = _chain(manifest, chain)
    kernels = {kernel["name"]: kernel for kernel in manifest["kernels"]}
    names = _names(steps, arrays, numbers)
    memory: dict[str, Array] = {}
    for tensor in steps["tensors"]:
        if tensor["role"] in ("output", "temporary"):
            shape = [evaluate(side, names) for side in tensor["shape"]]
            memory[tensor["name"]] = np.full(math.prod(shape) * _dtype(tensor).itemsize, 255, np.uint8)
            memory[tensor["name"]] = memory[tensor["name"]].view(_dtype(tensor)).reshape(shape)
        else:
            memory[tensor["name"]] = arrays[tensor["name"]]
    reports = {}
    for step in steps["launches"]:
        reports[step["kernel"]] = _launch(folder, kernels[step["kernel"]], step, memory, names, options)
    written = {t["name"]: memory[t["name"]] for t in steps["tensors"] if t["role"] != "input"}
    return ChainResult(written, reports)


def _launch(folder: Path, kernel: Any, step: Any, memory: Mapping[str, Array], names: Names, options: Any) -> Report:
    """Run one launch of a chain: bind its tensors and words, check its relations, evaluate its grid."""
    scalars = {name: evaluate(text, names) for name, text in step["scalars"].items()}
    own: Names = dict(scalars)
    shapes: dict[str, list[int]] = {}
    buffers: dict[int | str, Any] = {}
    for buffer in kernel["buffers"]:
        if buffer["role"] == "words":
            continue
        use = step["tensors"][buffer["name"]]
        shapes[buffer["name"]] = shape = [evaluate(side, names) for side in use["shape"]]
        array = memory[use["tensor"]]
        if math.prod(shape) != array.size or str(array.dtype) != buffer["dtype"]:
            found = f"{use['tensor']} has {array.size} elements of {array.dtype}"
            raise LaunchError(f"{kernel['name']} takes {math.prod(shape)} of {buffer['dtype']}; {found}")
        _match(buffer["name"], buffer["shape"], shape, own)
        _check_strides(buffer, shape)
        buffers[buffer["index"]] = array.reshape(-1)
    for relation in kernel["relations"]:
        if not evaluate(relation, own):
            raise LaunchError(f"{kernel['name']} needs {relation}; found {_mentioned(relation, own)}")
    for buffer in kernel["buffers"]:
        if buffer["role"] == "words":
            words = [_word(word, shapes, scalars) for word in buffer["words"]]
            buffers[buffer["index"]] = np.array(words, buffer["dtype"])
    grid = [evaluate(text, own) for text in kernel["grid"]]
    return runner.run(
        (folder / kernel["file"]).read_text(), kernel["name"], buffers, grid, kernel["threads"], **options
    )


def _chain(manifest: Any, name: str | None) -> Any:
    found = {chain["name"]: chain for chain in manifest["chains"]}
    if name is None and len(found) == 1:
        return next(iter(found.values()))
    if name not in found:
        raise LaunchError(f"the folder has the chains {', '.join(found)}; name one of them, found {name!r}")
    return found[name]


def _names(chain: Any, arrays: Mapping[str, Array], numbers: Mapping[str, Any]) -> Names:
    """Return the lengths of the inputs by symbol, and the scalars."""
    inputs = [tensor for tensor in chain["tensors"] if tensor["role"].startswith("input")]
    wanted = {tensor["name"] for tensor in inputs}
    if wanted != set(arrays):
        raise LaunchError(f"{chain['name']} takes the arrays {', '.join(sorted(wanted))}; found {', '.join(arrays)}")
    names = dict(numbers)
    for tensor in inputs:
        array = arrays[tensor["name"]]
        if str(array.dtype) != tensor["dtype"] or not array.flags.c_contiguous:
            raise LaunchError(f"{tensor['name']} is {array.dtype}; expected a contiguous array of {tensor['dtype']}")
        _match(tensor["name"], tensor["shape"], array.shape, names)
    for scalar in chain["scalars"]:
        if scalar["name"] not in names:
            if "default" not in scalar:
                raise LaunchError(f"{chain['name']} takes the number {scalar['name']}; pass it in `numbers`")
            names[scalar["name"]] = evaluate(scalar["default"], names)
    return names


def _match(name: str, wanted: Sequence[Any], shape: Sequence[int], names: Names) -> None:
    """Give each symbol of a shape its length; one that has another already, or a number that differs, is an error."""
    same = len(wanted) == len(shape)
    if same:
        sides = [names.setdefault(w, n) if isinstance(w, str) and w.isidentifier() else evaluate(w, names)
                 for w, n in zip(wanted, shape, strict=True)]  # fmt: skip
        same = sides == list(shape)
    if not same:
        raise LaunchError(f"{name} has shape {tuple(shape)}; expected {wanted} with {_mentioned(wanted, names)}")


def _check_strides(buffer: Any, shape: Sequence[int]) -> None:
    for axis, stride in enumerate(buffer["strides"]):
        if stride is not None and shape[axis] > 1 and stride != math.prod(shape[axis + 1 :]):
            found = f"a packed array has {math.prod(shape[axis + 1 :])}"
            raise LaunchError(f"{buffer['name']} has stride {stride} along axis {axis} compiled in; {found}")


def _word(word: Any, shapes: Mapping[str, Sequence[int]], scalars: Names) -> Any:
    meaning = word["meaning"]
    if meaning == "scalar":
        return scalars[word["name"]]
    if meaning == "length":
        return shapes[word["tensor"]][word["axis"]]
    return math.prod(shapes[word["tensor"]][word["axis"] + 1 :]) if meaning == "stride" else 0


def _dtype(tensor: Any) -> np.dtype[Any]:
    name: str = tensor["dtype"]
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def _mentioned(text: Any, names: Names) -> str:
    return ", ".join(f"{name} = {value}" for name, value in names.items() if name in str(text))


def evaluate(text: str | int, names: Names) -> Any:
    """Evaluate an expression of the manifest: numbers, names, + - * // %, min, max, == >= <=."""
    return _value(ast.parse(str(text), mode="eval").body, names)


def _value(node: ast.expr, names: Names) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Name(id=name):
            raise LaunchError(f"{name} has no value: no input has it as a length; pass it in `numbers`")
        case ast.BinOp(left, op, right) if type(op) in BINARY:
            return BINARY[type(op)](_value(left, names), _value(right, names))
        case ast.Compare(left, [op], [right]) if type(op) in COMPARE:
            return COMPARE[type(op)](_value(left, names), _value(right, names))
        case ast.Call(ast.Name(id=name), arguments) if name in CALLS:
            return CALLS[name](_value(argument, names) for argument in arguments)
    raise LaunchError(f"the manifest has an expression that is none: {ast.unparse(node)}")
