"""The functions of the library with their test cases, float64 definitions and tolerances: for tests, `monotile check`
and the benchmark.

A result may be twice as far from float64 as the plain formula is in the same dtype. To add a case, add a line.
"""

from __future__ import annotations

import sys
import types
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from .. import backends, dtypes
from ..kernels import reference, reference_caches
from . import ops, quantized_cases
from .block_mask import BlockMask
from .cache_cases import appended, exact_append, formula, paged, paged_rows, ragged, ragged_gradients, run_append
from .quantized import Quantized

Array = np.ndarray[Any, Any]
Inputs = dict[str, Any]
Results = dict[str, Array]

# Where the plain formula happens to be exact, as for one key: a few units in the last place of float32.
FEW_ULPS = 2.0**-21
LSE = 1e-6


@dataclass(frozen=True)
class Sizes:
    B: int
    Hq: int
    Hkv: int
    Nq: int
    Nk: int
    D: int
    Dv: int

    def __str__(self) -> str:
        heads = f"{self.B}x{self.Hq}" + (f"/{self.Hkv}" if self.Hq != self.Hkv else "")
        return f"{heads} heads, {self.Nq} x {self.Nk}, D {self.D}" + (f" Dv {self.Dv}" if self.Dv != self.D else "")


@dataclass(frozen=True)
class Case:
    """One call: sizes, dtype, plain options, and options that are made for the sizes (masks, functions)."""

    op: str
    sizes: Sizes
    dtype: str = "float32"
    options: Mapping[str, Any] = field(default_factory=dict)
    made: tuple[str, ...] = ()  # names in MAKERS
    values_in_keys: bool = False  # v is a view of the first columns of k, as in MLA

    @property
    def name(self) -> str:
        options = [f"{n} {v}".removesuffix(" True") for n, v in self.options.items()]
        view = ["values in keys"] if self.values_in_keys else []
        return ", ".join([f"{self.op} {self.dtype}", str(self.sizes), *options, *self.made, *view])

    def inputs(self) -> Inputs:
        """The arguments, the same at every call."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        found = OPS[self.op].make(rng, self.sizes, dtypes.to_numpy(dtypes.BY_NAME[self.dtype]))
        for maker in self.made:
            found |= MAKERS[maker](rng, self.sizes)
        return self.with_view(found) | dict(self.options)

    def with_view(self, inputs: Inputs) -> Inputs:
        """The inputs, with v as a view of k where the case has values in keys. Copies to a device lose the view."""
        return inputs | {"v": inputs["k"][..., : self.sizes.Dv]} if self.values_in_keys else inputs


@dataclass(frozen=True)
class CheckedFunction:
    """A function: how its inputs are made, monotile's results, the exact ones, and those of the plain formula."""

    name: str
    make: Callable[[np.random.Generator, Sizes, np.dtype[Any]], Inputs]
    run: Callable[..., Results]
    exact: Callable[[Inputs], Results]
    naive: Callable[[Inputs], Results]


@dataclass(frozen=True)
class Verdict:
    """The error of one output against float64, and its tolerance; the error is infinite if NaN or infinity is
    misplaced."""

    output: str
    error: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed


def judge(output: str, found: Array, exact: Array, naive: Array) -> Verdict:
    """Compare an output with float64: at most twice the error of the plain formula, NaN and infinity in the same
    places; a block map is exact."""
    if found.shape != exact.shape:
        return Verdict(output, np.inf, 0.0)
    if found.dtype.kind in "ub":
        return Verdict(output, float((found != exact).any()), 0.0)
    wide, rounded = found.astype(np.float64), exact.astype(found.dtype).astype(np.float64)
    finite = np.isfinite(rounded)
    if not np.array_equal(wide[~finite], rounded[~finite], equal_nan=True):
        return Verdict(output, np.inf, 0.0)
    with np.errstate(invalid="ignore"):
        error = np.abs(wide - exact)[finite].max(initial=0.0)
        usual = np.abs(naive.astype(np.float64) - exact)[finite].max(initial=0.0)
    largest = np.abs(exact[finite]).max(initial=0.0)
    tiny = LSE * max(1.0, largest) if output == "lse" else FEW_ULPS * largest
    return Verdict(output, float(error), float(2 * usual + tiny))


