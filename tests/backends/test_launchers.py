"""Apple GPUs from Python: torch MPS tensors and MLX arrays, with stand-ins that check every launch against what torch
and MLX document, and run the source. Nothing here has run on Apple hardware."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import monotile
from arrays import Array, numpy_type
from backends import mlx_stand_in, mps_stand_in
from kernels.cases import agrees, qkv
from monotile import metal
from monotile.backends import get
from monotile.cli import catalogue
from monotile.errors import ArgumentDevice, ArgumentDType, ArgumentKind, DeviceLimit, UnknownBackend
from monotile.kernels import examples, reference
from monotile.language import Const, Tensor, arange, kernel
from monotile.library import ops
from monotile.library.growth import Families

needs_runner = pytest.mark.skipif(metal.why_not() is not None, reason=str(metal.why_not()))
pytestmark = needs_runner


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop the launchers of another test's stand-in."""
    for each in catalogue.kernels().values():
        monkeypatch.setattr(each, "_programs", {})
        monkeypatch.setattr(each, "_templates", {})
        monkeypatch.setattr(each, "_plans", {})
    for op in (ops._ATTENTION, ops._PARTIALS, ops.MERGE, ops.MERGE_LSE, ops.MASK_BLOCKS):
        monkeypatch.setattr(op, "calls", {})
        monkeypatch.setattr(op, "families", Families(8))


class Kind:
    """A kind of array: how it is made from NumPy, and read back."""

    def __init__(self, make: Callable[[Array], Any], read: Callable[[Any], Array], type_: type) -> None:
        self.make, self.read, self.type = make, read, type_

    def back(self, found: Any) -> Any:
        if isinstance(found, tuple):
            return tuple(self.back(each) for each in found)
        assert isinstance(found, self.type)
        return self.read(found)


@pytest.fixture
def mps(monkeypatch: pytest.MonkeyPatch) -> Kind:
    monkeypatch.setitem(sys.modules, "torch", mps_stand_in.torch())
    return Kind(mps_stand_in.tensor, lambda t: t.view, mps_stand_in.Tensor)


@pytest.fixture
def mlx(monkeypatch: pytest.MonkeyPatch) -> Kind:
    package, core, kernels = mlx_stand_in.mlx()
    monkeypatch.setitem(sys.modules, "mlx", package)
    monkeypatch.setitem(sys.modules, "mlx.core", core)
    kind = Kind(mlx_stand_in.array, lambda a: a.values, mlx_stand_in.array)
    kind.kernels = kernels  # type: ignore[attr-defined]
    return kind


@pytest.fixture
def real_mlx(monkeypatch: pytest.MonkeyPatch) -> Kind:
    """MLX's own arrays, which exist on Linux too; only the launch is the stand-in's."""
    if importlib.util.find_spec("mlx") is None:
        pytest.skip("mlx is not installed")
    import mlx.core as mx

    def read(a: Any) -> Array:
        bits = a.view(mx.uint16) if a.dtype == mx.bfloat16 else a
        return np.array(bits).view(ml_dtypes.bfloat16) if a.dtype == mx.bfloat16 else np.array(a)

    def make(a: Array) -> Any:
        return mx.array(a.view(np.uint16)).view(mx.bfloat16) if a.dtype == ml_dtypes.bfloat16 else mx.array(a)

    kernels = mlx_stand_in.Kernels(read, make)
    monkeypatch.setattr(mx.fast, "metal_kernel", kernels.metal_kernel)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    return Kind(make, read, mx.array)


@pytest.fixture(params=["mps", "mlx", "real_mlx"])
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    yield request.getfixturevalue(request.param)


# ---- the library -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_attention(dtype: str, kind: Kind) -> None:
    q, k, v = qkv(20, 37, 32, B=2, Hq=4, Hkv=2, dtype=dtype)
    found = monotile.attention(*map(kind.make, (q, k, v)), causal=True, return_lse=True)
    agrees(kind.back(found), q, k, v, causal=True)


def test_attention_with_everything(kind: Kind) -> None:
    q, k, v = qkv(20, 37, 16, Hq=2)
    mask, sinks = np.arange(37) < 30, np.array([0.5, -1], np.float32)
    slopes = np.array([0.1, 0.2], np.float32)
    held = kind.make(slopes)
    found = monotile.attention(
        *map(kind.make, (q, k, v)), mask=kind.make(mask), sinks=kind.make(sinks), window=(9, 2), softcap=5.0,
        score_mod=lambda s, b, h, i, j: s + held[h], return_lse=True,
    )  # fmt: skip
    options: dict[str, Any] = {"mask": mask, "sinks": sinks, "window": (9, 2), "softcap": 5.0}
    agrees(kind.back(found), q, k, v, **options, score_mod=lambda s, b, h, i, j: s + slopes[h])


