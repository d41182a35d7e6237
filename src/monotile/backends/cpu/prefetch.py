"""Fetching ahead: asking for memory that a later turn of a loop will read, where no hardware guesses it.

Streamed tiles (streams.py) are asked for while the one before them is read, tiles that all panels of a dot read while
the panels are worked on, tiles that are turned or mapped strip by strip at the place where they are read.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...ir import Op
from .axes import Axis
from .dots import DotEmitter
from .emit import Index
from .fuse import Nest
from .nests import Panel
from .point import Point
from .tiles import Tile
from .vectors import BYTES

LINE = 64  # bytes fetched at once
MAX_LINES = 64  # lines: what is asked for faster than it comes is lost


@dataclass(frozen=True)
class NextTile:
    """The next tile: where it starts, how far apart its rows are, and how many."""

    base: str
    element: str
    stride: Index
    rows: int


class PrefetchEmitter(DotEmitter):
    # ---- streamed tiles ----------------------------------------------------------------------------------------------

    def prefetch_rows(self, ahead: NextTile | None, steps: int, points: list[Point], k: Index) -> None:
        """Asks for the same place of the next tile, and again half a tile later: what is asked for while memory is busy
        may be forgotten."""
        e = self.e
        for i in range(steps):
            row = e.add(k, i)
            rows = [row]
            if ahead is not None and ahead.rows & (ahead.rows - 1) == 0 and ahead.rows > 1:
                half = ahead.rows // 2
                rows.append(row ^ half if isinstance(row, int) else e.op(f"xor i64 {row}, {half}"))
            for pt in points:
                assert pt.lane is not None
                for place in rows:
                    self.prefetch_line(ahead, place, pt.at[pt.lane], self._constant_lanes(pt))

    def _constant_lanes(self, pt: Point) -> int:
        """Which vector of its group a point is, in lanes."""
        assert pt.lane is not None
        at = pt.at[pt.lane]
        return at if isinstance(at, int) else pt.group * self.e.lanes

    def find_next_tile(self, load: Op, in_order: bool) -> NextTile | None:
        """Where the tile that is streamed after this one lies, if it has the same shape. A tile that is read in order
        and followed by its own next turn needs no help."""
        following = self.layout.next_streamed.get(load)
        if following is None or following[0] not in self.ev.tensors.tiles:
            return None
        if following[0] is load and in_order:
            return None
        op, shift = following
        e, tile = self.e, self.ev.tensors.tiles[op]
        mine = self.ev.tensors.tiles[load]
        if [d.extent for d in tile.dims] != [d.extent for d in mine.dims] or tile.dims[-1].stride != 1 != mine.dims[
            -1
        ].stride:
            return None
        base = e.element(tile.base, self._offset(tile, shift), tile.element)
        return NextTile(base, tile.element, tile.dims[0].stride, tile.dims[0].extent)

    # ---- tiles that panels share -------------------------------------------------------------------------------------

    def prefetch_shared(self, nest: Nest, rows: Axis | None, panel: Panel, row: Index) -> None:
        """Register blocks of all panels divide the lines of the next tile among them: spread so over the arithmetic of
        a turn, no line has to wait for another."""
        assert nest.dot is not None
        found = self.layout.shared.get(self.operands(nest, nest.dot)[1].base)
        if found is None or panel is None or rows is None:
            return
        load, shift = found
        tile = self.ev.tensors.tiles[load]
        high, wide = tile.dims
        if wide.stride != 1:
            return
        e, size = self.e, BYTES[tile.element]
        lines = -(-wide.extent * size // LINE)  # of a row
        blocks = -(-rows.extent // self.height)
        panels = -(-nest.lane.extent // self.target.panel) if nest.lane is not None else 1
        wanted = -(-lines * high.extent // (blocks * panels))
        each = next((n for n in range(wanted, lines) if lines % n == 0), -(-wanted // lines) * lines)
        if each > MAX_LINES:
            return
        first = e.mul(e.add(e.mul(panel[0], blocks), self._divided(row, self.height)), each)
        start, column = self._divided(first, lines), self._rest(first, lines)
        for n in range(each):
            place = e.add(e.mul(e.add(start, n // lines), high.stride), e.mul(e.add(column, n % lines), LINE // size))
            self._prefetch(e.element(tile.base, e.add(self._offset(tile, shift), place), tile.element))

    def _divided(self, a: Index, b: int) -> Index:
        return a // b if isinstance(a, int) else self.e.op(f"udiv i64 {a}, {b}")

    def _rest(self, a: Index, b: int) -> Index:
        return a % b if isinstance(a, int) else self.e.op(f"urem i64 {a}, {b}")

    # ---- tiles that are turned, and strips ---------------------------------------------------------------------------

    def prefetch_next(self, load: Op, points: list[Point]) -> None:
        shift, at, lane = self.layout.next_iteration.get(load), points[0].at, points[0].lane
        if shift is None:
            return
        tile = self.ev.tensors.tiles[load]
        if any(d.axis not in at for d in tile.dims if d.axis is not None):
            return
        if not any(d.axis is lane and d.stride == 1 for d in tile.dims):
            return
        offset = self._offset(tile, shift)
        for pt in points:
            if self._constant_lanes(pt) * BYTES[tile.element] % LINE == 0:
                self._prefetch(self.e.element(self.ev.tensors.address(load, pt), offset, tile.element))

    def _offset(self, tile: Tile, shift: tuple[int, ...]) -> Index:
        """How far away in memory a tile is that lies so far along each dimension."""
        offset: Index = 0
        for dim, step in zip(tile.dims, shift, strict=True):
            offset = self.e.add(offset, self.e.mul(dim.stride, step))
        return offset

    def _prefetch(self, pointer: str) -> None:
        """For a line of memory, in the second-level cache."""
        self.e.call("void", "llvm.prefetch.p0", ("ptr", pointer), ("i32", "0"), ("i32", "2"), ("i32", "1"))

    def prefetch_line(self, ahead: NextTile | None, row: Index, column: Index, offset: int) -> None:
        """Asks for the line at a place of the next tile; `offset` is the part of the column known now, so that each
        line is asked for once."""
        e = self.e
        if ahead is None or offset * BYTES[ahead.element] % LINE:
            return
        at = e.element(ahead.base, e.add(e.mul(row, ahead.stride), column), ahead.element)
        self._prefetch(at)