def verdicts(case: Case, backend: str | None = None, threads: int | None = None) -> list[Verdict]:
    """Run a case and judge each of its outputs."""
    op, inputs = OPS[case.op], case.inputs()
    given = case.with_view({name: on_device(value, backend) for name, value in inputs.items()})
    found = {n: from_device(v) for n, v in op.run(given, backend=backend, threads=threads).items()}
    exact, naive = op.exact(inputs), op.naive(inputs)
    return [judge(name, found[name], exact[name], naive[name]) for name in found]


def gpu_of(backend: str | None) -> str | None:
    """The torch device that runs a backend's cases; None if they run on arrays in this machine's memory."""
    if backend == "nvidia" and not backends.get("nvidia").accepts("cpu"):  # Triton's interpreter takes them as they are
        return "cuda"
    if backend == "metal" and sys.platform == "darwin":
        from ..backends.metal import on_mps

        return "mps" if on_mps.why_not() is None else None
    return None


def on_device(value: Any, backend: str | None) -> Any:
    """Move an argument to where a backend takes it: on a GPU, with arrays that a function refers to."""
    device = gpu_of(backend)
    if device is None:
        return value
    if isinstance(value, types.FunctionType):
        cells = tuple(types.CellType(on_device(cell.cell_contents, backend)) for cell in value.__closure__ or ())
        known = value.__globals__
        named = [n for n in value.__code__.co_names if isinstance(known.get(n), np.ndarray)]
        moved = known | {n: on_device(known[n], backend) for n in named} if named else known
        return types.FunctionType(value.__code__, moved, value.__name__, value.__defaults__, cells)
    if isinstance(value, BlockMask):
        return BlockMask(on_device(value.mask_mod, backend), value.B, value.H, value.Nq, value.Nk)
    if isinstance(value, Quantized):
        return value.with_fields({name: on_device(array, backend) for name, array in value.fields().items()})
    if not isinstance(value, np.ndarray):
        return value
    import torch

    name = value.dtype.name
    bits = {"bfloat16": np.int16, "float8_e4m3fn": np.uint8, "float8_e5m2": np.uint8}.get(name)
    plain = value if bits is None else value.view(bits)
    tensor = torch.from_numpy(np.ascontiguousarray(plain).reshape(plain.shape)).view(getattr(torch, name))
    return tensor.to(device)


def from_device(value: Any) -> Any:
    """A result as a NumPy array."""
    if isinstance(value, np.ndarray):
        return value
    import torch

    home = value.cpu()
    if home.dtype is torch.bfloat16:
        return home.view(torch.int16).numpy().view(dtypes.to_numpy(dtypes.bfloat16))
    return home.numpy()


# ---- attention and its split form ------------------------------------------------------------------------------------


def _qkv(rng: np.random.Generator, s: Sizes, dtype: np.dtype[Any]) -> Inputs:
    shapes = {"q": (s.B, s.Hq, s.Nq, s.D), "k": (s.B, s.Hkv, s.Nk, s.D), "v": (s.B, s.Hkv, s.Nk, s.Dv)}
    return {n: rng.standard_normal(shape, dtype=np.float32).astype(dtype) for n, shape in shapes.items()}


def _attention_formula(compute: type) -> Callable[[Inputs], Results]:
    """In float64; or in float32 with sums term by term, the output rounded to q's type."""

    def attention(inputs: Inputs) -> Results:
        options = {n: v for n, v in inputs.items() if n != "splits"}
        out, lse = reference.attention(**options, compute=compute)
        return {"out": out.astype(inputs["q"].dtype) if compute is np.float32 else out, "lse": lse}

    return attention


def _decode(inputs: Inputs, **run: Any) -> Results:
    """The merged parts: a part alone has no exact value, since its maximum is free."""
    parts = ops.decode_partials(**inputs, **run)
    out, lse = ops.merge(*parts, dtype=inputs["q"].dtype, **run)
    return {"out": out, "lse": lse}


# ---- the backward pass -----------------------------------------------------------------------------------------------


def _with_gradients(rng: np.random.Generator, s: Sizes, dtype: np.dtype[Any]) -> Inputs:
    rows: tuple[int, ...] = (s.B, s.Hq, s.Nq)
    do, dlse = (rng.standard_normal(shape, dtype=np.float32) for shape in ((*rows, s.Dv), rows))
    return _qkv(rng, s, dtype) | {"do": do.astype(dtype), "dlse": dlse}


