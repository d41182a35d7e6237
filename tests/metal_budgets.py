"""The budgets of attention's kernels on Metal: python tests/metal_budgets.py [head sizes]

Prints registers, threadgroup memory and threadgroups of a core for every block that the library may choose, by the
model of backends/metal/budget.py. The exit code is 1 where fewer than eight simdgroups would live on a core.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from monotile.backends.choices import AttentionProblem
from monotile.backends.metal import choices
from monotile.backends.metal.backend import BACKEND
from monotile.backends.metal.budget import REGISTERS, Budget
from monotile.backends.metal.render import render
from monotile.backends.metal.source import MetalSource
from monotile.cli import catalogue, inspection
from monotile.cli.request import Request, parse_dtypes
from monotile.dtypes import BY_NAME

HEAD_SIZES = (64, 80, 128, 192, 256, 512)
SIMDGROUPS = 8  # on a core: two threadgroups of four


def rendered(dtype: str, values: dict[str, Any], mask: str | None = None) -> MetalSource:
    """The forward kernel, with a block map where it has a mask."""
    dtypes = [dtype, *([f"mask={mask}", "block_map=uint8"] if mask else [])]
    request = Request({"Dv": values["D"], **values}, {}, parse_dtypes(dtypes))
    form, _ = inspection.specialised(catalogue.kernels()["attention"], request, "metal", None)
    return render(BACKEND.lower(form))


def is_held(budget: Budget) -> bool:
    simdgroups = budget.threads // 32
    return budget.registers <= REGISTERS and budget.threadgroups_per_core * simdgroups >= SIMDGROUPS


def blocks(dtype: str, size: int, mask: str | None) -> Iterator[tuple[int, int]]:
    """The rows and keys of every block that may be chosen."""
    known = BY_NAME[mask] if mask else None
    problem = AttentionProblem("mps", BY_NAME[dtype], 1, 8, 1, 16, 4096, size, value_size=size, mask=known)
    found = {(b.rows, b.keys) for large in (False, True) for b in choices._blocks(problem, large=large)}
    yield from sorted(found)


def main(sizes: list[int]) -> int:
    short = 0
    for dtype in ("bfloat16", "float32"):
        for size in sizes or HEAD_SIZES:
            for mask in (None, "bool", "float32"):
                for rows, keys in blocks(dtype, size, mask):
                    values = {"D": size, "BR": rows, "BK": keys, "packed": True, "causal": mask == "float32"}
                    found = rendered(dtype, values, mask).budget
                    held = is_held(found)
                    short += not held
                    print(dtype, f"D {size}, mask {mask}, {rows} x {keys}:", found, end=" ")
                    print(f"{found.threadgroups_per_core} on a core", "" if held else "FALLS SHORT", flush=True)
    return int(short > 0)


if __name__ == "__main__":
    sys.exit(main([int(word) for word in sys.argv[1:]]))
