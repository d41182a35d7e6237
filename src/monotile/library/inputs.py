"""Reading the arguments of the attention library: every mistake gets an error before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..backends.choices import AttentionProblem
from ..dtypes import FLOATS, DType, float32
from ..errors import (
    ArgumentDevice,
    ArgumentShape,
    BadOption,
    HeadsDoNotDivide,
    HeadSize,
    LengthsDiffer,
    MixedDTypes,
)
from ..frontend.functions import is_function
from ..kernels.scores import Options
from ..launch.signature import read_scalar
from .calls import ArrayRef, CallBuilder
from .leading import Lead, as_one_batch, read_lead
from .masks import broadcast_mask_to
from .quantized_inputs import ALL_PLAIN, PLAIN, Codecs, StoredFields, as_numbers, numbers_in_one_batch, read_fields
from .rotations import rotated_queries

MAX_HEAD_SIZE = 576
MAX_PARTS = 2**20
UNBOUNDED = 2**30  # a window's side from here on hides nothing, and its sum with a position might not fit int32
SOFTCAPS = 1e-30, 1e30
GREATEST_SCALE = 2e38  # times log2(e) it is still a number


class AttentionOptions(NamedTuple):
    """The options of a call of attention, as given: on dense, ragged or paged keys."""

    causal: Any
    window: Any
    softcap: Any
    score_mod: Any
    mask_mod: Any
    negative: bool  # the scale is negative
    values_in_keys: bool  # v is the first columns of k, as in MLA: the same memory
    return_lse: Any
    backend: str | None
    threads: int | None


@dataclass
class AttentionInputs:
    """The checked arrays of a call of attention, with a batch dimension, read in place."""

    q: ArrayRef
    k: ArrayRef
    v: ArrayRef
    mask: ArrayRef | None  # rank 4, sides as given: 1 where it broadcasts
    sinks: ArrayRef | None
    dtype: DType
    batched: bool
    values_in_keys: bool = False  # v is the first columns of k, in the same memory
    stored: StoredFields = ALL_PLAIN  # of quantised keys and values, whose k and v stand for their numbers
    lead: Lead | None = None  # the dimensions in place of which the caller's arrays have one batch; None: as `batched`

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        B, Hq, Nq, _ = self.q.shape
        return B, Hq, Nq, self.v.shape[3]

    @property
    def work_per_key(self) -> tuple[int, int]:
        """Operations, and bytes of keys and values."""
        (B, Hq, Nq, Dv), H, D = self.out_shape, self.k.shape[1], self.q.shape[3]
        return 2 * B * Hq * Nq * (D + Dv), B * H * (D + Dv) * self.dtype.bytes

    @property
    def flops(self) -> int:
        return self.work_per_key[0] * self.k.shape[2]

    @property
    def bytes(self) -> int:
        return self.work_per_key[1] * self.k.shape[2]

    def are_as_given(self, builder: CallBuilder) -> bool:
        """True if kernels read keys and values as the caller passed them."""
        return self.stored.is_plain and (self.k, self.v) == (builder.inputs["k"], builder.inputs["v"])

    def problem(self, options: Options) -> AttentionProblem:
        """The facts that block sizes and schedules are chosen by."""
        (B, Hq, Nq, D), (_, Hkv, Nk, Dv) = self.q.shape, self.v.shape
        return AttentionProblem(
            self.q.view.device, self.dtype, B, Hq, Hkv, Nq, Nk, max(D, Dv),
            options.causal, options.left, options.right, options.softcap,
            mask=None if self.mask is None else self.mask.dtype, mask_mod=options.mask_mod is not None,
            values_in_keys=self.values_in_keys, value_size=Dv, quantized=not self.stored.is_plain,
        )  # fmt: skip

    def result(self, builder: CallBuilder, shape: tuple[int, ...], dtype: DType) -> ArrayRef:
        """A result of this shape, which the caller sees with the leading dimensions of the arguments."""
        lead = self.lead if self.lead is not None else shape[: int(self.batched)]
        return builder.result((*lead, *shape[1:]), dtype).reshaped(*shape)

    def output_by_position(self, builder: CallBuilder) -> ArrayRef:
        """The output, which the caller sees as (..., Nq, Hq, Dv)."""
        B, Hq, Nq, Dv = self.out_shape
        return self.result(builder, (B, Nq, Hq, Dv), self.dtype).permuted(0, 2, 1, 3)

    def broadcast_mask(self) -> ArrayRef | None:
        return None if self.mask is None else self.mask.broadcast((*self.q.shape[:3], self.k.shape[2]))


# ---- q, k, v ---------------------------------------------------------------------------------------------------------


def read_inputs(builder: CallBuilder, *, values_in_keys: bool = False, codecs: Codecs = PLAIN) -> AttentionInputs:
    """Check the arrays of a call. Leading dimensions may be any number, and differ where one has 1."""
    q, k, v = builder.input("q"), builder.input("k"), builder.input("v")
    k, v = (as_numbers(array, codec, q.dtype) for array, codec in zip((k, v), codecs, strict=True))
    lead = read_lead({"q": q.shape, "k": k.shape, "v": v.shape})
    dtype = one_dtype({"q": q, "k": k, "v": v})
    q, k, v = (
        as_one_batch(builder, unit_last(builder, a), lead) if codec is None else numbers_in_one_batch(a, lead)
        for a, codec in zip((q, k, v), (None, *codecs), strict=True)
    )
    check_shapes(q.shape, k.shape, v.shape)
    builder.scores = scores = *q.shape[:3], k.shape[2]
    mask, sinks = builder.inputs.get("mask"), builder.inputs.get("sinks")
    mask = None if mask is None else broadcast_mask_to(builder, mask, scores, lead)
    if sinks is not None:
        check_sinks(sinks, q.shape[1])
    one_device(builder.inputs)
    builder.scale = float(q.shape[3] ** -0.5)
    copied = builder.copies.keys() & {array.place[1] for array in (k, v)}
    stored = read_fields(builder, codecs, lambda field: as_one_batch(builder, field, lead))
    in_keys = values_in_keys and not copied
    q = rotated_queries(builder, q, codecs[0])
    return AttentionInputs(q, k, v, mask, sinks, dtype, bool(lead), in_keys, stored, lead)


def unit_last(builder: CallBuilder, array: ArrayRef) -> ArrayRef:
    """The array itself if its last stride is 1, else a copy: the only one attention makes of its inputs."""
    shape = array.shape
    return array if shape[-1] <= 1 or 0 in shape or array.view.strides[-1] == 1 else builder.contiguous(array)


def one_dtype(given: dict[str, ArrayRef]) -> DType:
    found = {name: a.dtype for name, a in given.items()}
    if len(set(found.values())) > 1:
        listing = ", ".join(f"{n} {d}" for n, d in found.items())
        raise MixedDTypes(f"q, k and v must have one element type, found {listing}; cast them")
    dtype = found["q"]
    if dtype not in FLOATS:
        raise MixedDTypes(f"attention computes in float32, float16 or bfloat16, found {dtype}; cast q, k and v")
    return dtype


def check_shapes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    sizes = 1 <= q[3] <= MAX_HEAD_SIZE and 1 <= v[3] <= MAX_HEAD_SIZE
    if q[3] == k[3] and sizes and q[0] == k[0] == v[0] and k[1:3] == v[1:3] and k[1] and q[1] % k[1] == 0:
        return
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


def one_device(given: Mapping[str, ArrayRef]) -> None:
    found = {n: a.view.device for n, a in given.items()}
    if len(set(found.values())) > 1:
        listing = ", ".join(f"{n} on {d}" for n, d in found.items())
        raise ArgumentDevice(f"the arrays lie on different devices: {listing}; move them to one")


# ---- sinks -----------------------------------------------------------------------------------------------------------


def check_sinks(sinks: ArrayRef, heads: int) -> None:
    if sinks.dtype not in FLOATS:
        raise MixedDTypes(f"sinks are floating, found {sinks.dtype}")
    if sinks.shape != (heads,):
        raise ArgumentShape(f"sinks must have shape ({heads},), one per query head; found {sinks.shape}")


# ---- options ---------------------------------------------------------------------------------------------------------


def read_options(given: Any) -> Options:
    """Check the options that all functions of attention share, and return the kernels' compile-time options."""
    check_flag("return_lse", getattr(given, "return_lse", False))
    left, right = (None, None) if given.window is None else read_window(given.window)
    for name, function in (("score_mod", given.score_mod), ("mask_mod", given.mask_mod)):
        if function is not None and not is_function(function):
            other = ", or what block_mask gives" if name == "mask_mod" else ""
            cure = f": pass {name}.__wrapped__" if is_function(getattr(function, "__wrapped__", None)) else ""
            raise BadOption(f"{name} is a Python function{other}; found {type(function).__name__}{cure}")
    softcap = None if given.softcap is None else read_softcap(given.softcap)
    causal = read_causal(given.causal)
    return Options(causal, left, right, softcap, given.score_mod, given.mask_mod, given.negative)


