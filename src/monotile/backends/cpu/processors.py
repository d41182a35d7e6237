"""The processors of this machine, and how many threads a launch has by default.

Threads that share a core share its FMA units and caches, so there is one for each physical core that the process may
run on, and no more than its CPU quota (cgroup) pays for. `OMP_NUM_THREADS` and `torch.set_num_threads`, by which users
and launchers divide a machine among processes, lower the number too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from functools import cache

from ...errors import BadThreadCount

MAX_THREADS = 1024
_MOUNTS, _GROUPS = "/proc/self/mountinfo", "/proc/self/cgroup"
_TOPOLOGY = "/sys/devices/system/cpu"
_LEAST_L2 = 512 * 1024


class FewThreads(int):
    """Threads for a small launch, for which none is woken while launches are far apart."""


def default_threads() -> int:
    """Return MONOTILE_THREADS, or else the number of usable cores; torch's number of threads where that is less."""
    number, is_chosen = _chosen_threads()
    torch = None if is_chosen else sys.modules.get("torch")
    ask = getattr(torch, "get_num_threads", None)  # absent while torch is being imported
    return number if ask is None else max(1, min(number, ask()))


@cache
def _chosen_threads() -> tuple[int, bool]:
    """Return the number of threads, and True if MONOTILE_THREADS says so; read once."""
    chosen = os.environ.get("MONOTILE_THREADS", "").strip()
    if not chosen:
        return min(_usable_cores(), MAX_THREADS), False
    if not (chosen.isascii() and chosen.isdigit()) or not 1 <= int(chosen) <= MAX_THREADS:
        raise BadThreadCount(
            f"MONOTILE_THREADS is {chosen!r}: expected a whole number from 1 to {MAX_THREADS}; "
            "unset it to use every core"
        )
    return int(chosen), True


def _usable_cores() -> int:
    limits = [physical_cores(available())]
    paid = quota()
    if paid is not None:
        limits.append(-int(-paid // 1))  # half a processor's time is worth a thread
    # OpenMP takes a list, one number for each level of nesting. It says itself what is wrong with any other value.
    outer = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if outer.isascii() and outer.isdigit():
        limits.append(int(outer))
    return max(1, min(limits))


def available() -> frozenset[int]:
    """Return the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    if sys.platform == "win32":
        from . import windows

        return windows.process_affinity() or all_processors()
    return all_processors()


def all_processors() -> frozenset[int]:
    if sys.platform == "win32":
        from . import windows

        found = windows.processors()
        if found:
            return found
    return frozenset(range(os.cpu_count() or 1))


def physical_cores(processors: Iterable[int]) -> int:
    """Count the cores of some processors. Where the system does not tell which share a core, each is one."""
    processors = frozenset(processors)
    if sys.platform == "win32":
        from . import windows

        return sum(1 for core in windows.cores() if core & processors) or len(processors)
    if sys.platform == "darwin":
        from . import macos

        return min(macos.number("hw.physicalcpu") or len(processors), len(processors))
    if _line(f"{_TOPOLOGY}/smt/active") != "1":
        return len(processors)
    files = ("core_cpus_list", "thread_siblings_list")  # the older name
    found = [[_line(f"{_TOPOLOGY}/cpu{n}/topology/{file}") for file in files] for n in processors]
    return len({names[0] or names[1] or str(n) for n, names in zip(processors, found, strict=True)})


@cache
def l2_bytes() -> int:
    """Bytes of a core's L2 cache; where the system does not tell, what processors have at least."""
    if sys.platform == "win32":
        from . import windows

        return windows.l2_bytes() or _LEAST_L2
    if sys.platform == "darwin":
        from . import macos

        return macos.l2_bytes() or _LEAST_L2
    size = _line(f"{_TOPOLOGY}/cpu0/cache/index2/size").removesuffix("K")
    return int(size) * 1024 if size.isdigit() else _LEAST_L2


# ---- quotas of control groups ----------------------------------------------------------------------------------------


def quota() -> float | None:
    """Return the processors' worth of time that control groups (versions 1 and 2) allow; None without a limit. A limit
    of any group around that of the process counts."""
    if not sys.platform.startswith("linux"):
        return None
    limits = []
    for folder, is_first_version in _group_folders():
        if is_first_version:
            time, period = _line(f"{folder}/cpu.cfs_quota_us"), _line(f"{folder}/cpu.cfs_period_us")
        else:
            time, _, period = _line(f"{folder}/cpu.max").partition(" ")
        if time.isdigit() and period.isdigit() and int(time) and int(period):
            limits.append(int(time) / int(period))
    return min(limits, default=None)


def _group_folders() -> Iterator[tuple[str, bool]]:
    """Yield the folders of this process's groups and of those around them, and True for version 1."""
    paths: dict[str, str] = {}  # by controller; "" is version 2
    for line in _lines(_GROUPS):
        _, _, group = line.partition(":")
        controllers, _, path = group.partition(":")
        paths.update((name, path) for name in controllers.split(","))
    for line in _lines(_MOUNTS):
        mount, _, system = line.partition(" - ")
        kind, _, rest = system.partition(" ")
        is_first_version = kind == "cgroup" and "cpu" in rest.partition(" ")[2].split(",")
        if kind != "cgroup2" and not is_first_version:
            continue
        root, point = mount.split(" ")[3:5]
        # A container may see the path of its group from outside, and only the group itself below the mount.
        path = paths.get("cpu" if is_first_version else "", "/")
        inside = path if root == "/" else path.removeprefix(root)
        parts = [part for part in inside.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            yield "/".join([point, *parts[:depth]]), is_first_version


def _line(path: str) -> str:
    return next(iter(_lines(path)), "")


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().splitlines()
    except (OSError, ValueError):
        return []
