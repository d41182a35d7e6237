"""Block maps of mask_mod and block masks: what is hidden is skipped, kept maps never go stale, and no bit changes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import monotile
from arrays import Array
from kernels.cases import check, equal, qkv
from kernels.test_row_groups import unreadable
from monotile import errors
from monotile.kernels.mask_blocks import joint_blocks, mod_blocks
from monotile.library import kept_maps
from monotile.library.block_maps import depends_on
from monotile.runtime import arrays, tensors
from usable import ON_GPU

N = 330
DOCUMENT = np.repeat([0, 1, 2, 3], [150, 7, 133, 40]).astype(np.int32)
OF_BATCH = np.stack([DOCUMENT, DOCUMENT[::-1]]).astype(np.int64)
PREFIX = np.array(40, np.int32)
LAST = N


def documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return DOCUMENT[q_idx] == DOCUMENT[kv_idx]


def documents_of_batch(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return OF_BATCH[b, q_idx] == OF_BATCH[b, kv_idx]


def prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx < PREFIX) | (kv_idx <= q_idx)


def slices(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Another slice of keys for every head; nothing for head 3."""
    return (kv_idx // 100 == h) & (h < 3)


def everything(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx >= 0


MODS = {f.__name__: f for f in (documents, documents_of_batch, prefix, slices, everything)}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One entry for each time that a call made its maps; nothing is kept from before."""
    monkeypatch.setattr(kept_maps, "OF_FUNCTIONS", kept_maps.KeptMaps())
    entries: list[int] = []
    make = kept_maps.MapMaker._make

    def noted(self: Any, *args: Any) -> Any:
        entries.append(1)
        return make(self, *args)

    monkeypatch.setattr(kept_maps.MapMaker, "_make", noted)
    yield entries


# ---- maps ------------------------------------------------------------------------------------------------------------


def expected_map(seen: Array, BR: int, BK: int) -> Array:
    rows, keys = seen.shape
    found = np.empty((-(-rows // BR), -(-keys // BK)), np.uint8)
    for i, j in np.ndindex(*found.shape):
        block = seen[i * BR : (i + 1) * BR, j * BK : (j + 1) * BK]
        found[i, j] = 2 if block.all() else 1 if block.any() else 0
    return found


def skip_on_gpu(backend: str) -> None:
    if ON_GPU and backend == "nvidia":
        pytest.skip("a kernel called by itself takes arrays on the GPU; tests of attention run it there")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", MODS)
def test_every_block_is_known(name: str, packed: bool, backend: str) -> None:
    skip_on_gpu(backend)
    mod, heads, groups, queries, keys, BR, BK = MODS[name], 4, 2, 90, 300, 48, 64
    b, h, i, j = np.ogrid[:2, :heads, :queries, :keys]
    seen = np.broadcast_to(mod(b, h, i, j), (2, heads, queries, keys))
    rows, H = (heads // groups * queries, groups) if packed else (queries, heads)
    seen = seen.reshape(2, H, rows, keys)
    found = np.full((2, H, -(-rows // BR), -(-keys // BK)), 255, np.uint8)
    mod_blocks(found, rows, queries, keys, mask_mod=mod, BR=BR, BK=BK, SPAN=2, packed=packed, backend=backend)
    for batch, head in np.ndindex(2, H):
        np.testing.assert_array_equal(found[batch, head], expected_map(seen[batch, head], BR, BK))


def test_a_mask_and_a_mod_together(backend: str) -> None:
    skip_on_gpu(backend)
    of_mask, of_mod = (np.random.default_rng(n).integers(0, 3, (1, 2, 3, 200)).astype(np.uint8) for n in (0, 1))
    for of, least in ((of_mask, of_mask), (None, np.ones_like(of_mod))):
        found = np.full_like(of_mod, 255)
        joint_blocks(of, of_mod, found, SPAN=128, backend=backend)
        np.testing.assert_array_equal(found, np.minimum(least, of_mod))


def test_what_a_mod_depends_on() -> None:
    def branches(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        limit = 5
        if h > 2:
            limit = b
        return kv_idx > limit

    def ignores(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        unused = h + b  # noqa: F841
        return everything(b, h, q_idx, kv_idx) & documents(b, h, q_idx, kv_idx)

    def by_batch(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return documents_of_batch(b, 7, q_idx, kv_idx)

    wanted = {branches: (True, True), ignores: (False, False), by_batch: (True, False), slices: (False, True)}
    assert {mod: depends_on(mod) for mod in wanted} == wanted


# ---- results ---------------------------------------------------------------------------------------------------------

TOGETHER: dict[str, dict[str, Any]] = {
    "alone": {}, "causal": {"causal": True}, "window": {"window": (70, 20)},
    "mask": {"mask": np.random.default_rng(0).random((2, 1, N, N)) < 0.8},
    "everything": {"mask": np.where(np.arange(N) // 64 % 2, -np.inf, 0).astype(np.float32), "window": (200, 0)},
}  # fmt: skip


PAIRS = [*zip(MODS, TOGETHER, strict=True), ("documents", "everything"), ("prefix", "causal")]


@pytest.mark.parametrize(("name", "together"), PAIRS)
def test_prefill(name: str, together: str, backend: str) -> None:
    q, k, v = qkv(N, N, B=2, Hq=4, Hkv=2)
    options = {"mask_mod": MODS[name], **TOGETHER[together]}
    found = check(q, k, v, backend, **options)
    blocks = monotile.block_mask(MODS[name], 2, 4, N, N)
    for _ in range(2):
        options["mask_mod"] = blocks
        equal(monotile.attention(q, k, v, return_lse=True, backend=backend, **options), found)


@pytest.mark.parametrize("Nq", [1, 3, 20])
def test_few_queries(Nq: int, backend: str) -> None:
    q, k, v = qkv(Nq, N, B=2, Hq=4, Hkv=2)
    for mod in (documents, slices):
        found = check(q, k, v, backend, mask_mod=mod)
        blocks = monotile.block_mask(mod, None if mod is documents else 2, 4, Nq, N)
        equal(monotile.attention(q, k, v, mask_mod=blocks, return_lse=True, backend=backend), found)
        parts = monotile.decode_partials(q, k, v, splits=3, mask_mod=blocks, backend=backend)
        equal(monotile.decode_partials(q, k, v, splits=3, mask_mod=mod, backend=backend), parts)


def test_hidden_blocks_hold_anything(backend: str) -> None:
    """Keys of a document that no query is in, and those that only a mask or a position hides from it."""
    q, k, v = qkv(N, N)
    hidden = (np.arange(N) >= 150) & (np.arange(N) < 290)

    def without(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx < 150) | (kv_idx >= 290)

    for options in ({}, {"causal": True}, {"mask": np.ones((N, N), bool)}):
        expected = check(q, k, v, backend, mask_mod=without, **options)
        k[:, :, hidden], v[:, :, hidden] = np.nan, np.inf
        equal(monotile.attention(q, k, v, mask_mod=without, return_lse=True, backend=backend, **options), expected)
        q, k, v = qkv(N, N)


@pytest.mark.parametrize("kind", ["mask_mod", "mask"])
def test_a_key_that_one_row_block_shows_and_no_position_reaches(kind: str, backend: str) -> None:
    """The first rows' blocks are full, but the causal limit cuts their last one; later rows hide what lies behind."""
    rows = {"cpu": 256, "interpreter": 128}.get(backend, 128)
    Nq, Nk, behind = 2 * rows, 2 * rows + 100, rows + 100
    q, k, v = qkv(Nq, Nk)

    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx < rows) | (kv_idx < behind)

    i, j = np.ogrid[:Nq, :Nk]
    options = {"mask_mod": mod} if kind == "mask_mod" else {"mask": mod(0, 0, i, j)}
    expected = check(q, k, v, backend, causal=True, **options)
    v[:, :, behind:] = np.nan
    equal(monotile.attention(q, k, v, causal=True, return_lse=True, backend=backend, **options), expected)


@pytest.mark.skipif(ON_GPU, reason="about this machine's memory")
def test_hidden_blocks_are_not_read() -> None:
    q, k, v = qkv(300, 1000, 32)

    def late(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx >= 900

    guarded = [unreadable(x[0, 0], 768)[None, None] for x in (k, v)]
    equal(monotile.attention(q, *guarded, mask_mod=late), monotile.attention(q, k, v, mask_mod=late))


# ---- kept maps -------------------------------------------------------------------------------------------------------


def in_document(document: Any) -> Callable[..., Any]:
    return lambda b, h, q_idx, kv_idx: document[q_idx] == document[kv_idx]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_map_is_made_once_and_again_when_its_arrays_change(kind: str, made: list[int]) -> None:
    document, (q, k, v) = DOCUMENT.copy(), qkv(N, N)
    if kind == "torch":
        torch = pytest.importorskip("torch")
        document, q, k, v = (torch.from_numpy(x) for x in (document, q, k, v))
    wholes = [np.asarray(x) for x in (q, k, v)]
    for changes in range(3):
        for _ in range(2):  # a function made anew has the same code and the same arrays
            found = np.asarray(monotile.attention(q, k, v, mask_mod=in_document(document)))
            expected = monotile.attention(*wholes, mask=in_document(np.asarray(document))(0, 0, *np.ogrid[:N, :N]))
            equal(found, expected)
        assert len(made) == changes + 1
        document[40 * changes : 200] = changes + 7
    other = document.copy() if kind == "numpy" else document.clone()
    monotile.attention(q, k, v, mask_mod=in_document(other))
    assert len(made) == 4


def test_a_map_without_arrays_is_made_once(made: list[int]) -> None:
    q, k, v = qkv(N, N)
    for width in (30, 30, 50, 50):
        found = monotile.attention(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: q_idx - kv_idx < width)  # noqa: B023
        equal(found, monotile.attention(q, k, v, mask=np.subtract(*np.ogrid[:N, :N]) < width))
    assert len(made) == 2


def test_a_block_mask_keeps_its_maps(made: list[int]) -> None:
    blocks = monotile.block_mask(documents, None, None, N, N)
    q, k, v = qkv(N, N)
    for with_lse in (False, False, True):
        options = {"mask_mod": documents, "return_lse": with_lse}
        equal(monotile.attention(q, k, v, **options | {"mask_mod": blocks}), monotile.attention(q, k, v, **options))
    few = monotile.block_mask(documents, None, None, 1, N)
    for _ in range(2):
        monotile.attention(*qkv(1, N), mask_mod=few)
    assert len(made) == 1 + 2 + 1  # the first block mask, the function in two kinds of calls, the second


def test_a_block_mask_follows_numbers_that_change() -> None:
    width = 30

    def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx < width) & (kv_idx < LAST)

    q, k, v = qkv(N, N)
    blocks = monotile.block_mask(near, None, None, N, N)
    for width, near.__globals__["LAST"] in ((30, N), (250, N), (250, 90), (30, N)):
        distance = np.subtract(*np.ogrid[:N, :N])
        mask = (distance < width) & (np.arange(N) < LAST)
        equal(monotile.attention(q, k, v, mask_mod=blocks), monotile.attention(q, k, v, mask=mask))


def test_maps_and_copies_are_bounded(made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_maps, "MAX_KEPT", 20)
    q, k, v = qkv(N, N)
    store = kept_maps.OF_FUNCTIONS
    for width in range(5, 10):
        monotile.attention(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: q_idx < kv_idx + width)  # noqa: B023
        assert store._bytes <= 20 and store._bytes == sum(entry[2] for entry in store._found.values())
    monkeypatch.setattr(kept_maps, "MAX_KEPT", 2**26)
    monkeypatch.setattr(kept_maps, "MAX_ENTRIES", 2)
    for _ in range(2):
        monotile.attention(q, k, v, mask_mod=documents)
    assert len(made) == 6 and len(store._found) == 2 and store._bytes > DOCUMENT.nbytes
    monkeypatch.setattr(kept_maps, "MAX_COPIED", 8)
    store.clear()
    for _ in range(2):
        monotile.attention(q, k, v, mask_mod=documents)
    assert len(made) == 8 and not store._found  # an array too large to compare: made at every call


def test_while_a_graph_is_recorded(made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A block mask's maps are those it has, kept as long as it is; a function's are made in the graph."""
    q, k, v = qkv(N, N)
    blocks = monotile.block_mask(documents, None, None, N, N)
    for queue, mod, count in (
        (0, blocks, 1), (0, documents, 2), (None, blocks, 2), (None, documents, 3), (None, documents, 4)
    ):  # fmt: skip
        monkeypatch.setattr(arrays.Numpy, "queue", lambda self, device, queue=queue: queue)
        equal(
            monotile.attention(q, k, v, mask_mod=mod), monotile.attention(q, k, v, mask=DOCUMENT[:, None] == DOCUMENT)
        )
        assert len(made) == count
    blocks.maps.clear()
    assert len(blocks.maps._in_graphs) == 1  # the graph still reads them
    monotile.attention(q, k, v, mask_mod=blocks)
    assert len(made) == 5  # there were none to find


def test_versions() -> None:
    """What counts on a GPU, on tensors of this machine."""
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(4)
    stamp = kept_maps.Version(weakref.ref(tensor), tensors.address(tensor), tensor._version)
    assert stamp.holds(tensor) and not stamp.holds(tensor.clone())
    tensor[1] = 2
    assert not stamp.holds(tensor)


def test_stamps_of_arrays_whose_writes_nobody_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(tensors, "device", lambda array: "cuda:0")
    with torch.inference_mode():
        tensor = torch.zeros(4)
    assert kept_maps.stamps([tensor], promised=False) is None
    (stamp,) = kept_maps.stamps([tensor], promised=True) or ()
    assert stamp.holds(tensor) and not stamp.holds(torch.zeros(4))
    (stamp,) = kept_maps.stamps([torch.zeros(4)], promised=False) or ()
    assert isinstance(stamp, kept_maps.Version)


def test_captured_arrays_are_not_kept(made: list[int]) -> None:
    class Noted(np.ndarray[Any, Any]):
        """Of an array itself there are no weak references."""

    q, k, v = qkv(N, N)
    document = DOCUMENT.view(Noted)
    monotile.attention(q, k, v, mask_mod=in_document(document))
    kept = weakref.ref(document)
    del document
    gc.collect()
    assert kept() is None and made == [1]


# ---- the object ------------------------------------------------------------------------------------------------------


def test_shares_and_repr() -> None:
    half = monotile.block_mask(prefix, None, None, 512, 512)
    seen = prefix(0, 0, *np.ogrid[:512, :512])
    cases = [float((expected_map(seen, 128, 128) == case).mean()) for case in (0, 1, 2)]
    assert list(half.shares()) == cases and sum(cases) == 1
    text = f"{cases[0]:.1%} hidden, {cases[1]:.1%} partial, {cases[2]:.1%} full"
    assert repr(half) == f"BlockMask(prefix, B=None, H=None, Nq=512, Nk=512: {text})"
    assert half.captured == () and half.mask_mod is prefix
    assert monotile.block_mask(half, 2, None, 0, 512).shares() == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("sides", [(None, None, N, N - 1), (None, None, 1, N), (3, None, N, N), (None, 4, N, N)])
def test_a_block_mask_of_other_sides(sides: tuple[Any, ...]) -> None:
    blocks = monotile.block_mask(documents, *sides)
    for call in (monotile.attention, monotile.decode_partials):
        with pytest.raises(errors.MaskShape, match=r"the block mask is for .* the call has \(1, 2, 330, 330\)"):
            call(*qkv(N, N), mask_mod=blocks)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((3, None, None, N, N), "a Python function, found int"),
        ((slices, 2, None, N, N), "H is None, but mask_mod depends on the head"),
        ((documents_of_batch, None, 2, N, N), "B is None, but mask_mod depends on the batch"),
        ((documents, None, None, -1, N), "Nq must be a whole number from 0 up"),
        ((documents, None, None, N, 2.0), "Nk must be a whole number from 0 up"),
        ((documents, True, None, N, N), "B must be a whole number from 0 up, or None"),
    ],
)
def test_mistakes(arguments: tuple[Any, ...], error: str) -> None:
    with pytest.raises(errors.BadOption, match=error):
        monotile.block_mask(*arguments)


def test_a_mod_that_does_not_compile() -> None:
    with pytest.raises(errors.UnknownName, match=r"line \d+"):
        monotile.block_mask(lambda b, h, q_idx, kv_idx: nothing > 0, None, None, N, N)
