"""float16 on processors without an instruction for it: every number of it, and float32 in every range."""

import numpy as np
import pytest

from monotile.backends import get
from monotile.language import Const, Tensor, arange, cdiv, float16, float32, kernel, program_id

BASELINE = "cpu:baseline"
pytestmark = pytest.mark.skipif(get(BASELINE).why_not() is not None, reason="needs an x86-64 processor")


@kernel
def widen(x: Tensor["N"], y: Tensor["N"], *, B: Const = 256):
    at = program_id(cdiv(x.shape[0], B)) * B + arange(B)
    y[at] = x[at].astype(float32)


@kernel
def narrow(x: Tensor["N"], y: Tensor["N"], *, B: Const = 256):
    at = program_id(cdiv(x.shape[0], B)) * B + arange(B)
    y[at] = x[at].astype(float16)


def test_every_float16_widens() -> None:
    x = np.arange(65536, dtype=np.uint16).view(np.float16)
    y = np.empty(65536, np.float32)
    widen(x, y, backend=BASELINE)
    expected = x.astype(np.float32)
    nan = np.isnan(expected)
    assert np.array_equal(y[~nan].view(np.uint32), expected[~nan].view(np.uint32)) and np.isnan(y[nan]).all()


def test_float32_narrows_to_the_nearest() -> None:
    """Around every float16 and between two of them, to the even one; beyond the largest to infinity."""
    halves = np.arange(0, 0x7C01, dtype=np.uint16).view(np.float16).astype(np.float32)
    halves[-1] = 65536.0
    middles = (halves[1:] + halves[:-1]) / 2
    near = [np.nextafter(m, np.float32(side)) for m in (halves, middles) for side in (-np.inf, np.inf)]
    random = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = np.concatenate([halves, middles, *near, random, np.array([np.inf, np.nan, 1e-45, 3e38], np.float32)])
    x = np.concatenate([x, -x])
    y = np.empty(x.shape, np.float16)
    narrow(x, y, backend=BASELINE)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    nan = np.isnan(expected)
    assert np.array_equal(y[~nan].view(np.uint16), expected[~nan].view(np.uint16)) and np.isnan(y[nan]).all()
