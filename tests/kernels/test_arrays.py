"""Array kinds: NumPy, torch and what speaks DLPack, read where they lie, results in kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import monotile
from arrays import Array, bfloat16
from kernels.cases import check, equal, normal, qkv
from monotile.errors import ArgumentAlignment, ArgumentKind
from monotile.runtime import arrays
from usable import ON_GPU

pytestmark = pytest.mark.skipif(ON_GPU, reason="these are about arrays in this machine's memory")


@pytest.fixture
def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, array: Any) -> Any:
        raise AssertionError("a copy was made")

    for kind in (arrays.Numpy, arrays.Torch):
        monkeypatch.setattr(kind, "contiguous", refuse)


# ---- NumPy -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_have_the_type_of_q(dtype: str, backend: str) -> None:
    out, lse = check(*qkv(5, 9, dtype=dtype), backend)
    assert type(out) is np.ndarray and out.dtype == (bfloat16 if dtype == "bfloat16" else dtype)
    assert type(lse) is np.ndarray and lse.dtype == np.float32


@pytest.mark.parametrize("Nq", [1, 300])
def test_views_are_read_in_place(Nq: int, backend: str, no_copies: None) -> None:
    """The used part of a larger cache, transposed (B, N, H, D), heads of a fused projection, steps, reversed
    positions."""
    q, k, v = qkv(Nq, 40, B=2, Hq=4, Hkv=2)
    expected = check(q, k, v, backend, causal=True)

    def run(q: Array, k: Array, v: Array) -> None:
        equal(monotile.attention(q, k, v, causal=True, return_lse=True, backend=backend), expected)

    cache = np.full((2, 2, 2, 100, 16), np.nan, np.float32)
    cache[0, :, :, :40], cache[1, :, :, :40] = k, v
    run(q, cache[0, :, :, :40], cache[1, :, :, :40])
    run(*(np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v)))
    fused = np.full((2, 40, 2, 40), np.nan, np.float32)
    fused[..., :16], fused[..., 20:36] = k.swapaxes(1, 2), v.swapaxes(1, 2)
    run(q, fused[..., :16].swapaxes(1, 2), fused[..., 20:36].swapaxes(1, 2))
    run(q, np.ascontiguousarray(k[:, :, ::-1])[:, :, ::-1], np.ascontiguousarray(v[::-1, ::-1])[::-1, ::-1])
    run(q, k.repeat(2, axis=2)[:, :, ::2], v.repeat(3, axis=2)[:, :, ::3])


def test_broadcast_keys_are_read_in_place(backend: str, no_copies: None) -> None:
    q, k, v = qkv(20, 30, B=3)
    same = np.broadcast_to(k[:1], k.shape), np.broadcast_to(v[:1], v.shape)
    check(q, *same, backend)


def test_a_last_stride_other_than_one_is_copied(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    plain = arrays.Numpy.contiguous

    def counted(self: Any, array: Any, shape: Any) -> Any:
        copies.append(array.shape)
        return plain(self, array, shape)

    monkeypatch.setattr(arrays.Numpy, "contiguous", counted)
    q, k, v = qkv(20, 30)
    check(q[..., ::2], np.asfortranarray(k)[..., ::2], v[..., ::-1], backend)
    assert copies == [(1, 2, 20, 8), (1, 1, 30, 8), (1, 1, 30, 16)]


def test_subclasses_are_arrays(backend: str, tmp_path: Any) -> None:
    q, k, v = qkv(10, 20)
    mapped = np.memmap(tmp_path / "k", np.float32, "w+", shape=k.shape)
    mapped[:] = k
    equal(monotile.attention(q, mapped, v, backend=backend), monotile.attention(q, k, v, backend=backend))


# ---- DLPack ----------------------------------------------------------------------------------------------------------


class Other:
    """An array of a library of its own, which shares its memory through DLPack and nothing else."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class Homed(Other):
    """One whose library can make arrays of results."""

    def __array_namespace__(self) -> Any:
        return Homed

    @staticmethod
    def from_dlpack(array: Array) -> Homed:
        return Homed(np.from_dlpack(array))


def test_dlpack(backend: str) -> None:
    q, k, v = qkv(10, 20)
    mask = np.random.default_rng(0).random((10, 20)) < 0.5
    expected = monotile.attention(q, k, v, mask=mask, return_lse=True, backend=backend)
    found = monotile.attention(*map(Other, (q, k, v)), mask=Other(mask), return_lse=True, backend=backend)
    assert all(type(x) is np.ndarray for x in found)
    equal(found, expected)
    homed = monotile.attention(*map(Homed, (q, k, v)), mask=mask, return_lse=True, backend=backend)
    assert all(type(x) is Homed for x in homed)
    equal(tuple(x.array for x in homed), expected)
    parts = monotile.decode_partials(*map(Homed, (q, k, v)), splits=2, backend=backend)
    assert all(type(x) is Homed for x in (*parts, *monotile.merge(*parts, backend=backend)))
    assert type(monotile.mask_blocks(Homed(mask), 4, 4, backend=backend)) is Homed


# ---- torch -----------------------------------------------------------------------------------------------------------

REASON = "torch is an optional library"


def numpy_of(tensor: Any) -> Array:
    import torch

    return tensor.float().numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("Nq", [1, 20])
