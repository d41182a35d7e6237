"""Block sizes of the backward pass on a CPU, and whether one kernel computes all gradients."""

from __future__ import annotations

from collections.abc import Callable

from ..choices import AttentionProblem, BackwardBlocks, BackwardChoice, cdiv

FUSED_PRODUCTS, SEPARATE_PRODUCTS = 5, 7  # of a tile, with one kernel and with two
LEAST = 16  # rows or keys of a panel


def choose_backward(
    problem: AttentionProblem, panel_rows: Callable[[int, int], int], cores: int, l2_bytes: int
) -> BackwardChoice:
    """Tiles whose keys and values with their gradients fill half of L2 at most. A program for each KV head computes
    five products where that keeps the processors as busy as two kernels would, which compute seven."""
    most = next((n for n in (128, 64, 32) if 32 * n * problem.head_size <= l2_bytes), LEAST)
    rows, keys = (max(LEAST, panel_rows(max(1, n), most)) for n in (problem.queries, problem.keys))
    why = f"{most} keys and values with their gradients fill half of the L2 cache of {l2_bytes >> 10} KiB at most"
    heads = problem.batch * problem.kv_heads
    if FUSED_PRODUCTS * cdiv(heads, cores) * cores <= SEPARATE_PRODUCTS * heads:
        why = f"{why}; {heads} KV heads keep {cores} processors busy"
        return BackwardChoice(None, BackwardBlocks({"BR": most, "BK": keys}, why=why))
    by_keys = BackwardBlocks({"BR": most, "BK": keys}, why=why)
    return BackwardChoice(BackwardBlocks({"BR": rows, "BK": most}, why=why), by_keys)
