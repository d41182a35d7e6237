"""Test the library on the vector units of this machine that are not its own: python tests/each_unit.py [--kernels]

The machine's own unit is tested by the whole suite. With MONOTILE_CPU set, the tests take the cpu backend alone. With
--kernels all tests of tests/kernels are among them, which take minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from monotile.backends.cpu import target

ROOT = Path(__file__).parents[1]
PLACES = ("tests/test_hazards.py", "tests/test_examples.py")
# Tests of all units, which the suite runs, and the cases that `monotile check` runs.
LEFT_OUT = (
    "--ignore=tests/kernels/test_vector_units.py",
    "--deselect=tests/kernels/test_check.py::test_registered_cases",
)


def main(kernels: bool) -> None:
    places = (*PLACES, "tests/kernels", *LEFT_OUT) if kernels else PLACES
    for unit in target.runnable()[1:]:
        print(f"-- {unit}", flush=True)
        for words in (("pytest", "-n", "auto", *places), ("monotile.cli", "check")):
            environment = {**os.environ, "MONOTILE_CPU": unit}
            subprocess.run([sys.executable, "-m", *words], cwd=ROOT, env=environment, check=True)


if __name__ == "__main__":
    try:
        main("--kernels" in sys.argv[1:])
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
