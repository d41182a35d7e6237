"""Test the library on the vector units of this machine that are not its own: python tests/each_unit.py [--tests]

The machine's own unit is tested by the whole suite. On the others `monotile check` runs every registered case; with
--tests so do the tests of kernels, hazards and examples, which take the cpu backend alone then, and minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from monotile.backends.cpu import target

ROOT = Path(__file__).parents[1]
PLACES = ("tests/kernels", "tests/test_hazards.py", "tests/test_examples.py")
# Tests of all units, which the suite runs, and the cases that `monotile check` runs.
LEFT_OUT = (
    "--ignore=tests/kernels/test_vector_units.py",
    "--deselect=tests/kernels/test_check.py::test_registered_cases",
)


def run(unit: str, tests: bool) -> tuple[str, int, str]:
    """Return the unit, the first exit status that is not 0, and what was printed."""
    commands = [("monotile", "check"), *([("pytest", *PLACES, *LEFT_OUT)] if tests else [])]
    printed, environment = "", {**os.environ, "MONOTILE_CPU": unit}
    for words in commands:
        command = [sys.executable, "-m", *words]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        printed += done.stdout.decode()
        if done.returncode:
            return unit, done.returncode, printed
    return unit, 0, printed


def main(tests: bool) -> int:
    status = 0
    with ThreadPoolExecutor() as pool:  # the units at the same time: a check has one thread for most of its time
        for unit, code, printed in pool.map(lambda unit: run(unit, tests), target.runnable()[1:]):
            print(f"-- {unit}\n{printed}", flush=True)
            status = status or code
    return status


if __name__ == "__main__":
    sys.exit(main("--tests" in sys.argv[1:]))
