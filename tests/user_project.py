"""Check the programs of README.md with mypy (and pyright, where it is installed) as a project of a user's.

Usage: tests/user_project.py. Run by `make check` and CI."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPTIONAL = ("torch", "transformers", "flash_attn", "jax")  # which need not be installed
TYPES = """
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import monotile

x: NDArray[np.float32] = np.ones((1, 2, 3, 4), np.float32)
assert_type(monotile.attention(x, x, x), NDArray[np.float32])
assert_type(monotile.attention(x, x, x, return_lse=True), tuple[NDArray[Any], NDArray[Any]])
monotile.attention([1.0], x, x)  # type: ignore[call-overload]  # pyright: ignore
"""


def main() -> None:
    text = (ROOT / "README.md").read_text()
    blocks = [TYPES, *re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)]
    with tempfile.TemporaryDirectory() as folder:
        for number, block in enumerate(blocks):
            if not any(f"import {name}" in block or f"from {name}" in block for name in OPTIONAL):
                (Path(folder) / f"program_{number}.py").write_text(block)
        config = ROOT / "pyproject.toml"
        checkers = [
            [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(ROOT / ".mypy_cache")]
        ]
        if pyright := shutil.which("pyright"):
            checkers.append([pyright, "--pythonpath", sys.executable])
        else:
            print("pyright is not on the path: the types of README.md are checked by mypy alone")
        for checker in checkers:
            done = subprocess.run([*checker, *map(str, sorted(Path(folder).iterdir()))], cwd=ROOT)
            if done.returncode:
                sys.exit(done.returncode)


if __name__ == "__main__":
    main()
