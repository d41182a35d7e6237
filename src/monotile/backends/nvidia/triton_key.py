"""Triton's fingerprint of itself, kept on disk.

Triton finds a compiled kernel under a key that contains a hash of its own files, 400 MB of them. It computes the hash
once a process: that takes 0.4 s, longer than everything else that a first call does if its kernel is on disk."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from ...runtime import cache as store

ENDINGS = (".py", ".so", ".pyd")


@cache
def remember() -> None:
    """Let Triton find the hash that it computed in an earlier process, as long as its files are the same."""
    import triton
    from triton.runtime import cache as triton_cache

    compute: Any = getattr(triton_cache, "triton_key", None)
    if compute is None:  # a version that has it elsewhere
        return
    found = store.fingerprint_of_files(os.path.dirname(triton.__file__), ENDINGS, compute)
    if found is not None:
        triton_cache.triton_key = lambda: found[0]
