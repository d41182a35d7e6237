"""The `monotile` command. Its libraries are loaded here and nowhere else, so that computing never needs them."""

from __future__ import annotations

import sys

from ..errors import InternalError, MonotileError


def main() -> None:
    try:
        from . import commands
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(f"the monotile command needs {error.name}, which is not installed; run: pip install typer rich")
        sys.exit(1)
    try:
        commands.app()
    except InternalError:
        raise  # a fault of monotile: the traceback is wanted
    except MonotileError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
