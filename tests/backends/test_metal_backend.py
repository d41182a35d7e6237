# ruff: noqa: UP037 (a tensor annotation such as Tensor["N"] names dimensions, not types)
"""Kernels as Metal source in the runner: correct, the same bits in every order of threads, no needless barrier."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import monotile
from kernel_calls import over_all_keys
from monotile import metal
from monotile.backends.metal import msl
from monotile.backends.metal.backend import MetalBackend, MetalProgram
from monotile.backends.metal.threadgroup import ThreadgroupMemory
from monotile.backends.metal.writer import Writer
from monotile.errors import DeviceLimit
from monotile.kernels import examples, reference
from monotile.kernels.attention import attention as attention_kernel
from monotile.kernels.scores import Options
from monotile.language import Const, Tensor, arange, cdiv, dot, kernel, maximum, program_id, where, zeros

pytestmark = pytest.mark.skipif(metal.why_not() is not None, reason=str(metal.why_not()))
Array = np.ndarray[Any, Any]
BF16 = ml_dtypes.bfloat16


def randoms(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Array:
    return np.random.default_rng((seed, *shape)).standard_normal(shape, dtype=np.float32).astype(dtype)


def launched(
    kernel: Any, arrays: list[Array], order: str, scalars: tuple[Any, ...] = (), **consts: Any
) -> MetalProgram:
    """Launch a kernel on arrays and return its program."""
    program = MetalBackend(order).compile(kernel.ir(*arrays, *scalars, **consts))
    assert isinstance(program, MetalProgram)
    words: list[int] = []
    for a in arrays:
        words += [0, *a.shape, *(stride // a.itemsize for stride in a.strides)]
    bound = program.bind(words + [0] * len(scalars))
    program.launch(bound, arrays, [a.ctypes.data for a in arrays], scalars, None)
    return program


def in_every_order(call: Callable[[str], Array]) -> Array:
    found = [call(order).view(np.uint8) for order in metal.ORDERS]
    assert all((found[0] == other).all() for other in found[1:])
    return call(metal.ORDERS[0])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("shape", [(64, 64, 64), (37, 45, 71)])
def test_matmul(dtype: Any, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = randoms(m, k, dtype=dtype), randoms(k, n, dtype=dtype, seed=1)

    def call(order: str) -> Array:
        c = metal.poisoned((m, n), np.float32)
        program = launched(examples.matmul, [a, b, c], order, BM=32, BN=32, BK=32)
        assert program.rendered.threads == 128 and program.rendered.threadgroup_bytes <= 32768
        return c

    np.testing.assert_allclose(in_every_order(call), a.astype(np.float64) @ b.astype(np.float64), atol=1e-4)


@kernel
def layer(x: Tensor["M K"], w: Tensor["K N"], bias: Tensor["M N"], y: Tensor["M N"], *, M: Const, K: Const, N: Const):
    y[:, :] = maximum(dot(x[:, :], w[:, :]) + bias[:, :], 0.0)


@pytest.mark.parametrize("rows", [4, 24])
def test_an_addend_inside_an_expression(rows: int) -> None:
    """Nothing but the maximum reads dot + bias, so that sum is not a value with registers of its own."""
    x, w, bias = randoms(rows, 40), randoms(40, 48, seed=1), randoms(rows, 48, seed=2)
    y = metal.poisoned((rows, 48), np.float32)
    launched(layer, [x, w, bias, y], "ascending")
    np.testing.assert_allclose(y, np.maximum(x.astype(np.float64) @ w + bias, 0), atol=1e-4)


@pytest.mark.parametrize("order", metal.ORDERS)
def test_strides_are_used_in_place(order: str) -> None:
    x = randoms(40, 66)[::-1, ::2]
    y = metal.poisoned((33, 40), np.float32).T
    launched(examples.copy, [x, y], order, BR=16, BC=16)
    np.testing.assert_array_equal(y, x)


@kernel
def antisymmetric(x: Tensor["N N"], y: Tensor["N N"], *, N: Const):
    tile = dot(x[:, :], x[:, :])
    y[:, :] = tile - tile.T


def test_reads_of_one_statement_come_after_its_barrier() -> None:
    """The barrier that the second tile needs must not hide the read of the first one."""
    writer = Writer()
    memory = ThreadgroupMemory(writer, "kernel", simdgroups=4)
    first, second = (memory.allocate(("float", 4), 8, 8, hint=hint, purpose="a test") for hint in ("a", "b"))
    memory.before_write(first)
    memory.barrier()
    memory.before_write(second)
    memory.before_read(first, second)
    memory.before_write(first)
    assert sum("barrier" in line for line in writer.lines) == 3


@kernel
def gram(x: Tensor["N N"], y: Tensor["N N"], *, N: Const):
    tile = x[:, :] * 2.0
    y[:, :] = dot(tile.T, tile)


@pytest.mark.parametrize("order", metal.ORDERS)
def test_rows_that_simdgroups_cannot_share_evenly(order: str) -> None:
    """9 rows of matrices over 4 simdgroups, with both operands in threadgroup memory."""
    x, y = randoms(65, 65), metal.poisoned((65, 65), np.float32)
    launched(gram, [x, y], order)
    np.testing.assert_allclose(y, 4 * x.astype(np.float64).T @ x, atol=1e-3)


def test_a_tile_that_does_not_fit_threadgroup_memory() -> None:
    x = randoms(96, 96)
    with pytest.raises(DeviceLimit, match=r"needs 36864 bytes of threadgroup memory .* use smaller blocks"):
        launched(antisymmetric, [x, x.copy()], "ascending")


def test_barriers_are_needed() -> None:
    """Removing any one of them causes a race or a read of unwritten memory. The exception is the barrier between
    iterations of the loop over the last, partial block, which has a single iteration here."""
    a, b = randoms(64, 100, dtype=BF16), randoms(100, 64, dtype=BF16, seed=1)  # three whole blocks and a partial one
    c = metal.poisoned((64, 64), np.float32)
    program = launched(examples.matmul, [a, b, c], "ascending", BM=64, BN=64, BK=32)
    source = program.rendered.source
    places = [match.span() for match in re.finditer(r"threadgroup_barrier\(.*?\);", source)]
    assert places
    meta = program.bind([0, 64, 100, 100, 1, 0, 100, 64, 64, 1, 0, 64, 64, 64, 1]).meta
    buffers: dict[int | str, Any] = {0: a, 1: b, 2: c, 3: meta}
    assert metal.run(source, program.rendered.name, buffers, 1, program.rendered.threads).clean
    needless = 0
    for start, end in places:
        cut = source[:start] + source[end:]
        needless += metal.run(cut, program.rendered.name, buffers, 1, program.rendered.threads).clean
    assert needless <= 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_attention(causal: bool, dtype: Any) -> None:
    shapes = (1, 4, 40, 64), (1, 2, 48, 64), (1, 2, 48, 64)
    q, k, v = (randoms(*shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes))
    o, lse = monotile.attention(q, k, v, causal=causal, return_lse=True, backend="metal")
    exact, exact_lse = reference.attention(q, k, v, causal=causal)
    naive, _ = reference.attention(q, k, v, causal=causal, compute=np.float32)
    error = np.abs(o.astype(np.float64) - exact).max()
    assert error <= 2 * np.abs(naive.astype(dtype).astype(np.float64) - exact).max() + 1e-6
    assert np.abs(lse - exact_lse).max() <= 1e-5


def test_decode_and_merge() -> None:
    q, k, v = randoms(1, 4, 1, 80), randoms(1, 2, 100, 80, seed=1), randoms(1, 2, 100, 80, seed=2)
    parts = monotile.decode_partials(q, k, v, splits=3, backend="metal")
    o, _ = monotile.merge(parts.o, parts.m, parts.l, backend="metal")
    assert np.abs(o - reference.attention(q, k, v)[0]).max() <= 1e-6


def test_offsets_do_not_wrap() -> None:
    """A second head 2^40 elements after the first is read there, where no memory is, not at the first one."""
    q, k, v = randoms(1, 2, 16, 16), randoms(1, 2, 8, 16, seed=1), randoms(1, 2, 8, 16, seed=2)
    arrays = [q, k, v, metal.poisoned(q.shape, np.float32)]
    given = over_all_keys(*arrays, scale=0.25)
    program = MetalBackend().compile(attention_kernel.ir(*given, options=Options(), BR=16, BK=16))
    assert isinstance(program, MetalProgram)
    words: list[int] = []
    for a in arrays:
        words += [0, *a.shape, *(stride // a.itemsize for stride in a.strides)]
    meta = program.bind([*words, 0, 0, 0, 0]).meta
    buffers: dict[int | str, Any] = dict(
        enumerate([*arrays, meta, np.array([16, 0, 0], np.int64), np.array([0.25], np.float32)])
    )
    rendered = program.rendered
    assert metal.run(rendered.source, rendered.name, buffers, 2, rendered.threads).clean
    meta[rendered.meta.index((1, "stride", 1))] = 2**40
    report = metal.run(rendered.source, rendered.name, buffers, 2, rendered.threads)
    assert [finding.kind for finding in report.findings] == ["fault"], report


@kernel
def three_dots(x: Tensor["N N"], t: Tensor["N N"], y: Tensor["N N"], n: int, *, N: Const):
    X = x[:, :]
    total = zeros((N, N))
    for _ in range(n):
        T = t[:, :]
        total = total + dot(X, (T - 2.0).T) + dot(X, (T - 1.0).T)
    y[:, :] = dot(X, total)


@kernel
def dots_of_dots(x: Tensor["N N"], t: Tensor["N N"], y: Tensor["N N"], n: int, *, N: Const):
    X, T = x[:, :], t[:, :]
    if n > 1:
        total = dot(X, dot(X, T))
    else:
        total = dot(dot(T, X), X.T)
    y[:, :] = dot(X, total)


@pytest.mark.parametrize("used, rows", [(three_dots, 8), (three_dots, 64), (dots_of_dots, 8), (dots_of_dots, 48)])
def test_operands_that_statements_compute(used: Any, rows: int) -> None:
    """The result of a loop, a branch or a dot is an operand of another dot: it has registers, and no expression."""
    x, t = randoms(rows, rows) / rows, randoms(rows, rows, seed=1)
    for n in (1, 2):
        found, expected = (metal.poisoned((rows, rows), np.float32) for _ in range(2))
        used(x, t, found, n, backend="metal")
        used(x, t, expected, n, backend="interpreter")
        np.testing.assert_allclose(found, expected, atol=1e-4)


@kernel
def crossed(x: Tensor["N N"], y: Tensor["N N"], *, N: Const):
    tile = dot(x[:, :], x[:, :])
    low = (tile < -12.0).max(axis=1)
    y[:, :] = where(low[:, None], tile, -tile)


def test_bools_in_threadgroup_memory() -> None:
    """All tiles share one array: a bool is a byte there, as Metal leaves the representation of bool open."""
    x, y = randoms(32, 32), metal.poisoned((32, 32), np.float32)
    source = launched(crossed, [x, y], "shuffled").rendered.source
    tile = x.astype(np.float64) @ x
    np.testing.assert_allclose(y, np.where((tile < -12).any(1)[:, None], tile, -tile), atol=1e-4)
    assert "threadgroup uchar *" in source and "threadgroup bool" not in source


def test_registers_are_indexed_by_constants() -> None:
    """A loop whose bound depends on another loop is not unrolled: its array would be in memory."""
    for _, bound in re.findall(r"for \(int (\w+) = [^;]+; \w+ [<>]=? ([^;]+);", "\n".join(msl.HELPERS.values())):
        assert bound.isdigit()


@kernel
def both_signs(x: Tensor["N"], y: Tensor["N"], z: Tensor["N"], *, B: Const = 32):
    i = program_id(cdiv(x.shape[0], B)) * B + arange(B)
    y[i], z[i] = x[i], -x[i]


@pytest.mark.parametrize("order", metal.ORDERS)
def test_outputs_that_share_memory(order: str) -> None:
    """Their elements alternate: none may be lost when the memory is copied back."""
    x, both = randoms(100), metal.poisoned(200, np.float32)
    launched(both_signs, [x, both[::2], both[1::2]], order, B=32)
    np.testing.assert_array_equal(both, np.stack([x, -x], 1).reshape(-1))
    backwards = metal.poisoned(200, np.float32)
    launched(both_signs, [x, backwards[::-2], backwards[-2::-2]], order, B=32)
    np.testing.assert_array_equal(backwards[::-1], both)
