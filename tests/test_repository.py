"""Habits of the repository that a test can hold: names, imports, sizes, commands, and what must not be in any file."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import monotile
from monotile.bench import cold_start

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "examples", "docs", "benchmarks", "baselines", ".ci")
MAX_FILE, MAX_FUNCTION, MAX_PARAMETERS = 600, 60, 8
MAX_PAGE, MAX_COLUMNS = 200, 120
MAX_PICTURE = 200_000  # bytes
MAX_PATH = 6000  # lines that a reader needs for one call
# Pages that are still longer, or have longer lines.
OPTIONAL = ("torch", "transformers", "triton", "mlx", "jax")
# Besides monotile's own three, those by which systems say where caches go, and users how many threads a process has.
VARIABLES = {
    "MONOTILE_CACHE_DIR", "MONOTILE_CPU", "MONOTILE_THREADS", "XDG_CACHE_HOME", "LOCALAPPDATA", "OMP_NUM_THREADS",
}  # fmt: skip


def files() -> Iterator[Path]:
    """What the repository holds, whether git is there to say so or not."""
    found = [p for p in ROOT.iterdir() if p.is_file()]
    found += [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.is_file()]
    skipped = {"__pycache__", ".git"}  # .git is a file in a work tree of git
    for path in sorted(found):
        parts = path.relative_to(ROOT).parts
        if path.suffix != ".pyc" and not skipped & set(parts) and not any(p.endswith(".egg-info") for p in parts):
            yield path


PYTHON = [path for path in files() if path.suffix == ".py"]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def modules() -> Iterator[str]:
    for path in (ROOT / "src").rglob("*.py"):
        if path.name == "__main__.py":  # runs the command when it is imported
            continue
        parts = path.relative_to(ROOT / "src").with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_public_names_are_complete() -> None:
    """Every name leads somewhere, none is listed twice, and what library/ops.py defines for users is listed."""
    assert [n for n in monotile.__all__ if not hasattr(monotile, n)] == []
    assert len(set(monotile.__all__)) == len(monotile.__all__)
    assert set(monotile.__all__) <= set(dir(monotile))
    ops = importlib.import_module("monotile.library.ops")
    own = [n for n, item in vars(ops).items() if getattr(item, "__module__", "") == ops.__name__ and n[0] != "_"]
    assert [n for n in own if n not in monotile.__all__ and not isinstance(getattr(ops, n), type)] == []


@pytest.mark.parametrize("module", sorted(modules()))
def test_every_module_imports_and_says_what_it_is_for(module: str) -> None:
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        pytest.skip(f"{error.name} is not installed")
    assert found.__doc__ or Path(str(found.__file__)).read_text() == ""


@pytest.mark.parametrize("module", ["monotile", "monotile.language", "monotile.kernels.examples"])
def test_import_is_light(module: str) -> None:
    """Compilers, frameworks and the command line's libraries are loaded by what needs them."""
    code = f"import sys, {module}; print([n for n in {cold_start.FORBIDDEN} if n in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("path", PYTHON, ids=name)
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {f.name: (f.end_lineno or f.lineno) - f.lineno + 1 for f in functions}
    assert {f: n for f, n in lengths.items() if n > MAX_FUNCTION} == {}


def test_functions_have_few_parameters() -> None:
    """Kernels aside, and the public functions whose options are the contract."""
    public = {"attention", "attention_backward", "decode_partials", "run"}  # of monotile, and monotile.metal.run
    public |= {"attention_varlen", "attention_varlen_backward", "attention_paged", "paged_append", "decode"}
    public.add("run_bench")  # a command
    found = {}
    for path in (ROOT / "src").rglob("*.py"):
        if "kernels" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                count = len([n for n in names if n not in ("self", "cls")])
                foreign = node.name.startswith(("flash_attn_", "flex_attention"))  # signatures of other libraries
                if count > MAX_PARAMETERS and node.name not in public and not foreign:
                    found[f"{name(path)}:{node.name}"] = count
    assert found == {}


def test_a_class_name_has_one_meaning() -> None:
    """Except for what users write (Tensor, Kernel) and its counterpart in the IR."""
    found: dict[str, list[str]] = {}
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(name(path))
    assert {n: paths for n, paths in found.items() if len(paths) > 1 and n not in ("Kernel", "Tensor")} == {}


def test_environment_variables() -> None:
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        found |= set(re.findall(r"""(?:environ\)?(?:\.get\(|\[)|getenv\()["'](\w+)""", path.read_text()))
    assert found <= VARIABLES


def test_every_file_is_text() -> None:
    """A package that was fetched for a moment does not belong here. Pictures of the pages are small."""
    binary = [path for path in files() if b"\0" in path.read_bytes()]
    assert [name(p) for p in binary if p.suffix != ".png" or p.stat().st_size > MAX_PICTURE] == []


def test_no_file_names_a_place_of_one_machine() -> None:
    homes = re.compile(r"/(?:home|Users|root|work|mnt)/\w|[A-Z]:\\Users\\")
    assert {name(p): m[0] for p in files() if (m := homes.search(p.read_text(errors="replace")))} == {}


# ---- commands --------------------------------------------------------------------------------------------------------


def targets() -> dict[str, list[str]]:
    """The Makefile's targets with their commands."""
    found: dict[str, list[str]] = {}
    current = ""
    for line in (ROOT / "Makefile").read_text().splitlines():
        if match := re.match(r"([\w-]+):(?!=)", line):
            current = match[1]
            found[current] = []
        elif line.startswith("\t") and current:
            found[current].append(line.strip())
        elif not line.startswith("\t"):
            current = ""
    return found


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "benchmarks/README.md"])
def test_commands_of_the_pages_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    wanted = set(
        re.findall(r"\bmake ([a-z]+)\b(?=`|\s|$)", "\n".join(re.findall(r"`[^`\n]+`|^\s*make .*$", text, re.M)))
    )
    assert wanted and wanted <= targets().keys()


@pytest.mark.parametrize("page", sorted(p for p in files() if p.suffix == ".md"), ids=name)
def test_links_of_the_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_ci_runs_the_commands_of_the_makefile() -> None:
    script = (ROOT / ".ci" / "run").read_text().replace('"$venv/bin/python"', "$(BIN)/python")
    for command in targets()["check"] + targets()["test"]:
        assert command in script
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_architecture_page_counts_lines_about_right() -> None:
    text = (ROOT / "docs" / "internals" / "architecture.md").read_text()
    counted = re.findall(r"^\| `([\w/.]+)` \| (\d+) \|", text, re.M)
    found = {path: len((ROOT / "src" / "monotile" / path).read_text().splitlines()) for path, _ in counted}
    assert found and sum(found.values()) <= MAX_PATH
    assert {
        path: found[path] for path, said in counted if abs(found[path] - int(said)) > max(30, found[path] // 4)
    } == {}


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=name)
def test_pages_are_short_and_wrapped(page: Path) -> None:
    """Lines of tables may be longer: they cannot be wrapped."""
    lines = page.read_text().splitlines()
    assert len(lines) <= MAX_PAGE
    assert [line for line in lines if len(line) > MAX_COLUMNS and not line.startswith("|")] == []


def test_the_tests_the_hazards_page_names_exist() -> None:
    tests = "\n".join(p.read_text() for p in (ROOT / "tests").rglob("*.py"))
    named = re.findall(r"`(test_\w+)`", (ROOT / "docs" / "internals" / "hazards.md").read_text())
    assert named and [n for n in named if f"def {n}(" not in tests] == []
