"""Imports point one way: every module imports from its own folder or from layers below it, without cycles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
# From the bottom up. docs/internals/architecture.md explains them.
LAYERS = (
    "dtypes", "errors", "ir", "frontend", "passes", "runtime", "backends", "launch", "language", "kernels", "library",
    "torch", "distributed", "flash_attn", "flex", "transformers", "jax", "mlx", "metal", "bench", "cli", "__main__",
)  # fmt: skip
BACKENDS = ("cpu", "interpreter", "metal", "nvidia")


def modules() -> dict[str, Path]:
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(module: str) -> Iterator[str]:
    """The modules of monotile that a module imports, wherever in its text."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            parents = parents[: len(parents) + 1 - node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                if inner in MODULES or base in MODULES:
                    yield inner if inner in MODULES else base


GRAPH = {module: {found for found in imported(module) if found != module} for module in MODULES}


def layer(module: str) -> float:
    """The place of a module's folder in LAYERS; the package itself offers the library to what is above it."""
    _, _, inside = module.partition(".")
    return LAYERS.index(inside.partition(".")[0]) if inside else LAYERS.index("library") + 0.5


def backend(module: str) -> str | None:
    parts = module.split(".")
    return parts[2] if parts[1:2] == ["backends"] and len(parts) > 2 and parts[2] in BACKENDS else None


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_down(module: str) -> None:
    assert [found for found in GRAPH[module] if layer(found) > layer(module)] == []


@pytest.mark.parametrize("module", sorted(m for m in MODULES if backend(m)))
def test_no_backend_imports_another(module: str) -> None:
    assert [found for found in GRAPH[module] if backend(found) not in (None, backend(module))] == []


def test_there_is_no_cycle() -> None:
    """Depth-first search; the first cycle found is the message."""
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for found in sorted(GRAPH[module]):
                visit(found, (*path, module))
            done.add(module)

    for module in sorted(MODULES):
        visit(module, ())


def test_the_graph_is_not_empty() -> None:
    """The test above would pass if nothing were found."""
    assert "monotile.launch.kernel" in GRAPH["monotile.language"]
    assert "monotile.frontend.build" in GRAPH["monotile.launch.kernel"]
    assert layer("monotile.ir.ops") < layer("monotile.launch.kernel") < layer("monotile")
