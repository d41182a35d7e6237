"""Load compiled code of either form: an image, or an object file on systems without images."""

from __future__ import annotations

from typing import Any

from . import loader


def load(data: bytes) -> Any:
    """Load an image or an object file. The returned object has `address(name)` and must outlive its functions."""
    if data.startswith(loader.MAGIC):
        return loader.Code(data)
    from . import jit  # LLVM, which an image does not need

    return jit.load_object(data)
