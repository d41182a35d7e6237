"""The report of a run: findings and counters, and the runner's errors."""

from __future__ import annotations

from dataclasses import dataclass, field

from ....errors import MonotileError


class ShaderError(MonotileError):
    """A shader that the runner cannot parse or the compiler rejects."""


class NoCompiler(MonotileError):
    """No C++ compiler that the runner can use."""


class LaunchError(MonotileError):
    """A launch with invalid sizes, buffers or order."""


class KernelFault(MonotileError):
    """A run with findings."""


@dataclass(frozen=True)
class BufferRace:
    """A race on a buffer: the threadgroup that makes the later access, whether another one made the earlier access, and
    whether each of them writes."""

    buffer: int
    group: tuple[int, ...]
    between_groups: bool
    write: bool
    other_write: bool


@dataclass(frozen=True)
class Finding:
    """One mistake of a kernel. `line` and `other_line` are lines of the shader, 0 if there is none."""

    kind: str
    line: int
    message: str
    other_line: int = 0
    place: str = ""
    count: int = 1
    race: BufferRace | None = None

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"{self.kind}: {self.message}{times}"


@dataclass(frozen=True)
class Counters:
    """Totals of a launch. Bytes are those that the threads access, without caches; simdgroup operations count once per
    simdgroup, barriers once per threadgroup, exponentials once per thread."""

    device_bytes_read: int
    device_bytes_written: int
    constant_bytes_read: int
    threadgroup_bytes_read: int
    threadgroup_bytes_written: int
    barriers: int
    simdgroup_barriers: int
    multiplies: int
    shuffles: int
    reductions: int
    exponentials: int
    atomics: int
    threadgroup_memory_bytes: int


@dataclass(frozen=True)
class Report:
    findings: tuple[Finding, ...]
    counters: Counters
    bytes_read: dict[str, int] = field(default_factory=dict)
    bytes_written: dict[str, int] = field(default_factory=dict)
    build_seconds: float = 0.0
    run_seconds: float = 0.0

    @property
    def clean(self) -> bool:
        return not self.findings

    def check(self) -> Report:
        """Return the report, or raise an error that lists all findings."""
        if self.findings:
            raise KernelFault("\n".join(map(str, self.findings)))
        return self

    def __str__(self) -> str:
        found = "\n".join(map(str, self.findings)) or "nothing found"
        return f"{found}\n{self.counters}"