def test_torch_tensors(dtype: str, Nq: int, backend: str) -> None:
    torch = pytest.importorskip("torch", reason=REASON)
    given = qkv(Nq, 50, B=2, Hq=4, Hkv=2, dtype=dtype)
    sinks, mask = normal(4), np.random.default_rng(0).random((2, 1, Nq, 50)) < 0.7
    tensors = [torch.from_numpy(x.astype(np.float32)).to(getattr(torch, dtype)) for x in given]
    options = {"causal": True, "return_lse": True, "backend": backend}
    expected = monotile.attention(*given, sinks=sinks, mask=mask, **options)
    found = monotile.attention(*tensors, sinks=torch.from_numpy(sinks), mask=torch.from_numpy(mask), **options)
    assert found[0].dtype is getattr(torch, dtype) and found[1].dtype is torch.float32
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(numpy_of(a), b.astype(np.float32))


def test_tensors_that_look_like_those_of_an_earlier_call() -> None:
    """Alike in shape and type, but sparse, negated lazily, or not aligned: errors, after a right call too."""
    torch = pytest.importorskip("torch", reason=REASON)
    q, k, v = map(torch.from_numpy, qkv(1, 9))
    odd = torch.frombuffer(bytearray(4 * k.numel() + 1), dtype=torch.uint8)[1:].numpy().view(np.float32)
    expected = monotile.attention(q, k, v)
    for wrong, error in (
        (k.to_sparse(), ArgumentKind),
        (torch._neg_view(k), ArgumentKind),
        (k.to("meta"), ArgumentKind),
        (torch.from_numpy(odd).view(k.shape), ArgumentAlignment),
    ):
        for _ in range(2):
            with pytest.raises(error):
                monotile.attention(q, wrong, v)
            assert torch.equal(monotile.attention(q, k, v), expected)


def test_torch_views_are_read_in_place(backend: str, no_copies: None) -> None:
    torch = pytest.importorskip("torch", reason=REASON)
    q, k, v = (torch.from_numpy(x) for x in qkv(20, 40, B=2, Hq=4, Hkv=2))
    expected = monotile.attention(q, k, v, backend=backend)
    cache = torch.full((2, 2, 2, 90, 16), float("nan"))
    cache[0, :, :, :40], cache[1, :, :, :40] = k, v
    assert torch.equal(monotile.attention(q, cache[0, :, :, :40], cache[1, :, :, :40], backend=backend), expected)
    long = monotile.attention(k, k, v, backend=backend)  # too many queries to pack the rows of several heads
    turned = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, k, v))
    assert torch.equal(monotile.attention(*turned, backend=backend), long)
    one, *turned = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q[:, :, :1], k, v))
    assert torch.equal(
        monotile.attention(one, *turned, backend=backend), monotile.attention(one, k, v, backend=backend)
    )


def test_few_rows_of_several_heads_are_copied_to_lie_together(backend: str) -> None:
    torch = pytest.importorskip("torch", reason=REASON)
    q, k, v = (torch.from_numpy(x) for x in qkv(3, 40, B=2, Hq=4, Hkv=2))
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(monotile.attention(turned, k, v, backend=backend), monotile.attention(q, k, v, backend=backend))


def test_torch_parts_and_masks(backend: str) -> None:
    torch = pytest.importorskip("torch", reason=REASON)
    q, k, v = (torch.from_numpy(x) for x in qkv(3, 40))
    parts = monotile.decode_partials(q, k, v, splits=3, backend=backend)
    out, lse = monotile.merge(*parts, dtype=torch.bfloat16, backend=backend)
    assert out.dtype is torch.bfloat16 and isinstance(lse, torch.Tensor)
    pieces = [
        monotile.attention(q, k[:, :, r], v[:, :, r], return_lse=True, backend=backend)
        for r in (slice(9), slice(9, 40))
    ]
    joined, total = monotile.merge_lse([p[0] for p in pieces], [p[1] for p in pieces], backend=backend)
    assert torch.allclose(total, lse, rtol=1e-5) and torch.allclose(joined, out.float(), atol=1e-2)
    assert monotile.mask_blocks(torch.ones(9, 9, dtype=torch.bool), 4, 4, backend=backend).dtype is torch.uint8


def test_torch_gradients_change_no_bit(backend: str) -> None:
    torch = pytest.importorskip("torch", reason=REASON)
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in qkv(20, 30))
    out, lse = monotile.attention(q, k, v, return_lse=True, backend=backend)
    assert out.requires_grad and lse.requires_grad
    plain = monotile.attention(q.detach(), k.detach(), v.detach(), return_lse=True, backend=backend)
    assert torch.equal(out, plain[0]) and torch.equal(lse, plain[1])


def test_torch_captured_tensors(backend: str) -> None:
    torch = pytest.importorskip("torch", reason=REASON)
    slopes = torch.tensor([0.5, 0.25])
    q, k, v = (torch.from_numpy(x) for x in qkv(20, 30))
    shifted = lambda score, b, h, q_idx, kv_idx: score + slopes[h]  # noqa: E731
    lse = monotile.attention(q, k, v, score_mod=shifted, return_lse=True, backend=backend)[1]
    plain = monotile.attention(q, k, v, return_lse=True, backend=backend)[1]
    assert torch.allclose(lse - plain, slopes[None, :, None].expand_as(lse), atol=1e-5)


def test_torch_and_numpy_do_not_mix() -> None:
    torch = pytest.importorskip("torch", reason=REASON)
    q, k, v = qkv(20, 30)
    with pytest.raises(ArgumentKind):
        monotile.attention(torch.from_numpy(q), k, v)
    with pytest.raises(ArgumentKind, match="'k' has no memory"):
        monotile.attention(torch.from_numpy(q), torch.from_numpy(k).to("meta"), torch.from_numpy(v))
