"""Name this machine and the commit of this source, for `monotile devices` and for benchmark reports."""

from __future__ import annotations

import contextlib
import platform
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1]  # the folder of the whole package
REPOSITORY = PACKAGE.parents[1]  # of a checkout; some other folder where monotile is installed


@cache
def processor() -> str:
    """Return the processor's name as the operating system reports it."""
    if sys.platform == "darwin":
        found = _output("sysctl", "-n", "machdep.cpu.brand_string")
    elif sys.platform == "win32":
        found = _registered_name()
    else:
        try:
            text = Path("/proc/cpuinfo").read_text()
        except OSError:
            text = ""
        match = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
        found = match[1].strip() if match else None
    return found or platform.processor() or platform.machine()


def _registered_name() -> str | None:
    """Return the processor's name in the registry of Windows, whose platform.processor() is a family and a model."""
    if sys.platform == "win32":
        import winreg

        path = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
        with contextlib.suppress(OSError), winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, path) as key:
            return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
    return None


def slug(*names: str) -> str:
    """Return a file name for a machine: lower case, words joined by dashes, repeated words once."""
    words = re.findall(r"[a-z0-9]+", " ".join(names).lower())
    return "-".join(dict.fromkeys(words))


def commit() -> tuple[str, bool] | None:
    """Return the commit of this source and whether the tree is dirty; None outside monotile's own repository.

    Files in baselines/ do not make the tree dirty: recording one baseline must not taint the next.
    """
    git = ("git", "-C", str(REPOSITORY))
    top = _output(*git, "rev-parse", "--show-toplevel")
    if top is None or Path(top) != REPOSITORY:
        return None
    name = _output(*git, "rev-parse", "HEAD")
    changes = _output(*git, "status", "--porcelain", "--", ".", ":!baselines")
    return None if name is None else (name, bool(changes))


def _output(*command: str) -> str | None:
    """Run a command and return what it prints, or None where it is missing or fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
