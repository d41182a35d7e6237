"""Kernels are not recorded by torch's autograd."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import NoGradient


def refuse_gradients(kernel: str, given: Sequence[Any]) -> None:
    """Raise an error where autograd would record nothing of what a kernel does to a tensor. torch is loaded."""
    if not any([type(a) is not np.ndarray and getattr(a, "requires_grad", False) for a in given]):
        return
    if sys.modules["torch"].is_grad_enabled():
        raise NoGradient(
            f"the kernel {kernel!r} has no gradient, and a tensor given to it or read by its functions requires grad; "
            "call it under torch.no_grad(), pass detached tensors, or launch it from a torch.autograd.Function with a "
            "backward pass of its own"
        )
