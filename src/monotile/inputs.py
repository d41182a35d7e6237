"""Reading the arguments of the attention library: every mistake gets an error before anything is computed."""

from __future__ import annotations

import math
import types
from dataclasses import dataclass
from typing import Any

from . import arrays, dtypes
from .arrays import Library
from .dtypes import BY_NAME, DType, bfloat16, bool_, float16, float32
from .errors import (
    ArgumentDevice,
    ArgumentRank,
    ArgumentShape,
    BadOption,
    HeadsDoNotDivide,
    HeadSize,
    LengthsDiffer,
    MaskShape,
    MixedDTypes,
)
from .kernels.scores import Options

Array = Any
FLOATS = (float32, float16, bfloat16)
MAX_HEAD_SIZE = 576
MAX_PARTS = 2**20
UNBOUNDED = 2**30  # a window's side from here on hides nothing, and its sum with a position might not fit int32
SOFTCAPS = 1e-30, 1e30


@dataclass
class Call:
    """The arrays of one call, with a batch dimension, read in place."""

    lib: Library
    q: Array
    k: Array
    v: Array
    mask: Array | None  # rank 4, sides as given: 1 where it broadcasts
    sinks: Array | None
    scale: float
    dtype: DType
    batched: bool

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        B, Hq, Nq, _ = self.q.shape
        return B, Hq, Nq, self.v.shape[3]

    @property
    def keys(self) -> int:
        return int(self.k.shape[2])

    @property
    def flops(self) -> int:
        B, Hq, Nq, Dv = self.out_shape
        return 2 * B * Hq * Nq * self.keys * (int(self.q.shape[3]) + Dv)

    @property
    def bytes(self) -> int:
        B, H, N, D = self.k.shape
        return int(B * H * N * (D + self.v.shape[3]) * self.dtype.bytes)

    def new(self, shape: tuple[int, ...], dtype: DType | None = None) -> Array:
        return self.lib.empty(shape, dtype or self.dtype, self.q)

    def broadcast_mask(self) -> Array | None:
        if self.mask is None:
            return None
        return self.lib.broadcast(self.mask, (*self.q.shape[:3], self.keys))

    def finish(self, result: Array) -> Array:
        """A result as the caller expects it: without the batch dimension that was added, in the caller's library."""
        return self.lib.give_back(result if self.batched else result[0])


# ---- q, k, v ---------------------------------------------------------------------------------------------------------


def read_call(q: Any, k: Any, v: Any, scale: float | None, mask: Any, sinks: Any) -> Call:
    lib = arrays.library("q", q)
    q, k, v = (lib.adopt(name, a) for name, a in (("q", q), ("k", k), ("v", v)))
    given = {"q": q, "k": k, "v": v}
    for name, array in given.items():
        if array.ndim not in (3, 4):
            found = f"{name!r} has shape {tuple(array.shape)}"
            raise ArgumentRank(f"{found}; attention takes (batch, heads, length, head size), or the last three")
        if array.ndim != q.ndim:
            raise ArgumentRank(
                f"'q' has {q.ndim} dimensions and {name!r} has {array.ndim}; give all of them a batch, or none"
            )
    dtype = _one_dtype(given)
    batched = q.ndim == 4
    if not batched:
        q, k, v = q[None], k[None], v[None]
    _check_shapes(tuple(q.shape), tuple(k.shape), tuple(v.shape))
    q, k, v = (arrays.unit_last(lib, a) for a in (q, k, v))
    if mask is not None:
        mask = _read_mask(lib, mask, (*q.shape[:3], k.shape[2]))
    if sinks is not None:
        sinks = _read_sinks(lib, sinks, q.shape[1])
    _one_device({**given, "mask": mask, "sinks": sinks})
    return Call(lib, q, k, v, mask, sinks, _read_scale(scale, q.shape[3]), dtype, batched)


def _one_dtype(given: dict[str, Array]) -> DType:
    found = {name: arrays.dtype_of(name, a) for name, a in given.items()}
    listing = ", ".join(f"{n} {d}" for n, d in found.items())
    if len(set(found.values())) > 1:
        raise MixedDTypes(f"q, k and v must have one element type, found {listing}; cast them")
    dtype = found["q"]
    if dtype not in FLOATS:
        raise MixedDTypes(f"attention computes in float32, float16 or bfloat16, found {dtype}; cast q, k and v")
    return dtype


