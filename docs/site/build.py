"""Build the documentation as a site: `make docs`, then open build/site/index.html.

The pages are those of the repository, in its own layout, so that their links hold in both. Added are a gallery of the
examples, the API from docstrings, and the report of every baseline. Usage: docs/site/build.py [FOLDER]."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import monotile
from monotile.bench import baselines, html

ROOT = Path(__file__).parents[2]
SITE = Path(__file__).parent
FOLDERS = ("docs", "benchmarks", "baselines", "examples")
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE")
MODULES = ("torch", "jax", "transformers", "flash_attn", "flex", "distributed", "metal")
DIRECTORIES = re.compile(r"\]\(((?:\.\./)*(?:baselines|examples))/?\)")  # links to folders, which are pages here


def main() -> None:
    target = Path(sys.argv[1]) if sys.argv[1:] else ROOT / "build" / "site"
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "pages"
        stage(source)
        config = Path(name) / "mkdocs.yml"
        config.write_text((SITE / "mkdocs.yml").read_text() + navigation(source))
        command = [sys.executable, "-m", "mkdocs", "--quiet", "build", "--strict", "--config-file", str(config)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
        subprocess.run([*command, "--site-dir", str(target.absolute())], check=True, env=environment)
    dead = dead_links(target)
    if dead:
        sys.exit("dead links:\n" + "\n".join(dead))
    print(f"{len(list(target.rglob('*.html')))} pages, no dead link: {target / 'index.html'}")


# ---- pages -----------------------------------------------------------------------------------------------------------


def stage(source: Path) -> None:
    """Copy the pages to a folder and add what is made from code."""
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "site"))
    for page in PAGES:
        shutil.copy(ROOT / page, source / page)
    (source / "baselines" / "README.md").write_text(measured(source))
    (source / "examples" / "README.md").write_text(gallery())
    (source / "docs" / "api.md").write_text(api())
    shutil.copy(SITE / "site.css", source / "site.css")
    for page in source.rglob("*.md"):
        page.write_text(DIRECTORIES.sub(r"](\1/README.md)", page.read_text()))


def measured(source: Path) -> str:
    """Make the report of every baseline, and a page that lists them."""
    lines = ["# What was measured", "", "| device | tables | report |", "|---|---|---|"]
    for path in sorted((source / "baselines").glob("*.json")):
        report = baselines.load(path)
        html.save(report, path.with_suffix(".report.html"))
        device = report["device"].get("name") or report["device"]["processor"]
        tables, page = f"[all rows]({path.stem}.md)", f"[a page to look at]({path.stem}.report.html)"
        lines.append(f"| {device} | {tables} | {page} |")
    return "\n".join(lines) + "\n\n[How to read them](../docs/results/performance.md)\n"


def gallery() -> str:
    """Show the source of every example: what it says of itself, then its code with the kernel it uses."""
    parts = [
        "# Gallery",
        "Kernels that run as they are, and say how far they are from float64. A test runs each of them.",
    ]
    parts.append("`python examples/rope.py` runs one, `python examples/rope.py metal` on another backend.")
    library = (ROOT / "src" / "monotile" / "kernels" / "examples.py").read_text()
    kernels_first = sorted((ROOT / "examples").glob("*.py"), key=lambda path: (uses_torch(path), path))
    for path in kernels_first:
        text = path.read_text()
        said = ast.get_docstring(ast.parse(text)) or ""
        first, _, rest = said.partition("\n\n")
        parts += [f"## {path.stem}", first.replace("\n", " "), inspect.cleandoc(rest)]
        imported = re.search(r"from monotile\.kernels\.examples import (\w+)", text)
        if imported:
            parts.append(f"```python\n{kernel_source(library, imported[1])}\n```")
        code = text.partition(said)[2].removeprefix(chr(34) * 3).replace("  # fmt: skip", "").strip()
        parts.append(f"```python\n{code}\n```")
    return "\n\n".join(parts) + "\n"


def uses_torch(path: Path) -> bool:
    return "import torch" in path.read_text()


def kernel_source(text: str, name: str) -> str:
    (node,) = (n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == name)
    return "\n".join(text.splitlines()[node.decorator_list[0].lineno - 1 : node.end_lineno])


def api() -> str:
    """List every public function by its docstring: those of the package, then those of each module."""
    parts = ["# API", "What `help()` says. The guide explains each function at length.", "## monotile"]
    public = {name: getattr(monotile, name) for name in monotile.__all__ if callable(getattr(monotile, name))}
    for name, item in sorted(public.items(), key=lambda pair: inspect.isclass(pair[1])):
        parts.append(f"::: {item.__module__}.{name}")
    parts.append("## monotile.language\n\n[Every word](guide/words.md) of the kernel language.")
    for module in MODULES:
        tree = ast.parse(source_of(module).read_text())
        parts.append(f"## monotile.{module}\n\n{ast.get_docstring(tree)}")
        parts += [f"::: monotile.{module}.{name}" for name in exported(tree) if not name.isupper()]
    return "\n\n".join(parts) + "\n"


def source_of(module: str) -> Path:
    file = ROOT / "src" / "monotile" / f"{module}.py"
    return file if file.exists() else file.with_suffix("") / "__init__.py"


def exported(tree: ast.Module) -> list[str]:
    """Read `__all__` without importing the module, whose libraries need not be installed."""
    (found,) = (n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__")
    return list(ast.literal_eval(found.value))


def navigation(source: Path) -> str:
    """Read the order of the pages from docs/README.md, whose tables list all of them."""
    lines = [f"docs_dir: {source}", "nav:", "  - monotile: README.md", "  - Gallery: examples/README.md"]
    seen: set[str] = set()
    for section in (source / "docs" / "README.md").read_text().split("\n## ")[1:]:
        lines.append(f"  - {section.splitlines()[0]}:")
        for title, link in re.findall(r"\[([^\]]+)\]\(([^)#]+\.md)\)", section):
            page = os.path.normpath(f"docs/{link}")
            if page not in seen:
                lines.append(f"      - {title.strip('/')}: {page}")
                seen.add(page)
    missing = {str(p.relative_to(source)) for p in (source / "docs").rglob("*.md")} - seen
    missing -= {"docs/README.md", "docs/api.md"}
    assert not missing, f"docs/README.md does not list {sorted(missing)}"
    lines += ["  - API: docs/api.md", "  - Changes: CHANGELOG.md", "  - Contributing: CONTRIBUTING.md"]
    return "\n".join(lines) + "\n"


# ---- links -----------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """The links of a page, what it loads, and the places in it that can be linked to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.places |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag in ("script", "img", "iframe") and "src" in found:
            self.loads.append(found["src"])
        elif tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload"):
            self.loads.append(found["href"])


def dead_links(folder: Path) -> list[str]:
    """Return the links within the site that lead nowhere, and everything that a page loads from elsewhere."""
    pages = {path.resolve(): Page(path) for path in folder.rglob("*.html")}
    dead = []
    for path, page in pages.items():
        for link in [*page.links, *page.loads]:
            if re.match(r"(https?:)?//", link) or link.startswith(("mailto:", "javascript:", "data:")):
                dead += [f"{path.name} loads {link}"] if link in page.loads and not link.startswith("data:") else []
                continue
            file, _, place = unquote(link).partition("#")
            target = (path.parent / file.partition("?")[0]).resolve() if file else path
            found = target in pages and (not place or place in pages[target].places)
            if not found and not (target.is_file() and not place) and path.name != "404.html":
                dead.append(f"{path.relative_to(folder.resolve())}: {link}")
    return sorted(set(dead))


if __name__ == "__main__":
    main()
