"""mask_blocks: 0 hidden, 1 mixed, 2 all visible; of an additive mask all zero."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import monotile
from arrays import Array, numpy_type
from kernels.cases import normal
from monotile.kernels import reference
from monotile.kernels.attention import DENSE
from monotile.kernels.attention import attention as attention_kernel
from monotile.kernels.mask_blocks import cover_blocks, mod_blocks
from monotile.kernels.mask_blocks import mask_blocks as mask_blocks_kernel
from monotile.kernels.scores import Options


def patches(shape: tuple[int, ...], kind: str, seed: int) -> Array:
    """Rectangles of zero, of -inf and of other numbers."""
    rng = np.random.default_rng(seed)
    mask = np.zeros(shape, np.float32)
    for value in (-np.inf, 1.5, -np.inf, 0, -np.inf):
        (a, c), (b, d) = (rng.integers(0, n + 1, 2) for n in shape[-2:])
        mask[..., min(a, c) : max(a, c), min(b, d) : max(b, d)] = value
    return mask == 0 if kind == "bool" else mask.astype(numpy_type(kind))


@pytest.mark.parametrize("kind", ["bool", "float32", "float16", "bfloat16"])
@settings(deadline=None, derandomize=True, max_examples=20, suppress_health_check=list(HealthCheck))
@given(
    lead=st.sampled_from([(), (3,), (2, 1)]),
    lengths=st.tuples(st.sampled_from([0, 1, 7, 8, 9, 33]), st.sampled_from([0, 1, 15, 16, 17, 50, 130])),
    blocks=st.sampled_from([(8, 16), (1, 16), (5, 3), (16, 64), (12, 128)]),  # some have several strips of rows
    seed=st.integers(0, 99),
)
def test_every_block_is_known(
    kind: str, lead: tuple[int, ...], lengths: tuple[int, int], blocks: tuple[int, int], seed: int, backend: str
) -> None:
    mask = patches((*lead, *lengths), kind, seed)
    found = monotile.mask_blocks(mask, *blocks, backend=backend)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, reference.mask_blocks(mask, *blocks))


def test_all_three_states() -> None:
    mask = np.array([[0, 0, 0, -np.inf, -np.inf, -np.inf]], np.float32)
    assert monotile.mask_blocks(mask, 1, 2).tolist() == [[2, 1, 0]]
    assert monotile.mask_blocks(mask == 0, 1, 2).tolist() == [[2, 1, 0]]
    assert monotile.mask_blocks(mask + 1, 1, 2).tolist() == [[1, 1, 0]]
    assert monotile.mask_blocks(np.float32([[np.nan, -0.0]]), 1, 1).tolist() == [[1, 2]]


def test_a_large_negative_number_hides_nothing() -> None:
    mask = np.full((4, 4), -65504, np.float16)
    assert monotile.mask_blocks(mask, 4, 4).tolist() == [[1]]


@pytest.mark.parametrize("strip", [8, 32])
def test_a_fine_map_knows_where_every_key_is_seen(strip: int) -> None:
    """3 is said only where it is so, and in strips at least where one of them hides nothing."""
    for seed in range(30):
        mask = patches((1, 1, 70, 100), "float32", seed)
        kinds = np.full((1, 1, 3, 7), 255, np.uint8)
        mask_blocks_kernel(mask, kinds, BQ=32, BK=16, STRIP=strip, covered=True, backend="cpu")
        plain = reference.mask_blocks(mask, 32, 16)
        np.testing.assert_array_equal(np.where(kinds == 3, 1, kinds), plain)
        for i, j in np.argwhere(plain[0, 0] == 1):
            seen = mask[0, 0, 32 * i : 32 * i + 32, 16 * j : 16 * j + 16] != -np.inf
            if kinds[0, 0, i, j] == 3:
                assert seen.any(axis=0).all()
            else:
                assert not any(seen[r : r + strip].all() for r in range(0, len(seen), strip))


def test_a_key_that_only_some_strips_hide() -> None:
    """A bias hides key 3 from most rows, and key 5 from all: what key 5 holds must not matter."""
    q, k, v = normal(1, 2, 64, 16), normal(1, 2, 40, 16), normal(1, 2, 40, 16)
    mask = normal(64, 40)
    mask[8:, 3] = -np.inf
    expected, _ = reference.attention(q, k, v, mask=mask)
    np.testing.assert_allclose(monotile.attention(q, k, v, mask=mask, backend="cpu"), expected, atol=2e-6)
    mask[:, 5] = -np.inf
    expected, _ = reference.attention(q, k, v, mask=mask)
    v[:, :, 5] = np.nan
    np.testing.assert_allclose(monotile.attention(q, k, v, mask=mask, backend="cpu"), expected, atol=2e-6)


def test_a_key_that_some_row_of_the_head_sees_is_covered() -> None:
    """Also where no row of its block sees it. A key that no row sees leaves its column of blocks PARTIAL."""
    N, document, dead = 700, (np.arange(700) // 50).astype(np.int32), np.arange(700) == 333
    for mod in (
        lambda b, h, q, k: document[q] == document[k],
        lambda b, h, q, k: (document[q] == document[k]) & ~dead[k],
    ):
        found = np.zeros((1, 1, 44, 22), np.uint8)
        given = {"mask_mod": mod, "BR": 16, "BK": 32, "packed": False, "backend": "cpu"}
        mod_blocks(found, N, N, N, SPAN=16, **given)
        plain = found.copy()
        cover_blocks(found, N, N, N, **given)
        seen = mod(0, 0, np.arange(N)[:, None], np.arange(N)[None, :]).any(axis=0)
        columns = np.pad(seen, (0, 4), constant_values=True).reshape(22, 32).all(axis=1)
        np.testing.assert_array_equal(found, np.where((plain == 1) & columns, 3, plain))


def test_splits_of_what_a_map_shows() -> None:
    """Splits divide the blocks between the first and the last visible one, wherever these lie; the rest is empty."""
    q, k, v = normal(2, 1, 4, 16), normal(2, 1, 800, 16), normal(2, 1, 800, 16)
    mask = np.zeros((2, 4, 1, 800), bool)
    mask[0, :, :, 333:420], mask[0, 1, :, 700], mask[1, 2, :, 795] = True, True, True
    block_map = reference.mask_blocks(mask.reshape(2, 1, 4, 800), 4, 16)
    for splits in (1, 7, 60):
        o, m, l = (np.full((2, 1, 4, splits, *last), np.nan, np.float32) for last in ((16,), (), ()))
        tensors = q, k, v, mask, block_map, None, None, None, o, m, l, *DENSE
        constants = {"options": Options(), "D": 16, "Dv": 16, "BR": 4, "BK": 16, "packed": True, "glance": 16}
        attention_kernel(*tensors, 0.25, 1, 0, 1, **constants, backend="cpu")
        found, _ = monotile.merge(o, m, l, backend="cpu")
        expected, _ = reference.attention(q.reshape(2, 4, 1, 16), k, v, mask=mask)
        np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=2e-6)


def test_strided_masks(backend: str) -> None:
    mask = patches((40, 60), "bool", 3)
    for view in (mask.T, mask[::-2, ::3], np.broadcast_to(mask[:1], (30, 60))):
        found = monotile.mask_blocks(view, 8, 16, backend=backend)
        np.testing.assert_array_equal(found, reference.mask_blocks(view, 8, 16))


def test_hidden_blocks_are_not_read(backend: str) -> None:
    """What a block hides may hold anything, in attention too."""
    q, k, v = normal(1, 1, 100, 16), normal(1, 1, 300, 16), normal(1, 1, 300, 16)
    k[:, :, 128:256], v[:, :, 128:256] = np.nan, np.nan
    mask = np.zeros((100, 300), np.float32)
    mask[:, 128:256] = -np.inf
    for m in (mask, mask == 0):
        assert np.isfinite(monotile.attention(q, k, v, mask=m, backend=backend)).all()