def test_decode_and_merging(kind: Kind) -> None:
    """One query in splits; partials merged; normalised parts merged."""
    q, k, v = qkv(1, 300, 64, Hq=4, Hkv=2)
    mask = np.random.default_rng(0).random((1, 4, 1, 300)) < 0.5
    held = tuple(map(kind.make, (q, k, v)))
    agrees(kind.back(monotile.attention(*held, return_lse=True)), q, k, v)
    parts = monotile.decode_partials(*held, mask=kind.make(mask), splits=3)
    agrees(kind.back(monotile.merge(*parts)), q, k, v, mask=mask)
    halves = [monotile.attention(held[0], kind.make(k[:, :, s]), kind.make(v[:, :, s]), return_lse=True)
              for s in (slice(0, 100), slice(100, 300))]  # fmt: skip
    agrees(kind.back(monotile.merge_lse(*map(list, zip(*halves, strict=True)))), q, k, v)


def test_mask_blocks(kind: Kind) -> None:
    mask = np.random.default_rng(0).random((2, 40, 50)) < 0.9
    mask[:, :16], mask[:, 16:32, :16] = True, False
    found = kind.back(monotile.mask_blocks(kind.make(mask), 16, 16))
    np.testing.assert_array_equal(found, reference.mask_blocks(mask, 16, 16))


def test_no_keys_and_no_rows(kind: Kind) -> None:
    q, k, v = qkv(20, 0)
    out, lse = kind.back(monotile.attention(*map(kind.make, (q, k, v)), return_lse=True))
    assert (out == 0).all() and (lse == -np.inf).all()
    q, k, v = qkv(0, 5)
    assert kind.back(monotile.attention(*map(kind.make, (q, k, v)))).shape == q.shape


def test_without_a_batch(kind: Kind) -> None:
    q, k, v = qkv(20, 30)
    found = monotile.attention(*(kind.make(x[0]) for x in (q, k, v)), return_lse=True)
    out, lse = kind.back(found)
    agrees((out[None], lse[None]), q, k, v)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_users_kernel(dtype: str, kind: Kind) -> None:
    a, b = (np.random.default_rng(n).standard_normal((40, 40)).astype(numpy_type(dtype)) for n in (0, 1))
    c = kind.make(np.full((40, 40), np.nan, np.float32))
    examples.matmul(kind.make(a), kind.make(b), c, BM=32, BN=32, BK=32)
    np.testing.assert_allclose(kind.read(c), a.astype(np.float64) @ b.astype(np.float64), atol=1e-4)


# ---- torch -----------------------------------------------------------------------------------------------------------


def test_parts_of_a_cache_are_read_in_place(mps: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any) -> Any:
        raise AssertionError("a copy was made")

    monkeypatch.setattr(mps_stand_in.Tensor, "contiguous", refuse)
    q, k, v = qkv(20, 40, 16, B=2)
    cache = np.full((2, 2, 1, 100, 16), np.nan, np.float32)
    cache[0, :, :, :40], cache[1, :, :, :40] = k, v
    held = mps.make(cache)
    found = monotile.attention(mps.make(q), held[0][:, :, :40], held[1][:, :, :40], return_lse=True)
    agrees(mps.back(found), q, k, v)


def test_an_output_that_is_an_input(mps: Kind) -> None:
    """Buffers close together do not overlap; parts of one buffer may."""
    held = mps.make(np.ones((8, 64), np.float32))
    examples.copy(held, mps.make(np.zeros((8, 64), np.float32)), BR=8, BC=64)
    examples.copy(held[:4], held[4:], BR=8, BC=64)
    with pytest.raises(monotile.errors.OverlappingOutput):
        examples.copy(held[:4], held[2:6], BR=8, BC=64)


def test_no_mps(mps: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = map(mps.make, qkv(12, 12))
    torch: Any = sys.modules["torch"]
    monkeypatch.delattr(torch.mps, "compile_shader")
    with pytest.raises(UnknownBackend, match=r"torch 2.13.0 has no torch.mps.compile_shader: pip install 'torch>=2.7'"):
        monotile.attention(q, k, v)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UnknownBackend, match=r"torch sees no Apple GPU.* move tensors with .cpu\(\)"):
        monotile.attention(q, k, v)


def test_a_compiler_that_refuses(mps: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str) -> Any:
        raise SyntaxError("program_source:3:1: error")

    monkeypatch.setattr(sys.modules["torch"].mps, "compile_shader", refuse)  # type: ignore[attr-defined]
    with pytest.raises(DeviceLimit, match="Metal's compiler refuses attention: program_source"):
        monotile.attention(*map(mps.make, qkv(12, 12)))


