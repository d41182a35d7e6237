"""Tables that fit the terminal: names are wrapped between words, and columns that do not fit are left out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

NAME_WIDTH = 32  # least width of the first column, where its names are longer
NOTE_WIDTH = 16  # the same of columns whose text may be wrapped
BAR_WIDTH = 10
GAP = 2  # between columns


class Heading(NamedTuple):
    """The heading of a column. Of those that do not fit, the ones with the highest `rank` go first."""

    text: str
    rank: int = 0  # 0: stays
    wraps: bool = False


def show(
    console: Console,
    heads: Sequence[Heading],
    rows: Iterable[Sequence[str | Text]],
    title: str | None = None,
    *,
    silent: bool = False,
) -> None:
    """Print a table with as many columns as fit, and say which were left out. Columns without any text do not count."""
    found = [list(row) for row in rows]
    if not found:
        return
    kept = [n for n in range(len(heads)) if n == 0 or any(str(row[n]) for row in found)]
    left_out: list[str] = []
    while (widths := _widths(console.width, heads, kept, found)) is None:
        worst = max(kept, key=lambda n: heads[n].rank)
        kept.remove(worst)
        left_out.insert(0, heads[worst].text)
    console.print(_table([heads[n] for n in kept], widths, [[row[n] for n in kept] for row in found], title))
    if left_out and not silent:
        console.print(f"not shown at this width: {', '.join(left_out)}", style="dim", highlight=False)


def _widths(width: int, heads: Sequence[Heading], kept: list[int], rows: list[list[str | Text]]) -> list[int] | None:
    """Return the widths of the columns, or None where they do not fit and one can be left out."""
    longest = {n: max(len(heads[n].text), *(len(str(row[n])) for row in rows)) for n in kept}
    found = {n: min(longest[n], NAME_WIDTH if n == 0 else NOTE_WIDTH) if heads[n].wraps else longest[n] for n in kept}
    spare = width - sum(found.values()) - GAP * len(kept)
    if spare < 0 and any(heads[n].rank for n in kept):
        return None
    for n in kept:
        more = max(0, min(spare, longest[n] - found[n]))
        found[n], spare = found[n] + more, spare - more
    return list(found.values())


def _table(heads: list[Heading], widths: list[int], rows: list[list[str | Text]], title: str | None) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shape = {"box": box.SIMPLE_HEAD, "show_edge": False, "pad_edge": False, "padding": (0, 1, 0, 0)}
    table = Table(title=title and f"\n{title}", title_justify="left", **shape)  # type: ignore[arg-type]
    for head, width in zip(heads, widths, strict=True):
        table.add_column(head.text, no_wrap=not head.wraps, width=width)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def bar(console: Console, ratio: float, most: float, verdict: str) -> Text:
    """Draw how many times as fast as a peer, on a logarithmic scale up to `most`."""
    from rich.text import Text

    if verdict != "faster":
        return Text(verdict, style="yellow" if verdict == "slower" else "dim")
    block = "#" if console.options.ascii_only else "█"
    length = round(BAR_WIDTH * math.log(ratio) / math.log(max(most, 2.0)))
    return Text(block * max(1, length), style="cyan")
