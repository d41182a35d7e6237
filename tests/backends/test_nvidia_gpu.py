"""The nvidia backend with torch: its tensors, and a GPU (`pytest -m gpu`)."""

from __future__ import annotations

import numpy as np
import pytest

import monotile
from backends.nvidia_kernels import (
    attention_oracle,
    copy,
    forward,
    interpreted,
    product,
    scale_rows,
)
from monotile import errors
from monotile.backends.nvidia import build
from monotile.backends.nvidia.gluon import persistent
from monotile.kernels import reference
from monotile.library import kept_maps, ops, registry

torch = pytest.importorskip("torch", reason="torch is not installed")

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(build.interpreting() or not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@interpreted
def test_torch_tensors_and_numpy_arrays() -> None:
    for dtype in ("float32", "bfloat16", "bool", "int64", "uint8"):
        x = torch.arange(100).to(getattr(torch, dtype))
        y = torch.zeros_like(x)
        copy(x, y, backend="nvidia")
        assert torch.equal(x, y)


# ---- on a GPU --------------------------------------------------------------------------------------------------------


def gpu_attention(D: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn((2, h, 333, D), generator=generator, device="cuda").to(dtype) for h in (4, 2, 2))
    return [q, k, v, torch.empty_like(q), torch.empty(q.shape[:3], device="cuda")]


class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("D", [1, 17, 64, 80, 96, 128, 192, 256, 512])
    @pytest.mark.parametrize("causal", [False, True])
    def test_attention(self, D: int, dtype: torch.dtype, causal: bool) -> None:
        args = gpu_attention(D, dtype)
        for _ in range(2):  # the second launch calls the compiled function directly
            args[3].fill_(float("nan"))
            forward(*args, 0.1, BQ=64, BK=32, causal=causal)
        expected, lse = attention_oracle(*(a.float().cpu().numpy() for a in args[:3]), 0.1, causal)
        tolerance = 1e-4 if dtype is torch.float32 else 2e-2
        np.testing.assert_allclose(args[3].float().cpu().numpy(), expected, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(args[4].cpu().numpy(), lse, rtol=1e-3, atol=1e-3)

    def test_graphs_and_streams(self) -> None:
        args = gpu_attention(64, torch.bfloat16)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            forward(*args, 0.1, BQ=64, BK=32, causal=True)
        stream.synchronize()
        expected = args[3].clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward(*args, 0.1, BQ=64, BK=32, causal=True)
        args[3].zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(args[3], expected)

    def test_a_block_mask_in_a_graph(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The graph reads the maps of the call before it, and the queries of the moment."""
        document = torch.arange(600, device="cuda", dtype=torch.int32) // 130
        blocks = ops.block_mask(lambda b, h, i, j: document[i] == document[j], None, None, 600, 600)
        q, k, v, other = (torch.randn(1, 4, 600, 64, device="cuda").bfloat16() for _ in range(4))
        expected = [ops.attention(x, k, v, mask_mod=blocks) for x in (q, other)]
        monkeypatch.setattr(kept_maps.MapMaker, "_make", None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = ops.attention(q, k, v, mask_mod=blocks)
        for x, right in zip((q.clone(), other), expected, strict=True):
            q.copy_(x)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(o, right)

    def test_views_with_other_alignment(self) -> None:
        """A pointer that is not a multiple of 16 must not use what was compiled for one that is."""
        x = torch.randn(1000, device="cuda")
        for start in (0, 4, 1, 2, 0):
            y = torch.zeros_like(x[start:])
            copy(x[start:], y)
            assert torch.equal(x[start:], y)

    def test_a_grid_past_65535(self) -> None:
        x = torch.randn(70000, 8, device="cuda")
        y = torch.zeros_like(x)
        scale_rows(x, y, B=1)
        assert torch.equal(y, x * 2)

    def test_a_schedule_that_does_not_fit(self) -> None:
        x = torch.randn(512, 512, device="cuda").to(torch.bfloat16)
        with pytest.raises(errors.DeviceLimit, match="does not fit the GPU"):
            product(x, x.clone(), torch.empty(512, 512, device="cuda"))

    def test_a_mask_gives_the_same_bits_every_time(self) -> None:
        """Private tiles are copied to the same memory again and again: no copy may overtake its reader."""
        generator = torch.Generator("cuda").manual_seed(0)
        q, k, v = (torch.randn((1, h, 704, 256), generator=generator, device="cuda").bfloat16() for h in (4, 2, 2))
        seen = torch.rand((704, 704), generator=generator, device="cuda") < 0.7
        seen[:, 350:358] = False
        k[:, :, 350:358], v[:, :, 350:358] = torch.nan, torch.nan
        bias = torch.where(seen, torch.randn((704, 704), generator=generator, device="cuda"), -torch.inf)
        for mask in (seen, bias):
            first = monotile.attention(q, k, v, mask=mask, return_lse=True)
            keys, values = (x.nan_to_num(0.0).float() for x in (k, v))
            expected = torch.nn.functional.scaled_dot_product_attention(
                q.float(), keys, values, attn_mask=mask, enable_gqa=True
            )
            np.testing.assert_allclose(first[0].float().cpu().numpy(), expected.cpu().numpy(), atol=1e-2)
            for _ in range(25):
                again = monotile.attention(q, k, v, mask=mask, return_lse=True)
                assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("D", [64, 128, 256, 512])
    def test_rows_of_any_size(self, D: int, dtype: torch.dtype) -> None:
        """Rows whose scores are subtracted first beside rows whose scores are not: the former have one key, the latter
        are those of a call without the former."""
        generator = torch.Generator("cuda").manual_seed(2)
        q, k, v = (torch.randn((1, h, 333, D), generator=generator, device="cuda") for h in (4, 2, 2))
        large = torch.rand((1, 4, 333, 1), generator=generator, device="cuda") < 0.3
        great = 1e4 if dtype is torch.float16 else 1e30
        q, k, v = (x.to(dtype) for x in (torch.where(large, great, 1.0) * q, k, v))
        found, lse = monotile.attention(q, k, v, return_lse=True)
        arrays = [x.double().cpu().numpy() for x in (q, k, v)]
        exact, exact_lse = reference.attention(*arrays)
        naive, _ = reference.attention(*arrays, compute=np.float32)
        out = registry.from_device(found)
        assert registry.judge("out", out, exact, naive.astype(out.dtype)).ok  # two keys may have nearly one score
        np.testing.assert_allclose(lse.double().cpu().numpy(), exact_lse, rtol=1e-5)
        alone = monotile.attention(torch.where(large, 0.0, q.float()).to(dtype), k, v)
        same = (alone == found) | large
        assert same.all()

    @pytest.mark.parametrize("sizes", [(700, 650), (9, 650), (513, 40)])
    @pytest.mark.parametrize("causal", [False, True])
    def test_persistent_tiles(self, causal: bool, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
        """Three tiles per CTA, of which the last may lie outside the grid: the same bits as with one."""
        generator = torch.Generator("cuda").manual_seed(1)
        shapes = (2, 4, sizes[0], 128), (2, 2, sizes[1], 128), (2, 2, sizes[1], 128)
        q, k, v = (torch.randn(shape, generator=generator, device="cuda").half() for shape in shapes)
        found = []
        for many in (1, 3):
            monkeypatch.setattr(persistent, "CANDIDATES", (many,))
            monkeypatch.setattr(ops._ATTENTION, "calls", {})
            found.append(monotile.attention(q, k, v, causal=causal, return_lse=True))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        exact, _ = reference.attention(*(x.double().cpu().numpy() for x in (q, k, v)), causal=causal)
        np.testing.assert_allclose(found[0][0].double().cpu().numpy(), exact, atol=4e-3)
