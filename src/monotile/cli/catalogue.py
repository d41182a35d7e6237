"""The library's kernels and functions by name, with the defaults by which the command line describes a call of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from .. import backends
from ..backends.choices import AttentionProblem, Choice, Choices
from ..dtypes import DType, bfloat16, bool_, float32, int32, uint8
from ..kernels import attention, backward, examples, mask_blocks, merge, option_gradients
from ..kernels.scores import Options
from ..launch.kernel import Kernel
from ..library import backward as backward_call
from ..library import inputs as call_inputs
from ..library import mask_maps, merging, ops
from ..runtime.tensors import View, dense
from .request import BadRequest, Request, find

HEAD_SIZE, MASK_BLOCK, PARTS, LONG = 128, 64, 64, 2**20
CAUSAL = {True: "lower_right", False: None}
DEVICES = {"cpu": "cpu", "interpreter": "cpu", "nvidia": "gpu", "metal": "mps"}  # where no device is named


def device_of(backend: str, device: str | None) -> str:
    """The device whose choices are shown; it need not be here. On a CPU, `device` names a vector unit."""
    return device if backend == "nvidia" and device is not None else DEVICES.get(backend, "cpu")


def chooser(backend: str, device: str | None) -> str:
    """The backend whose choices are shown: on a CPU that of the vector unit."""
    return f"cpu:{device}" if backend == "cpu" and device not in (None, "cpu") else backend


# ---- kernels ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Defaults:
    """Dtypes of tensors that do not follow the others', and tensors that are left out unless they are asked for."""

    dtypes: Mapping[str, DType]
    optional: tuple[str, ...] = ()


STATE = {"o": float32, "m": float32, "l": float32}
SPLIT_STATE = {f"split_{name}": dtype for name, dtype in STATE.items()}
SLOTS = {"plan": int32, **{f"slot_{name}": dtype for name, dtype in STATE.items()}}  # of balanced splits
QUANTIZED = tuple(f"{name}_{field}" for name in "kv" for field in ("codes", "scales", "zeros"))
OFFSETS = dict.fromkeys(("q_offsets", "k_offsets", "spans"), int32)  # of ragged sequences
PLACES = {**OFFSETS, "page_table": int32, "lengths": int32}  # of ragged and paged keys
SCORES = {"mask": bool_, "block_map": uint8, "lse": float32, "delta": float32, **OFFSETS}
LEFT_OUT = ("mask", "block_map", *OFFSETS)
BACKWARD = (backward.backward_queries, backward.backward_keys, option_gradients.mask_gradient)
LIBRARY: dict[Kernel, Defaults] = {
    attention.attention: Defaults(
        {"mask": bool_, "block_map": uint8, "sinks": float32, "lse": float32, **SPLIT_STATE, **PLACES, **SLOTS},
        ("mask", "block_map", "sinks", *SPLIT_STATE, *PLACES, "k_pages", "v_pages", *SLOTS, *QUANTIZED),
    ),
    backward.row_deltas: Defaults({"dlse": float32, "delta": float32}, ("dlse",)),
    backward.backward_queries: Defaults(SCORES, LEFT_OUT),
    backward.backward_keys: Defaults({**SCORES, "workspace": float32}, (*LEFT_OUT, "dq", "workspace")),
    option_gradients.mask_gradient: Defaults({n: float32 for n in ("mask", "lse", "delta", "dmask")}),
    option_gradients.sink_gradient: Defaults({"sinks": float32, "lse": float32, "delta": float32, "dsinks": float32}),
    merge.merge: Defaults({"sinks": float32, "lse": float32, **STATE}, ("sinks",)),
    merge.merge_lse: Defaults({"lse": float32, "total": float32}),
    mask_blocks.mask_blocks: Defaults({"mask": bool_, "block_map": uint8}),
}


@cache
def kernels() -> dict[str, Kernel]:
    """Every kernel that comes with monotile."""
    small = [item for item in vars(examples).values() if isinstance(item, Kernel)]
    return {kernel.name: kernel for kernel in (*LIBRARY, *small)}


def find_kernel(place: str) -> Kernel:
    """A kernel of monotile by its name, or one in a file or module."""
    if place in kernels():
        return kernels()[place]
    if not place.endswith(".py") and ":" not in place and "." not in place:
        raise BadRequest(f"no kernel of monotile is called {place!r}; it has {', '.join(kernels())}")
    found: Kernel = find(place)
    return found


