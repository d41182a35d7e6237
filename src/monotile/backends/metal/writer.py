"""Lines of text, and threadgroup memory: who has which part of it, and where barriers must stand."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import DeviceLimit
from .layout import Family
from .msl import TAKEN
from .points import Room

THREADGROUP_LIMIT = 32 << 10


@dataclass
class Nest:
    """Loops over registers that were written last, and may take in what follows."""

    key: object
    start: int  # lines
    end: int
    braces: int


class Writer:
    """Lines of text, and which names are taken."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 1
        self.scopes: list[set[str]] = [set(TAKEN)]
        self.last: Nest | None = None

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    def open(self, text: str) -> None:
        self.line(f"{text} {{".lstrip())
        self.depth += 1

    def unrolled(self, index: str, count: int) -> None:
        """A loop over registers, which have no addresses: its index must be known to the compiler."""
        self.open(f"UNROLL for (int {index} = 0; {index} < {count}; ++{index})")

    def close(self, braces: int = 1) -> None:
        for _ in range(braces):
            self.depth -= 1
            self.line("}")

    def before(self, text: str) -> None:
        """A line that may stand before the loops written last."""
        if self.last is None or self.last.end != len(self.lines):
            self.line(text)
            return
        self.lines.insert(self.last.start, "  " * self.depth + text)
        self.last.start += 1
        self.last.end += 1

    def name(self, hint: str) -> str:
        """A name that means nothing else here."""
        base = "".join(c for c in hint if c.isalnum() or c == "_") or "t"
        while base in TAKEN:
            base += "0"
        name, n = base, 1
        while any(name in scope for scope in self.scopes):
            n += 1
            name = f"{base}_{n}"
        self.scopes[-1].add(name)
        return name


class Rooms(Writer):
    """Threadgroup memory is one array, of which every use takes a part. A barrier stands before a read of what was
    written since the last one, and before a write over what was read or written since."""

    def __init__(self, title: str, family: Family) -> None:
        super().__init__()
        self.title, self.family = title, family
        self.top = self.room_bytes = 0  # next free byte, and the most there ever were
        self.reads: list[tuple[int, int]] = []
        self.writes: list[tuple[int, int]] = []

    def barrier(self, flags: str = "mem_threadgroup") -> None:
        scope = "simdgroup" if self.family.simdgroups == 1 else "threadgroup"
        self.line(f"{scope}_barrier(mem_flags::{flags});")
        if flags == "mem_threadgroup":
            self.reads.clear()
            self.writes.clear()

    def will_write(self, room: Room) -> None:
        if _meets(self.reads, room) or _meets(self.writes, room):
            self.barrier()
        self.writes.append((room.start, room.end))

    def will_read(self, room: Room) -> None:
        if _meets(self.writes, room):
            self.barrier()
        self.reads.append((room.start, room.end))

    def take(self, kind: str, size: int, rows: int, width: int, hint: str, what: str) -> Room:
        """A part for `rows` rows of `width` elements."""
        start = self.top
        end = start + -(-rows * width * size // 16) * 16
        if end > THREADGROUP_LIMIT:
            found = f"{self.title} needs {end} bytes of threadgroup memory for {what}, of {THREADGROUP_LIMIT}"
            raise DeviceLimit(f"{found}; use smaller blocks")
        self.room_bytes, self.top = max(self.room_bytes, end), end
        room = Room(self.name(hint), start, end, width)
        place = "room" if start == 0 else f"room + {start // 16}"
        self.before(f"threadgroup {kind} *{room.name} = (threadgroup {kind} *)({place});")
        return room


def _meets(spans: list[tuple[int, int]], room: Room) -> bool:
    return any(low < room.end and room.start < high for low, high in spans)