def test_a_gpu_with_fewer_registers(mps: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline may take fewer threads than the source asks for."""
    plain = mps_stand_in.Function.__init__

    def small(self: Any, source: str, name: str) -> None:
        plain(self, source, name)
        self.max_threads_per_threadgroup = 64

    monkeypatch.setattr(mps_stand_in.Function, "__init__", small)
    q, k, v = map(mps.make, qkv(80, 80, 64))
    with pytest.raises(DeviceLimit, match=r"attention needs threadgroups of \d+ threads, .* registers for 64"):
        monotile.attention(q, k, v)


def test_mlx_compiles_when_it_evaluates(mlx: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first launch is evaluated at once, so that the error is of the call that caused it; others are lazy."""
    core: Any = sys.modules["mlx.core"]
    evaluated: list[Any] = []

    def refuse(arrays: Any) -> None:
        raise RuntimeError("[metal::Device] Unable to build metal library from source")

    q, k, v = map(mlx.make, qkv(9, 9, 16))
    monkeypatch.setattr(core, "eval", refuse)
    with pytest.raises(DeviceLimit, match=r"MLX cannot run attention: .* Unable to build"):
        monotile.attention(q, k, v)
    monkeypatch.setattr(core, "eval", evaluated.append)
    monotile.attention(q, k, v)
    monotile.attention(q, k, v)
    assert len(evaluated) == 1


def test_other_backends_do_not_take_tensors_on_mps(mps: Kind) -> None:
    with pytest.raises(ArgumentDevice, match=r"backend 'cpu' cannot use arrays on 'mps:0'; move them with .cpu\(\)"):
        monotile.attention(*map(mps.make, qkv(12, 12)), backend="cpu")


def test_float64(kind: Kind) -> None:
    if kind.type is not mps_stand_in.Tensor and kind.type is not mlx_stand_in.array:
        pytest.skip("MLX makes float32 of it")
    q, k, v = (x.astype(np.float64) for x in qkv(12, 12))
    with pytest.raises(ArgumentDType, match=r"'q' has dtype \S*float64; monotile has float32, .*: cast it"):
        monotile.attention(*map(kind.make, (q, k, v)))
    with pytest.raises(ArgumentDType, match="cast it"):
        examples.copy(kind.make(q[0, 0]), kind.make(q[0, 0]))


def test_torch_leaves_the_source_unchanged() -> None:
    """torch replaces `#include` lines that name its own headers."""
    pytest.importorskip("torch")
    from torch.utils._cpp_embed_headers import _embed_headers

    a = np.zeros((32, 32), np.float32)
    source = get("metal").stages(examples.matmul.ir(a, a, a))["metal"]()
    assert _embed_headers([line + "\n" for line in source.split("\n")], [], set()).rstrip() == source.rstrip()


# ---- MLX -------------------------------------------------------------------------------------------------------------


def test_a_mask_is_not_made_larger(mlx: Any) -> None:
    """A mask of one row stays one, whatever shape it is broadcast to."""
    q, k, v = qkv(64, 128, 16, Hq=2)
    mask = np.arange(128) < 100
    found = monotile.attention(*map(mlx.make, (q, k, v)), mask=mlx.make(mask), return_lse=True)
    agrees(mlx.back(found), q, k, v, mask=mask)
    assert max(mlx.kernels.input_sizes) == q.size


@kernel
def twice(x: Tensor["N M"], *, B: Const = 8):
    x[arange(B), arange(B)] = x[arange(B), arange(B)] * 2.0


def test_what_is_read_cannot_be_written(mlx: Kind) -> None:
    x = mlx.make(np.ones((8, 8), np.float32))
    with pytest.raises(ArgumentKind, match=r"twice reads 'x', which it also writes.*; write to another array"):
        twice(x)


@kernel
def half(x: Tensor["N M"], threads_per_grid: Tensor["N M"], *, B: Const = 8):
    threads_per_grid[arange(B), arange(B)] = x[arange(B), arange(B)]


def test_what_is_not_written_is_zero(mlx: Kind) -> None:
    """A tensor may also have the name of an MLX attribute."""
    y = mlx.make(np.full((16, 8), np.nan, np.float32))
    half(mlx.make(np.ones((16, 8), np.float32)), y)
    np.testing.assert_array_equal(mlx.read(y), np.arange(16)[:, None] < np.full(8, 8))


def test_no_metal_in_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    package, core, _ = mlx_stand_in.mlx(available=False)
    monkeypatch.setitem(sys.modules, "mlx", package)
    monkeypatch.setitem(sys.modules, "mlx.core", core)
    with pytest.raises(UnknownBackend, match=r"MLX has no Metal here.* pass numpy.array\(x\)"):
        monotile.attention(*map(mlx_stand_in.array, qkv(12, 12)))
    with pytest.raises(ArgumentKind, match="'k' is a NumPy array and 'q' an MLX array; pass arrays of one library"):
        monotile.attention(mlx_stand_in.array(qkv(12, 12)[0]), *qkv(12, 12)[1:])


def test_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each runtime says what to install."""
    from monotile.backends.metal import on_mlx, on_mps
    from monotile.backends.metal.runner import build

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("torch", "mlx.core"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert on_mps.why_not() == "torch is not installed: pip install torch"
    assert on_mlx.why_not() == "mlx is not installed: pip install mlx"
    monkeypatch.setattr(build, "why_not", lambda: "no compiler")
    assert str(get("metal").why_not()).startswith("no compiler; torch is not installed")
