"""The kernel language as users import it: `@kernel` and its words. docs/guide/words.md is the reference."""

from __future__ import annotations

from collections.abc import Callable

from .frontend import vocabulary
from .frontend.vocabulary import *  # noqa: F403 (the list of words stands once, there)
from .launch.kernel import Kernel


def kernel(function: Callable[..., None]) -> Kernel:
    """Make a kernel of a Python function. Its source is specialised and compiled when it is called."""
    return Kernel(function)


__all__ = ["kernel"]
__all__ += vocabulary.__all__
