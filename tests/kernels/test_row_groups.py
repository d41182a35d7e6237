"""Packed rows and splits: any number of rows over any number of keys, every option, and what must not be read."""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import monotile
from arrays import Array
from kernels.cases import check, check_output, equal, normal, qkv
from monotile import backends
from monotile.backends.choices import AttentionChoice, AttentionProblem
from monotile.backends.cpu import windows
from monotile.backends.cpu.choices import CpuChoices
from monotile.kernels.reference import attention as reference
from monotile.library import ops
from monotile.runtime import tensors
from usable import ON_GPU

GROUPS = [(2, 2), (4, 2), (6, 2), (8, 1), (24, 8)]


def narrow(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Some keys in every other block, others for other heads."""
    return (j % 256 < 40 + i) & (j >= 3 * h)


def last_keys(b: Any, h: Any, i: Any, j: Any) -> Any:
    return j >= 900


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "causal": {"causal": True}, "upper_left": {"causal": "upper_left"}, "window": {"window": (70, 3)},
    "causal window": {"causal": True, "window": (40, 0)}, "mask_mod": {"mask_mod": narrow},
    "softcap": {"softcap": 5.0, "causal": True},
}  # fmt: skip
SOME_OPTIONS = ("causal", "mask_mod")


# Every option in groups of three heads and in one of eight; the others share their kernels with these or with decode.
OF_GROUPS = [(heads, name) for heads in GROUPS for name in OPTIONS if heads in ((6, 2), (8, 1)) or name in SOME_OPTIONS]


@pytest.mark.parametrize(("heads", "name"), OF_GROUPS, ids=str)
def test_any_number_of_rows(heads: tuple[int, int], name: str, backend: str) -> None:
    options = OPTIONS[name]
    for Nq, Nk in ((1, 700), (3, 257), (9, 64), (17, 1300)):
        check(*qkv(Nq, Nk, 32, B=2, Hq=heads[0], Hkv=heads[1]), backend, **options)


@pytest.mark.parametrize("kind", ["all", "row", "head", "additive", "with mask_mod"])
@pytest.mark.parametrize("Nq", [1, 4, 19])
def test_masks_of_packed_rows(Nq: int, kind: str, backend: str) -> None:
    rng, (B, Hq, Nk) = np.random.default_rng(Nq), (2, 6, 900)
    shape = {"row": (B, 1, 1, Nk), "head": (1, Hq, Nq, Nk)}.get(kind, (B, 1, Nq, Nk))
    mask: Array = (rng.random(shape) < 0.5) & (np.arange(Nk) // 128 % 3 != 1)
    if kind == "additive":
        mask = np.where(mask, rng.standard_normal(shape), -np.inf).astype(np.float32)
    more = {"mask_mod": narrow} if kind == "with mask_mod" else {}
    check(*qkv(Nq, Nk, 32, B=B, Hq=Hq, Hkv=2), backend, mask=mask, **more)


def test_a_mask_of_heads_that_do_not_lie_evenly(backend: str) -> None:
    wide = np.random.default_rng(0).random((1, 4, 9, 300)) < 0.5
    check(*qkv(3, 300, Hq=4, Hkv=2), backend, mask=wide[:, :, 3:6])


def test_rows_past_a_group_do_not_see_for_it(backend: str) -> None:
    """Three heads of a group are padded to four rows or more: the next rows are the next group's."""
    q, k, v = qkv(1, 40, Hq=6, Hkv=2)
    mask = np.ones((1, 6, 1, 40), bool)
    mask[:, :3, :, 7] = False
    k[:, 0, 7], v[:, 0, 7] = np.nan, np.nan
    out = monotile.attention(q, k, v, mask=mask, backend=backend)
    assert np.isfinite(out).all()
    clean = k.copy(), v.copy()
    for x in clean:
        x[:, 0, 7] = 0
    check_output(q, *clean, backend, mask=mask)


HIDDEN: dict[str, dict[str, Any]] = {
    "window": {"window": (99, 0)},
    "bool": {"mask": (np.arange(1000) >= 900)[None, None, None]},
    "additive": {"mask": np.where(np.arange(1000) >= 900, 0.0, -np.inf).astype(np.float32)[None, None, None]},
    "mask_mod": {"mask_mod": last_keys},
}


@pytest.mark.parametrize("options", HIDDEN.values(), ids=HIDDEN)
@pytest.mark.parametrize("heads", [(4, 2), (8, 1), (2, 2)], ids=str)
def test_few_queries_do_not_see_hidden_memory(heads: tuple[int, int], options: dict[str, Any], backend: str) -> None:
    q, k, v = qkv(1, 1000, Hq=heads[0], Hkv=heads[1])
    seen = monotile.attention(q, k, v, backend=backend, **options)
    k[:, :, :900], v[:, :, :900] = np.nan, np.inf
    equal(monotile.attention(q, k, v, backend=backend, **options), seen)
    np.testing.assert_allclose(seen, monotile.attention(q, k[:, :, 900:], v[:, :, 900:], backend=backend), atol=1e-5)


@pytest.mark.skipif(ON_GPU, reason="about this machine's memory")
@pytest.mark.parametrize("options", HIDDEN.values(), ids=HIDDEN)
def test_hidden_keys_are_not_read(options: dict[str, Any]) -> None:
    """Keys and values that nobody sees lie on pages that may not be read at all."""
    q, k, v = qkv(1, 1000, 32, Hq=4)
    guarded = [unreadable(x[0, 0], 768)[None, None] for x in (k, v)]  # blocks of 128 keys: those from 896 on are read
    equal(
        monotile.attention(q, *guarded, backend="cpu", **options), monotile.attention(q, k, v, backend="cpu", **options)
    )


def uneven_mask() -> Array:
    """A mask for each of 4 heads, whose 3 rows are the first of 5: heads and rows are no one dimension."""
    mask = np.random.default_rng(0).random((1, 4, 5, 1000)) < 0.5
    mask[..., :900] = False
    return mask[:, :, :3]


UNEVEN: dict[str, Array] = {
    "bool": uneven_mask(),
    "additive": np.where(uneven_mask().base, 0.5, -np.inf).astype(np.float32)[:, :, :3],
    "by columns": np.asfortranarray(uneven_mask()),
    "expanded": np.broadcast_to(uneven_mask()[:, :1], (1, 4, 3, 1000)),
}


@pytest.mark.skipif(ON_GPU, reason="about this machine's memory")
@pytest.mark.parametrize("kind", UNEVEN)
def test_a_mask_of_uneven_rows_hides_keys(kind: str) -> None:
    mask = UNEVEN[kind]
    q, k, v = qkv(3, 1000, 32, Hq=4)
    expected = monotile.attention(q, k, v, backend="cpu", mask=np.ascontiguousarray(mask))
    guarded = [unreadable(x[0, 0], 768)[None, None] for x in (k, v)]
    equal(monotile.attention(q, *guarded, backend="cpu", mask=mask), expected)
    np.testing.assert_allclose(expected, reference(q, k, v, mask=mask)[0], atol=1e-5)


def test_a_mask_larger_than_the_keys_is_not_copied(backend: str) -> None:
    q, k, v = qkv(6, 300, 1, Hq=8, Hkv=2)
    mask = (np.random.default_rng(0).random((1, 8, 9, 300)) < 0.5)[:, :, :6]
    found = monotile.attention(q, k, v, backend=backend, mask=mask)
    np.testing.assert_allclose(found, reference(q, k, v, mask=mask)[0], atol=1e-5)


@pytest.mark.skipif(ON_GPU, reason="about this machine's memory")
@pytest.mark.parametrize("format", [None, "int8", "int4"])
def test_pages_past_the_end_are_not_read(format: str | None) -> None:
    """Table entries past a sequence's end name pages that may not be read, be they numbers or codes."""
    q, pages = normal(1, 4, 1, 64), normal(12, 16, 2, 64)
    if format is None:
        k = unreadable(pages, 8)
    else:
        pages = plain = monotile.quantize(pages, format)
        k = plain.with_fields({name: unreadable(field, 8) for name, field in plain.fields().items()})
    table, lengths = np.array([[9, 11, 8, 0, 1]], np.int32), np.array([41], np.int32)
    equal(
        monotile.attention_paged(q, k, k, table, lengths, backend="cpu"),
        monotile.attention_paged(q, pages, pages, table, lengths, backend="cpu"),
    )


@pytest.mark.skipif(ON_GPU, reason="about this machine's memory")
@pytest.mark.parametrize("queries", [1, 40])
def test_neighbours_of_a_sequence_are_not_read(queries: int) -> None:
    """Keys of a sequence without queries lie on pages that may not be read."""
    q, k = normal(queries, 4, 64), normal(1024, 2, 64)
    q_offsets, k_offsets = np.array([0, 0, queries], np.int32), np.array([0, 512, 1024], np.int32)
    guarded = unreadable(k, 512)
    equal(
        monotile.attention_varlen(q, guarded, guarded, q_offsets, k_offsets, backend="cpu"),
        monotile.attention_varlen(q, k, k, q_offsets, k_offsets, backend="cpu"),
    )


@pytest.mark.skipif(ON_GPU, reason="about this machine's memory")
@pytest.mark.parametrize("format", ["int8", "int4_zero_point", "aura4"])
def test_hidden_codes_are_not_read(format: str) -> None:
    """Codes and scales of keys that a window hides lie on pages that may not be read."""
    q, k, _ = qkv(1, 8192, 64, Hq=4)
    plain = monotile.quantize(k, format)
    fields = {name: unreadable(np.moveaxis(field, 2, 0), 6144) for name, field in plain.fields().items()}
    guarded = plain.with_fields({name: np.moveaxis(field, 0, 2) for name, field in fields.items()})
    found = [monotile.attention(q, x, x, window=(99, 0), backend="cpu") for x in (guarded, plain)]
    equal(found[0], found[1])


def unreadable(array: Array, row: int) -> Array:
    """A copy whose whole pages of memory before a row of the first axis may not be read."""
    memory = mmap.mmap(-1, array.nbytes)
    copy = np.frombuffer(memory, array.dtype).reshape(array.shape)
    copy[:] = array
    size = row * array.nbytes // len(array) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "win32":
        assert windows.kernel32().VirtualProtect(copy.ctypes.data, size, 0x01, ctypes.byref(ctypes.c_uint32()))
    else:
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(copy.ctypes.data), ctypes.c_size_t(size), 0) == 0
    KEPT.append(memory)
    return copy


