"""Chains of `monotile emit`: the launches that make one result, in order, and the memory that goes between them.

The tensors of a chain are packed arrays. Each launch reads them as tensors of shapes of its own, so that rows may be
packed for one kernel and flattened for another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..backends.manifest import Entry
from ..ir import Kernel as KernelIR
from ..kernels import attention, mask_blocks, merge
from ..launch.kernel import Kernel
from .request import BadRequest

Shape = list[str | int]
STATES = {"split_o": "o", "split_m": "m", "split_l": "l"}  # of attention, by their names in merge
SHAPED = ("q", "k", "v", "mask", "block_map", "sinks", "split_o", "split_m", "split_l", "o", "lse")  # by _shapes
SPLITS = "max(1, min(32, Nk // 128))"  # a plain rule, where the caller names no number


class EmittedKernel(NamedTuple):
    """A kernel of the manifest."""

    kernel: Kernel
    form: KernelIR
    entry: Entry


def chains(parts: Sequence[EmittedKernel]) -> list[Entry]:
    """Return the chains of a manifest's kernels. A kernel that belongs to no other is a chain of one launch."""
    by = {part.kernel: part for part in parts}
    found, used = [], set[Kernel]()
    if attention.attention in by:
        chain = _attention(by)
        used = {part.kernel for part in parts if part.entry["name"] in [n["kernel"] for n in chain["launches"]]}
        found.append(chain)
    found += [_alone(part) for part in parts if part.kernel not in used]
    for chain in found:
        _check_dtypes(chain, parts)
    return found


def _alone(part: EmittedKernel) -> Entry:
    tensors = [{n: t[n] for n in ("name", "role", "dtype", "shape")} for t in tensors_of(part.entry)]
    bound = {t["name"]: t["shape"] for t in tensors}
    scalars = [{"name": name, "dtype": dtype.name} for name, dtype in part.form.scalars]
    launch = _launch(part, {name: name for name in bound}, bound, {s["name"]: s["name"] for s in scalars})
    return {"name": part.entry["name"], "tensors": tensors, "scalars": scalars, "launches": [launch]}


def _attention(by: Mapping[Kernel, EmittedKernel]) -> Entry:
    """Attention, after the block map that it reads and before the merge of its splits, if they are emitted with it."""
    part = by[attention.attention]
    consts, present = part.form.consts, {tensor.name: tensor for tensor in part.form.tensors}
    mapped = "block_map" in present and mask_blocks.mask_blocks in by
    if unknown := [name for name in present if name not in SHAPED]:
        found = f"attention with {', '.join(unknown)} cannot be emitted: packed sequences, pages and quantized keys are"
        raise BadRequest(f"{found} run by the library alone; emit takes the tensors {', '.join(SHAPED)}")
    split, merged = "split_o" in present, "split_o" in present and merge.merge in by
    if mapped and consts["packed"]:
        raise BadRequest(
            "mask_blocks maps the rows of one head, and --packed=True packs those of several: leave it out"
        )
    groups, rows = ("Hkv", "Hq // Hkv * Nq") if consts["packed"] else ("Hq", "Nq")
    shapes = _shapes(consts, groups, rows)
    launches = []
    if mapped:
        names = {"mask": "mask", "block_map": "block_map"}
        launches.append(_launch(by[mask_blocks.mask_blocks], names, shapes, {}))
    scalars: dict[str, str] = {"scale": "scale", "queries": "Nq" if consts["packed"] else "1", "first_block": "0"}
    scalars["blocks_per_split"] = f"({_blocks('Nk', consts['BK'])} + S - 1) // S" if split else "0"
    own = {**shapes, "q": ["B", groups, rows, consts["D"]], "o": ["B", groups, rows, consts["Dv"]]}
    launches.append(_launch(part, {name: name for name in present}, {**own, "lse": ["B", groups, rows]}, scalars))
    outputs = [name for name in ("o", "lse", *STATES) if name in present]
    if merged:
        form = by[merge.merge].form
        names = {"out": "o", "lse": "lse", "sinks": "sinks", **{short: name for name, short in STATES.items()}}
        names = {tensor.name: names[tensor.name] for tensor in form.tensors}
        flat = f"B * {groups} * ({rows})"
        flattened: dict[str, Shape] = {name: [flat, "S", *shapes[name][4:]] for name in STATES}
        flattened |= {"o": [flat, consts["Dv"]], "lse": [flat], "sinks": shapes["sinks"]}
        launches.append(_launch(by[merge.merge], names, flattened, {"queries": "Nq"}))
        outputs = [name for name in names.values() if name in ("o", "lse")]
    dtypes = {use["tensor"]: _dtype(by, launch, name) for launch in launches for name, use in launch["tensors"].items()}
    temporary = (*STATES, *["block_map"] * mapped)
    roles = {name: "output" if name in outputs else "temporary" if name in temporary else "input" for name in dtypes}
    tensors = [{"name": n, "role": roles[n], "dtype": dtypes[n], "shape": shapes[n]} for n in shapes if n in dtypes]
    numbers: list[Entry] = [{"name": "scale", "dtype": "float32"}]
    numbers += [{"name": "S", "dtype": "int64", "default": SPLITS}] if split else []
    name = "_".join(launch["kernel"] for launch in launches)
    return {"name": name, "tensors": tensors, "scalars": numbers, "launches": launches}


