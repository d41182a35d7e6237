"""What Gluon modules compute, in Python (gluon_in_python.py): rings, barriers, block cases, and tiles of every kind."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="tiles are torch tensors here")
import torch

from backends import gluon_in_python
from backends.gluon_shared_memory import Allocation, SharedMemoryError, TileLayout, Written
from backends.nvidia_kernels import compiled, lowered
from monotile.backends.nvidia.gluon import support
from monotile.backends.nvidia.program import NvidiaProgram
from monotile.backends.nvidia.schedule import Schedule
from monotile.kernels.attention import DENSE, attention
from monotile.kernels.scores import Options
from monotile.kernels.visibility import COVERED, FULL, HIDDEN, PARTIAL

needs_gluon = pytest.mark.skipif(not support.version_supported(), reason="the Gluon text is for another Triton")
BR = 64


def two(stages: int = 2, **options: Any) -> Schedule:
    return Schedule(4, stages, consumers=2, **options)


def eight_warps(stages: int, **options: Any) -> Schedule:
    return Schedule(8, stages, consumers=1, **options)


def attend(
    schedule: Schedule, D: int, Dv: int, rows: int, keys: int, *, BK: int = 32, tall: int = BR, splits: int = 0,
    columns: bool = False, mask: Any = None, block_map: Any = None, mutate: Any = None, **options: Any,
) -> float:  # fmt: skip
    """Return the greatest error of one head's attention, by the module that a schedule gets. `columns`: the values are
    the first columns of the keys. `mutate` changes the module's text."""
    torch.manual_seed(0)
    q, k = (torch.randn(2, 1, n, D).bfloat16() for n in (rows, keys))
    v = k[..., :Dv] if columns else torch.randn(2, 1, keys, Dv).bfloat16()
    tensors = {"q": q, "k": k, "v": None if columns else v, "mask": mask, "block_map": block_map, "sinks": None}
    tensors |= dict.fromkeys(("o", "lse", "split_o", "split_m", "split_l"))
    nan = float("nan")
    if splits:
        tensors["split_o"] = torch.full((2, 1, rows, splits, Dv), nan)
        tensors |= {name: torch.full((2, 1, rows, splits), nan) for name in ("split_m", "split_l")}
    else:
        tensors["o"] = torch.full((2, 1, rows, Dv), nan).bfloat16()
    blocks = -(-keys // BK)
    scalars = {"scale": D**-0.5, "queries": rows, "first_block": 0, "blocks_per_split": -(-blocks // max(1, splits))}
    constants = {"D": D, "Dv": Dv, "BR": tall, "BK": BK, "covered": mask is not None}
    call = attention.ir(*tensors.values(), *DENSE, *scalars.values(), options=Options(**options), **constants)
    kernel_ir = lowered(call)
    program = NvidiaProgram(kernel_ir, schedule)
    assert program.path.pipeline is not None, program.why_plain
    source = program.default.source
    if mutate is not None:
        source = replace(source, text=mutate(source.text))
    gluon_in_python.run(kernel_ir, program.schedule, source, tensors, scalars)
    S = q.double() @ k.double().transpose(2, 3) * D**-0.5
    exact = torch.softmax(S.masked_fill(~seen(rows, keys, mask, **options), -torch.inf), 3).nan_to_num(0) @ v.double()
    return float((merged(tensors) - exact).abs().max())


def seen(
    rows: int, keys: int, mask: Any, causal: str | None = None, left: int | None = None, mask_mod: Any = None
) -> Any:
    i, j = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)[None, :]
    found = torch.ones(rows, keys, dtype=torch.bool)
    found &= (j <= i) if causal else found
    found &= (j >= i - left) if left is not None else found
    found &= mask_mod(0, 0, torch.arange(rows)[:, None], j) if mask_mod is not None else found
    return found if mask is None else found & (mask if mask.dtype is torch.bool else mask == 0)


def merged(tensors: dict[str, Any]) -> Any:
    """Return the output, of all splits."""
    if tensors["o"] is not None:
        return tensors["o"].double()
    m, l, o = (tensors[name].double() for name in ("split_m", "split_l", "split_o"))
    w = torch.where(l == 0, 0.0, torch.exp(m - m.amax(3, keepdim=True)))
    total = (w * l).sum(3)[..., None]
    return torch.where(l == 0, 0.0, w)[..., None].mul(o.nan_to_num(0)).sum(3) / torch.where(total == 0, 1.0, total)


CASES: dict[str, tuple[Schedule, dict[str, Any]]] = {
    "one tile per consumer": (two(), {}),
    "three slots, three consumers": (Schedule(4, 3, consumers=3), {}),
    "persistent tiles": (two(persistent=True), {"rows": 300}),
    "persistent tiles, results apart": (two(persistent=True), {"rows": 700, "Dv": 32}),
    "persistent tiles, results in a scratch tile": (
        two(persistent=True),
        {"rows": 700, "BK": 64, "causal": "lower_right", "left": 40},
    ),
    "persistent tiles, one slot of queries": (
        two(3, persistent=True),
        {"D": 192, "Dv": 192, "BK": 64, "rows": 500, "causal": "lower_right"},
    ),
    "causal": (two(), {"causal": "lower_right"}),
    "persistent and causal": (two(persistent=True), {"rows": 300, "causal": "lower_right"}),
    "a window, rows of values zeroed": (two(), {"causal": "lower_right", "left": 40}),
    "masked loops in order": (two(edge_stages=1), {"causal": "lower_right", "splits": 2}),
    "splits": (two(), {"splits": 3}),
    "more splits than blocks": (two(), {"splits": 9, "keys": 70}),
    "one row and one key": (two(), {"rows": 1, "keys": 1}),
    "pieces of a side": (two(), {"D": 96, "Dv": 96}),
    "a padded piece": (two(3), {"D": 72, "Dv": 72}),
    "pieces of a side and of the output": (two(), {"D": 192, "Dv": 192, "causal": "lower_right"}),
    "pieces of the output in splits": (two(3), {"D": 80, "Dv": 80, "splits": 2}),
    "pieces of the output, rows of values zeroed": (
        two(),
        {"D": 96, "Dv": 96, "causal": "lower_right", "left": 40},
    ),
    "pieces of the output that lie in the keys": (two(), {"D": 192, "Dv": 96, "columns": True}),
    "warps that share rows, pieces of the output": (eight_warps(1), {"D": 320, "Dv": 320}),
    "persistent tiles, pieces of a side": (two(persistent=True), {"D": 80, "Dv": 64, "rows": 300}),
    "values in the keys, whole tiles": (two(), {"D": 64, "Dv": 64, "columns": True}),
    "values in a piece of the keys": (two(), {"D": 80, "Dv": 64, "columns": True}),
    "values across pieces of the keys": (two(), {"D": 192, "Dv": 128, "columns": True}),
    "values in the keys, overlapped": (two(3), {"D": 80, "Dv": 64, "columns": True, "splits": 2}),
    "values in the keys, rows zeroed": (
        two(),
        {"D": 80, "Dv": 64, "columns": True, "causal": "lower_right", "left": 40},
    ),
    "two tiles of one width": (eight_warps(2), {"D": 576, "Dv": 64, "columns": True}),
    "eight warps of 128 rows, a window": (
        eight_warps(2, persistent=True, edge_stages=1),
        {"tall": 128, "rows": 300, "causal": "lower_right", "left": 40},
    ),
    "warps that share rows": (eight_warps(1), {"D": 576, "Dv": 512}),
    "warps that share rows, masked loops in order": (eight_warps(1, edge_stages=1), {"D": 576, "Dv": 512, "splits": 2}),
    "warps that share rows, values in the keys": (eight_warps(2), {"D": 576, "Dv": 512, "columns": True}),
    "the same with splits": (eight_warps(2), {"D": 576, "Dv": 512, "columns": True, "splits": 3, "BK": 64}),
    "the same with one slot": (eight_warps(1), {"D": 576, "Dv": 512, "columns": True, "causal": "lower_right"}),
    "the same, persistent": (eight_warps(2, persistent=True), {"D": 576, "Dv": 512, "columns": True}),
    "the same, overlapped": (eight_warps(4), {"D": 576, "Dv": 512, "columns": True}),
}


@compiled
@needs_gluon
@pytest.mark.parametrize("name", CASES)
def test_attention(name: str) -> None:
    schedule, given = CASES[name]
    assert attend(schedule, **{"D": 64, "Dv": 64, "rows": 130, "keys": 150, **given}) < 0.01


@compiled
@needs_gluon
@pytest.mark.parametrize("columns", [False, True], ids=["values", "columns"])
@pytest.mark.parametrize(("D", "Dv"), [(80, 64), (80, 80)])
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks(kind: str, D: int, Dv: int, columns: bool) -> None:
    """Blocks that no row sees, that all do, that some do, and a key that no row sees."""
    rows, keys, BK = 128, 192, 32
    mask = torch.rand(rows, keys) < 0.5
    mask[:64, 32:64], mask[:64, 64:96], mask[64:, 96:128], mask[:, 130] = False, True, False, False
    tiles = mask.view(rows // BR, BR, keys // BK, BK).transpose(1, 2)
    whole, some, covered = tiles.flatten(2).all(2), tiles.flatten(2).any(2), tiles.any(2).all(2)
    states = torch.where(whole, FULL, torch.where(some, torch.where(covered, COVERED, PARTIAL), HIDDEN))
    assert set(states.flatten().tolist()) == {HIDDEN, PARTIAL, FULL, COVERED}
    given = {
        "mask": mask if kind == "bool" else torch.where(mask, 0.0, -torch.inf),
        "block_map": states.to(torch.uint8),
    }
    given = {name: tensor.expand(2, 1, *tensor.shape).contiguous() for name, tensor in given.items()}
    assert attend(two(), D, Dv, rows, keys, columns=columns, **given) < 0.01


@compiled
@needs_gluon
def test_blocks_arrive_in_the_order_of_overlapped_iterations() -> None:
    """The next block's keys are read before this block's values, and with one slot of each they are free first."""
    texts: list[str] = []
    attend(eight_warps(1), 64, 64, 64, 200, mutate=lambda text: texts.append(text) or text)
    producer = texts[0].split("def produce(")[1].split("\ndef ")[0]
    keys, values = (producer.index(f"{name}_ring.index(slot)") for name in ("k", "v"))
    assert producer.index("if block < blocks_0:") < keys < producer.index("if block > 0:") < values
    assert "position = first_0 + (block - 1) *" in producer[keys:values]


@compiled
@needs_gluon
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_a_private_tile_waits_for_dots_in_its_memory(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under causality a FULL block zeroes rows of values, in the memory of the next block's private tile."""

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.01)
        return wait(*arguments, **options)

    wait = gluon_in_python.wait_for_dots
    monkeypatch.setattr(gluon_in_python, "wait_for_dots", slow)
    mask = torch.ones(128, 128, dtype=torch.bool)
    mask[40:60, 32:64:3], mask[80:90, 96:128:2] = False, False  # behind a FULL block of the diagonal
    given = {
        "mask": mask if kind == "bool" else torch.where(mask, 0.0, -torch.inf),
        "block_map": block_states(mask, 32),
    }
    given = {name: tensor.expand(2, 1, *tensor.shape).contiguous() for name, tensor in given.items()}
    assert attend(two(), 64, 64, 128, 128, causal="lower_right", **given) < 0.01


def block_states(mask: Any, BK: int) -> Any:
    """The block map of a mask."""
    rows, keys = mask.shape
    padded = torch.zeros(-(-rows // BR) * BR, -(-keys // BK) * BK, dtype=torch.bool)
    inside = torch.zeros_like(padded)
    padded[:rows, :keys], inside[:rows, :keys] = mask, True
    tiles, real = (x.view(-1, BR, x.shape[1] // BK, BK).transpose(1, 2) for x in (padded, inside))
    some, whole = tiles.flatten(2).any(2), (tiles | ~real).flatten(2).all(2)
    covered = (tiles.any(2) | ~real.any(2)).all(2)
    return torch.where(whole, FULL, torch.where(some, torch.where(covered, COVERED, PARTIAL), HIDDEN)).to(torch.uint8)


@compiled
@needs_gluon
def test_no_block_behind_many_hidden_ones_is_missed() -> None:
    """The search looks at 32 blocks at once: the next to be found lies behind the last of them, or is the last."""
    mask = torch.zeros(64, 70 * 32, dtype=torch.bool)
    mask[:, 33 * 32 : 34 * 32], mask[:, 66 * 32 + 5] = True, True
    given = {"mask": mask, "block_map": block_states(mask, 32)}
    given = {name: tensor.expand(2, 1, *tensor.shape).contiguous() for name, tensor in given.items()}
    assert attend(two(), 16, 16, 64, 70 * 32, **given) < 0.01


def masked(rows: int, keys: int, BK: int, kind: str = "bool") -> dict[str, Any]:
    """A mask with a key that no row sees, and its block map."""
    mask = torch.rand(rows, keys, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[:, keys // 2] = False
    given = {
        "mask": mask if kind == "bool" else torch.where(mask, 0.0, -torch.inf),
        "block_map": block_states(mask, BK),
    }
    return {name: tensor.expand(2, 1, *tensor.shape).contiguous() for name, tensor in given.items()}


@compiled
@needs_gluon
@pytest.mark.parametrize("seed", range(12))
def test_random_calls(seed: int) -> None:
    """Shapes, head sizes, options and schedules drawn at random: right, and nothing in shared memory is read or written
    that must not be."""
    draw = random.Random(seed)
    D, Dv, BK = (
        draw.choice((16, 32, 64, 80, 96, 128)),
        draw.choice((16, 32, 64, 128)),
        draw.choice((32, 64, 128)),
    )
    rows, keys = draw.choice((1, 17, 64, 130, 200)), draw.choice((1, 2, 17, 64, 150, 257))
    schedule = Schedule(4, draw.choice((1, 2, 3)), consumers=draw.choice((1, 2, 3)), persistent=draw.random() < 0.3)
    given: dict[str, Any] = {}
    if seed % 2:
        given |= masked(rows, keys, BK, draw.choice(("bool", "additive")))
    else:
        given |= {"causal": "lower_right"} if draw.random() < 0.5 else {}
        given |= {"left": draw.choice((0, 5, 40))} if draw.random() < 0.5 else {}
        given |= {"splits": draw.choice((2, 3))} if draw.random() < 0.5 and not schedule.persistent else {}
    assert attend(schedule, D, Dv, rows, keys, BK=BK, **given) < 0.02


def changed(old: str, new: str) -> Any:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    return change


def not_waited_for(barrier: str) -> Any:
    """Leave out the first wait for this barrier, where the copy happens to be done all the same."""

    def change(text: str) -> str:
        wait = f"mbarrier.wait({barrier}"
        assert wait in text
        return text.replace(wait, f"mbarrier.by_chance({barrier}", 1)

    return change


# With 64 columns of keys, 16 of values and blocks of 128: the mask's tile has 8192 bytes, that of the values 4096.
WIDE = "gl.allocate_shared_memory(mask_desc.dtype, [2, 1, 1, 64, 128], mask_desc.layout)"
NARROW = "(v_desc.dtype, [4, 128, 16], gl.NVMMASharedLayout(32, 16, 2))"


def narrow_first(text: str) -> str:
    """Allocate the tile of the narrower swizzle, and reinterpret it as the other."""
    text = changed(f"mask_private = {WIDE}", f"v_scratch = gl.allocate_shared_memory{NARROW}")(text)
    wide = WIDE.replace("gl.allocate_shared_memory", "mask_private = v_scratch._reinterpret")
    found: str = changed(f"v_scratch = mask_private._reinterpret{NARROW}", wide)(text)
    return found


STORED = "v_scratch.index(CONSUMER * 2).store("
FAULTS = {
    "scratch tiles of the values' size": (changed("[4, 128, 16]", "[2, 128, 16]"), "16384 bytes are reinterpreted as"),
    "a narrow swizzle's alignment for a wide one": (narrow_first, "aligned to 256 is reinterpreted"),
    "tiles beyond the last": (
        changed("v_scratch.index(CONSUMER * 2)", "v_scratch.index(CONSUMER + 3)"),
        "tile 4 of 4|bytes",
    ),
    "another consumer's scratch tile": (changed(STORED, "v_scratch.index(2 - CONSUMER * 2).store("), "bytes"),
    "a scratch tile that nothing wrote": (changed(STORED, "nothing("), "were written as|not all of them were written"),
    "a mask that is not waited for": (not_waited_for("mask_full.index(CONSUMER)"), "before the barrier"),
    "keys that are not waited for": (not_waited_for("k_full.index(slot_"), "before the barrier"),
}


@compiled
@needs_gluon
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str) -> None:
    mutate, said = FAULTS[name]
    given = masked(100, 256, 128)
    assert attend(two(), 64, 16, 100, 256, BK=128, **given) < 0.01
    with pytest.raises(SharedMemoryError, match=said):
        attend(two(), 64, 16, 100, 256, BK=128, mutate=mutate, **given)


def test_a_tile_that_a_dot_reads_is_not_written() -> None:
    tile = Allocation(torch.float16, [2, 16, 16], TileLayout(32, 16, 2)).tile
    tile.index(0).begin_reading("a dot")
    tile.index(1).write(torch.zeros(16, 16))
    with pytest.raises(SharedMemoryError, match="may still read"):
        tile.index(0).write(torch.zeros(16, 16))
    tile.index(0).end_reading("a dot")
    tile.index(0).write(torch.zeros(16, 16))
    tile.allocation.write((0, 100), Written((1, 2, 3, 4), 0))
    with pytest.raises(SharedMemoryError, match=r"not all of them were written|were written as"):
        tile.index(0).read()


def blocks_of_keys(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Rows 0 to 63 see all of the first 64 keys, some keys from 70 on, and none between."""
    return (kv_idx < 64) & (q_idx < 64) | (kv_idx >= 96) & ((q_idx + kv_idx) % 3 > 0) | (q_idx >= 64) & (kv_idx < 160)


@compiled
@needs_gluon
@pytest.mark.parametrize("options", [{}, {"causal": "lower_right"}, {"causal": "lower_right", "left": 60}], ids=str)
def test_the_block_map_of_a_mod(options: dict[str, Any]) -> None:
    """A mod is not evaluated in full blocks, and hidden ones are skipped."""
    rows, keys, BK = 128, 192, 32
    shown = seen(rows, keys, None, mask_mod=blocks_of_keys)
    tiles = shown.view(rows // BR, BR, keys // BK, BK).transpose(1, 2).flatten(2)
    states = torch.where(tiles.all(2), FULL, torch.where(tiles.any(2), PARTIAL, HIDDEN)).to(torch.uint8)
    assert set(states.flatten().tolist()) == {HIDDEN, PARTIAL, FULL}
    block_map = states.expand(2, 1, *states.shape).contiguous()
    assert attend(two(), 64, 64, rows, keys, block_map=block_map, mask_mod=blocks_of_keys, **options) < 0.01