def forward_inputs(inputs: Inputs) -> Inputs:
    return {n: v for n, v in inputs.items() if n not in ("do", "dlse", "mask_grad")}


def _backward(name: str, inputs: Inputs, **run: Any) -> Results:
    """The gradients of a forward pass by monotile."""
    o, lse = getattr(ops, name)(**forward_inputs(inputs), return_lse=True, **run)
    found = getattr(ops, f"{name}_backward")(**inputs, o=o, lse=lse, **run)._asdict()
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def backward_formula(compute: type, forward: Callable[..., Any], backward: Callable[..., Results]) -> Any:
    """In float64; or in float32 with sums term by term, from an output and a logsumexp that are rounded to their types,
    each gradient rounded to its own."""

    def gradients(inputs: Inputs) -> Results:
        o, lse = forward(**forward_inputs(inputs))
        if compute is np.float64:
            return backward(**inputs, o=o, lse=lse)
        o, lse = o.astype(inputs["q"].dtype), lse.astype(np.float32)
        found = backward(**inputs, o=o, lse=lse, compute=compute)
        return {name: gradient.astype(inputs[name[1:]].dtype) for name, gradient in found.items()}

    return gradients


# ---- merging ---------------------------------------------------------------------------------------------------------


def _parts(rng: np.random.Generator, s: Sizes, dtype: np.dtype[Any]) -> Inputs:
    """Nk parts for each query row. Every fourth is empty, and what an empty part holds must not matter."""
    rows = s.B, s.Hq, s.Nq, s.Nk
    m, l = 20 * rng.standard_normal(rows, dtype=np.float32), 1 + 500 * rng.random(rows, dtype=np.float32)
    o = rng.standard_normal((*rows, s.Dv), dtype=np.float32) * l[..., None]
    l[..., ::4] = 0
    m[..., ::4], o[..., ::4, :] = -np.inf, np.nan
    return {"o": o, "m": m, "l": l, "dtype": dtypes.from_numpy(dtype)}


def _finished(rng: np.random.Generator, s: Sizes, dtype: np.dtype[Any]) -> Inputs:
    parts = _parts(rng, s, dtype)
    with np.errstate(divide="ignore", invalid="ignore"):
        return {"outs": (parts["o"] / parts["l"][..., None]).astype(dtype), "lses": parts["m"] + np.log(parts["l"])}


def _merge_formula(compute: type) -> Callable[[Inputs], Results]:
    def merge(inputs: Inputs) -> Results:
        finished = "outs" in inputs
        o, m = inputs["outs" if finished else "o"], inputs["lses" if finished else "m"]
        l = (m != -np.inf).astype(np.float32) if finished else inputs["l"]
        out, lse = reference.merge(o, m, l, compute)
        kind = o.dtype if finished else dtypes.to_numpy(inputs["dtype"])
        return {"out": out.astype(kind) if compute is np.float32 else out, "lse": lse}

    return merge


# ---- masks -----------------------------------------------------------------------------------------------------------


