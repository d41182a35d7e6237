"""Sides that are no powers of two, in pieces: the pass, results in Triton's interpreter, and what is compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arrays import Array, poisoned, random
from backends.nvidia_kernels import compiled, interpreted, lowered
from monotile import ir
from monotile.backends.nvidia import build
from monotile.backends.nvidia.backend import BACKEND
from monotile.backends.nvidia.emission import emitted
from monotile.backends.nvidia.paths import select
from monotile.backends.nvidia.program import NvidiaProgram
from monotile.backends.nvidia.schedule import SHARED_BYTES, Schedule, choose
from monotile.backends.nvidia.sides import pieces
from monotile.backends.nvidia.triton.module import render_triton
from monotile.kernels.attention import DENSE, attention
from monotile.kernels.scores import Options
from monotile.language import Const, Tensor, arange, dot, kernel

MLA = {"D": 576, "Dv": 512}
TWO_SLOTS = Schedule(8, 2, consumers=1)


@compiled
def test_in_tritons_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize(
    ("side", "expected"),
    [
        (576, [512, 64]), (192, [128, 64]), (96, [64, 32]), (80, [64, 16]), (72, [64, 8]), (48, [32, 16]),
        (64, [64]), (16, [16]), (24, [24]), (7, [7]), (1, [1]), (112, [112]), (127, [127]),
    ],
)  # fmt: skip
def test_pieces(side: int, expected: list[int]) -> None:
    found = pieces(side)
    assert [piece.side for piece in found] == expected
    assert [piece.start for piece in found] == [0, *np.cumsum(expected)[:-1]]


# ---- the pass --------------------------------------------------------------------------------------------------------


def call(D: int, Dv: int, *, shares: bool = False, splits: int = 0, BK: int = 64, dtype: str = "bfloat16") -> ir.Kernel:
    """The attention kernel for packed rows, with values of their own or in the first columns of the keys."""
    q, k = random((2, 1, 128, D), dtype), random((2, 1, 300, D), dtype)
    v = None if shares else random((2, 1, 300, Dv), dtype)
    rows = (2, 1, 128, splits)
    parts = (random((*rows, Dv)), random(rows), random(rows, seed=1)) if splits else (None, None, None)
    o = None if splits else random((2, 1, 128, Dv), dtype)
    numbers = 0.1, 1, 0, 2
    return attention.ir(
        q,
        k,
        v,
        None,
        None,
        None,
        o,
        None,
        *parts,
        *DENSE,
        *numbers,
        options=Options(),
        D=D,
        Dv=Dv,
        BR=64,
        BK=BK,
        packed=True,
    )


def loads(found: ir.Kernel) -> dict[str, set[tuple[Any, ...]]]:
    """Shapes of the loaded tiles by tensor."""
    shapes: dict[str, set[tuple[Any, ...]]] = {}
    for op in ir.walk(found.body):
        if op.kind == "load":
            shapes.setdefault(op.attrs["tensor"].name, set()).add(op.result.shape)
    return shapes


@pytest.mark.parametrize(("D", "parts"), [(80, [64, 16]), (96, [64, 32]), (192, [128, 64]), (576, [512, 64])])
def test_contracted_sides_are_split(D: int, parts: list[int]) -> None:
    assert loads(lowered(call(D, 64))) == {
        "q": {(64, side) for side in parts},
        "k": {(64, side) for side in parts},
        "v": {(64, 64)},
    }


@pytest.mark.parametrize(("Dv", "parts"), [(80, [64, 16]), (96, [64, 32]), (192, [128, 64])])
@pytest.mark.parametrize("splits", [0, 3])
def test_columns_of_the_output_are_split(Dv: int, parts: list[int], splits: int) -> None:
    """From the values to the stores, through the loops that carry the accumulators."""
    found = lowered(call(64, Dv, splits=splits))
    assert loads(found)["v"] == {(64, side) for side in parts}
    stores = [op for op in ir.walk(found.body) if op.kind == "store" and len(op.operands[0].shape) == 2]
    assert [op.operands[0].shape for op in stores] == [(64, side) for side in parts]
    tiles = {value.shape for op in ir.walk(found.body) for value in op.results if len(value.shape) == 2}
    assert not any(Dv in shape for shape in tiles)


@pytest.mark.parametrize(
    "use",
    [
        lambda a, b: dot(a, b) + dot(a, b).sum(axis=1)[:, None],
        lambda a, b: dot(a, b) + arange(96),
        lambda a, b: dot(a, b) + dot(dot(a, b), dot(b.T, b)),
    ],
    ids=["a fold", "positions", "a contraction"],
)
def test_columns_that_stay_whole(use: Any) -> None:
    a, b, c = random((32, 32)), random((32, 96)), random((32, 96))
    assert loads(lowered(products.ir(a, b, c, use=use)))["b"] == {(32, 96)}


def test_values_in_the_columns_of_the_keys_are_loaded_once() -> None:
    found = lowered(call(**MLA, shares=True))
    assert loads(found) == {"q": {(64, 512), (64, 64)}, "k": {(64, 512), (64, 64)}}
    for loop in (op for op in ir.walk(found.body) if op.kind == "for"):
        assert sum(op.kind == "load" for op in loop.blocks[0].ops) == 2
        assert sum(op.kind == "dot" for op in loop.blocks[0].ops) == 3


@kernel
def products(a: Tensor["M K"], b: Tensor["K N"], c: Tensor["M N"], *, use: Const, M: Const, K: Const, N: Const):
    c[:, :] = use(a[:, :], b[:, :])


WHOLE = {
    "another reader": lambda a, b: dot(a, b) + a.sum(axis=1)[:, None],
    "a computed operand": lambda a, b: dot(a * 2.0, b),
}
SPLIT = {
    "one dot": lambda a, b: dot(a, b),
    "two dots": lambda a, b: dot(a, b) + dot(a, b * 1.0),
    "transposed": lambda a, b: dot(b.T, a.T).T,
    "twice transposed": lambda a, b: dot(a.T.T, b),
}


@pytest.mark.parametrize("name", ["one dot", "transposed", "twice transposed"])
def test_what_is_split(name: str) -> None:
    a, b, c = random((32, 96)), random((96, 32)), random((32, 32))
    found = lowered(products.ir(a, b, c, use=SPLIT[name]))
    assert loads(found) == {"a": {(32, 64), (32, 32)}, "b": {(64, 32), (32, 32)}}


@pytest.mark.parametrize("name", WHOLE)
def test_what_stays_whole(name: str) -> None:
    a, b, c = random((32, 96)), random((96, 32)), random((32, 32))
    assert loads(lowered(products.ir(a, b, c, use=WHOLE[name])))["a"] == {(32, 96)}


def test_a_load_that_is_contracted_along_both_sides_stays_whole() -> None:
    a, b, c = random((96, 96)), random((96, 96)), random((96, 96))
    found = lowered(products.ir(a, b, c, use=lambda a, b: dot(a, b) + dot(b, a)))
    assert loads(found) == {"a": {(96, 96)}, "b": {(96, 96)}}


@interpreted
@pytest.mark.parametrize("K", [17, 48, 72, 80, 96, 100, 192, 576])
@pytest.mark.parametrize("name", SPLIT)
def test_products(name: str, K: int) -> None:
    """Elements outside are NaN in memory: a piece that reads past its side shows."""
    whole = random((40, K + 8)), random((K + 8, 24))
    whole[0][:, K:], whole[1][K:] = np.nan, np.nan
    a, b, c = whole[0][:, :K], whole[1][:K], poisoned((40, 24))
    products(a, b, c, use=SPLIT[name], backend="nvidia")
    exact = a.astype(np.float64) @ b.astype(np.float64) * (2 if name == "two dots" else 1)
    np.testing.assert_allclose(c, exact, rtol=0, atol=2e-5 * np.sqrt(K))


# ---- attention -------------------------------------------------------------------------------------------------------


def exact_attention(q: Array, k: Array, v: Array, scale: float) -> Array:
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    S = q @ k.swapaxes(2, 3) * scale
    P = np.exp(S - S.max(axis=3, keepdims=True))
    return np.asarray(P @ v / P.sum(axis=3, keepdims=True))


@interpreted
@pytest.mark.parametrize("shares", [False, True], ids=["values", "columns"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("Dv", [64, 80, 96, 192, 512])
@pytest.mark.parametrize("D", [80, 96, 192, 576])
def test_attention(D: int, Dv: int, dtype: str, shares: bool) -> None:
    if shares and Dv > D:
        pytest.skip("the keys have fewer columns")
    rows, keys, scale = 5, 37, D**-0.5
    q, k = random((2, 1, rows, D), dtype, 1), random((2, 1, keys, D), dtype, 2)
    v = k[..., :Dv] if shares else random((2, 1, keys, Dv), dtype, 3)
    o = poisoned((2, 1, rows, Dv), dtype)
    given = q, k, None if shares else v, None, None, None, o, None, None, None, None, *DENSE
    blocks = {"D": D, "Dv": Dv, "BR": 16, "BK": 16, "packed": True}
    attention(*given, scale, 1, 0, 0, options=Options(), **blocks, backend="nvidia")
    exact = exact_attention(q, k, v, scale)
    np.testing.assert_allclose(o.astype(np.float64), exact, rtol=0, atol=2e-5 if dtype == "float32" else 0.03)


# ---- compiled for sm_90 ----------------------------------------------------------------------------------------------


@compiled
@pytest.mark.parametrize("splits", [0, 4])
@pytest.mark.parametrize(("BK", "slots", "spills"), [(64, 2, 16), (32, 4, 8)])
def test_keys_and_values_in_one_ring(BK: int, slots: int, spills: int, splits: int) -> None:
    """8 warps share 64 rows: each four multiply half of the keys of a block, and hold half of the output's columns.
    The dots over 512 and 64 are one chain: a loop waits for it once, and once for the output."""
    found, schedule = lowered(call(**MLA, shares=True, splits=splits, BK=BK)), replace(TWO_SLOTS, num_stages=slots)
    program = NvidiaProgram(found, schedule)
    assert program.path.pipeline is not None, program.why_plain
    assert [ring.name for ring in program.path.pipeline.rings.values()] == ["k", "k_tile_2"]
    made = build.compile_ahead(found, program.default.source, schedule)
    ptx = made.asm["ptx"]
    assert ptx.count(f"m64n{BK // 2}k16") % (576 // 16) == 0 and "m64n256k16" in ptx and "mma.sync" not in ptx
    assert ("stmatrix" in ptx) == (slots == 2)  # weights, of which each warp has half a row, where nothing overlaps
    assert made.metadata.shared <= SHARED_BYTES
    if metadata.version("triton") == "3.6.0":
        assert build.resources(made)["STACK"] <= spills


@compiled
@pytest.mark.parametrize(("D", "Dv"), [(80, 64), (96, 128), (192, 128), (576, 512)])
@pytest.mark.parametrize("shares", [False, True])
def test_other_sides_have_a_pipeline(D: int, Dv: int, shares: bool) -> None:
    if shares and Dv > D:
        pytest.skip("the keys have fewer columns")
    found = lowered(call(D, Dv, shares=shares, BK=32))
    schedule = TWO_SLOTS if D > 256 else Schedule(4, 2, consumers=2)
    path = select(found, schedule)
    assert path.pipeline is not None, path.why_plain
    tiles = [descriptor["name"] for descriptor in emitted(found, path).entry["arguments"] if "block" in descriptor]
    assert len(tiles) == len(set(tiles)) == len(path.pipeline.fetched) + (D <= 256)  # the output's
    made = build.compile_ahead(found, path.render(found), schedule)
    assert "wgmma" in made.asm["ptx"] and made.metadata.shared <= SHARED_BYTES
    if metadata.version("triton") == "3.6.0":
        assert build.resources(made)["STACK"] == 0


@compiled
def test_plain_triton_multiplies_pieces() -> None:
    """Without padding to 1024, tiles of 64 x 64 fit shared memory."""
    found = lowered(call(**MLA, shares=True))
    schedule = choose(found)
    source = render_triton(found, schedule)
    assert "1024" not in source.text
    made = build.compile_ahead(found, source, schedule)
    assert "wgmma.mma_async" in made.asm["ptx"] and made.metadata.shared <= SHARED_BYTES


def test_the_pass_is_shown() -> None:
    shown = BACKEND.stages(call(96, 64))["passes"]()
    assert "# split_sides" in shown and "# split_columns" in shown
