"""Triton's fingerprint of itself, which an earlier process may have left on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from monotile import runtime
from monotile.backends.nvidia import triton_key
from monotile.runtime import cache

triton_cache = pytest.importorskip("triton.runtime.cache", reason="it is Triton's")


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Grows whenever Triton computes the fingerprint; what it left on disk before is not seen."""
    found: list[str] = []
    monkeypatch.setenv("MONOTILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(triton_cache, "triton_key", lambda: found.append("") or f"triton {len(found)}")
    yield found
    triton_key.remember.cache_clear()


def in_a_new_process(monkeypatch: pytest.MonkeyPatch, compute: object) -> str:
    monkeypatch.setattr(triton_cache, "triton_key", compute)
    triton_key.remember.cache_clear()
    triton_key.remember()
    return str(triton_cache.triton_key())


def test_it_is_computed_once(computed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    compute = triton_cache.triton_key
    assert [in_a_new_process(monkeypatch, compute) for _ in range(3)] == ["triton 1"] * 3
    assert len(computed) == 1


def test_files_that_changed_are_hashed_again(
    computed: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "triton"
    folder.mkdir()
    (folder / "a.py").write_text("1")
    monkeypatch.setattr(runtime, "LOADING_SINCE_NS", 2**62)
    compute = triton_cache.triton_key
    kept = [cache.fingerprint_of_files(str(folder), (".py",), compute) for _ in range(2)]
    os.utime(folder / "a.py", ns=(1, 1))
    assert cache.fingerprint_of_files(str(folder), (".py",), compute) != kept[0] == kept[1]
    monkeypatch.setattr(runtime, "LOADING_SINCE_NS", 0)
    assert cache.fingerprint_of_files(str(folder), (".py",), compute) is None