def _additive(rng: np.random.Generator, s: Sizes) -> Inputs:
    """Added to the scores: a part is zero, a part hides."""
    mask = rng.standard_normal((s.B, s.Hq, s.Nq, s.Nk), dtype=np.float32)
    mask[:, :, : s.Nq // 2, : s.Nk // 2] = 0
    mask[:, :, s.Nq // 2 :, : s.Nk // 2] = -np.inf
    return {"mask": mask}


def _bool(rng: np.random.Generator, s: Sizes) -> Inputs:
    """True = attend, per head: a part is open, a part hides, and the first rows of many see nothing."""
    mask = rng.random((1, s.Hq, s.Nq, s.Nk)) < 0.7
    mask[..., : s.Nk // 2] = np.arange(s.Nq)[:, None] < s.Nq // 2
    mask[:, :, : s.Nq // 8] = False
    return {"mask": mask}


def _padding(rng: np.random.Generator, s: Sizes) -> Inputs:
    """Keys past the end of each sequence of the batch are hidden."""
    ends = rng.integers(1, s.Nk + 1, (s.B, 1, 1, 1))
    return {"mask": np.arange(s.Nk) < ends}


def _sinks(rng: np.random.Generator, s: Sizes) -> Inputs:
    return {"sinks": rng.standard_normal(s.Hq, dtype=np.float32)}


def _alibi(rng: np.random.Generator, s: Sizes) -> Inputs:
    slopes = (2.0 ** -(8 * (np.arange(s.Hq) + 1) / s.Hq)).astype(np.float32)
    return {"score_mod": lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)}


def _documents(rng: np.random.Generator, s: Sizes) -> Inputs:
    ids = np.sort(rng.integers(0, 4, max(s.Nq, s.Nk))).astype(np.int32)
    return {"mask_mod": lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx]}


def _early_keys(rng: np.random.Generator, s: Sizes) -> Inputs:
    """A mask_mod that depends on the batch: keys of a sequence from some position on are hidden."""
    ends = rng.integers(0, s.Nk, s.B).astype(np.int32)
    return {"mask_mod": lambda b, h, q_idx, kv_idx: kv_idx < ends[b]}


MAKERS: dict[str, Callable[[np.random.Generator, Sizes], Inputs]] = {
    "additive mask": _additive,
    "bool mask": _bool,
    "padding mask": _padding,
    "sinks": _sinks,
    "alibi": _alibi,
    "documents": _documents,
    "early keys": _early_keys,
}


def _mask(rng: np.random.Generator, s: Sizes, dtype: np.dtype[Any]) -> Inputs:
    return {**(_bool if dtype.kind == "b" else _additive)(rng, s), "block_q": 32, "block_k": 64}


def _results(function: Callable[..., Any], *names: str) -> Callable[..., Results]:
    return lambda inputs, **run: dict(zip(names, function(**inputs, **run), strict=True))


def _block_map(function: Callable[..., Any]) -> Callable[..., Results]:
    return lambda inputs, **run: {"block_map": function(**inputs, **run)}


def _of_caches(name: str, make: Callable[..., Inputs], function: str = "") -> CheckedFunction:
    """`function` where the name is another than the function's."""
    function = function or name
    run = _results(partial(getattr(ops, function), return_lse=True), "out", "lse")
    return CheckedFunction(name, make, run, formula(function, np.float64), formula(function, np.float32))


ATTENTION = _attention_formula(np.float64), _attention_formula(np.float32)
BACKWARD, VARLEN_BACKWARD = (
    tuple(backward_formula(compute, *functions) for compute in (np.float64, np.float32))
    for functions in (
        (reference.attention, reference.attention_backward),
        (reference_caches.attention_varlen, reference_caches.attention_varlen_backward),
    )
)
QUANTIZED, QUANTIZED_PAGES = (
    tuple(quantized_cases.formula(compute, pages=pages) for compute in (np.float64, np.float32))
    for pages in (False, True)
)
MERGE = _merge_formula(np.float64), _merge_formula(np.float32)
OPS = {
    op.name: op
    for op in (
        CheckedFunction("attention", _qkv, _results(partial(ops.attention, return_lse=True), "out", "lse"), *ATTENTION),
        *(_of_caches(name, make) for name, make in (("attention_varlen", ragged), ("attention_paged", paged))),
        _of_caches("attention_paged_rows", paged_rows, "attention_paged"),
        CheckedFunction("paged_append", appended, partial(run_append, ops.paged_append), exact_append, exact_append),
        CheckedFunction("attention_backward", _with_gradients, partial(_backward, "attention"), *BACKWARD),
        CheckedFunction(
            "attention_varlen_backward", ragged_gradients, partial(_backward, "attention_varlen"), *VARLEN_BACKWARD
        ),
        CheckedFunction("decode_partials", _qkv, _decode, *ATTENTION),
        CheckedFunction("merge", _parts, _results(ops.merge, "out", "lse"), *MERGE),
        CheckedFunction("merge_lse", _finished, _results(ops.merge_lse, "out", "lse"), *MERGE),
        CheckedFunction("mask_blocks", _mask, _block_map(ops.mask_blocks), *[_block_map(reference.mask_blocks)] * 2),
        CheckedFunction("quantize", _qkv, quantized_cases.run, *QUANTIZED),
        CheckedFunction("quantize_pages", paged, quantized_cases.run_pages, *QUANTIZED_PAGES),
    )
}


# ---- the cases -------------------------------------------------------------------------------------------------------

CAUSAL: dict[str, Any] = {"causal": True}
F32, F16, BF16 = "float32", "float16", "bfloat16"

# Small enough for the interpreter. The head sizes are those of the documents monotile replaces, and awkward ones.
CHECKS = (
    Case("attention", Sizes(1, 4, 1, 70, 130, 128, 128), F32, CAUSAL),
    Case("attention", Sizes(1, 4, 1, 70, 130, 128, 128), BF16, CAUSAL),
    Case("attention", Sizes(1, 8, 1, 40, 48, 256, 256), BF16, CAUSAL),
    Case("attention", Sizes(1, 2, 1, 33, 65, 512, 512), BF16, made=("bool mask",)),
    Case("attention", Sizes(2, 2, 2, 34, 67, 96, 96), F16),
    Case("attention", Sizes(2, 2, 1, 31, 129, 80, 80), F32, made=("padding mask",)),
    Case("attention", Sizes(1, 2, 1, 20, 40, 576, 512), F32, {"causal": "upper_left"}),
    Case("attention", Sizes(1, 4, 2, 37, 150, 64, 64), F32, {"window": (40, 5)}),
    Case("attention", Sizes(1, 4, 2, 40, 150, 64, 64), F32, made=("additive mask",)),
    Case("attention", Sizes(1, 2, 2, 150, 40, 64, 64), F16, {"causal": True, "softcap": 20.0}, ("sinks",)),
    Case("attention", Sizes(1, 4, 2, 70, 130, 128, 128), BF16, {"causal": True, "softcap": 50.0}),
    Case("attention", Sizes(1, 2, 2, 40, 150, 64, 64), F32, {"softcap": 5.0}, ("additive mask",)),
    Case("attention", Sizes(1, 4, 4, 33, 77, 64, 64), F32, CAUSAL, ("alibi",)),
    Case("attention", Sizes(1, 2, 2, 90, 90, 64, 64), F32, CAUSAL, ("documents",)),
    Case("attention", Sizes(2, 3, 3, 9, 10, 1, 7), F32),
    Case("attention", Sizes(1, 8, 2, 1, 1025, 128, 128), F32),
    Case("attention", Sizes(1, 8, 2, 1, 1025, 128, 128), BF16, {}, ("padding mask", "sinks")),
    Case("attention", Sizes(1, 4, 2, 5, 0, 64, 64), F32, CAUSAL),
    Case("attention", Sizes(2, 3, 3, 17, 1, 64, 16), F16, made=("bool mask",)),  # once faulted on an H200
    # Between decode and prefill: few queries over many keys, large groups, values in keys, few visible keys.
    Case("attention", Sizes(1, 8, 2, 4, 1100, 64, 64), F32, CAUSAL),
    Case("attention", Sizes(1, 8, 2, 17, 1025, 128, 128), BF16, CAUSAL),
    Case("attention", Sizes(1, 2, 2, 9, 2049, 64, 64), F32),
    Case("attention", Sizes(1, 64, 1, 1, 700, 64, 64), F32),
    Case("attention", Sizes(2, 64, 1, 1, 300, 128, 128), BF16, {}, ("padding mask",)),
    Case("attention", Sizes(1, 16, 1, 1, 300, 576, 512), BF16, values_in_keys=True),
    Case("attention", Sizes(1, 8, 1, 2, 130, 576, 512), F32, CAUSAL, values_in_keys=True),
    Case("attention", Sizes(1, 4, 2, 3, 1500, 64, 64), F32, {"window": (100, 0)}),
    Case("attention", Sizes(1, 4, 2, 2, 1500, 64, 64), F16, made=("bool mask",)),
    Case("attention", Sizes(1, 4, 2, 3, 700, 64, 64), F32, made=("additive mask",)),
    Case("attention", Sizes(1, 4, 2, 1, 900, 64, 64), F32, made=("documents",)),
    Case("attention_varlen", Sizes(4, 4, 2, 30, 40, 64, 64), F32, CAUSAL),
    Case("attention_varlen", Sizes(3, 2, 1, 12, 33, 128, 128), BF16, {"window": (20, 3)}, ("sinks",)),
    Case("attention_varlen", Sizes(3, 2, 2, 9, 20, 80, 16), F16, {"causal": "upper_left"}, ("alibi", "early keys")),
    Case("attention_varlen", Sizes(5, 8, 2, 1, 700, 64, 64), F32, CAUSAL),
    Case("attention_varlen", Sizes(4, 8, 2, 2, 600, 64, 32), BF16, {"window": (560, None)}, ("sinks",)),
    Case("attention_paged", Sizes(4, 4, 2, 1, 90, 64, 64), F32),
    Case("attention_paged", Sizes(2, 2, 1, 1, 4110, 16, 16), F32),
    Case("attention_paged", Sizes(3, 8, 2, 3, 100, 128, 128), BF16, {"window": (20, None)}, ("sinks",)),
    Case("attention_paged", Sizes(3, 2, 1, 20, 77, 24, 16), F16, {"causal": False}, ("alibi", "early keys")),
    Case("attention_paged_rows", Sizes(4, 4, 2, 30, 90, 64, 64), F32),
    Case("attention_paged_rows", Sizes(5, 8, 2, 1, 700, 64, 64), F32),
    Case("attention_paged_rows", Sizes(3, 8, 2, 5, 100, 128, 128), BF16, {"window": (20, None)}, ("sinks",)),
    Case("attention_paged_rows", Sizes(3, 2, 1, 40, 77, 24, 16), F16, {"causal": False}, ("alibi", "early keys")),
    Case("paged_append", Sizes(3, 2, 2, 3, 40, 24, 16), F16),
    Case("attention_backward", Sizes(1, 4, 1, 70, 130, 128, 128), F32, CAUSAL),
    Case("attention_backward", Sizes(2, 4, 2, 70, 130, 128, 128), BF16, CAUSAL),
    Case("attention_backward", Sizes(2, 2, 2, 34, 67, 96, 96), F16),
    Case("attention_backward", Sizes(1, 2, 1, 33, 65, 512, 512), BF16, made=("bool mask",)),
    Case("attention_backward", Sizes(1, 2, 1, 20, 40, 576, 512), F32, {"causal": "upper_left"}),
    Case("attention_backward", Sizes(1, 4, 2, 37, 150, 64, 64), F32, {"window": (40, 5)}),
    Case("attention_backward", Sizes(2, 4, 2, 40, 150, 64, 64), F32, {"mask_grad": True}, ("additive mask",)),
    Case("attention_backward", Sizes(2, 2, 1, 31, 129, 80, 80), F32, made=("padding mask",)),
    Case("attention_backward", Sizes(1, 2, 2, 150, 40, 64, 64), F16, {"causal": True, "softcap": 20.0}, ("sinks",)),
    Case("attention_backward", Sizes(1, 2, 2, 90, 90, 64, 64), F32, CAUSAL, ("documents",)),
    Case("attention_backward", Sizes(2, 3, 3, 9, 10, 1, 7), F32),
    Case("attention_backward", Sizes(1, 4, 2, 5, 0, 64, 64), F32, CAUSAL),
    Case("attention_backward", Sizes(1, 8, 2, 1, 300, 64, 64), F32),
    Case("attention_varlen_backward", Sizes(4, 4, 2, 30, 40, 64, 64), F32, CAUSAL),
    Case("attention_varlen_backward", Sizes(3, 2, 1, 12, 33, 96, 128), BF16, {"window": (20, 3)}, ("sinks",)),
    Case(
        "attention_varlen_backward",
        Sizes(3, 2, 2, 9, 20, 80, 16),
        F32,
        {"causal": "upper_left", "softcap": 5.0},
        ("alibi", "early keys"),
    ),
    Case("decode_partials", Sizes(1, 8, 2, 1, 1025, 128, 128), F32, {"splits": 48}),
    Case("decode_partials", Sizes(1, 8, 2, 6, 700, 64, 64), F32, {"splits": 5, "causal": True}),
    Case("decode_partials", Sizes(1, 16, 1, 1, 300, 576, 512), F32, {"splits": 3}, values_in_keys=True),
    Case("decode_partials", Sizes(2, 4, 1, 3, 200, 64, 64), F16, {"splits": 7, "causal": True}),
    Case("decode_partials", Sizes(2, 4, 2, 2, 300, 80, 80), F16, {"splits": 5, "softcap": 30.0}),
    Case("decode_partials", Sizes(1, 2, 2, 1, 5, 96, 96), F32, {"splits": 64}),
    Case("decode_partials", Sizes(1, 4, 1, 1, 300, 256, 256), BF16, {"splits": 4}, ("bool mask",)),
    Case("merge", Sizes(1, 2, 2, 3, 48, 64, 64), F32),
    Case("merge", Sizes(1, 4, 4, 1, 200, 80, 80), BF16),
    Case("merge", Sizes(1, 1, 1, 5, 3, 512, 512), F16),
    Case("merge_lse", Sizes(1, 2, 2, 3, 9, 128, 128), F32),
    Case("merge_lse", Sizes(1, 2, 2, 3, 9, 64, 64), BF16),
    Case("mask_blocks", Sizes(1, 2, 2, 70, 200, 1, 1), "bool"),
    Case("mask_blocks", Sizes(2, 1, 1, 64, 129, 1, 1), F32),
    Case("quantize", Sizes(1, 4, 2, 3, 150, 64, 64), BF16, {"format": "int8", "causal": True}),
    Case("quantize", Sizes(1, 4, 1, 1, 130, 80, 96), F32, {"format": "int4", "group": 16}, ("bool mask",)),
    Case("quantize", Sizes(2, 2, 1, 5, 67, 33, 33), F16, {"format": "int4_zero_point"}),
    Case("quantize", Sizes(1, 4, 2, 1, 300, 64, 64), BF16, {"format": "fp8_e4m3"}),
    Case("quantize", Sizes(1, 2, 1, 9, 70, 96, 96), F32, {"format": "fp8_e5m2", "window": (20, 0)}),
    Case("quantize", Sizes(1, 2, 1, 2, 70, 80, 64), F32, {"format": "aura3", "softcap": 5.0}, ("sinks",)),
    Case("quantize", Sizes(1, 4, 1, 1, 130, 64, 64), BF16, {"format": "aura4"}),
    Case("quantize_pages", Sizes(2, 4, 2, 1, 90, 64, 64), BF16, {"format": "int4"}),
    Case("quantize_pages", Sizes(2, 2, 1, 2, 40, 48, 48), F32, {"format": "aura3"}),
)

# As large as they are used.
BENCHMARKS = (
    *(Case("attention", Sizes(1, 32, 8, 4096, 4096, 128, 128), dtype, CAUSAL) for dtype in (F32, BF16)),
    Case("attention", Sizes(1, 16, 2, 2048, 2048, 256, 256), BF16, CAUSAL),
    Case("attention", Sizes(1, 8, 1, 1024, 1024, 512, 512), BF16, CAUSAL),
    Case("attention", Sizes(1, 16, 16, 2048, 2048, 96, 96), F16),
    Case("attention", Sizes(1, 16, 16, 2048, 2048, 80, 80), F32),
    Case("attention", Sizes(1, 8, 2, 2048, 2048, 64, 64), F32, CAUSAL),
    Case("attention", Sizes(1, 8, 2, 4096, 4096, 64, 64), F32, {"window": (512, 0)}),
    Case("attention", Sizes(1, 8, 2, 2048, 2048, 64, 64), F32, made=("bool mask",)),
    *(Case("attention", Sizes(1, 32, 8, 1, 32768, 128, 128), dtype) for dtype in (F32, BF16)),
    Case("attention", Sizes(1, 16, 2, 1, 8192, 256, 256), BF16),
    Case("attention", Sizes(1, 8, 1, 1, 8192, 512, 512), BF16),
    Case("attention_varlen", Sizes(8, 16, 4, 512, 512, 128, 128), F32, CAUSAL),
    Case("attention_paged", Sizes(8, 32, 8, 1, 4096, 128, 128), F32),
    Case("paged_append", Sizes(64, 8, 8, 1, 4096, 128, 128), F32),
    *(Case("attention_backward", Sizes(1, 8, 8, 2048, 2048, 128, 128), dtype, CAUSAL) for dtype in (F32, BF16)),
    Case("attention_backward", Sizes(1, 8, 8, 2048, 2048, 64, 64), F32),
    Case("attention_backward", Sizes(1, 4, 4, 1024, 1024, 256, 256), F32),
    Case("attention_varlen_backward", Sizes(8, 8, 8, 512, 512, 128, 128), F32, CAUSAL),
    Case("decode_partials", Sizes(1, 32, 8, 1, 32768, 128, 128), BF16, {"splits": 64}),
    Case("merge", Sizes(1, 32, 32, 1, 1024, 128, 128), F32),
    Case("mask_blocks", Sizes(1, 8, 8, 2048, 2048, 1, 1), "bool"),
)
