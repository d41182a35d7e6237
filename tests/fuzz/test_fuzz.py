"""Random kernels on the interpreter, through the passes, and as compiled code for vector units of several widths.

A failure names the seed: `check(program(random.Random(seed)))` repeats it, and
`ir.show(program(...).kernel)` prints the kernel.
"""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .harness import TARGETS, check
from .programs import program


@given(st.integers(0, 2**32 - 1))
@settings(
    max_examples=100, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
def test_random_kernels(seed: int) -> None:
    check(program(random.Random(seed)), (TARGETS[0], TARGETS[1 + seed % (len(TARGETS) - 1)]))