def on_one_diagonal(options: Options, inputs: AttentionInputs) -> Options:
    """Return the options with the usual alignment where there are as many queries as keys: both are the same, and one
    program serves them."""
    if options.causal == "upper_left" and inputs.q.shape[2] == inputs.k.shape[2]:
        return options._replace(causal="lower_right")
    return options


CAUSAL = {True: "lower_right", False: None, "lower_right": "lower_right", "upper_left": "upper_left"}


def read_causal(causal: Any) -> str | None:
    if not isinstance(causal, bool | np.bool_ | str) or causal not in CAUSAL:
        raise BadOption(f"causal is True, False, 'lower_right' or 'upper_left'; found {causal!r}")
    return CAUSAL[causal]


def read_softcap(softcap: Any) -> float | None:
    softcap = read_number("softcap", softcap)
    if softcap and not SOFTCAPS[0] <= softcap <= SOFTCAPS[1]:
        limits = f"from {SOFTCAPS[0]} to {SOFTCAPS[1]}"
        raise BadOption(f"softcap is a positive number {limits}, found {softcap}; None or 0 leaves it out")
    return softcap or None


def read_scoring(
    causal: Any, scale: Any, window: Any, softcap: Any
) -> tuple[float | None, tuple[int | None, int | None] | None, float | None, bool]:
    """Check these options, of which a call gives few, and return scale, window and softcap as numbers, and whether the
    scale is negative."""
    if causal is not False:
        read_causal(causal)
    scale = scale if scale is None else read_scale(scale)
    window = window if window is None else read_window(window)
    softcap = softcap if softcap is None else read_softcap(softcap)
    return scale, window, softcap, scale is not None and scale < 0.0


