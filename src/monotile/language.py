"""The kernel language as users import it: `@kernel` and its words. docs/guide/words.md is the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .errors import BadSignature
from .frontend import vocabulary
from .frontend.vocabulary import *  # noqa: F403 (the list of words stands once, there)
from .launch.kernel import Kernel

if TYPE_CHECKING:
    # A kernel is the tile language, which only looks like Python: checkers pass over its body and its annotations.
    from typing import no_type_check as kernel
else:

    def kernel(function: Callable[..., None] | None = None) -> Kernel:
        """Make a kernel of a Python function. Its source is specialised and compiled when it is called."""
        if function is None:
            raise BadSignature("@kernel takes no arguments", "write @kernel without parentheses, directly above a def")
        return Kernel(function)


__all__ = ["kernel"]
__all__ += vocabulary.__all__
