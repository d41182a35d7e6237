"""Which backends can run here, and arrays of tests on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from monotile import MonotileError, backends
from monotile.library import registry

ON_GPU = os.environ.get("MONOTILE_TEST_GPU") == "1"  # the library's tests on an NVIDIA GPU, too
DEVICE = "cuda" if ON_GPU else "cpu"  # of torch tensors in tests of what is under other libraries' names
# Triton's interpreter takes arrays in this machine's memory; it has to be asked for before Triton is imported.
TRITON = ("nvidia",) if ON_GPU or os.environ.get("TRITON_INTERPRET") == "1" else ()
# A vector unit that is asked for concerns the cpu backend alone; the others are tested without it.
ONE_UNIT = bool(os.environ.get("MONOTILE_CPU"))
IN_MEMORY: tuple[str, ...] = ("cpu",) if ONE_UNIT else ("interpreter", "cpu", *TRITON)
WITH_METAL = IN_MEMORY if ONE_UNIT else (*IN_MEMORY, "metal")


def usable(*names: str) -> list[str]:
    found = []
    for name in names:
        try:
            backends.usable(name)
        except (ImportError, MonotileError):
            continue
        found.append(name)
    return found


def on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the library that takes NumPy arrays to the GPU for nvidia, and brings its results back."""

    def home(found: Any) -> Any:
        if isinstance(found, tuple):
            parts = [None if part is None else registry.from_device(part) for part in found]
            return type(found)(*parts) if hasattr(found, "_fields") else tuple(parts)
        return registry.from_device(found)

    @wraps(function)
    def moved(*args: Any, **options: Any) -> Any:
        if options.get("backend") != "nvidia":
            return function(*args, **options)

        def there(value: Any) -> Any:
            if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
                return type(value)(there(part) for part in value)
            return registry.on_device(value, "nvidia")

        return home(function(*map(there, args), **{name: there(value) for name, value in options.items()}))

    return moved
