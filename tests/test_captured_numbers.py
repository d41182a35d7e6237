"""Numbers that functions capture are arguments of the kernel: a new value is neither compiled again nor stale."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import monotile
from arrays import Array
from kernels.cases import qkv
from monotile import errors
from monotile.kernels import reference
from monotile.launch.kernel import Kernel
from monotile.library import ops
from usable import WITH_METAL, on_gpu, usable

N = 40
BACKENDS = usable(*WITH_METAL)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows whenever the front end builds a kernel; nothing is found compiled, in memory or on disk."""
    found: list[str] = []
    plain = Kernel.build

    def counted(self: Kernel, *args: Any) -> Any:
        found.append(self.name)
        return plain(self, *args)

    monkeypatch.setattr(Kernel, "build", counted)
    monkeypatch.setattr("monotile.launch.source_keys.source_key", lambda *_: None)
    for function in (ops._ATTENTION, ops.ATTENTION_BACKWARD):
        monkeypatch.setattr(function, "calls", {})
    return found


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def expected_of(arrays: tuple[Array, ...], low: Any, high: Any, factor: Any) -> Any:
    shown = lambda b, h, i, j: (j >= low) & (j < high)  # noqa: E731
    scaled = lambda s, b, h, i, j: s * factor  # noqa: E731
    return reference.attention(*arrays, mask_mod=shown, score_mod=scaled)[0]


class Range:
    """A mask_mod as an object, with a method that it calls."""

    def __init__(self, low: Any, high: Any) -> None:
        self.low, self.high = low, high

    def __call__(self, b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j >= self.low) & self.below(j)

    def below(self, j: Any) -> Any:
        return j < self.high

    def method(self, b: Any, h: Any, i: Any, j: Any) -> Any:
        return self(b, h, i, j)


def in_range(low: Any, b: Any, h: Any, i: Any, j: Any, *, high: Any) -> Any:
    return (j >= low) & (j < high)


FORMS = {
    "closure": lambda low, high: lambda b, h, i, j: (j >= low) & (j < high),
    "partial": lambda low, high: functools.partial(in_range, low, high=high),
    "object": Range,
    "method": lambda low, high: Range(low, high).method,
}
VALUES = [(3, 30, 0.5), (0, 1, -2.0), (7, 39, 1e-3), (np.int64(5), np.int32(6), np.float32(0.25))]


@pytest.mark.parametrize("form", FORMS)
def test_new_values_are_compiled_once(form: str, built: list[str]) -> None:
    arrays = qkv(N, N)
    for low, high, factor in VALUES:
        scaled = lambda s, b, h, i, j: s * factor  # noqa: B023, E731
        found = monotile.attention(*arrays, mask_mod=FORMS[form](low, high), score_mod=scaled)
        close(found, expected_of(arrays, low, high, factor))
        assert built.count("attention") == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend(backend: str, built: list[str]) -> None:
    arrays = qkv(N, N)
    for low, high, factor in VALUES[:2]:
        shown = lambda b, h, i, j: (j >= low) & (j < high)  # noqa: B023, E731
        scaled = lambda s, b, h, i, j: s * factor  # noqa: B023, E731
        found = on_gpu(monotile.attention)(*arrays, mask_mod=shown, score_mod=scaled, backend=backend)
        close(found, expected_of(arrays, low, high, factor))
    assert built.count("attention") == 1


def test_block_maps_follow_the_value() -> None:
    """Of several blocks, some hidden: a map of another value would show or hide the wrong ones."""
    arrays = qkv(300, 300)
    high = 0
    shown = lambda b, h, i, j: (j >= 0) & (j < high)  # noqa: E731
    blocks = monotile.block_mask(shown, None, None, 300, 300)
    for high in (10, 290, 10, 150):
        expected = expected_of(arrays, 0, high, 1.0)
        close(monotile.attention(*arrays, mask_mod=shown), expected)
        close(monotile.attention(*arrays, mask_mod=blocks), expected)


