"""The size of the disk cache: its limit, and the removal of what was used longest ago.

A file's modification time is when it was last used, to within an hour (`cache.mark_used`). Processes need no lock: a
file that another one has removed counts as removed, and files that are being written have names of their own until they
are complete. `root` is the cache directory.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import NamedTuple

from ..errors import BadOption

DEFAULT_LIMIT = 1 << 30
LIMIT_FILE = "limit"
FOLDERS = ("", "nvidia")  # with compiled kernels; `tuned` holds measurements, which stay
RECENT_S = 60  # what was used in the last minute stays: another process may be about to read it
ABANDONED_S = 86400  # age of a file whose writer is gone
KEPT_SHARE = 0.8  # of the limit, after files were removed: so that it is not reached again at once
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
KERNEL_KINDS = ("cpu", "metal", "py")  # of files that are a kernel; others belong to one, or describe the machine


class CachedFile(NamedTuple):
    path: str
    size: int
    used: float  # seconds since 1970

    @property
    def kind(self) -> str:
        return self.path.rpartition(".")[2]


def files(root: str) -> list[CachedFile]:
    """Return the complete files of the cache, those used longest ago first. Abandoned parts are removed."""
    found = []
    now = time.time()
    for folder in FOLDERS:
        with contextlib.suppress(OSError), os.scandir(os.path.join(root, folder)) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # removed by another process
                    state = entry.stat(follow_symlinks=False)
                    if entry.name.startswith(".new-"):
                        if state.st_mtime < now - ABANDONED_S:
                            os.unlink(entry.path)
                    elif entry.is_file(follow_symlinks=False) and entry.name != LIMIT_FILE:
                        found.append(CachedFile(entry.path, state.st_size, state.st_mtime))
    return sorted(found, key=lambda file: file.used)


def limit(root: str) -> int:
    """Return how many bytes the cache may take."""
    try:
        with open(os.path.join(root, LIMIT_FILE)) as file:
            return int(file.read())
    except (OSError, ValueError):
        return DEFAULT_LIMIT


def set_limit(root: str, size: str) -> int:
    """Set the limit to a size such as "500M" or "2 GiB", remove what is beyond it, and return it in bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", size.strip(), re.IGNORECASE)
    if match is None:
        raise BadOption(f"a limit is a size such as 500M or 2GiB, found {size!r}")
    count = int(float(match[1]) * UNITS[match[2].upper()])
    path = os.path.join(root, LIMIT_FILE)
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w") as file:
        file.write(str(count))
    os.replace(temporary, path)
    evict(root)
    return count


def evict(root: str) -> int:
    """If the cache is beyond its limit, remove what was used longest ago; return the number of files."""
    allowed = limit(root)
    found = files(root)
    total = sum(file.size for file in found)
    if total <= allowed:
        return 0
    newest = time.time() - RECENT_S
    removed = 0
    for file in found:
        if total <= KEPT_SHARE * allowed or file.used > newest:
            break
        with contextlib.suppress(OSError):
            os.unlink(file.path)
        total -= file.size
        removed += 1
    return removed


def clear(root: str) -> int:
    """Remove every compiled kernel; return the number of files. Measurements and the limit stay."""
    found = files(root)
    for file in found:
        with contextlib.suppress(OSError):
            os.unlink(file.path)
    return len(found)
