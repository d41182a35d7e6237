"""Test the library on the vector units of this machine that are not its own: python tests/each_unit.py [--tests]

The machine's own unit is tested by the whole suite. On the others `monotile check` runs every registered case; with
--tests so do the tests of kernels, hazards and examples, which take the cpu backend alone then, and minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from monotile.backends.cpu import target

ROOT = Path(__file__).parents[1]
PLACES = ("tests/kernels", "tests/test_hazards.py", "tests/test_examples.py")
# Tests of all units, which the suite runs, and the cases that `monotile check` runs.
LEFT_OUT = (
    "--ignore=tests/kernels/test_vector_units.py",
    "--deselect=tests/kernels/test_check.py::test_registered_cases",
)


def main(tests: bool) -> None:
    commands = [("monotile.cli", "check"), *([("pytest", "-n", "auto", *PLACES, *LEFT_OUT)] if tests else [])]
    for unit in target.runnable()[1:]:
        print(f"-- {unit}", flush=True)
        for words in commands:
            environment = {**os.environ, "MONOTILE_CPU": unit}
            subprocess.run([sys.executable, "-m", *words], cwd=ROOT, env=environment, check=True)


if __name__ == "__main__":
    try:
        main("--tests" in sys.argv[1:])
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
