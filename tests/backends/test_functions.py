"""The elementary functions in machine code, against NumPy's float64 over all of float32."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from monotile.backends.cpu import functions, jit, machine_code
from monotile.backends.cpu.emit import Emitter, Index, Reg
from monotile.backends.cpu.host import host
from monotile.backends.cpu.target import target
from monotile.ir import special

Array = np.ndarray[Any, np.dtype[Any]]
Compiled = Callable[[Array], Array]

HOST_LANES = target(host()).lanes
LEAST_NORMAL = 2.0**-126
GREATEST = float(np.finfo(np.float32).max)
REFERENCES: dict[str, Callable[[Array], Array]] = {
    "exp2": np.exp2,
    "exp": np.exp,
    "log2": np.log2,
    "log": np.log,
    "tanh": np.tanh,
    "sigmoid": special.sigmoid,
    "erf": special.erf,
    "sin": np.sin,
    "cos": np.cos,
    "sqrt": np.sqrt,
    "reciprocal": np.reciprocal,
    "abs": np.abs,
}
NAMES = list(REFERENCES)
LIMITS = {"sigmoid": 2.5, "sin": 2.5, "cos": 2.5, "erf": 2.0}  # in ulp; of the others 2


def _module(name: str, lanes: int) -> str:
    """Emit @apply(x, y, n): y[i] = name(x[i]) for i < n, a multiple of the lanes. One lane is a uniform register."""
    e = Emitter(lanes, has_scalef=target(host()).has_scalef and lanes == HOST_LANES)
    kind = e.vector_type("float") if lanes > 1 else "float"

    def body(i: Index) -> None:
        x = Reg(e.load(e.element("%x", i, "float"), kind, 4), "float", lanes > 1)
        e.store(functions.FUNCTIONS[name](e, x).text, e.element("%y", i, "float"), kind, 4)

    e.loop(0, "%n", lanes, body)
    e.do("ret void")
    return "\n".join([*sorted(e.declarations), e.function("define void @apply(ptr %x, ptr %y, i64 %n)")])


@cache
def compiled(name: str, lanes: int, cpu: str = "") -> Compiled:
    """Compile the function for this processor, or for a lesser one whose code it can run."""
    processor = host()._replace(cpu=cpu, features="") if cpu else host()
    loaded = machine_code.load(jit.compile_code(_module(name, lanes), processor))
    apply = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(loaded.address("apply"))

    def call(x: Array, _keep: object = loaded) -> Array:
        padded = np.concatenate([x, np.ones(-x.size % lanes, np.float32)])
        y = np.empty_like(padded)
        apply(padded.ctypes.data, y.ctypes.data, padded.size)
        return y[: x.size]

    return call


def _singles(bits: Array) -> Array:
    return bits.astype(np.uint32).view(np.float32)


def _bits(values: Array) -> Array:
    return values.view(np.uint32)


def _errors(name: str, x: Array, y: Array) -> Array:
    """Return errors in ulp of the true value; infinite where a special or subnormal value is wrong."""
    with np.errstate(all="ignore"):
        true, got = REFERENCES[name](x.astype(np.float64)), y.astype(np.float64)
        error = np.abs(got - true)
        ulps = error / np.ldexp(1.0, np.frexp(true)[1] - 24)
        rounded = true.astype(np.float32)
    finite = np.abs(true) <= GREATEST
    right = np.where(np.isnan(true), np.isnan(y), y == rounded)
    right |= finite & (np.abs(true) < LEAST_NORMAL) & (error <= LEAST_NORMAL)
    normal = finite & (np.abs(true) >= LEAST_NORMAL)
    return np.where(normal, ulps, np.where(right, 0.0, np.inf))


@pytest.mark.parametrize("name", NAMES)
def test_accurate_everywhere(name: str) -> None:
    stride, chunk = 997 if name in LIMITS else 97, 1 << 20
    for start in range(0, 1 << 32, stride * chunk):
        x = _singles(np.arange(start, min(start + stride * chunk, 1 << 32), stride))
        errors = _errors(name, x, compiled(name, HOST_LANES)(x))
        worst = errors.argmax()
        assert errors[worst] <= LIMITS.get(name, 2.0), f"{name}({x[worst]!r}) is {errors[worst]:.2f} ulp off"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lanes", [1, 4, 8])
@pytest.mark.parametrize("cpu", ["", "haswell"])
def test_same_bits_for_all_widths_and_processors(name: str, lanes: int, cpu: str) -> None:
    if cpu and not {"+avx2", "+fma", "+bmi2"} <= set(host().features.split(",")):
        pytest.skip(f"this processor cannot run code for {cpu}")
    x = _singles(np.arange(0, 1 << 32, 9973))
    expected, got = compiled(name, HOST_LANES)(x), compiled(name, lanes, cpu)(x)
    same = (_bits(got) == _bits(expected)) | (np.isnan(got) & np.isnan(expected))
    assert same.all(), x[~same][:4]


EDGE = np.float32(88.72283)  # the greatest float whose exponential is one
SPECIALS: list[tuple[str, float, float]] = [
    ("exp2", -math.inf, 0.0),
    ("exp2", -1e30, 0.0),
    ("exp2", 0.0, 1.0),
    ("exp2", -0.0, 1.0),
    ("exp2", -126.0, LEAST_NORMAL),
    ("exp2", 10.0, 1024.0),
    ("exp2", 127.0, 2.0**127),
    ("exp2", 128.0, math.inf),
    ("exp2", 1e30, math.inf),
    ("exp2", math.inf, math.inf),
    ("exp", -math.inf, 0.0),
    ("exp", -1e30, 0.0),
    ("exp", 0.0, 1.0),
    ("exp", -0.0, 1.0),
    ("exp", float(np.nextafter(EDGE, np.float32(np.inf))), math.inf),
    ("exp", 88.73, math.inf),
    ("exp", math.inf, math.inf),
    ("log2", 8.0, 3.0),
    ("log2", 2.0**-149, -149.0),
    ("tanh", 0.0, 0.0),
    ("tanh", -0.0, -0.0),
    ("tanh", 2.0**-149, 2.0**-149),
    ("tanh", math.inf, 1.0),
    ("tanh", -math.inf, -1.0),
    ("sigmoid", -math.inf, 0.0),
    ("sigmoid", -0.0, 0.5),
    ("sigmoid", math.inf, 1.0),
    ("erf", -0.0, -0.0),
    ("erf", math.inf, 1.0),
    ("erf", -math.inf, -1.0),
    ("sin", -0.0, -0.0),
    ("sin", 2.0**-149, 2.0**-149),
    ("sin", math.inf, math.nan),
    ("cos", -math.inf, math.nan),
    ("cos", -0.0, 1.0),
    ("sqrt", -0.0, -0.0),
    ("sqrt", -1.0, math.nan),
    ("sqrt", math.inf, math.inf),
    ("reciprocal", -0.0, -math.inf),
    ("reciprocal", math.inf, 0.0),
    ("reciprocal", -1.0, -1.0),
    ("abs", -0.0, 0.0),
    ("abs", -math.inf, math.inf),
]
for _name in ("log", "log2"):
    SPECIALS += [
        (_name, 0.0, -math.inf),
        (_name, -0.0, -math.inf),
        (_name, 1.0, 0.0),
        (_name, -1.0, math.nan),
        (_name, -(2.0**-149), math.nan),
        (_name, -math.inf, math.nan),
        (_name, math.inf, math.inf),
    ]


@pytest.mark.parametrize("lanes", [1, HOST_LANES])
@pytest.mark.parametrize(("name", "x", "expected"), SPECIALS)
def test_special_values(name: str, x: float, expected: float, lanes: int) -> None:
    got = float(compiled(name, lanes)(np.array([x], np.float32))[0])
    assert (got == expected and math.copysign(1, got) == math.copysign(1, expected)) or (
        got != got and expected != expected
    )


@pytest.mark.parametrize(("name", "x"), [("exp2", 127.99), ("exp2", 127.99999), ("exp", 88.72), ("exp", float(EDGE))])
def test_great_results_are_finite(name: str, x: float) -> None:
    assert 2.0**127 < compiled(name, HOST_LANES)(np.array([x], np.float32))[0] <= GREATEST


@pytest.mark.parametrize("lanes", [1, HOST_LANES])
@pytest.mark.parametrize("name", NAMES)
def test_nan_of_any_payload(name: str, lanes: int) -> None:
    payloads = np.unique(np.concatenate([2 ** np.arange(23), np.arange(1, 1 << 23, 1021), [(1 << 23) - 1]]))
    for sign in (0x7F800000, 0xFF800000):
        assert np.isnan(compiled(name, lanes)(_singles(sign + payloads))).all()


@pytest.mark.parametrize("name", ["exp2", "exp"])
def test_powers_of_nothing_positive_are_at_most_one(name: str) -> None:
    y = compiled(name, HOST_LANES)(_singles(np.arange(0x80000000, 0xFF800001, 997)))
    assert (y >= 0).all() and (y <= 1).all()


def test_tanh_is_odd_and_bounded() -> None:
    x = _singles(np.arange(0, 0x7F800001, 997))
    y = compiled("tanh", HOST_LANES)(x)
    assert (_bits(-compiled("tanh", HOST_LANES)(-x)) == _bits(y)).all()
    assert (y <= 1).all()


def test_a_constant_is_a_register_too() -> None:
    e = Emitter(4)
    e.store(functions.exp2(e, e.number(-3.0, "float")).text, "%y", "float", 4)
    e.do("ret void")
    text = "\n".join([*sorted(e.declarations), e.function("define void @apply(ptr %y)")])
    loaded, y = machine_code.load(jit.compile_code(text)), ctypes.c_float()
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(loaded.address("apply"))(ctypes.addressof(y))
    assert y.value == 0.125


@pytest.mark.skipif(target(host()).name == "baseline", reason="it has no fma and no floor")
def test_nothing_calls_a_library() -> None:
    for name in NAMES:
        assert "call" not in jit.assembly(_module(name, HOST_LANES))
