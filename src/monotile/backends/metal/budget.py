"""The registers and threadgroup memory of a threadgroup, and how many of them share a core, by a model.

The model reads the generated text. A lane's registers are those of the arrays, vectors, matrices and variables that
are live at once: from the first mention after the declaration to the last one, or to the end of a loop that began in
between and mentions the name. To these come OTHERS, for addresses, positions and parts of expressions. Constants that
all threads share count nothing. The sizes of a core are public figures (docs/internals/metal_cost.md); what Apple's
compiler allocates was not measured.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

REGISTERS = 128  # of a lane, 32 bits each
OTHERS = 16
CORE_REGISTER_BYTES = 208 << 10
CORE_THREADGROUP_BYTES = 60 << 10
CORE_THREADS = 1024
BYTES = {"float": 4, "int": 4, "uint": 4, "long": 8, "half": 2, "bfloat": 2, "bool": 2, "char": 2, "uchar": 2}
BYTES |= {"short": 2, "ushort": 2}
DECLARATION = re.compile(
    rf"(?P<const>const )?(?P<matrix>simdgroup_)?(?P<type>{'|'.join(BYTES)})(?P<width>8x8|[234])? "
    r"(?P<name>\w+)(?P<sides>(\[\d+\])*)( = .*)?;"
)
LOOP = re.compile(r"(UNROLL )?for \(")


@dataclass(frozen=True)
class Budget:
    """What a threadgroup takes of a core: registers of a lane by the model, and bytes of threadgroup memory."""

    threads: int
    registers: int
    threadgroup_bytes: int

    @property
    def threadgroups_per_core(self) -> int:
        """How many fit a core at once. Registers beyond those of a lane, or of a core where one threadgroup has more,
        are spilled to memory."""
        registers = min(self.registers, REGISTERS)
        counts = [CORE_THREADS // self.threads, CORE_REGISTER_BYTES // (4 * registers * self.threads)]
        if self.threadgroup_bytes:
            counts.append(CORE_THREADGROUP_BYTES // self.threadgroup_bytes)
        return max(1, min(counts))


@dataclass(frozen=True)
class Scope:
    """Lines from an opening brace to the closing one."""

    first: int
    last: int
    is_loop: bool


def live_registers(lines: list[str]) -> int:
    """Return the most registers of a lane that are live at a line of a function's body."""
    words = [set(re.findall(r"\w+", line)) for line in lines]
    scopes = _scopes(lines)
    ends = {
        n: min((s.last for s in scopes if s.first < n <= s.last), default=len(lines) - 1) for n in range(len(lines))
    }
    changes = [0.0] * (len(lines) + 1)
    for n, line in enumerate(lines):
        found = DECLARATION.fullmatch(line.strip())
        if found is None or (found["const"] and not (found["width"] or found["sides"])):
            continue
        mentions = [m for m in range(n + 1, ends[n] + 1) if found["name"] in words[m]] or [n]
        loops = [s for s in scopes if s.is_loop and n < s.first and any(s.first <= m <= s.last for m in mentions)]
        first = min([mentions[0], *(s.first for s in loops)])
        last = max([mentions[-1], *(s.last for s in loops)])
        changes[first] += _size(found)
        changes[last + 1] -= _size(found)
    live, most = 0.0, 0.0
    for change in changes:
        live += change
        most = max(most, live)
    return math.ceil(most) + OTHERS


def _size(found: re.Match[str]) -> float:
    """Registers of a declaration. A lane holds two elements of an 8x8 matrix."""
    elements = 2 if found["matrix"] else int(found["width"] or 1)
    return math.prod(map(int, re.findall(r"\d+", found["sides"]))) * elements * BYTES[found["type"]] / 4


def _scopes(lines: list[str]) -> list[Scope]:
    found: list[Scope] = []
    opened: list[int] = []
    for n, line in enumerate(lines):
        text = line.strip()
        if text.startswith("}"):
            first = opened.pop()
            found.append(Scope(first, n, LOOP.match(lines[first].strip()) is not None))
        if text.endswith("{"):
            opened.append(n)
    return found
