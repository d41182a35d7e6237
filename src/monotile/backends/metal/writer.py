"""Lines of a kernel's body, names that are free, and the loop nest that may still be extended."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from .names import RESERVED, safe


@dataclass
class LoopNest:
    """Loops over registers at the end of the text. A statement with the same loops is appended to their body."""

    key: object
    start: int  # lines
    end: int
    braces: int


@dataclass(frozen=True)
class WriterState:
    lines: list[str]
    depth: int
    scopes: list[set[str]]
    last: LoopNest | None


class Writer:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 1
        self.scopes: list[set[str]] = [set(RESERVED)]
        self.last: LoopNest | None = None  # the nest that ended with the last line
        self.pending_comment = ""

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    def write_all(self, texts: list[str]) -> None:
        for text in texts:
            self.line(text)

    def write_comment(self) -> None:
        """Write the pending comment, once."""
        if self.pending_comment:
            self.line(self.pending_comment)
            self.pending_comment = ""

    def open(self, text: str) -> None:
        self.line(f"{text} {{".lstrip())
        self.depth += 1

    def open_unrolled(self, index: str, count: int) -> None:
        """Open a loop over registers. Registers have no addresses, so the compiler must know the index."""
        self.open(unrolled([(index, count)]).rstrip())

    def close(self, braces: int = 1) -> None:
        for _ in range(braces):
            self.depth -= 1
            self.line("}")

    def otherwise(self) -> None:
        self.depth -= 1
        self.line("} else {")
        self.depth += 1

    def declare(self, text: str) -> None:
        """Write a declaration, before the last loop nest if that may still be extended."""
        if not self.extensible:
            self.line(text)
            return
        assert self.last is not None
        self.lines.insert(self.last.start, "  " * self.depth + text)
        self.last.start += 1
        self.last.end += 1

    @property
    def extensible(self) -> bool:
        return self.last is not None and self.last.end == len(self.lines)

    def reopen(self, key: object) -> int | None:
        """Reopen the last loop nest if it has this key and nothing follows it, and return its first line."""
        if self.last is None or not self.extensible or self.last.key != key:
            return None
        del self.lines[-self.last.braces :]
        self.depth += self.last.braces
        return self.last.start

    def name(self, hint: str) -> str:
        """Return a name that is free in all open scopes, and take it."""
        base = safe(hint)
        name, n = base, 1
        while any(name in scope for scope in self.scopes):
            n += 1
            name = f"{base}_{n}"
        self.scopes[-1].add(name)
        return name

    def save(self) -> WriterState:
        return WriterState(list(self.lines), self.depth, [set(s) for s in self.scopes], copy.copy(self.last))

    def restore(self, state: WriterState) -> None:
        self.lines, self.depth = list(state.lines), state.depth
        self.scopes, self.last = [set(s) for s in state.scopes], copy.copy(state.last)


def unrolled(loops: list[tuple[str, int]]) -> str:
    """Return the headers of nested unrolled loops, for a statement on the same line."""
    return "".join(f"UNROLL for (int {v} = 0; {v} < {n}; ++{v}) " for v, n in loops)
