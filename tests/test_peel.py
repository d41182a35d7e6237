"""Loops that are split where their position predicates become constant."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from arrays import random
from kernel_calls import in_splits, over_all_keys
from monotile import ir
from monotile.backends import interpreter
from monotile.kernels.attention import attention
from monotile.kernels.scores import Options
from monotile.language import arange, kernel, zeros
from monotile.passes import pipeline


def loops(options: Options) -> Iterator[ir.Op]:
    q = random((1, 2, 256, 64))
    made = attention.ir(*over_all_keys(q, q, q, q.copy()), options=options, BR=64, BK=64)
    pipeline.run(made, pipeline.PipelineOptions())
    return (op for op in made.body.ops if op.kind == "for")


def packed_loops(options: Options) -> Iterator[ir.Op]:
    """With splits, and positions that are remainders."""
    q, k = random((1, 1, 256, 64)), random((1, 1, 900, 64))
    states = random((1, 1, 256, 3, 64)), random((1, 1, 256, 3)), random((1, 1, 256, 3))
    call = in_splits(q, k, k.copy(), states, 5, queries=32)
    made = attention.ir(*call, options=options, BR=64, BK=64, packed=True)
    pipeline.run(made, pipeline.PipelineOptions())
    return (op for op in made.body.ops if op.kind == "for")


def comparisons(loop: ir.Op) -> int:
    """Comparisons of positions."""
    ops = ir.walk(loop.blocks[0])
    return sum(op.kind in ("lt", "le") and op.operands[0].dtype.is_int for op in ops)


def test_whole_blocks_have_no_tests() -> None:
    before, whole, behind = loops(Options("lower_right", left=100))
    assert [loop.attrs.get("edge", False) for loop in (before, whole, behind)] == [True, False, True]
    assert comparisons(before) > 0 == comparisons(whole)


def test_whole_blocks_of_packed_rows_have_no_tests() -> None:
    """Those that every remainder sees."""
    before, whole, behind = packed_loops(Options("lower_right", left=100))
    assert [loop.attrs.get("edge", False) for loop in (before, whole, behind)] == [True, False, True]
    assert comparisons(before) > 0 == comparisons(whole) < comparisons(behind)
    whole, behind = packed_loops(Options("lower_right"))
    assert comparisons(whole) == 0 < comparisons(behind)


def test_what_has_begun_to_hold_is_not_tested_behind() -> None:
    """A window's begin: behind the whole blocks there is as little to test as without a window."""
    *_, windowed = loops(Options("lower_right", left=100))
    *_, causal = loops(Options("lower_right"))
    assert 0 < comparisons(windowed) == comparisons(causal)


@kernel
def far_positions(x, y, end: int):
    total = zeros(4)
    for j in range(2**31 - 20, end):
        at = (j + 100) // 2  # j + 100 wraps: this is negative
        for i in range(0, x.shape[0], 4):
            total += x[at + i + arange(4)]
    y[arange(4)] = total


def test_position_that_may_wrap_keeps_its_bounds_check() -> None:
    """The interpreter refuses an access outside its tensor that a pass marked as inside."""
    x, y, end = np.ones(64, np.float32), np.full(4, np.nan, np.float32), 2**31 - 10
    made = far_positions.ir(x, y, end)
    pipeline.run(made, pipeline.PipelineOptions(peel_bounds=True))
    interpreter.evaluate(made, [x, y], [end])
    assert not y.any()
