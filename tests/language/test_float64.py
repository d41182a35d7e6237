# ruff: noqa: UP037 (a tensor annotation such as Tensor["N"] names dimensions, not types)
"""The interpreter's float64 mode: the same IR as a reference without rounding."""

from __future__ import annotations

import numpy as np
import pytest

from arrays import FLOATS, poisoned, random
from monotile import ir
from monotile.backends.interpreter import evaluate
from monotile.dtypes import BY_NAME
from monotile.errors import InternalError
from monotile.language import Const, Tensor, arange, dot, exp, fma, kernel


@kernel
def pipeline(
    a: Tensor["M K"], b: Tensor["K N"], y: Tensor["M N"], scale: float, *, M: Const, K: Const, N: Const, narrow: Const
):
    S = dot(a[:, :], b[:, :]) * scale
    P = exp(S - S.max(axis=1)[:, None]).astype(narrow)
    y[:, :] = (P / P.sum(axis=1)[:, None]).astype(y.dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_float64_mode_rounds_nothing(dtype: str) -> None:
    a, b, y = random((5, 16), dtype, 1), random((16, 9), dtype, 2), poisoned((5, 9), dtype)
    kernel_ir = pipeline.ir(a, b, y, 0.1, narrow=BY_NAME["bfloat16"])
    wide = np.full((5, 9), np.nan)
    evaluate(kernel_ir, [a, b, wide], [0.1], float64=True)
    scores = a.astype(np.float64) @ b.astype(np.float64) * 0.1
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    np.testing.assert_allclose(wide, weights / weights.sum(axis=1, keepdims=True), rtol=1e-14)


def test_float64_inputs_are_used_as_they_are() -> None:
    a, b = np.full((1, 2), 1 + 2.0**-40), np.full((2, 1), 1.0)
    narrow, wide = np.zeros((1, 1), np.float32), np.full((1, 1), np.nan)
    kernel_ir = pipeline.ir(a.astype(np.float32), b.astype(np.float32), narrow, 1.0, narrow=BY_NAME["float32"])
    evaluate(kernel_ir, [a, b, wide], [1.0], float64=True)
    assert wide[0, 0] == 1.0


def test_stores_convert_to_the_array() -> None:
    a, b = random((2, 3)), random((3, 2))
    y = poisoned((2, 2), "float16")
    kernel_ir = pipeline.ir(a, b, y, 1.0, narrow=BY_NAME["float16"])
    wide = np.full((2, 2), np.nan)
    evaluate(kernel_ir, [a, b, wide], [1.0], float64=True)
    evaluate(kernel_ir, [a, b, y], [1.0], float64=True)
    np.testing.assert_array_equal(y, wide.astype(np.float16))


@kernel
def fused(x: Tensor["N"], y: Tensor["N"], *, N: Const):
    y[:] = fma(x[:], x[:], 1.0)


def test_fma_rounds_nothing() -> None:
    x, y = np.full(3, 1 + 2.0**-30), np.full(3, np.nan)
    narrow = x.astype(np.float32)
    evaluate(fused.ir(narrow, narrow.copy()), [x, y], [], float64=True)
    np.testing.assert_array_equal(y, x * x + 1)


@kernel
def shift(x: Tensor["N"], y: Tensor["8"], start: int):
    y[0:8] = x[start + arange(8)]


def test_a_false_proof_of_bounds_is_found() -> None:
    """An access that a pass marks as in bounds must be in bounds."""
    x, y = random(10), poisoned(8)
    kernel_ir = shift.ir(x, y, 0)
    for op in ir.walk(kernel_ir.body):
        if op.kind == "load":
            op.attrs["checked"] = (False,)
    evaluate(kernel_ir, [x, y], [2])
    np.testing.assert_array_equal(y, x[2:])
    for start in (-1, 3, 100):
        with pytest.raises(InternalError, match=r"'x'.*line \d+"):
            evaluate(kernel_ir, [x, y], [start])