KEPT: list[mmap.mmap] = []  # mapped until the end: unmapping what may not be read is none of this test's business


# ---- values in the keys ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "D", "Dv"),
    [("float32", 72, 64), ("bfloat16", 16, 16), ("float32", 33, 7), ("float32", 576, 512), ("bfloat16", 576, 512)],
)
def test_values_that_lie_in_the_keys(D: int, Dv: int, dtype: str, backend: str) -> None:
    q, k, _ = qkv(2, 150, D, B=2, Hq=6, Hkv=2, dtype=dtype)
    v = k[..., :Dv] if Dv != D else k
    assert tensors.is_leading_part(v, k)
    for options in ({}, {"causal": True}, {"mask": (np.arange(150) % 3 > 0)[None, None, None]}):
        check_output(q, k, v, backend, **options)
        check(q, k, v, backend, **options)


def test_what_lies_in_the_keys_is_told_by_memory() -> None:
    k = normal(1, 1, 20, 8)
    inside = tensors.is_leading_part
    assert inside(k[..., :4], k) and inside(k[:, :, ::2, :3], k[:, :, ::2]) and inside(k[...], k)
    assert not inside(k[..., 4:], k) and not inside(k[..., :4].copy(), k)
    assert not inside(k[:, :, 1::2, :3], k[:, :, ::2]) and not inside(None, k)
    assert not inside(k.astype(np.float16)[..., :4], k)
    assert not inside([1.0], "k") and not inside(k[0, ..., :4], k)


