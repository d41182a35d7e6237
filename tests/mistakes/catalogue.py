"""The table of cases: a kernel with a mistake, and what its error must say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from monotile.errors import KernelError


@dataclass(frozen=True)
class Mistake:
    function: Callable[..., None]
    error: type[KernelError]
    caret: str  # the exact source underlined
    found: tuple[str, ...]  # words that must be in the description
    cure: tuple[str, ...]  # words that must be in the cure


MISTAKES: list[Mistake] = []


def mistake(error: type[KernelError], caret: str, found: str, cure: str) -> Callable[[Any], Any]:
    """Add a kernel to the table. Phrases separated by `|` must all occur."""

    def file(function: Callable[..., None]) -> Callable[..., None]:
        MISTAKES.append(Mistake(function, error, caret, tuple(found.split("|")), tuple(cure.split("|"))))
        return function

    return file
