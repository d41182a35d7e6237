"""The tests of the language as Metal source: python tests/language_on_metal.py [--fast-math] [files] [pytest's options]
The registered cases of the library: python tests/language_on_metal.py --library [--fast-math]

Every launch runs in the runner in three orders of threads, which must give the same bits. It takes minutes, so the
suite runs only a few of them (backends/test_metal_language.py). In fast math the tests of TAKEN_AWAY may fail, and no
others: docs/internals/metal.md says what it takes away.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

FAST, LIBRARY = "--fast-math", "--library"
NAN, SIGN, ROUNDING = "NaN and infinities of memory", "the sign of zero", "roundings in the middle"
TAKEN_AWAY = {
    "test_casts.py::test_a_cast_in_the_middle_really_rounds[metal]": ROUNDING,
    "test_derivatives.py::test_rule_on_every_backend[metal-reciprocal of a root]": SIGN,
    "test_derivatives.py::test_rule_on_every_backend[metal-comparison]": NAN,
    "test_derivatives.py::test_nan_that_maximum_ignores_has_no_derivative[metal]": NAN,
    "test_elementwise.py::test_maximum_ignores_nan[metal]": NAN,
    "test_elementwise.py::test_where_hides_what_it_does_not_pick[metal]": NAN,
    "test_elementwise.py::test_fma_is_rounded_once[metal]": ROUNDING,
    "test_elementwise.py::test_narrow_results_are_rounded_once[metal-float32]": ROUNDING,
    "test_reductions.py::test_running_extremes_of_nothing_but_nan[metal]": NAN,
    "test_reductions.py::test_two_reductions_of_nothing_but_nan[metal]": NAN,
    "test_reductions.py::test_extremes_ignore_nan[metal]": NAN,
    "test_reductions.py::test_dot_of_a_computed_operand[metal-float16]": ROUNDING,
    "test_reductions.py::test_dot_of_a_computed_operand[metal-bfloat16]": ROUNDING,
    "test_reductions.py::test_positions_of_extremes[metal-float32]": NAN,
    "test_regressions.py::test_faults_of_metal[metal]": NAN,
    **{f"test_infinities.py::test_infinities_are_as_real_ones[{n}-metal]": NAN for n in range(0, 60, 10)},
    **{f"test_infinities.py::test_infinities_in_dots[{n}-metal]": NAN for n in (4, 16)},
    **{f"test_infinities.py::test_infinities_that_a_loop_carries[{n}-metal]": NAN for n in (0, 1, 3)},
}


def run_in_every_order(source: str, kernel: str, buffers: dict[Any, Any], *sizes: Any, **options: Any) -> Any:
    """A launch in each order, from the same memory."""
    from monotile import metal

    before = {index: array.copy() for index, array in buffers.items()}
    first: dict[Any, Any] = {}
    for order in metal.ORDERS:
        for index, array in buffers.items():
            array[...] = before[index]
        report = metal.run(source, kernel, buffers, *sizes, **{**options, "order": order})
        if not report.clean:  # a race, say, after which orders may differ: the launch becomes an error
            return report
        found = {index: array.copy() for index, array in buffers.items()}
        first = first or found
        for index, array in found.items():
            np.testing.assert_array_equal(array.view(np.uint8), first[index].view(np.uint8), f"in {order} order")
    return report


def use_runner(fast_math: bool) -> None:
    """Compile in a mode, and take every order in each launch."""
    from monotile.backends.metal import backend, on_cpu

    backend.BACKEND = backend.MetalBackend(fast_math=fast_math)
    on_cpu.runner = SimpleNamespace(run=run_in_every_order)  # type: ignore[assignment]


class OnlyMetal:
    """Plugin of pytest: metal is the only backend."""

    def __init__(self, fast_math: bool) -> None:
        import usable

        self.taken_away = TAKEN_AWAY if fast_math else {}
        usable.IN_MEMORY = usable.WITH_METAL = ("metal",)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        import pytest

        for item in items:
            reason = self.taken_away.get(item.nodeid.rpartition("/")[2])
            if reason is not None:
                item.add_marker(pytest.mark.xfail(reason=f"fast math takes away {reason}"))


def check_library() -> int:
    """Run every registered case, and return how many do not hold."""
    from monotile.library import registry

    wrong = 0
    for case in registry.CHECKS:
        op, inputs = registry.OPS[case.op], case.inputs()
        exact, naive = op.exact(inputs), op.naive(inputs)
        found = op.run(inputs, backend="metal", threads=None)
        verdicts = [registry.judge(name, found[name], exact[name], naive[name]) for name in found]
        wrong += not all(verdict.ok for verdict in verdicts)
        print("holds" if all(verdict.ok for verdict in verdicts) else "WRONG", case.name, flush=True)
    return wrong


def main(words: list[str]) -> int:
    import pytest

    here = Path(__file__).parent
    sys.path.insert(0, str(here))
    use_runner(FAST in words)
    if LIBRARY in words:
        return int(check_library() > 0)
    options = [word for word in words if word != FAST]
    chosen = [word for word in options if ".py" in word] or [str(here / "language")]
    options = [word for word in options if ".py" not in word]
    return int(pytest.main(["-q", *options, *chosen], plugins=[OnlyMetal(FAST in words)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
