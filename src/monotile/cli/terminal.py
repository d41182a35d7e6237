"""Where the verbs print: the terminal, or wide plain text for files and pipes."""

from rich.console import Console

PLAIN_WIDTH = 160  # of tables that go to a file or a pipe


def plain_console() -> Console:
    """Return a console as wide as the terminal; of a fixed width where the output is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)
