"""The tests of the language as Metal source: python tests/language_on_metal.py [--fast-math] [pytest's options]

Every launch runs in the runner in three orders of threads, which must give the same bits. It takes minutes, so the
suite leaves it out. In fast math tests of infinities and NaN fail: docs/internals/metal.md says what it takes away.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

FAST = "--fast-math"


def run_in_every_order(source: str, kernel: str, buffers: dict[Any, Any], *sizes: Any, **options: Any) -> Any:
    """A launch in each order, from the same memory."""
    from monotile import metal

    before = {index: array.copy() for index, array in buffers.items()}
    first: dict[Any, Any] = {}
    for order in metal.ORDERS:
        for index, array in buffers.items():
            array[...] = before[index]
        report = metal.run(source, kernel, buffers, *sizes, **{**options, "order": order})
        found = {index: array.copy() for index, array in buffers.items()}
        first = first or found
        for index, array in found.items():
            np.testing.assert_array_equal(array.view(np.uint8), first[index].view(np.uint8), f"in {order} order")
    return report


class OnlyMetal:
    """Plugin of pytest: metal is the only backend, and the runner takes every order."""

    def __init__(self, fast_math: bool) -> None:
        import usable
        from monotile.backends.metal import backend, on_cpu

        usable.IN_MEMORY = usable.WITH_METAL = ("metal",)
        backend.BACKEND = backend.MetalBackend(fast_math=fast_math)
        on_cpu.runner = SimpleNamespace(run=run_in_every_order)  # type: ignore[assignment]


def main(words: list[str]) -> int:
    import pytest

    here = Path(__file__).parent
    sys.path.insert(0, str(here))
    options = [word for word in words if word != FAST]
    return int(pytest.main(["-q", *options, str(here / "language")], plugins=[OnlyMetal(FAST in words)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
