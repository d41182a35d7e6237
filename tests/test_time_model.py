"""How a call of attention is divided: rows that are packed, keys that are split, and no cliff between few and many."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from monotile.backends.choices import AttentionChoice, AttentionProblem, Choice, Choices
from monotile.backends.cpu import choices as cpu_choices
from monotile.backends.cpu.choices import CpuChoices
from monotile.backends.cpu.row_costs import MEASURED, row_costs
from monotile.backends.metal.choices import MetalChoices
from monotile.backends.nvidia.choices import NvidiaChoices
from monotile.backends.time_model import RowKind, TimeModel
from monotile.dtypes import bfloat16, bool_, float32
from query_steps import STEPS

CHOICES: dict[str, tuple[Choices, str]] = {
    "cpu": (CpuChoices(), "cpu"),
    "sm_90": (NvidiaChoices(), "sm_90"),
    "sm_80": (NvidiaChoices(), "sm_80"),
    "metal": (MetalChoices(), "mps"),
    "none": (Choices(), "cpu"),
}


def problem(
    device: str, queries: int, keys: int, heads: tuple[int, int] = (32, 8), size: int = 128
) -> AttentionProblem:
    return AttentionProblem(device, bfloat16, 1, *heads, queries, keys, size)


def covers(choice: AttentionChoice, given: AttentionProblem) -> bool:
    """True if the splits hold every visible key, each once, and none is empty."""
    if not choice.splits:
        return True
    low, end = given.visible_range
    block, per_split = choice.key_block, choice.blocks_per_split
    first = choice.first_block * block
    last = (choice.first_block + choice.splits * per_split) * block
    return first <= low and last >= end and last - per_split * block < end


# ---- choices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("heads", [(32, 8), (64, 1), (8, 8), (24, 8), (128, 1)], ids=str)
@pytest.mark.parametrize("size", [64, 96, 128, 256, 512, 576])
def test_every_visible_key_is_in_one_split(name: str, heads: tuple[int, int], size: int) -> None:
    choices, device = CHOICES[name]
    for queries in (1, 2, 3, 7, 8, 9, 17, 64, 65, 200, 513, 2000):
        for keys in (0, 1, 63, 513, 4096, 33000):
            for options in ({}, {"causal": "lower_right"}, {"causal": "upper_left"}, {"left": 100, "right": 3}):
                for mask in (None, bool_):
                    given = replace(problem(device, queries, keys, heads, size), mask=mask, **options)
                    choice = choices.attention(given)
                    assert covers(choice, given), (given, choice)
                    assert choice.row_block > 0 and choice.key_block > 0


@pytest.mark.parametrize("name", CHOICES)
def test_fixed_splits_fix_how_a_row_is_computed(name: str) -> None:
    choices, device = CHOICES[name]
    for keys_per_split in (1, 64, 512, 1000):
        found = [choices.attention(problem(device, n, 4096), keys_per_split) for n in (1, 2, 5, 9, 33, 300)]
        assert len({choice.key_block for choice in found}) == 1
        assert all(choice.row_block <= 12 and choice.packed for choice in found)


@pytest.mark.parametrize("name", ["cpu", "sm_90", "metal"])
def test_keys_of_one_head_are_shared_out(name: str) -> None:
    """One KV head is too little for a machine, however many query heads it has."""
    choices, device = CHOICES[name]
    for heads in ((64, 1), (128, 1), (8, 1)):
        choice = choices.attention(problem(device, 1, 65536, heads))
        assert choice.packed and choice.splits > 1


def test_hopper_packs_the_rows_of_a_group() -> None:
    choices, device = CHOICES["sm_90"]
    for queries, consumers in ((4, 1), (16, 1), (32, 1), (48, 3), (64, 2)):
        choice = choices.attention(problem(device, queries, 32768))
        assert choice.packed and choice.schedule.consumers == consumers
    long = choices.attention(problem(device, 4096, 4096))
    assert not long.packed and not long.splits


def test_other_gpus_have_small_blocks_for_few_queries() -> None:
    """Nothing was measured on them: more rows of a group have larger blocks where the model finds them faster."""
    for architecture in ("sm_80", "sm_89", "sm_120"):
        for heads in ((32, 8), (64, 1), (128, 1)):
            for queries in (1, 4, 8):
                given = problem(architecture, queries, 32768, heads)
                choice = NvidiaChoices().attention(given)
                assert choice.packed and choice.key_block <= 64 and choice.row_block <= max(8, min(given.rows, 128))
                masked = NvidiaChoices().attention(replace(given, mask=bool_))
                assert masked.packed and masked.row_block <= 8


def test_few_rows_with_a_block_map_divide_what_it_shows() -> None:
    """The keys that one query sees may lie anywhere; the map is made while the kernel starts. Fixed splits stay where
    they are."""
    plain = problem("sm_90", 1, 16384)
    for given in (replace(plain, mask=bool_), replace(plain, mask_mod=True)):
        choice, whole = NvidiaChoices().attention(given), NvidiaChoices().attention(plain)
        assert not choice.schedule.consumers and choice.schedule.waits_for_previous
        assert choice.splits and choice.blocks["glance"] > 0 and "glance" not in whole.blocks
        assert choice.row_block == whole.row_block and choice.key_block == whole.key_block
        assert "glance" not in NvidiaChoices().attention(given, 512).blocks
    for rows, early in ((1, True), (64, False)):
        for map_ in (NvidiaChoices().mod_blocks(rows, "sm_90"), NvidiaChoices().mask_blocks(rows, 64, "sm_90")):
            assert (map_.schedule is not None and map_.schedule.triggers_dependents) == early


def test_short_prefill_has_small_ctas_and_long_prefill_producers() -> None:
    short = problem("sm_90", 512, 512)
    assert not NvidiaChoices().attention(short).schedule.consumers
    for given in (replace(short, queries=4096, keys=4096), replace(short, mask=bool_), replace(short, queries=64)):
        assert NvidiaChoices().attention(given).schedule.consumers


def test_a_window_is_split_like_its_slice() -> None:
    for name in ("cpu", "sm_90", "metal"):
        choices, device = CHOICES[name]
        seen = choices.attention(replace(problem(device, 1, 16384), left=511, right=0))
        alone = choices.attention(problem(device, 1, 512))
        assert (seen.splits, seen.blocks_per_split) == (alone.splits, alone.blocks_per_split)
        assert seen.splits == 0 or seen.first_block * seen.key_block == 16384 - 512
        cut = choices.attention(replace(problem(device, 1, 16400), left=511, right=0))  # begins inside a block
        assert cut.splits <= alone.splits + 1 and (alone.splits or not cut.splits)


def test_streamed_splits_have_like_sizes() -> None:
    """The longest decides how long many cores take."""
    for keys, splits, each in ((512, 0, 0), (700, 2, 384), (1024, 2, 512), (1152, 3, 384), (2000, 4, 512)):
        choice = CHOICES["cpu"][0].attention(replace(problem("cpu", 1, keys), dtype=float32))
        assert (choice.splits, choice.blocks_per_split * choice.key_block) == (splits, each)


# ---- the model -------------------------------------------------------------------------------------------------------


def test_no_splits_where_a_block_map_says_what_is_visible() -> None:
    """Most would have nothing to do. Heads alone keep the cores busy; where they are few, keys are split as ever."""
    cores = cpu_choices.cores()
    for keys, heads in itertools.product((700, 4096, 16384), (2 * cores - 1, 2 * cores, 8 * cores)):
        given = replace(problem("cpu", 1, keys, (4 * heads, heads)), dtype=float32, mask=bool_)
        assert given.has_block_map
        choice, unmapped = (CHOICES["cpu"][0].attention(p) for p in (given, replace(given, mask=None)))
        assert unmapped.splits and choice.splits == (unmapped.splits if heads < 2 * cores else 0)


def test_splits_fill_the_slots() -> None:
    kind = RowKind(64, Choice({"BR": 64, "BK": 128}), block_time=1.0, start=2.0)
    model = TimeModel(slots=132, merge=4.0, bytes_per_time=1e9, least=256)
    choice = model.choose(problem("sm_90", 16, 32768), [kind])
    assert choice.splits == 16 and choice.time == pytest.approx(16 + 2 + 4, abs=1)  # 8 heads x 16 splits <= 132 slots
    assert model.choose(problem("sm_90", 16, 256), [kind]).splits == 0
    assert model.choose(replace(problem("sm_90", 16, 4096), batch=64), [kind]).splits == 0


def test_reading_bounds_the_time() -> None:
    kind = RowKind(64, Choice({"BR": 64, "BK": 128}), block_time=1e-9, start=0.0)
    given = problem("sm_90", 16, 32768)
    assert TimeModel(132, 0.0, 1e6).choose(given, [kind]).time == pytest.approx(given.key_bytes / 1e6)


@pytest.mark.parametrize("heads", [(8, 8), (32, 8), (64, 1), (16, 2)], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_one_more_query_costs_a_quarter_at_most(
    name: str, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every greater step is one of the hardware's tiles, and listed."""
    for size_of_machine in ("cores", "default_threads"):
        monkeypatch.setattr(cpu_choices, size_of_machine, lambda: 8)
    monkeypatch.setattr(cpu_choices, "l2_bytes", lambda: 1 << 20)
    monkeypatch.setattr(cpu_choices, "row_costs", lambda processor, dtype: row_costs(name, dtype))
    gpu, unit = name.startswith("sm_"), "avx512" if name in MEASURED else name
    choices, device = (
        CHOICES[name] if name in CHOICES else (NvidiaChoices(), name) if gpu else (CpuChoices(unit), "cpu")
    )
    launch = 5.0 if gpu else 0.0  # us of a call beside its kernels
    for size in (64, 128, 256):
        listed = STEPS[name].get((heads, size)) or STEPS[name].get((heads, 0), {})
        times = [choices.attention(problem(device, n, 32768, heads, size)).time + launch for n in range(1, 513)]
        steps = {n + 1: times[n] / times[n - 1] for n in range(1, 512)}
        assert {n: step for n, step in steps.items() if step > listed.get(n, 1.255)} == {}, size


