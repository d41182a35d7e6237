"""Run tests with a Python for Windows, in Wine, on x86-64 Linux:

    python tests/windows/run.py --python FOLDER [--packages FOLDER] [--torch] [tests, and options of pytest]

Needs Wine (Debian: apt-get install wine wine64) and, in a folder, the embeddable package of a Python for 64-bit
Windows. pip downloads NumPy, ml_dtypes, llvmlite and pytest for it, to the folder of --packages or a temporary one. By
default the examples, every case of `monotile check`, and the tests of the pool, of images, of the number of threads and
of the cache on disk are run; with --torch those of torch's tensors.

Everything else is made in a temporary folder: a copy of Python, and the prefix, in which Wine keeps its files.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1]
DEFAULT = (
    "tests/test_examples.py",
    "tests/kernels/test_check.py::test_registered_cases",
    "tests/backends/test_pool.py",
    "tests/backends/test_loader.py",
    "tests/backends/test_processors.py",
    "tests/test_cache.py",
)
WITH_TORCH = (
    "tests/test_torch_operator.py",
    "tests/test_torch_sdpa.py",
    "tests/test_flash_attn.py",
    "tests/test_flex.py",
    "tests/test_leading.py",
    "tests/test_captured_gradients.py",
    "tests/test_captured_numbers.py",
    "tests/test_unusual_tensors.py",
    "tests/kernels/test_arrays.py",
    "tests/kernels/test_attention.py",
    "tests/kernels/test_torch_mods.py",
    # For forward derivatives torch reads the source of the standard library, which the embeddable package has not.
    "--deselect=tests/test_torch_operator.py::test_a_tangent_is_refused",
    "--deselect=tests/test_torch_operator.py::test_a_hessian_is_refused",
    "--deselect=tests/test_torch_operator.py::test_a_dual_level_without_tangents_changes_nothing",
)
# Later versions of typer need pydantic, whose library needs more of Windows than Wine 8 has.
PACKAGES = ("numpy", "ml_dtypes", "llvmlite", "typer<0.24", "rich", "pytest", "hypothesis", "colorama")
TORCH = "torch==2.13.0"  # as in pyproject.toml
WINES = ("/usr/lib/wine/wine64", "wine64", "wine")  # the first: Debian's, without a word on 32-bit programs


def install_packages(folder: Path, python: Path, *names: str) -> None:
    """Install the packages' files for Windows, unless a folder that was kept has them."""
    found = [re.fullmatch(r"python3(\d\d)\.dll", path.name) for path in python.iterdir()]
    version = next((f"3.{match[1]}" for match in found if match), None)
    if version is None:
        sys.exit(f"{python} holds no Python for Windows: it has no file such as python311.dll")
    if not all((folder / re.split("[<=]", name)[0]).exists() for name in names):
        platform = ("--platform", "win_amd64", "--python-version", version, "--only-binary=:all:")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", str(folder)]
        subprocess.run([*command, *platform, *names], check=True)


def make_python(python: Path, packages: Path, folder: Path) -> None:
    """Copy Python without its `._pth`, which makes it ignore PYTHONPATH, and put the packages where it finds them, also
    in the processes that tests start."""
    shutil.copytree(python, folder, ignore=shutil.ignore_patterns("*._pth"))
    site = folder / "Lib" / "site-packages"
    shutil.copytree(packages, site, dirs_exist_ok=True)
    shutil.copy(Path(__file__).with_name("sitecustomize.py"), site)
    if (site / "torch").exists():  # which needs NumPy's copy of the C++ library, under the library's own name
        (library,) = site.glob("numpy.libs/msvcp140-*.dll")
        shutil.copy(library, folder / "msvcp140.dll")


def environment(prefix: Path, *, has_torch: bool) -> dict[str, str]:
    """Return the variables of the processes. For torch: the C++ library of Windows, since an exception of Python that
    passes through Wine's ends the process, and an OpenMP that does not ask for nodes of memory, of which Wine knows
    nothing."""
    overrides = "mscoree=;mshtml=;winedbg.exe=d"  # no .NET, no browser, no debugger
    if has_torch:
        overrides += ";msvcp140,vcruntime140,vcruntime140_1=n,b"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MONOTILE_", "PYTHON"))}
    return {
        **kept,
        "WINEPREFIX": str(prefix),
        "WINEDEBUG": "-all",
        "WINEDLLOVERRIDES": overrides,
        **({"KMP_AFFINITY": "disabled"} if has_torch else {}),
        "DISPLAY": "",
        "PYTHONPATH": "Z:" + str(TESTS.parent / "src").replace("/", "\\"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def run(wine: str, program: Path, words: list[str], variables: dict[str, str]) -> int:
    """Run pytest and pass on what it writes. Through a pipe: Python does not start in Wine if its output is a file."""
    command = [wine, str(program), "-m", "pytest", "-p", "no:cacheprovider", *words]
    with subprocess.Popen(
        command, cwd=TESTS.parent, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace",
    ) as process:  # fmt: skip
        for line in process.stdout or ():
            print(line, end="", flush=True)
    return process.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="the folder with python.exe")
    parser.add_argument("--packages", type=Path, help="a folder to keep the packages for Windows in")
    parser.add_argument("--wine", help="the program, where it is not on the path")
    parser.add_argument("--torch", action="store_true", help="with torch, of which pip downloads 120 MB")
    parser.add_argument("tests", nargs="*")
    options, words = parser.parse_known_args()
    wine = options.wine or next(filter(None, map(shutil.which, WINES)), None)
    if wine is None:
        print("there is no Wine here; install it, or name it: --wine PATH")
        return 2
    tests = options.tests or (WITH_TORCH if options.torch else DEFAULT)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        packages = options.packages or folder / "packages"
        packages.mkdir(exist_ok=True)
        install_packages(packages, options.python, *PACKAGES, *([TORCH] if options.torch else []))
        make_python(options.python, packages, folder / "python")
        variables = environment(folder / "prefix", has_torch=options.torch)
        code = run(wine, folder / "python" / "python.exe", [*words, *tests], variables)
        # Wine's server, which is this prefix's own, outlives the programs for a while and holds its files.
        subprocess.run([Path(wine).with_name("wineserver"), "-k"], env=variables, check=False)
    return code


if __name__ == "__main__":
    sys.exit(main())