def _check_shapes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    shapes = f"q {q}, k {k}, v {v}"
    if q[3] != k[3]:
        raise HeadSize(f"queries have head size {q[3]} and keys {k[3]}; they must be equal ({shapes})")
    for name, size in (("D", q[3]), ("Dv", v[3])):
        if not 1 <= size <= MAX_HEAD_SIZE:
            raise HeadSize(f"the head size {name} is {size}; it must be from 1 to {MAX_HEAD_SIZE} ({shapes})")
    if not q[0] == k[0] == v[0]:
        raise LengthsDiffer(f"the batch sizes are {q[0]}, {k[0]} and {v[0]}; they must be equal ({shapes})")
    if k[1] != v[1]:
        raise LengthsDiffer(f"k has {k[1]} heads and v has {v[1]}; they must be equal ({shapes})")
    if k[2] != v[2]:
        raise LengthsDiffer(f"k has {k[2]} positions and v has {v[2]}; they must be equal ({shapes})")
    if (k[1] == 0 and q[1] != 0) or (k[1] and q[1] % k[1]):
        raise HeadsDoNotDivide(
            f"{q[1]} query heads do not share {k[1]} key-value heads evenly; make Hq a multiple of Hkv ({shapes})"
        )


def _one_device(given: dict[str, Array | None]) -> None:
    found = {n: str(getattr(a, "device", "cpu")) for n, a in given.items() if a is not None}
    if len(set(found.values())) > 1:
        listing = ", ".join(f"{n} on {d}" for n, d in found.items())
        raise ArgumentDevice(f"the arrays lie on different devices: {listing}; move them to one")


def _read_scale(scale: float | None, head_size: int) -> float:
    if scale is None:
        return float(head_size**-0.5)
    return read_number("scale", scale)


# ---- masks and sinks -------------------------------------------------------------------------------------------------


def _read_mask(lib: Library, mask: Any, scores: tuple[int, ...]) -> Array:
    mask = lib.adopt("mask", mask)
    dtype = arrays.dtype_of("mask", mask)
    if dtype is not bool_ and dtype not in FLOATS:
        raise MixedDTypes(f"a mask is bool (True = attend) or floating (added to the scores), found {dtype}")
    shape = tuple(mask.shape)
    fits = len(shape) <= 4 and all(s in (1, t) for s, t in zip(shape[::-1], scores[::-1], strict=False))
    if not fits:
        raise MaskShape(
            f"the mask {shape} does not broadcast to the scores {scores} (batch, query heads, queries, keys)"
        )
    return mask.reshape((1,) * (4 - len(shape)) + shape)


def read_mask(mask: Array) -> tuple[Array, tuple[int, ...]]:
    """A mask of rank 2 to 4 as rank 4, and its leading sides."""
    dtype = arrays.dtype_of("mask", mask)
    if dtype is not bool_ and dtype not in FLOATS:
        raise MixedDTypes(f"a mask is bool (True = attend) or floating (added to the scores), found {dtype}")
    if not 2 <= mask.ndim <= 4:
        raise ArgumentRank(
            f"a mask has 2 to 4 dimensions, the last two queries and keys; found shape {tuple(mask.shape)}"
        )
    lead = tuple(mask.shape[:-2])
    return mask.reshape((1,) * (2 - len(lead)) + tuple(mask.shape)), lead


def _read_sinks(lib: Library, sinks: Any, heads: int) -> Array:
    sinks = lib.adopt("sinks", sinks)
    dtype = arrays.dtype_of("sinks", sinks)
    if dtype not in FLOATS:
        raise MixedDTypes(f"sinks are floating, found {dtype}")
    if tuple(sinks.shape) != (heads,):
        raise ArgumentShape(f"sinks must have shape ({heads},), one per query head; found {tuple(sinks.shape)}")
    return sinks


# ---- options ---------------------------------------------------------------------------------------------------------


