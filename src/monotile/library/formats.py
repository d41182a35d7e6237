"""The formats of `quantize`, and the checks of a `Quantized`, which anyone may have made."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ..dtypes import float8_e4m3fn, float8_e5m2
from ..errors import ArgumentKind, ArgumentShape, BadOption, MixedDTypes
from ..kernels.codecs import Codec
from ..runtime import tensors
from ..runtime.arrays import check_one_library
from . import aura
from .readable import check_readable

Array = Any
Stored = Any  # a `Quantized`, of quantized.py, which is built on this module
FP8 = {"fp8_e4m3": (float8_e4m3fn, 448.0), "fp8_e5m2": (float8_e5m2, 57344.0)}
AURA = {f"aura{bits}": bits for bits in (2, 3, 4, 6, 8)}
INTEGERS = ("int8", "int4", "int4_zero_point")
FORMATS = (*INTEGERS, *FP8, *AURA)
FINITE = {"float32": 3.4028234663852886e38, "float16": 65504.0, "bfloat16": 3.3895313892515355e38}  # the largest
CODES = {"int8": "int8", "int4": "uint8", "int4_zero_point": "uint8", **dict.fromkeys(AURA, "uint32")}
CODES |= {format: dtype.name for format, (dtype, _) in FP8.items()}
CURE = "make it with quantize"
MAX_CHECKED = 1024


def width(format: str, size: int) -> int:
    """Return the codes of a row, as stored."""
    bits = {"int4": 4, "int4_zero_point": 4, **AURA}.get(format, 8)
    unit = 32 if format in AURA else 8
    return -(-size * bits // unit)


@cache
def codec(format: str, size: int, group: int) -> Codec:
    """Return the compile-time description that kernels get."""
    found = codec_without_levels(format, size, group)
    return found._replace(levels=aura.levels(size, found.bits)) if found.kind == "aura" else found


def codec_without_levels(format: str, size: int, group: int) -> Codec:
    """Return a codec without the levels of aura, which take time to compute."""
    if format in AURA:
        return Codec("aura", size, size, AURA[format])
    if format in FP8:
        return Codec("fp8", size, group)
    if format == "int8":
        return Codec("integers", size, group)
    return Codec("nibbles", size, group, 4, zeros=format == "int4_zero_point")


# ---- checks of a Quantized -------------------------------------------------------------------------------------------

_checked: dict[Any, Codec] = {}  # codecs by all that the checks depend on


def checked_codec(x: Stored) -> Codec:
    """Return the codec of a `Quantized` after a check of all that it holds but the contents of its fields. Calls with
    fields of the same shapes and types are checked once."""
    codes, scales, zeros = x.codes, x.scales, x.zeros
    key: Any
    try:
        key = (x.format, x.size, type(x.size), x.dtype, type(codes), codes.shape, codes.dtype, type(scales),
               scales.shape, scales.dtype)  # fmt: skip
        if zeros is not None:
            key = (*key, type(zeros), zeros.shape, zeros.dtype)
        found = _checked.get(key)
    except (AttributeError, TypeError, RuntimeError):  # no array, not hashable, or nested: the check will say what
        key = found = None
    if found is None:
        found = _check(x)
        if key is not None:
            if len(_checked) >= MAX_CHECKED:
                _checked.clear()
            _checked[key] = found
    return found


def _check(x: Stored) -> Codec:
    check_kinds(x)
    fields = named_fields(x)
    check_one_library(fields.items())
    check_readable(**fields)
    groups = check_rows(x)
    wanted = (*x.codes.shape[:-1], groups)
    for name in ("scales", "zeros"):
        if name in fields and tuple(fields[name].shape) != wanted:
            raise ArgumentShape(f"{name} must have shape {wanted}, found {tuple(fields[name].shape)}; {CURE}")
    return codec(x.format, int(x.size), int(x.size) // groups)


def named_fields(x: Stored) -> dict[str, Array]:
    """Return the fields of a `Quantized` by name, without zeros where it has none."""
    found = {"codes": x.codes, "scales": x.scales}
    return found if x.zeros is None else {**found, "zeros": x.zeros}


def check_kinds(x: Stored) -> None:
    """Raise an error unless the format, the size, the dtype and the types of the fields fit together. What this asks is
    known in a trace."""
    check_format(x.format)
    check_size(x.size)
    if not isinstance(x.dtype, str) or x.dtype not in FINITE:
        names = ", ".join(map(repr, FINITE))
        raise BadOption(f"the dtype of a Quantized is one of {names}; found {x.dtype!r}; {CURE}")
    if (x.zeros is not None) != (x.format == "int4_zero_point"):
        raise BadOption(f"{x.format} has {'no ' if x.zeros is not None else ''}zeros; {CURE}")
    for name, field in named_fields(x).items():
        check_field(name, field)
        wanted = {"codes": CODES[x.format], "scales": "float32", "zeros": "uint8"}[name]
        found = dtype_name(field)
        if found != wanted:
            raise MixedDTypes(f"the {name} of {x.format} must be {wanted}, found {found}; {CURE}")


def check_rows(x: Stored) -> int:
    """Check the last side of each field; return how many scales a row has."""
    shapes = {name: tuple(field.shape) for name, field in named_fields(x).items()}
    for name, shape in shapes.items():
        if not shape:
            raise ArgumentShape(f"the {name} of a Quantized have shape (..., N, width), found (); {CURE}")
    codes, scales = shapes["codes"], shapes["scales"]
    wanted = (*codes[:-1], width(x.format, x.size))
    if codes[-1] != wanted[-1]:
        raise ArgumentShape(f"codes of {x.format} have shape {wanted} for rows of {x.size}, found {codes}; {CURE}")
    groups = scales[-1]
    if x.format in AURA and groups != 1:
        wanted = (*scales[:-1], 1)
        raise ArgumentShape(f"scales of {x.format} have shape {wanted}, one norm for a row, found {scales}; {CURE}")
    if groups < 1 or x.size % groups:
        raise ArgumentShape(f"scales {scales} do not divide rows of {x.size} into groups; {CURE}")
    return int(groups)


def check_format(format: Any) -> None:
    if not isinstance(format, str) or format not in FORMATS:
        raise BadOption(f"format must be one of {', '.join(FORMATS)}; found {format!r}")


def check_size(size: Any) -> None:
    if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 1:
        raise BadOption(
            f"the size of a Quantized is how many numbers a row has, an int from 1 up; found {size!r}; {CURE}"
        )


def check_field(name: str, field: Any) -> None:
    if not tensors.is_array(field) and not hasattr(field, "__dlpack__"):
        raise ArgumentKind(f"the {name} of a Quantized must be an array, found {type(field).__name__}; {CURE}")


def dtype_name(array: Array) -> str:
    """Return the name of an array's element type, in any library."""
    return str(array.dtype).removeprefix("torch.").removeprefix("mlx.core.")


def read_group(group: Any, size: int, format: str) -> int:
    integral = isinstance(group, int | np.integer) and not isinstance(group, bool)
    if not integral or group < 1 or size % group:
        raise BadOption(f"group must divide the {size} numbers of a row, found {group!r}; leave it out for one scale")
    if format in AURA and group != size:
        raise BadOption(f"{format} has one norm for a row of {size}, found group {group}; leave group out")
    return int(group)