# Matrix units take 64 rows and a CTA two or three times as many: behind 32, 64, 128 and 256 queries of four heads a
# further block of rows begins. (Measured on an H200, 32768 keys: 1.24, 1.44, 1.28 and 1.19.)
HOPPER_STEPS = {33: 1.34, 65: 1.52, 129: 1.32, 257: 1.42}


@pytest.mark.parametrize("keys", [8192, 32768])
def test_one_more_query_never_costs_more_than_a_quarter_on_hopper(keys: int) -> None:
    choices, device = CHOICES["sm_90"]
    launch = 5.0  # us of a call beside its kernels
    times = {n: choices.attention(problem(device, n, keys)).time + launch for n in range(3, 513)}
    steps = {n: times[n] / times[n - 1] for n in range(4, 513)}
    assert {n: s for n, s in steps.items() if s > HOPPER_STEPS.get(n, 1.25)} == {}


def test_float32_and_other_gpus_have_blocks_that_fit() -> None:
    choices, _ = CHOICES["sm_80"]
    for queries in (9, 33, 600):
        for device in ("sm_80", "sm_90", "sm_120"):
            choice = choices.attention(replace(problem(device, queries, 8192), dtype=float32))
            assert choice.row_block in (16, 32, 64, 128) and (choice.schedule is None or not choice.schedule.consumers)
