"""Software prefetch: request memory that a later iteration reads, where no hardware prefetcher predicts it.

Streamed tiles (streamed_dots.py) are prefetched while the tile before them is read; tiles that all panels of a dot
read, while the panels are computed; tiles that are transposed or read strip by strip, where the current one is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ...dtypes import FLOATS
from ...ir import Op, Spread
from .dots import UNROLL, DotEmitter
from .emit import Index
from .fuse import Nest
from .point import Panel, Point
from .spread_reads import spread_position
from .tile_rows import Rows, StridedRows, TableRows
from .tiles import Tile
from .vectors import BYTES

LINE = 64  # bytes of a cache line
# FMAs per cache line of a streamed tile between which lines are requested twice: with fewer the hardware's prefetcher
# keeps up, with more, or where codes are converted, arithmetic is the limit.
FEWEST_FMAS, MOST_FMAS = 3, 8
LONG_PIECE = 2 * LINE  # bytes of a row, with which one more line is few
BURST = 8  # lines requested at once: requests faster than memory answers are dropped


@dataclass(frozen=True)
class NextTile:
    """The tile that is streamed next: where its rows are, their number and their elements. And where those are of the
    tile before it, whose lines are requested again `rows_ahead` rows before they are read."""

    at: Rows
    element: str
    rows: int
    columns: int
    spread: Spread | None  # of its columns
    current: Rows
    rows_ahead: int = 0

    @property
    def apart(self) -> bool:
        """True if rows do not follow each other in memory: the line that one ends in may be no other row's."""
        return not isinstance(self.at, StridedRows) or self.at.stride != self.columns

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a row in memory."""
        return self.columns * BYTES[self.element]

    def bytes_of(self, columns: int) -> int | None:
        """Return the bytes of some columns of the tile, if rows fill cache lines and these columns whole bytes."""
        extent = self.columns if self.spread is None else self.spread.extent
        whole = self.row_bytes % LINE == 0 and columns * self.row_bytes % extent == 0
        return columns * self.row_bytes // extent if whole else None


class PrefetchEmitter(DotEmitter):
    # ---- streamed tiles ----------------------------------------------------------------------------------------------

    def prefetch_rows(
        self, next_tile: NextTile | None, steps: int, read_once: bool, points: list[Point], k: Index
    ) -> None:
        """Prefetch a part of the next tile where this one is read in pieces of its rows. Which way is faster was
        measured: with vectors of half a line (AVX2), of a whole one (AVX-512), and on Zen 5."""
        if next_tile is None:
            return
        size = next_tile.bytes_of(len(points) * self.e.lanes)
        short = size is not None and size < 2 * LINE and self.e.lanes * 4 < LINE
        if size is not None and (short or self.target.streaming.in_order):
            self._prefetch_in_order(next_tile, size, steps, points, k)
        else:
            self._prefetch_same(next_tile, steps, read_once, points, k)
        for i in range(steps):
            for pt in points:
                assert pt.lane is not None
                self._prefetch_again(next_tile, self.e.add(k, i), pt.at[pt.lane], self._constant_lanes(pt))
        width, last = len(points) * self.e.lanes, points[-1]
        if width >= next_tile.columns or width * next_tile.row_bytes >= LONG_PIECE * next_tile.columns:
            assert last.lane is not None
            for i in range(steps):
                self.prefetch_end(next_tile, self.e.add(k, i), self.e.add(last.at[last.lane], self.e.lanes))

    def _prefetch_in_order(self, tile: NextTile, size: int, steps: int, points: list[Point], k: Index) -> None:
        """Prefetch as many bytes as are read, in the order of memory; `size` are read at each position. Short pieces of
        its rows would come from everywhere in the tile, and each time from other rows of DRAM."""
        e, (_, unrolled) = self.e, self.e.base_and_offset(k)
        span = next(n for n in (UNROLL, 2, 1) if n == 1 or n * size <= LINE)  # positions that share a request
        if unrolled % span:
            return
        assert points[0].lane is not None
        before = e.mul(points[0].at[points[0].lane], tile.rows)  # columns of the pieces before this one
        width = len(points) * e.lanes
        skipped = before * size // width if isinstance(before, int) else self._div(e.mul(before, size), width)
        first = e.add(skipped, e.mul(k, size))
        for begin in range(0, steps * size, LINE):
            self._prefetch_byte(tile, e.add(first, begin))

    def _prefetch_same(self, next_tile: NextTile, steps: int, read_once: bool, points: list[Point], k: Index) -> None:
        """Prefetch the same rows of the next tile. A request made while memory is busy may be dropped: where this tile
        is read once, rows half a tile away are requested a second time."""
        e, half = self.e, next_tile.rows // 2
        again = read_once and next_tile.rows & (next_tile.rows - 1) == 0 and half
        for i in range(steps):
            row = e.add(k, i)
            rows = [row]
            if again:
                rows.append(row ^ half if isinstance(row, int) else e.op(f"xor i64 {row}, {half}"))
            for pt in points:
                assert pt.lane is not None
                for at in rows:
                    self._prefetch_line(next_tile, at, pt.at[pt.lane], self._constant_lanes(pt))

    def _prefetch_byte(self, tile: NextTile, n: Index) -> None:
        """Prefetch the line of the tile's nth byte."""
        e = self.e
        if isinstance(tile.at, StridedRows) and not tile.apart:
            self._prefetch(e.element(tile.at.base, n, "i8"))
        else:
            self._prefetch(tile.at.byte(e, self._div(n, tile.row_bytes), self._mod(n, tile.row_bytes)))

    def _constant_lanes(self, pt: Point) -> int:
        """Return the part of a point's position along the lanes that is known at compile time."""
        assert pt.lane is not None
        at = pt.at[pt.lane]
        return at if isinstance(at, int) else pt.group * self.e.lanes

    def find_next_tile(self, load: Op, height: int, paired: bool, in_order: bool) -> NextTile | None:
        """Return the tile that is streamed after this one, if it has the same shape; `height` rows are multiplied with
        each. For a tile that is read in order and followed by its own next iteration the hardware's prefetcher is
        enough on most processors."""
        following = self.layout.next_streamed.get(load)
        if following is None or following[0] not in self.ev.tensors.tiles:
            return None
        streaming = self.target.streaming
        if following[0] is load and in_order and not streaming.in_order:
            return None
        op, shift = following
        e, tile = self.e, self.ev.tensors.tiles[op]
        current = self.ev.tensors.tiles[load]
        strided = tile.dims[-1].stride != 1 and current.dims[-1].stride != 1
        if [(d.extent, d.spread) for d in tile.dims] != [(d.extent, d.spread) for d in current.dims] or strided:
            return None
        at = self.ev.tensors.next_rows.get(op) if self._comes_around(op, load) else None
        at = at or self._shifted(tile, shift)
        rows, columns = tile.dims[0], tile.dims[-1]
        found = NextTile(at, tile.element, rows.extent, columns.extent, columns.spread, current.rows)
        fmas = height * LINE * found.columns // (found.row_bytes * e.lanes * (2 if paired else 1))  # for each line
        if not FEWEST_FMAS <= fmas <= MOST_FMAS or load.result.dtype not in FLOATS:
            return found
        return replace(found, rows_ahead=min(rows.extent, streaming.bytes_ahead // max(1, found.row_bytes)))

    def _comes_around(self, op: Op, load: Op) -> bool:
        """True if the load that is streamed next is one of the next iteration."""
        body = self.layout.ahead[op].body if op in self.layout.ahead else ()
        return op in body and load in body and body.index(op) <= body.index(load)

    # ---- tiles that panels share -------------------------------------------------------------------------------------

    def prefetch_shared(self, nest: Nest, panel: Panel, row: Index, height: int, steps: int) -> Callable[[Index], None]:
        """Prefetch this register block's share of the next tile. The blocks of all panels divide its lines among them:
        spread over the arithmetic of an iteration, no request waits for another. A large share is spread over the
        contraction."""
        assert nest.dot is not None
        _, row_operand, rows = self.operands(nest, nest.dot)
        found = self.layout.shared.get(row_operand.base)
        if found is None or panel is None or rows is None:
            return _nothing
        load, shift = found
        tile = self.ev.tensors.tiles[load]
        rows_dim, columns_dim = tile.dims
        if columns_dim.stride != 1:
            return _nothing
        e, size = self.e, BYTES[tile.element]
        lines = -(-columns_dim.extent * size // LINE)  # of a row
        blocks = -(-rows.extent // height)
        depth = row_operand.contracted.extent if row_operand.contracted is not None else 1
        total = blocks * -(-nest.lane.extent // self.layout.panel) if nest.lane is not None else blocks
        parts = 1 if lines * rows_dim.extent <= BURST * total else max(1, depth // steps)
        wanted = -(-lines * rows_dim.extent // (total * parts))
        each = next((n for n in range(wanted, lines) if lines % n == 0), -(-wanted // lines) * lines)
        block = e.add(e.mul(panel[0], blocks), self._div(row, height))

        def prefetch(part: Index) -> None:
            first = e.mul(e.add(e.mul(block, parts), part), each)
            start, column = self._div(first, lines), self._mod(first, lines)
            for n in range(each):
                line, offset = e.add(start, n // lines), e.mul(e.add(column, n % lines), LINE // size)
                at = e.add(e.mul(line, rows_dim.stride), offset)
                self._prefetch(e.element(tile.base, e.add(self._offset(tile, shift), at), tile.element))

        if parts > 1:
            return lambda k: prefetch(self._div(k, steps))
        prefetch(0)
        return _nothing

    def _div(self, a: Index, b: int) -> Index:
        return a // b if isinstance(a, int) else self.e.op(f"udiv i64 {a}, {b}")

    def _mod(self, a: Index, b: int) -> Index:
        return a % b if isinstance(a, int) else self.e.op(f"urem i64 {a}, {b}")

    # ---- transposed tiles, and strips --------------------------------------------------------------------------------

    def prefetch_next(self, load: Op, points: list[Point]) -> None:
        rows = self.ev.tensors.next_rows.get(load)
        if isinstance(rows, TableRows):
            self._prefetch_looked_up(load, rows, points)
            return
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

    def _prefetch_looked_up(self, load: Op, rows: TableRows, points: list[Point]) -> None:
        """Prefetch the lines that a gather of rows, which are copied, reads at these points in the next iteration."""
        gather, element = self.layout.row_gathers[load], self.ev.tensors.tiles[load].element
        for pt in points:
            if pt.lane is gather.columns and self._constant_lanes(pt) * BYTES[element] % LINE == 0:
                self._prefetch(rows.address(self.e, pt.at[gather.rows], pt.at[gather.columns]))

    def _shifted(self, tile: Tile, shift: tuple[int, ...]) -> Rows:
        """Return the rows of the tile that is shifted so far along each dimension."""
        if tile.table is not None:
            return tile.table
        base = self.e.element(tile.base, self._offset(tile, shift), tile.element)
        return StridedRows(base, tile.dims[0].stride, tile.element)

    def _offset(self, tile: Tile, shift: tuple[int, ...]) -> Index:
        """Return the distance in memory to the tile that is shifted so far along each dimension."""
        offset: Index = 0
        for dim, step in zip(tile.dims, shift, strict=True):
            offset = self.e.add(offset, self.e.mul(dim.stride, step))
        return offset

    def _prefetch(self, pointer: str, level: int = 2) -> None:
        """Prefetch a cache line into a cache of this level."""
        locality = ("i32", str(4 - level))
        self.e.call("void", "llvm.prefetch.p0", ("ptr", pointer), ("i32", "0"), locality, ("i32", "1"))

    def prefetch_ahead(self, next_tile: NextTile | None, row: Index, column: Index, offset: int) -> None:
        """Prefetch the line at a position of the next tile and, again, one that is read soon. `offset` is the part of
        the column that is known at compile time: only the column at which a line begins requests it."""
        if next_tile is not None:
            self._prefetch_line(next_tile, row, column, offset)
            self._prefetch_again(next_tile, row, column, offset)

    def prefetch_end(self, next_tile: NextTile | None, row: Index, end: Index) -> None:
        """Prefetch the line that the columns before `end` end in, where rows are apart: none may begin in it."""
        if next_tile is not None and next_tile.apart and next_tile.spread is None:
            last = self.e.add(end, -1)
            self._prefetch(next_tile.at.address(self.e, row, last))
            if next_tile.rows_ahead:
                self._request_again(next_tile, row, last)

    def _prefetch_line(self, tile: NextTile, row: Index, column: Index, offset: int) -> None:
        at = self._line_at(tile, column, offset)
        if at is not None:
            self._prefetch(tile.at.address(self.e, row, at))

    def _prefetch_again(self, tile: NextTile, row: Index, column: Index, offset: int) -> None:
        at = self._line_at(tile, column, offset) if tile.rows_ahead else None
        if at is not None:
            self._request_again(tile, row, at)

    def _request_again(self, tile: NextTile, row: Index, at: Index) -> None:
        """Prefetch the line that is read `rows_ahead` rows after this one: of this tile, or of the next."""
        e, ahead = self.e, self.e.add(row, tile.rows_ahead)
        inside, behind = e.compare("slt", ahead, tile.rows), e.sub(ahead, tile.rows)
        if isinstance(tile.at, TableRows) or isinstance(tile.current, TableRows):  # a table has no other rows
            behind = e.op(f"select i1 {inside}, i64 0, i64 {behind}")
            ahead = e.op(f"select i1 {inside}, i64 {ahead}, i64 0")
        here, there = tile.current.start(e, ahead), tile.at.start(e, behind)
        start = e.op(f"select i1 {inside}, ptr {here}, ptr {there}")
        self._prefetch(e.element(start, at, tile.element), 1)

    def _line_at(self, tile: NextTile, column: Index, offset: int) -> Index | None:
        """Return the column at which a line begins in memory; None where none begins."""
        if tile.spread is not None:
            if offset * tile.spread.factor % tile.spread.divisor:
                return None
            offset = tile.spread.at(offset)
            column = spread_position(self.e, tile.spread, column)
        return None if offset * BYTES[tile.element] % LINE else column


def _nothing(k: Index) -> None:
    """Prefetch nothing."""