def completed(kernel: Kernel, request: Request, backend: str, device: str | None) -> tuple[Request, Choice]:
    """The request with what the library would choose for this kernel: options, block sizes, tensors that are left out;
    and that choice. Other kernels have no choice but their constants."""
    defaults = LIBRARY.get(kernel)
    if defaults is None:
        return request, Choice({})
    given = {*request.shapes, *request.dtypes}
    if kernel is attention.attention and given & SPLIT_STATE.keys():  # which are written instead of the output
        given |= SPLIT_STATE.keys()
        defaults = replace(defaults, optional=(*defaults.optional, "o", "lse"))
    values: dict[str, Any] = {name: None for name in defaults.optional if name not in given}
    options = {n: v for n, v in request.values.items() if n in Options._fields}
    values |= {n: v for n, v in request.values.items() if n not in options}
    if "options" in kernel.const_names:
        if type(options.get("causal")) is bool:
            options["causal"] = CAUSAL[options["causal"]]
        values.setdefault("options", Options(**options))
    else:
        values |= options  # unknown to the kernel, which will say so
    values, choice = _with_blocks(kernel, replace(request, values=values), backend, device)
    return replace(request, values=values, dtypes={**defaults.dtypes, **request.dtypes}), choice


def _with_blocks(kernel: Kernel, request: Request, backend: str, device: str | None) -> tuple[dict[str, Any], Choice]:
    """The values with head sizes and block sizes that are not given, and the choice they are of."""
    values, choices = dict(request.values), backends.get(chooser(backend, device)).choices
    where = device_of(backend, device)
    if kernel is mask_blocks.mask_blocks:
        values = {"BQ": MASK_BLOCK, "BK": MASK_BLOCK, **values}
        choice = choices.mask_blocks(values["BQ"], values["BK"], where)
    elif kernel in (merge.merge, merge.merge_lse):
        values = {**_head_sizes(kernel, request), **values}
        choice = choices.merge(PARTS, PARTS, where)
    elif kernel in (backward.row_deltas, option_gradients.sink_gradient):
        values, choice = {**_head_sizes(kernel, request), **values}, Choice({})
    else:
        values = {**_head_sizes(kernel, request), **values}
        problem = _problem(request, values, where)
        choice = _backward_blocks(kernel, choices, problem) if kernel in BACKWARD else choices.attention(problem)
        if kernel is option_gradients.mask_gradient:
            values.setdefault("summed", (False,) * 4)
        if values.get("mask", request) is not None and "covered" in kernel.const_names:
            values.setdefault("covered", choices.marks_covered(problem))
    return {**choice.blocks, **values}, choice


def _backward_blocks(kernel: Kernel, choices: Choices, problem: AttentionProblem) -> Choice:
    chosen = choices.attention_backward(problem)
    return chosen.rows or chosen.keys if kernel is backward.backward_queries else chosen.keys


def _problem(request: Request, values: Mapping[str, Any], device: str) -> AttentionProblem:
    """A call with long sequences, so that no length decides."""
    options, dtype = values["options"], request.dtypes.get("", float32)
    masked = values.get("mask", request) is not None
    mask = request.dtypes.get("mask", bool_) if masked else None
    return AttentionProblem(
        device, dtype, 1, 8, 1, LONG, LONG, max(values["D"], values["Dv"]), options.causal, options.left, options.right,
        options.softcap, mask, options.mask_mod is not None,
    )  # fmt: skip


def _head_sizes(kernel: Kernel, request: Request) -> dict[str, int]:
    """D and Dv: as given, as the shape of a tensor says, or usual."""
    sizes: dict[str, int] = {}
    for name in ("D", "Dv"):
        dims = {p.name: p.dims for p in kernel.parameters}
        shapes = [shape[-1] for tensor, shape in request.shapes.items() if (dims.get(tensor) or ("",))[-1] == name]
        given = request.values.get(name, shapes[0] if shapes else sizes.get("D", HEAD_SIZE))
        sizes[name] = check_length(name, given)
    return {name: size for name, size in sizes.items() if name in kernel.const_names}


# ---- functions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FunctionDefaults:
    """How a call of a library function is described: its options, and its arrays by the names of their sides."""

    options: type[Any]
    arrays: Mapping[str, str]
    optional: tuple[str, ...] = ()
    dtypes: Mapping[str, DType] | None = None  # of arrays whose dtype does not follow the others'


