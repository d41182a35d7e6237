"""What every test shares: the examples on the path, a cache of its own, and the backends that can run here."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import monotile
from usable import IN_MEMORY, ON_GPU, on_gpu, usable

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
# By default JAX takes three quarters of a GPU's memory when it is first used, from every other process there.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


# Tests whose cases compile kernels, by the beginning of their names: about one case in so many runs without --all.
SAMPLED = {
    "tests/kernels/": 8,
    "tests/backends/test_metal_": 8,
    "tests/backends/test_nvidia_": 4,
    "tests/language/test_streamed_dots.py": 4,
    "tests/language/test_panel_sums.py": 4,
    "tests/test_time_model.py": 4,
    "tests/test_hazards.py": 3,
    "tests/test_torch_operator.py": 2,
    "tests/test_flex.py": 2,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run every case of the tests that are sampled otherwise")
    parser.addoption("--one-in", type=int, default=1, help="of every test keep about one case in so many")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a sampled test keep its first case and about one in n of the others, the same every time. A test's own mark,
    sampled(n), comes before what holds for its file."""
    if config.getoption("--all"):
        return
    usual: int = config.getoption("--one-in")
    kept: dict[str, list[pytest.Item]] = {}  # by test
    left_out: list[pytest.Item] = []
    for item in items:
        mark = item.get_closest_marker("sampled")
        of_file = max((n for start, n in SAMPLED.items() if item.nodeid.startswith(start)), default=1)
        of = max(usual, of_file if mark is None else mark.args[0])
        cases = kept.setdefault(item.nodeid.partition("[")[0], [])
        (left_out if cases and zlib.crc32(item.nodeid.encode()) % of else cases).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for cases in kept.values() for item in cases]


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Compiled kernels of a test run stay in it and go with it. Its processes share them."""
    path = tmp_path_factory.getbasetemp() / "kernels"
    if "PYTEST_XDIST_WORKER" in os.environ:
        path = path.parents[1] / "kernels"
    path.mkdir(exist_ok=True)
    before = os.environ.get("MONOTILE_CACHE_DIR")
    os.environ["MONOTILE_CACHE_DIR"] = str(path)
    yield path
    if before is None:
        del os.environ["MONOTILE_CACHE_DIR"]
    else:
        os.environ["MONOTILE_CACHE_DIR"] = before


@pytest.fixture(scope="session", autouse=True)
def library_on_gpu() -> None:
    """With MONOTILE_TEST_GPU=1 the library takes the tests' arrays to the GPU. Memory that torch hands out is NaN."""
    if ON_GPU:
        import torch

        torch.use_deterministic_algorithms(True, warn_only=True)
        for name in (
            "attention",
            "attention_backward",
            "decode_partials",
            "merge",
            "merge_lse",
            "mask_blocks",
            "attention_varlen",
            "attention_varlen_backward",
            "attention_paged",
        ):
            setattr(monotile, name, on_gpu(getattr(monotile, name)))


@pytest.fixture(params=usable(*IN_MEMORY))
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that computes on arrays in this machine's memory, or to which tests take them."""
    name: str = request.param
    return name
