"""Test the library on the vector units of this machine that are not its own: python tests/each_unit.py [--tests]

The machine's own unit is tested by the whole suite. On the others `monotile check` runs every registered case, then
pytest a sample of the tests of kernels, hazards and examples, which take the cpu backend alone then; with --tests all
of them, which takes minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from monotile.backends.cpu import target

ROOT = Path(__file__).parents[1]
ALL = ("tests/kernels", "tests/test_hazards.py", "tests/test_examples.py")
# Tests of all units, which the suite runs, and the cases that `monotile check` runs.
LEFT_OUT = (
    "--ignore=tests/kernels/test_vector_units.py",
    "--deselect=tests/kernels/test_check.py::test_registered_cases",
)
# What depends on lanes, registers and the order of sums: edges, masks, conversions, splits. Training and scripts, which
# do not, are left out, and so is what takes long to compile twice.
SAMPLE = (
    "tests/test_hazards.py",
    "tests/test_examples.py",
    "tests/kernels/test_attention.py::test_head_sizes",
    "tests/kernels/test_attention_backward.py::test_options_of_narrow_types",
    "tests/kernels/test_decode_partials.py",
    "tests/kernels/test_quantized.py::test_attention_on_quantised_keys_and_values",
    "tests/kernels/test_caches.py",
    "tests/kernels/test_merge.py",
    "tests/kernels/test_mask_blocks.py",
    "-k=not train and not script and not torch and not mistake",
)
# Without instructions for fma and conversions, code is long and slow.
SAMPLE_OF_BASELINE = (
    "tests/test_examples.py",
    "tests/test_hazards.py",
    "tests/kernels/test_merge.py",
    "tests/kernels/test_mask_blocks.py",
    "-k=not train and not script and not torch and not more_than and not 65544 and not 262144"
    " and not fully_masked and not future",
)


def tests_of(unit: str, everything: bool) -> tuple[str, ...]:
    """Return the arguments of pytest for a vector unit."""
    if everything:
        return (*ALL, *LEFT_OUT)
    return SAMPLE_OF_BASELINE if unit == "baseline" else SAMPLE


def run(unit: str, everything: bool) -> tuple[str, int, str]:
    """Return the unit, the first exit status that is not 0, and what was printed."""
    printed, environment = "", {**os.environ, "MONOTILE_CPU": unit}
    for words in (("monotile", "check"), ("pytest", *tests_of(unit, everything))):
        command = [sys.executable, "-m", *words]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        printed += done.stdout.decode()
        if done.returncode:
            return unit, done.returncode, printed
    return unit, 0, printed


def main(everything: bool) -> int:
    status = 0
    with ThreadPoolExecutor() as pool:  # the units at the same time: tests have one thread for most of their time
        for unit, code, printed in pool.map(lambda unit: run(unit, everything), target.runnable()[1:]):
            print(f"-- {unit}\n{printed}", flush=True)
            status = status or code
    return status


if __name__ == "__main__":
    sys.exit(main("--tests" in sys.argv[1:]))
