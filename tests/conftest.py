"""What every test shares: the examples on the path, a cache of its own, and the backends that can run here."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from usable import usable

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Compiled kernels of a test run stay in it and go with it."""
    path = tmp_path_factory.mktemp("kernels")
    before = os.environ.get("MONOTILE_CACHE_DIR")
    os.environ["MONOTILE_CACHE_DIR"] = str(path)
    yield path
    if before is None:
        del os.environ["MONOTILE_CACHE_DIR"]
    else:
        os.environ["MONOTILE_CACHE_DIR"] = before


# Triton's interpreter takes arrays in this machine's memory; it has to be asked for before Triton is imported.
TRITON = ("nvidia",) if os.environ.get("TRITON_INTERPRET") == "1" else ()


@pytest.fixture(params=usable("interpreter", "cpu", *TRITON))
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that computes on arrays in this machine's memory."""
    name: str = request.param
    return name
