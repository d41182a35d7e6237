"""The names of this machine and of the source's commit, as `monotile devices` shows and benchmarks record them."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1]  # the folder of the whole package


@cache
def processor() -> str:
    """Return the processor's name as the system reports it."""
    if sys.platform == "darwin":
        found = _output("sysctl", "-n", "machdep.cpu.brand_string")
    else:
        try:
            text = Path("/proc/cpuinfo").read_text()
        except OSError:
            text = ""
        match = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
        found = match[1].strip() if match else None
    return found or platform.processor() or platform.machine()


def slug(*names: str) -> str:
    """Return a file name for a machine: lower case, with dashes, repeated words once."""
    words = re.findall(r"[a-z0-9]+", " ".join(names).lower())
    return "-".join(dict.fromkeys(words))


def commit() -> tuple[str, bool] | None:
    """Return the commit of this source and True if files differ from it; None outside monotile's own repository.

    Baselines do not count as a difference: recording one must not mark the next as dirty.
    """
    root = PACKAGE.parents[1]
    top = _output("git", "-C", str(root), "rev-parse", "--show-toplevel")
    if top is None or Path(top) != root:
        return None
    name = _output("git", "-C", str(root), "rev-parse", "HEAD")
    changes = _output("git", "-C", str(root), "status", "--porcelain", "--", ".", ":!baselines")
    return None if name is None else (name, bool(changes))


def _output(*command: str) -> str | None:
    """Return a command's output, or None if it does not exist or fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
