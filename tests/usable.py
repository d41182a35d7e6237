"""Which backends can run here."""

from __future__ import annotations

from monotile import MonotileError, backends


def usable(*names: str) -> list[str]:
    found = []
    for name in names:
        try:
            backends.usable(name)
        except (ImportError, MonotileError):
            continue
        found.append(name)
    return found
