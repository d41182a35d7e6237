# ruff: noqa: UP037 (a tensor annotation such as Tensor["N"] names dimensions, not types)
"""Derivatives of random elementwise functions, against torch's autograd, finite differences and other backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monotile import language
from monotile.backends.interpreter import evaluate
from monotile.language import Const, Tensor, arange, kernel, value_and_grad
from usable import TRITON, usable

from .expressions import load, points, text, torch_words

Array = np.ndarray[Any, np.dtype[Any]]
COUNT = 40
SEEDS = range(4)


@kernel
def all_of_them(x: Tensor["N"], y: Tensor["F N"], d: Tensor["F N"], s: float, *, functions: Const, N: Const):
    u = arange(N) * 0.125 - 1.0
    for n, f in enumerate(functions):
        y[n, :], d[n, :] = value_and_grad(f)(x[:], u, s)


def arguments(seed: int, folder: Path, N: int = 64) -> tuple[str, tuple[Any, ...], Array]:
    source = text(seed, COUNT)
    names = load(source, folder / f"random_{seed}.py", {n: getattr(language, n) for n in language.__all__})
    return source, tuple(names[f"f{n}"] for n in range(COUNT)), points(N)


def exact(functions: tuple[Any, ...], x: Array) -> tuple[Array, Array]:
    """Values and derivatives in float64."""
    y, d = (np.full((len(functions), x.size), np.nan) for _ in "yd")
    narrow = y.astype(np.float32)
    compiled = all_of_them.ir(x.astype(np.float32), narrow, narrow.copy(), 0.5, functions=functions)
    evaluate(compiled, [x, y, d], [0.5], float64=True)
    return y, d


@pytest.mark.parametrize("seed", SEEDS)
def test_against_torch(seed: int, tmp_path: Path) -> None:
    """Where torch's answer is NaN, ours is NaN or a number: torch multiplies zeros of branches not taken by inf."""
    torch = pytest.importorskip("torch", reason="torch's autograd is the reference")
    source, functions, x = arguments(seed, tmp_path)
    y, d = exact(functions, x)
    in_torch = load(source, tmp_path / "torch.py", torch_words(torch))
    u = torch.arange(x.size, dtype=torch.float64) * 0.125 - 1.0
    compared = 0
    for n in range(COUNT):
        s = torch.tensor(x, requires_grad=True)
        value = in_torch[f"f{n}"](s, u, 0.5)
        (slope,) = torch.autograd.grad(value.sum(), s)
        usual = torch.isfinite(value.detach()) & torch.isfinite(slope)
        compared += int(usual.sum())
        np.testing.assert_allclose(y[n][usual], value.detach()[usual], rtol=1e-10, atol=1e-12, err_msg=f"f{n}")
        np.testing.assert_allclose(d[n][usual], slope[usual], rtol=1e-9, atol=1e-10, err_msg=f"f{n}")
    assert compared > 0.6 * d.size


@pytest.mark.parametrize("seed", SEEDS)
def test_against_finite_differences(seed: int, tmp_path: Path) -> None:
    """Central differences, where those of two steps agree: at a kink or a jump they do not."""
    _, functions, x = arguments(seed, tmp_path)
    _, d = exact(functions, x)
    step = 1e-4
    values = {k: exact(functions, x + k * step)[0] for k in (-2, -1, 1, 2)}
    with np.errstate(all="ignore"):
        near, far = (values[1] - values[-1]) / (2 * step), (values[2] - values[-2]) / (4 * step)
        better = (4 * near - far) / 3
        smooth = np.isfinite(better) & np.isfinite(d) & (np.abs(near - far) < 1e-5 * (1 + np.abs(near)))
    assert smooth.mean() > 0.5
    np.testing.assert_allclose(d[smooth], better[smooth], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", usable("interpreter", "cpu", "metal", *TRITON))
@pytest.mark.parametrize("seed", SEEDS[:2])
def test_on_every_backend(seed: int, backend: str, tmp_path: Path) -> None:
    """Differences of two exact expressions cancel, so that float32 has few digits of some; where a shift of x by 1e-5
    changes the result, it has fewer."""
    _, functions, x = arguments(seed, tmp_path)
    y, d = (np.full((COUNT, x.size), np.nan, np.float32) for _ in "yd")
    all_of_them(x.astype(np.float32), y, d, 0.5, functions=functions, backend=backend)
    expected = exact(functions, x)
    shifted = [exact(functions, x + k * 1e-5) for k in (-1, 1)]
    compared = 0
    for n, found in enumerate((y, d)):
        with np.errstate(all="ignore"):
            spread = sum(np.abs(other[n] - expected[n]) for other in shifted)
            usual = np.isfinite(expected[n]) & (np.abs(spread) < 1e-2 * (1 + np.abs(expected[n])))
            wrong = usual & ~(np.abs(found - expected[n]) <= 3 * spread + 5e-4 * (1 + np.abs(expected[n])))
        assert not wrong.any(), (np.argwhere(wrong)[:3], found[wrong][:3], expected[n][wrong][:3])
        compared += int(usual.sum())
    assert compared > 0.6 * 2 * d.size
