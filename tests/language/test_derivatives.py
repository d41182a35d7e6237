# ruff: noqa: UP037 (a tensor annotation such as Tensor["N"] names dimensions, not types)
"""Derivatives of elementwise functions: every rule against torch's autograd in float64, kinks included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from arrays import Array, poisoned, same
from monotile import ir
from monotile.backends.interpreter import evaluate
from monotile.ir.derivatives import RULES
from monotile.language import (
    Const,
    Tensor,
    abs,
    arange,
    cdiv,
    cos,
    erf,
    exp,
    exp2,
    float32,
    fma,
    grad,
    inf,
    int32,
    kernel,
    log,
    log2,
    maximum,
    minimum,
    program_id,
    reciprocal,
    sigmoid,
    sin,
    sqrt,
    static_range,
    tanh,
    value_and_grad,
    where,
)
from monotile.language import bfloat16 as bfloat16_type
from monotile.passes import pipeline
from usable import TRITON, usable

POINTS = np.array([-3.0, -1.0, -0.5, -0.25, -0.0, 0.0, 0.25, 0.5, 1.0, 2.0, 3.0, 40.0, np.inf, -np.inf, np.nan])


@pytest.fixture(params=usable("interpreter", "cpu", "metal", *TRITON))
def backend(request: pytest.FixtureRequest) -> str:
    """Here Metal text is run, too."""
    name: str = request.param
    return name


@kernel
def both(x: Tensor["N"], y: Tensor["N"], d: Tensor["N"], *, f: Const, B: Const = 16):
    rows = program_id(cdiv(x.shape[0], B)) * B + arange(B)
    y[rows], d[rows] = value_and_grad(f)(x[rows])


@kernel
def second(x: Tensor["N"], d: Tensor["N"], *, f: Const, B: Const = 16):
    rows = program_id(cdiv(x.shape[0], B)) * B + arange(B)
    d[rows] = grad(grad(f))(x[rows])


# ---- every rule against torch ----------------------------------------------------------------------------------------


def stepped(s):
    return (s * 2.0).astype(int32).astype(float32)


def clamped_root(s):
    """The root is not differentiable where its argument is the constant."""
    return sqrt(maximum(s, 0.0))


def guarded_log(s):
    """The logarithm of the branch not taken is NaN or infinite, and so is its derivative."""
    return where(s > 0.0, log(s), 0.0)


def log_of_guarded(s):
    return log(where(s > 0.0, s, 0.0)) * 2.0


def nested(s):
    def square(t):
        return t * t

    t = (lambda t: t * 0.5)(s)
    for n in static_range(3):
        if n != 1:
            t = square(t) + s
    return t


# A function, and the same in torch's words.
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "identity": (lambda s: s, lambda t, s: s),
    "neg": (lambda s: -s, lambda t, s: -s),
    "abs": (lambda s: abs(s), lambda t, s: s.abs()),
    "exp": (exp, lambda t, s: t.exp(s)),
    "exp2": (lambda s: exp2(s * 3.0), lambda t, s: t.exp2(s * 3.0)),
    "log": (log, lambda t, s: t.log(s)),
    "log2": (log2, lambda t, s: t.log2(s)),
    "tanh": (lambda s: 20.0 * tanh(s / 20.0), lambda t, s: 20.0 * t.tanh(s / 20.0)),
    "sigmoid": (lambda s: sigmoid(s * 0.1), lambda t, s: t.sigmoid(s * 0.1)),
    "erf": (erf, lambda t, s: t.erf(s)),
    "sin": (lambda s: sin(s * 3.0), lambda t, s: t.sin(s * 3.0)),
    "cos": (cos, lambda t, s: t.cos(s)),
    "power": (lambda s: s**3 + s**-1, lambda t, s: s**3 + s**-1),
    "sqrt": (sqrt, lambda t, s: t.sqrt(s)),
    "reciprocal": (reciprocal, lambda t, s: t.reciprocal(s)),
    "reciprocal of a root": (lambda s: 1.0 / sqrt(s), lambda t, s: 1.0 / t.sqrt(s)),
    "add": (lambda s: s + 1.0 + s, lambda t, s: s + 1.0 + s),
    "sub": (lambda s: 1.0 - s, lambda t, s: 1.0 - s),
    "mul": (lambda s: s * s * 3.0, lambda t, s: s * s * 3.0),
    "div by": (lambda s: s / (s - 0.1), lambda t, s: s / (s - 0.1)),
    "div of": (lambda s: s / 4.0, lambda t, s: s / 4.0),
    "fma": (lambda s: fma(s, exp(s), s), lambda t, s: s * t.exp(s) + s),
    "maximum": (lambda s: maximum(s, 0.5), lambda t, s: t.maximum(s, t.full_like(s, 0.5))),
    "maximum, other side": (lambda s: maximum(0.5, s), lambda t, s: t.maximum(t.full_like(s, 0.5), s)),
    "maximum of two": (lambda s: maximum(s * 2.0, s * s), lambda t, s: t.maximum(s * 2.0, s * s)),
    "minimum": (lambda s: minimum(s, 0.5), lambda t, s: t.minimum(s, t.full_like(s, 0.5))),
    "minimum of two": (lambda s: minimum(s, -s), lambda t, s: t.minimum(s, -s)),
    "where": (lambda s: where(s < 0.5, s * 3.0, -s), lambda t, s: t.where(s < 0.5, s * 3.0, -s)),
    "where with a number": (lambda s: where(s < 0.5, s, -inf), lambda t, s: t.where(s < 0.5, s, -inf)),
    "comparison": (lambda s: (s > 0.0).astype(float32) * s, lambda t, s: (s > 0).double() * s),
    "cast to an integer": (stepped, lambda t, s: s.floor()),
    "narrowing": (lambda s: s.astype(bfloat16_type) * 2.0, lambda t, s: s * 2.0),
    "constant": (lambda s: 3.0, lambda t, s: s.detach() + s.floor()),
    "clamped root": (clamped_root, lambda t, s: t.sqrt(t.maximum(s, t.zeros_like(s)))),
    "log of guarded": (log_of_guarded, lambda t, s: t.log(t.where(s > 0, s, 0.0)) * 2.0),
    "nested": (nested, lambda t, s: ((s * 0.5) ** 2 + s) ** 2 + s),
    "relu, squared": (lambda s: maximum(s, 0.0) * maximum(s, 0.0), lambda t, s: t.maximum(s, t.zeros_like(s)) ** 2),
}
# Where maximum ignores a NaN that torch hands on, the derivative is that of the operand taken.
NAN_IGNORED = {"maximum", "maximum, other side", "minimum", "minimum of two", "clamped root", "relu, squared"}


def torch_derivative(function: Callable[..., Any], x: Array) -> Array:
    torch = pytest.importorskip("torch", reason="torch's autograd is the reference")
    s = torch.tensor(x.astype(np.float64), requires_grad=True)
    (slope,) = torch.autograd.grad(function(torch, s).sum(), s)
    found: Array = slope.numpy()
    return found


def in_float64(function: Callable[..., Any], x: Array) -> tuple[Array, Array]:
    """Value and derivative without rounding."""
    narrow = x.astype(np.float32)
    kernel_ir = both.ir(narrow, np.empty_like(narrow), np.empty_like(narrow), f=function)
    y, d = np.full(x.shape, np.nan), np.full(x.shape, np.nan)
    evaluate(kernel_ir, [x.astype(np.float64), y, d], [], float64=True)
    return y, d


@pytest.mark.parametrize("name", CASES)
def test_rule(name: str) -> None:
    function, in_torch = CASES[name]
    with np.errstate(all="ignore"):
        expected = torch_derivative(in_torch, POINTS)
    x = POINTS
    if name in NAN_IGNORED:
        expected, x = expected[~np.isnan(POINTS)], POINTS[~np.isnan(POINTS)]
    _, found = in_float64(function, x)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_rule_on_every_backend(name: str, backend: str) -> None:
    function, _ = CASES[name]
    x = np.concatenate([POINTS, np.linspace(-4, 4, 66)]).astype(np.float32)
    exact, slope = in_float64(function, x)
    y, d = poisoned(x.shape), poisoned(x.shape)
    both(x, y, d, f=function, backend=backend)
    with np.errstate(over="ignore"):
        rtol = 1e-2 if name == "narrowing" else 2e-6
        np.testing.assert_allclose(y, exact.astype(np.float32), rtol=rtol, atol=1e-6)
        np.testing.assert_allclose(d, slope.astype(np.float32), rtol=4e-6, atol=2e-6)


def test_branches_not_taken_give_no_nan(backend: str) -> None:
    """In torch, 0 * inf of the branch not taken is NaN; and where a root of a clamped value is taken, it is 0."""
    x = np.array([-2.0, -0.0, 0.0, 1.0, 4.0, -np.inf], np.float32)
    y, d = poisoned(6), poisoned(6)
    both(x, y, d, f=guarded_log, backend=backend)
    np.testing.assert_allclose(d, [0, 0, 0, 1, 0.25, 0], rtol=1e-6)
    both(x, y, d, f=clamped_root, backend=backend)
    np.testing.assert_allclose(d, [0, np.inf, np.inf, 0.5, 0.25, 0], rtol=1e-6)
    both(x, y, d, f=lambda s: exp(where(s > 0.0, s, -inf)) * inf, backend=backend)
    np.testing.assert_array_equal(d, [0, 0, 0, np.inf, np.inf, 0])
    both(x, y, d, f=lambda s: where(s > 0.0, 1.0 / s, 0.0) + where(s < 0.0, sqrt(-s), 0.0), backend=backend)
    np.testing.assert_allclose(d, [-0.5 / np.sqrt(2), 0, 0, -1, -1 / 16, 0], rtol=1e-6)


def test_nan_that_maximum_ignores_has_no_derivative(backend: str) -> None:
    x, y, d = np.array([np.nan, 0.0, 1.0, -1.0], np.float32), poisoned(4), poisoned(4)
    both(x, y, d, f=lambda s: maximum(s, 0.0), backend=backend)
    same(d, np.array([0, 0.5, 1, 0], np.float32))
    both(x, y, d, f=lambda s: minimum(s * np.nan, s), backend=backend)
    same(d[1:], np.array([1, 1, 1], np.float32))


# ---- second derivatives ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["exp2", "log", "tanh", "sqrt", "reciprocal", "div by", "fma", "nested", "clamped root"]
)
def test_second_derivative(name: str, backend: str) -> None:
    torch = pytest.importorskip("torch", reason="torch's autograd is the reference")
    function, in_torch = CASES[name]
    x = np.array([0.25, 0.5, 1.5, 3.0], np.float32)
    s = torch.tensor(x.astype(np.float64), requires_grad=True)
    (first,) = torch.autograd.grad(in_torch(torch, s).sum(), s, create_graph=True)
    (expected,) = torch.autograd.grad(first.sum(), s)
    d = poisoned(4)
    second(x, d, f=function, backend=backend)
    np.testing.assert_allclose(d, expected.numpy(), rtol=1e-5)


def test_second_derivative_through_a_branch(backend: str) -> None:
    x, d = np.array([-1.0, 0.0, 2.0], np.float32), poisoned(3)
    second(x, d, f=lambda s: where(s > 0.0, s * s * s, abs(s)), backend=backend)
    np.testing.assert_array_equal(d, [0, 0, 12])


# ---- what is built ---------------------------------------------------------------------------------------------------


def kinds(function: Callable[..., Any]) -> list[str]:
    """The floating tile ops of the derivative alone, after the passes."""

    x = np.zeros(16, np.float32)
    kernel_ir = derivative_only.ir(x, x.copy(), f=function)
    pipeline.run(kernel_ir, pipeline.PipelineOptions())
    return [op.kind for op in ir.walk(kernel_ir.body) if op.results and op.results[0].shape and op.kind != "load"]


@kernel
def derivative_only(x: Tensor["N"], d: Tensor["N"], *, f: Const, B: Const = 16):
    rows = program_id(cdiv(x.shape[0], B)) * B + arange(B)
    d[rows] = grad(f)(x[rows])


def test_nothing_is_computed_for_zeros_and_ones() -> None:
    assert kinds(lambda s: s + 3.0) == ["broadcast"]
    assert kinds(lambda s: s * 3.0 - 1.0) == ["broadcast"]
    assert kinds(lambda s: s.astype(int32).astype(float32)) == ["broadcast"]
    assert kinds(lambda s: exp(s)) == ["exp"]
    assert kinds(lambda s: where(s > 0.0, s, -inf)) == ["lt", "where"]
    assert sorted(kinds(lambda s: 20.0 * tanh(s / 20.0))) == ["div", "mul", "mul", "mul", "sub", "tanh"]


def test_every_floating_op_has_a_rule() -> None:
    without = ir.COMPARE | ir.ops.BITWISE | {"not", "and", "or", "floordiv", "mod", "lookup"}
    assert set(RULES) == (ir.ELEMENTWISE | ir.SHAPE_ONLY) - without