QKV = {"q": "B Hq Nq D", "k": "B Hkv Nk D", "v": "B Hkv Nk Dv", "mask": "B Hq Nq Nk", "sinks": "Hq"}
FUNCTIONS: dict[str, FunctionDefaults] = {
    "attention": FunctionDefaults(
        call_inputs.AttentionOptions, QKV, ("mask", "sinks"), {"mask": bool_, "sinks": float32}
    ),
    "attention_backward": FunctionDefaults(
        backward_call.BackwardOptions,
        {**QKV, "do": "B Hq Nq Dv", "o": "B Hq Nq Dv", "lse": "B Hq Nq", "dlse": "B Hq Nq"},
        ("mask", "sinks", "dlse"),
        {"mask": bool_, "sinks": float32, "lse": float32, "dlse": float32},
    ),
    "decode_partials": FunctionDefaults(
        ops.PartialsOptions, {n: dims for n, dims in QKV.items() if n != "sinks"}, ("mask",), {"mask": bool_}
    ),
    "merge": FunctionDefaults(merging.MergeOptions, {"o": "R S Dv", "m": "R S", "l": "R S"}, (), STATE),
    "merge_lse": FunctionDefaults(merging.MergeLseOptions, {"outs": "R S Dv", "lses": "R S"}, (), {"lses": float32}),
    "mask_blocks": FunctionDefaults(mask_maps.MaskBlocksOptions, {"mask": "B Hq Nq Nk"}, (), {"mask": bool_}),
}
LENGTHS = {"B": 1, "Hq": 32, "Hkv": 8, "Nq": 4096, "D": HEAD_SIZE, "R": 32, "S": 16}
ELEMENTS = {"nvidia": bfloat16, "metal": bfloat16}  # the usual dtype of models on a GPU
OPTIONS: dict[str, Any] = {
    "causal": False, "negative": False, "return_lse": False, "dtype": float32, "block_q": MASK_BLOCK,
    "block_k": MASK_BLOCK, "mask_grad": False,
}  # fmt: skip


def _lengths(defaults: FunctionDefaults, request: Request) -> dict[str, int]:
    """The lengths of a function's arrays by name: given, or usual."""
    names = {side for dims in defaults.arrays.values() for side in dims.split()}
    found = {**LENGTHS, **{n: check_length(n, v) for n, v in request.values.items() if n in names}}
    found.setdefault("Nk", found["Nq"])
    found.setdefault("Dv", found["D"])
    return {name: length for name, length in found.items() if name in names}


def check_length(name: str, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise BadRequest(f"--{name}={value} is a length; write a whole number from 0 up")
    return value


def _with_arrays(defaults: FunctionDefaults, request: Request) -> Request:
    """Read `--mask=bool` as `--dtype mask=bool`, and `--mask` and `--mask=True` as an array of its usual dtype."""
    given = {array: value for array, value in request.values.items() if array in defaults.arrays}
    dtypes: dict[str, DType] = {}
    for array, value in given.items():
        usual = (defaults.dtypes or {}).get(array)
        dtype = value if isinstance(value, DType) else usual if value is True else None
        if dtype is not None:
            dtypes[array] = dtype
        elif value is not None or array not in defaults.optional:
            raise BadRequest(f"--{array}={value}: {array} is an array; write --{array}=DTYPE or --shape {array}=64x128")
    values = {name: value for name, value in request.values.items() if name not in given}
    return replace(request, values=values, dtypes={**dtypes, **request.dtypes})


def described_call(name: str, request: Request, backend: str, device: str | None) -> tuple[dict[str, View], Any]:
    """The arrays and options of a call of a library function, as a command line describes it."""
    defaults = FUNCTIONS[name]
    request = _with_arrays(defaults, request)
    lengths = _lengths(defaults, request)
    left, right = request.values.get("left"), request.values.get("right")
    window = {"window": (left, right)} if (left, right) != (None, None) else {}
    sides = ("left", "right") if "window" in defaults.options._fields else ()
    known = {*lengths, *sides, *defaults.options._fields} - {"window", "backend", "threads"}
    for other in [*request.values, *request.shapes, *filter(None, request.dtypes)]:
        if other not in known and other not in defaults.arrays:
            found = f"{name} has no option, length or array {other!r}"
            hint = "block sizes are the backend's choice"
            raise BadRequest(f"{found}; it has {', '.join(sorted({*known, *defaults.arrays}))} ({hint})")
    values = {**OPTIONS, **window, **request.values, "backend": chooser(backend, device), "threads": None}
    options = defaults.options(*[values.get(field) for field in defaults.options._fields])
    element, views = request.dtypes.get("", ELEMENTS.get(backend, float32)), {}
    for array, dims in defaults.arrays.items():
        if array in defaults.optional and array not in request.shapes and array not in request.dtypes:
            continue
        shape = request.shapes.get(array) or tuple(lengths[side] for side in dims.split())
        dtype = request.dtypes.get(array, (defaults.dtypes or {}).get(array, element))
        views[array] = View(dtype, shape, dense(shape), device_of(backend, device))
    return views, options