def read_window(window: Any) -> tuple[int | None, int | None]:
    """Return how many keys a query sees on its left and on its right, None for all of them."""
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise BadOption(f"window is a pair (left, right), found {window!r}; None on a side leaves it unbounded")
    for side in window:
        whole = isinstance(side, int | np.integer) and not isinstance(side, bool)
        if side is not None and (not whole or side < -1):
            allowed = "a whole number from 0 up, or None or -1 for unbounded"
            raise BadOption(f"a side of window is {allowed}; found {side!r}")
    left, right = (None if side is None or not 0 <= side < UNBOUNDED else int(side) for side in window)
    return left, right


def read_number(name: str, value: Any) -> float:
    try:
        number = float(value) if not isinstance(value, bool | str) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise BadOption(f"{name} must be a finite number, found {value!r}")
    return number


def read_scale(scale: Any) -> float:
    if type(scale) is float and abs(scale) <= GREATEST_SCALE:
        return scale
    number = float(read_scalar("scale", read_number("scale", scale), float32))
    if abs(number) > GREATEST_SCALE:
        limits = f"from -{GREATEST_SCALE} to {GREATEST_SCALE}"
        raise BadOption(f"scale must be {limits}, found {scale!r}; multiply q or k by a part of it")
    return number


def read_count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 1 <= value <= MAX_PARTS:
        raise BadOption(f"{name} must be a whole number from 1 to {MAX_PARTS}, found {value!r}")
    return int(value)


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool | np.bool_ | int):
        raise BadOption(f"{name} is True or False, found {value!r}")