def test_gradients_with_captured_numbers(built: list[str]) -> None:
    """The gradients of scores scaled by a number are those with another scale; a tensor of one number is one, too."""
    torch = pytest.importorskip("torch")
    for factor in (0.5, 2.0, torch.tensor(3.0)):
        scaled = lambda s, b, h, i, j: s * factor  # noqa: B023, E731
        pairs = []
        for options in ({"score_mod": scaled, "scale": 0.25}, {"scale": 0.25 * float(factor)}):
            given = [torch.from_numpy(a).clone().requires_grad_() for a in qkv(20, 30)]
            monotile.attention(*given, **options).square().sum().backward()
            pairs.append([t.grad for t in given])
        for found, expected in zip(*pairs, strict=True):
            close(found, expected)
    counts = [built.count(name) for name in ("backward_queries", "backward_keys")]
    assert max(counts) <= 4  # with the number, as a float and as a tensor, and without score_mod


def test_gradients_use_the_numbers_of_the_forward_pass() -> None:
    """Though the variable has another value by then."""
    torch = pytest.importorskip("torch")
    given = [torch.from_numpy(a).clone().requires_grad_() for a in qkv(20, 30)]
    apart = [torch.from_numpy(a).clone().requires_grad_() for a in qkv(20, 30)]
    total = 0.0
    for n in (5, 25):
        total = total + monotile.attention(*given, mask_mod=lambda b, h, i, j: j < n).square().sum()  # noqa: B023
        monotile.attention(*apart, mask_mod=lambda b, h, i, j: j < n).square().sum().backward()  # noqa: B023
    total.backward()
    for found, expected in zip(given, apart, strict=True):
        close(found.grad, expected.grad)


def test_numbers_that_are_needed_to_compile_are_constants(built: list[str]) -> None:
    arrays = qkv(N, N)
    for n in (2, 5, 3):
        expected = expected_of(arrays, 0, 2**n, 1.0)
        close(monotile.attention(*arrays, mask_mod=lambda b, h, i, j: j < 2**n), expected)  # noqa: B023
    assert built.count("attention") == 4  # once as an argument, in vain


def test_a_number_may_choose_of_a_table(built: list[str]) -> None:
    arrays, bounds = qkv(N, N), (5, 20, 39)
    for n in (0, 2, 1):
        expected = expected_of(arrays, 0, bounds[n], 1.0)
        close(monotile.attention(*arrays, mask_mod=lambda b, h, i, j: j < bounds[n]), expected)  # noqa: B023
    assert built.count("attention") == 1


def test_large_and_special_numbers() -> None:
    arrays = qkv(N, N)
    for high in (2**31 - 1, 2**40, -(2**40)):
        expected = reference.attention(*arrays, mask_mod=lambda b, h, i, j: j < high)[0]  # noqa: B023
        close(monotile.attention(*arrays, mask_mod=lambda b, h, i, j: j < high), expected)  # noqa: B023
    for least in (float("inf"), float("-inf"), -0.0):
        expected = reference.attention(*arrays, mask_mod=lambda b, h, i, j: j + 0.0 > least)[0]  # noqa: B023
        close(monotile.attention(*arrays, mask_mod=lambda b, h, i, j: j + 0.0 > least), expected)  # noqa: B023


def test_options_as_other_libraries_write_them() -> None:
    arrays = qkv(20, 30)
    expected = reference.attention(*arrays, causal=True)[0]
    close(monotile.attention(*arrays, causal=np.True_), expected)
    close(monotile.attention(*arrays, window=(-1, 0)), expected)
    close(monotile.attention(*arrays, window=(-1, -1)), reference.attention(*arrays)[0])
    close(monotile.attention(*arrays, window=(np.int64(3), -1)), reference.attention(*arrays, window=(3, None))[0])
    close(monotile.attention(*arrays, threads=np.int64(2)), reference.attention(*arrays)[0])
    assert monotile.decode_partials(*arrays, splits=np.int32(3)).m.shape[3] == 3
    assert monotile.mask_blocks(np.ones((20, 30), bool), np.int64(16), np.int64(8)).shape == (2, 4)
    blocks = monotile.block_mask(lambda b, h, i, j: j <= i + 10, None, None, np.int64(20), np.int64(30))
    close(monotile.attention(*arrays, mask_mod=blocks), expected)
    with pytest.raises(errors.BadOption, match="return_lse is True or False"):
        monotile.attention(*arrays, return_lse=np.array([1, 2]))