def _shapes(consts: Mapping[str, Any], groups: str, rows: str) -> dict[str, Shape]:
    """The shapes of attention's tensors by name, as a caller has them."""
    D, Dv = consts["D"], consts["Dv"]
    state: Shape = ["B", groups, rows, "S"]
    return {
        "q": ["B", "Hq", "Nq", D],
        "k": ["B", "Hkv", "Nk", D],
        "v": ["B", "Hkv", "Nk", Dv],
        "mask": ["B", "Hq", "Nq", "Nk"],
        "block_map": ["B", groups, _blocks(rows, consts["BR"]), _blocks("Nk", consts["BK"])],
        "sinks": ["Hq"],
        "split_o": [*state, Dv],
        "split_m": state,
        "split_l": state,
        "o": ["B", "Hq", "Nq", Dv],
        "lse": ["B", "Hq", "Nq"],
    }


def _blocks(length: str, size: int) -> str:
    return f"({length} + {size - 1}) // {size}"


def _launch(
    part: EmittedKernel, names: Mapping[str, str], shapes: Mapping[str, Shape], scalars: Mapping[str, str]
) -> Entry:
    tensors = {own: {"tensor": name, "shape": shapes[name]} for own, name in names.items()}
    return {"kernel": part.entry["name"], "tensors": tensors, "scalars": dict(scalars)}


def tensors_of(entry: Entry) -> list[Entry]:
    """The tensors of a kernel's entry, which for Metal are among its buffers."""
    return [tensor for tensor in entry.get("tensors") or entry["buffers"] if tensor["role"] != "words"]


def _dtype(by: Mapping[Kernel, EmittedKernel], launch: Entry, name: str) -> str:
    (part,) = (part for part in by.values() if part.entry["name"] == launch["kernel"])
    return next(str(tensor.dtype) for tensor in part.form.tensors if tensor.name == name)


def _check_dtypes(chain: Entry, parts: Sequence[EmittedKernel]) -> None:
    dtypes = {tensor["name"]: tensor["dtype"] for tensor in chain["tensors"]}
    forms = {part.entry["name"]: part.form for part in parts}
    for launch in chain["launches"]:
        for tensor in forms[launch["kernel"]].tensors:
            name = launch["tensors"][tensor.name]["tensor"]
            if str(tensor.dtype) != dtypes[name]:
                found = f"{launch['kernel']} takes {tensor.name} as {tensor.dtype}, and {name} of the chain is"
                raise BadRequest(f"{found} {dtypes[name]}: give both the same --dtype, or emit one of the kernels")
