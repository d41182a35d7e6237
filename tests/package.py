"""Build the source archive, the wheel from it, install that in an empty environment, and use it there.

Run by CI and `make package`. Usage: tests/package.py [PYTHON], the interpreter of the new environment."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).parents[1]
IN_SOURCE = (
    "Makefile",
    "MANIFEST.in",
    "docs/README.md",
    "docs/guide/report.png",
    "examples/matmul.py",
    "tests/package.py",
)
IN_WHEEL = ("monotile/py.typed", "monotile/__init__.pyi", "monotile/bench/page/report.css", "monotile/__main__.py")
USE = """
import numpy as np, monotile
from monotile.kernels.examples import matmul
q = np.random.default_rng(0).standard_normal((1, 2, 9, 16), dtype=np.float32)
p = np.exp(q @ q.swapaxes(2, 3) / 4); p /= p.sum(axis=3, keepdims=True)
assert np.abs(monotile.attention(q, q, q) - p @ q).max() < 1e-5
c = np.empty((9, 9), np.float32)
matmul(q[0, 0], q[0, 0].T, c)
assert np.abs(c - q[0, 0] @ q[0, 0].T).max() < 1e-5
assert "site-packages" in monotile.__file__
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def main() -> None:
    python = sys.argv[1] if sys.argv[1:] else sys.executable
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
        run(sys.executable, "-c", build, folder, cwd=ROOT)
        (source,) = folder.glob("*.tar.gz")
        with tarfile.open(source) as archive:
            names = {path.partition("/")[2] for path in archive.getnames()}
        assert not set(IN_SOURCE) - names, sorted(set(IN_SOURCE) - names)
        pip = (sys.executable, "-m", "pip", "--quiet")
        run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source, cwd=folder)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as inside:
            assert not set(IN_WHEEL) - set(inside.namelist()), sorted(set(IN_WHEEL) - set(inside.namelist()))
            (metadata,) = (item for item in inside.namelist() if item.endswith(".dist-info/METADATA"))
            readme = str(message_from_bytes(inside.read(metadata)).get_payload())
        assert "# monotile" in readme and "](docs/" not in readme
        run(python, "-m", "venv", "--without-pip", folder / "empty", cwd=folder)
        installed = folder / "empty" / "bin"
        run(*pip, "--python", installed / "python", "install", "--no-compile", wheel, cwd=folder)
        run(installed / "python", "-c", USE, cwd=folder)
        version = run(installed / "python", "-m", "monotile", "--version", cwd=folder)
        assert version == run(installed / "monotile", "--version", cwd=folder)
        kept = ROOT / "baselines" / "nvidia-h200.json"
        run(installed / "monotile", "bench", "--from", kept, "--html", folder / "report.html", cwd=folder)
        assert (folder / "report.html").read_text().startswith("<!doctype html>")
        print(f"{version.strip()}: {wheel.name} works in an empty environment")


if __name__ == "__main__":
    main()
