"""`monotile emit --with swift`: a Swift package around the emitted kernels, and numbers that its test checks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..backends.manifest import Entry
from ..backends.metal.runner.folder import evaluate
from ..dtypes import BY_NAME, to_numpy
from .chains import EmittedKernel
from .request import BadRequest

Array = np.ndarray[Any, Any]
SOURCES = Path(__file__).parent / "swift"
CHECKS = "check.json"
LENGTHS = {"B": 2, "Hq": 4, "Hkv": 2, "Nq": 37, "Nk": 300}
OTHER_LENGTHS = (33, 70, 65, 40)  # of symbols in order: no multiples of a block
ALLOWED = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-2}  # relative to the greatest element


def files(parts: Sequence[EmittedKernel], chains: Sequence[Entry]) -> dict[str, bytes]:
    """Return the package's files by path: its sources, and inputs and results of a run of every chain."""
    found = {str(path.relative_to(SOURCES)): path.read_bytes() for path in sorted(SOURCES.rglob("*.swift"))}
    cases = []
    for chain in chains:
        case, data = _case(parts, chain)
        cases.append(case)
        found |= data
    found[CHECKS] = (json.dumps({"cases": cases}, indent=2) + "\n").encode()
    return found


def _case(parts: Sequence[EmittedKernel], chain: Entry) -> tuple[Entry, dict[str, bytes]]:
    """Describe a run of a chain on random inputs, with the results of the interpreter."""
    relations = [relation for part in parts for relation in part.entry["relations"]]
    names, numbers, memory = _inputs(chain, relations)
    for tensor in chain["tensors"]:
        if tensor["name"] not in memory:
            shape = [evaluate(side, names) for side in tensor["shape"]]
            memory[tensor["name"]] = np.zeros(shape, to_numpy(BY_NAME[tensor["dtype"]]))
    case: Entry = {"chain": chain["name"], "numbers": numbers, "inputs": {}, "outputs": {}}
    data: dict[str, bytes] = {}

    def keep(tensor: Entry, kind: str, **more: Any) -> None:
        array, file = memory[tensor["name"]], f"check/{chain['name']}.{tensor['name']}.{kind}.bin"
        case[kind][tensor["name"]] = {"file": file, "dtype": tensor["dtype"], "shape": list(array.shape), **more}
        data[file] = array.tobytes()

    for tensor in chain["tensors"]:
        if tensor["role"].startswith("input"):
            keep(tensor, "inputs")
    for launch in chain["launches"]:
        _interpret(next(part for part in parts if part.entry["name"] == launch["kernel"]), launch, memory, names)
    for tensor in chain["tensors"]:
        if tensor["role"].endswith("output"):
            result = memory[tensor["name"]].astype(np.float64)
            greatest = float(np.max(np.abs(result), where=np.isfinite(result), initial=0.0))
            keep(tensor, "outputs", allowed=ALLOWED.get(tensor["dtype"], 0.0) * greatest)
    return case, data


def _inputs(chain: Entry, relations: Sequence[str]) -> tuple[dict[str, Any], dict[str, float], dict[str, Array]]:
    """Choose lengths, numbers and random arrays for a chain."""
    rng, names, memory = np.random.default_rng(0), dict[str, Any](), dict[str, Array]()
    for tensor in chain["tensors"]:
        for side in tensor["shape"]:
            if isinstance(side, str) and side.isidentifier() and side not in names:
                names[side] = LENGTHS.get(side, OTHER_LENGTHS[len(names) % len(OTHER_LENGTHS)])
    defaults = {s["name"]: s["default"] for s in chain["scalars"] if "default" in s}
    names = {name: length for name, length in names.items() if name not in defaults}
    numbers = {s["name"]: _number(s, relations) for s in chain["scalars"] if s["name"] not in defaults}
    names |= numbers
    names |= {name: evaluate(text, names) for name, text in defaults.items()}
    for tensor in chain["tensors"]:
        if tensor["role"].startswith("input"):
            shape, dtype = [evaluate(side, names) for side in tensor["shape"]], BY_NAME[tensor["dtype"]]
            if not dtype.is_float and tensor["dtype"] != "bool":
                cure = "emit mask_blocks with it" if tensor["name"] == "block_map" else "leave out --with swift"
                raise BadRequest(f"no test can be written for {tensor['name']}, which holds {dtype}: {cure}")
            drawn = rng.standard_normal(shape) if dtype.is_float else rng.random(shape) < 0.7
            memory[tensor["name"]] = drawn.astype(to_numpy(dtype))
    return names, numbers, memory


def _number(scalar: Entry, relations: Sequence[str]) -> float | int:
    if scalar["dtype"] != "float32":
        return 1
    return -0.125 if f"{scalar['name']} <= 0" in relations else 0.125


def _interpret(part: EmittedKernel, launch: Entry, memory: Mapping[str, Array], names: Mapping[str, Any]) -> None:
    """Run one launch in the interpreter, which defines what a kernel means."""
    given: dict[str, Any] = {name: evaluate(text, dict(names)) for name, text in launch["scalars"].items()}
    for name, use in launch["tensors"].items():
        given[name] = memory[use["tensor"]].reshape([evaluate(side, dict(names)) for side in use["shape"]])
    arguments = [given.get(parameter.name) for parameter in part.kernel.parameters]
    consts = {name: value for name, value in part.form.consts.items() if name in part.kernel.const_names}
    part.kernel(*arguments, backend="interpreter", **consts)
