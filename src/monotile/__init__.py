"""monotile: attention kernels written once, on tiles, for every machine. Types are in __init__.pyi."""

from __future__ import annotations

from typing import Any

from . import runtime as _runtime  # noqa: F401  # isort: skip  # first: it notes the time
from .errors import MonotileError

__version__ = "0.1.0"
__all__ = [
    "BlockMask",
    "Gradients",
    "MonotileError",
    "Partials",
    "Quantized",
    "__version__",
    "attention",
    "attention_backward",
    "attention_paged",
    "attention_varlen",
    "attention_varlen_backward",
    "block_mask",
    "decode_partials",
    "mask_blocks",
    "merge",
    "merge_lse",
    "paged_append",
    "quantize",
    "recommended_splits",
]


def __getattr__(name: str) -> Any:
    """The library is loaded when it is first used, so that `import monotile` costs next to nothing."""
    if name in __all__:
        from .library import entry, ops, quantized

        found = next(getattr(module, name) for module in (entry, quantized, ops) if hasattr(module, name))
        globals()[name] = found  # the next time nobody asks here
        return found
    raise AttributeError(f"module 'monotile' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