def test_values_that_move_out_of_the_keys() -> None:
    """Calls alike but for the memory of v are different calls."""
    q, k, _ = qkv(1, 50, 12, Hq=4)
    other = normal(1, 1, 50, 12, seed=9)[..., :8]
    for v in (k[..., :8], other, k[..., :8]):
        check_output(q, k, v)


# ---- every choice ----------------------------------------------------------------------------------------------------


class Forced(CpuChoices):
    """Rows, keys and splits of a test's own."""

    def __init__(self, rows: int, keys: int, packed: bool, per_split: int) -> None:
        super().__init__()
        self.forced = AttentionChoice({"BR": rows, "BK": keys, "packed": packed}), per_split

    def attention(self, problem: AttentionProblem, keys_per_split: int | None = None) -> AttentionChoice:
        chosen, per_split = self.forced
        return chosen.divided(problem, per_split)


@settings(max_examples=24, deadline=None)
@given(data=st.data())
def test_results_do_not_depend_on_how_a_call_is_divided(data: st.DataObject) -> None:
    """Rows of a block, packed or not, keys of a block and of a split: what is computed is the same."""
    heads = data.draw(st.sampled_from(GROUPS))
    Nq, Nk = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 400))
    rows, keys = data.draw(st.sampled_from([1, 3, 5, 8, 12, 16, 24, 32, 48])), data.draw(st.sampled_from([16, 64, 128]))
    packed, per_split = data.draw(st.booleans()), data.draw(st.integers(1, 8))
    options = dict(data.draw(st.sampled_from(list(OPTIONS.values()))))
    if data.draw(st.booleans()):
        hidden = data.draw(st.integers(0, Nk))
        options["mask"] = (np.arange(Nk) >= hidden)[None, None, None] & (np.arange(Nk) % 7 > 0)
    cpu, usual = backends.get("cpu"), backends.get("cpu").choices
    ops._ATTENTION.calls.clear()
    try:
        cpu.choices = Forced(rows, keys, packed, per_split)
        check(*qkv(Nq, Nk, 16, Hq=heads[0], Hkv=heads[1], seed=Nq), "cpu", **options)
    finally:
        cpu.choices = usual
        ops._ATTENTION.calls.clear()