def options_of(causal: Any, window: Any, softcap: Any, score_mod: Any, mask_mod: Any) -> Options:
    kinds = {True: "lower_right", False: None, "lower_right": "lower_right", "upper_left": "upper_left"}
    if not isinstance(causal, bool | str) or causal not in kinds:
        raise BadOption(f"causal is True, False, 'lower_right' or 'upper_left'; found {causal!r}")
    left, right = _read_window(window)
    for name, function in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if function is not None and not isinstance(function, types.FunctionType):
            raise BadOption(f"{name} is a plain Python function, found {type(function).__name__}")
    if softcap is not None:
        softcap = read_number("softcap", softcap)
        if softcap and not SOFTCAPS[0] <= softcap <= SOFTCAPS[1]:
            limits = f"from {SOFTCAPS[0]} to {SOFTCAPS[1]}"
            raise BadOption(f"softcap is a positive number {limits}, found {softcap}; None or 0 leaves it out")
    return Options(kinds[causal], left, right, softcap or None, score_mod, mask_mod)


def _read_window(window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise BadOption(f"window is a pair (left, right), found {window!r}; None on a side leaves it unbounded")
    for side in window:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < 0):
            raise BadOption(f"a side of window is a whole number from 0 up, or None for unbounded; found {side!r}")
    left, right = (side if side is not None and side < UNBOUNDED else None for side in window)
    return left, right


def read_number(name: str, value: Any) -> float:
    try:
        number = float(value) if not isinstance(value, bool | str) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise BadOption(f"{name} must be a finite number, found {value!r}")
    return number


def check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_PARTS:
        raise BadOption(f"{name} must be a whole number from 1 to {MAX_PARTS}, found {value!r}")


def check_parts(o: Array, *others: tuple[str, Array]) -> None:
    """Parts to be merged: o (..., S, Dv) and its companions (..., S)."""
    if o.ndim < 2:
        raise ArgumentRank(f"parts have shape (..., S, Dv), found {tuple(o.shape)}")
    if not 1 <= o.shape[-1] <= MAX_HEAD_SIZE:
        raise HeadSize(f"the head size is {o.shape[-1]}; it must be from 1 to {MAX_HEAD_SIZE}")
    if arrays.dtype_of("parts", o) not in FLOATS:
        raise MixedDTypes(f"parts are float32, float16 or bfloat16, found {arrays.dtype_of('parts', o)}; cast them")
    for name, array in others:
        if tuple(array.shape) != tuple(o.shape[:-1]):
            raise ArgumentShape(
                f"{name!r} has shape {tuple(array.shape)}; parts {tuple(o.shape)} need {tuple(o.shape[:-1])}"
            )
        dtype = arrays.dtype_of(name, array)
        if dtype is not float32:
            raise MixedDTypes(f"{name!r} must be float32, found {dtype}: narrower maxima and sums lose the result")
    _one_device({"parts": o, **dict(others)})


def stack_parts(lib: Library, name: str, parts: Any, axis: int) -> Array:
    """One array of a sequence of parts that are alike."""
    parts = [lib.adopt(name, part) for part in parts]
    kinds = {(tuple(part.shape), arrays.dtype_of(name, part), str(getattr(part, "device", "cpu"))) for part in parts}
    if len(kinds) != 1 or parts[0].ndim < -1 - axis:
        listing = ", ".join(sorted(f"{shape} {dtype}" for shape, dtype, _ in kinds)) or "none"
        raise ArgumentShape(f"{name!r} must be parts of one shape, element type and device, found {listing}")
    return lib.stack(parts, axis)


def read_dtype(dtype: Any) -> DType:
    """An element type as monotile, NumPy or torch names it."""
    if isinstance(dtype, DType):
        found: DType | None = dtype
    else:
        name = str(dtype).removeprefix("torch.") if not isinstance(dtype, type) else None
        found = BY_NAME.get(name) if name in BY_NAME else _numpy_dtype(dtype)
    if found not in FLOATS:
        raise BadOption(f"dtype must be float32, float16 or bfloat16, found {dtype!r}")
    assert found is not None
    return found


def _numpy_dtype(dtype: Any) -> DType | None:
    import numpy as np

    try:
        return dtypes.from_numpy(np.dtype(dtype))
    except (TypeError, ValueError):
        return None
