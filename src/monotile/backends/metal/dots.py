"""Products of tiles with 8x8 simdgroup matrices."""

from __future__ import annotations

from ...errors import DeviceLimit
from ...ir import Op, Value
from .layout import COLUMN, ROW, Shape, scaled
from .msl import type_of
from .points import ZERO, Coordinate, Point, Room
from .staging import Staging, base, squares
from .writer import THREADGROUP_LIMIT

STAGE_LIMIT = THREADGROUP_LIMIT - 1024  # leaves room for what else a statement exchanges
LONG = 256  # contractions from here on are summed in two halves, which loses fewer digits


class Dots(Staging):
    def matrix_dot(self, op: Op, result: Value, addend: Value | None, name: str) -> None:
        """result = addend + a b. Sums are float32; `name` may hold the addend already."""
        a, b = op.operands
        top, temporary = self.top, []
        for operand in (base(a), base(b)):
            if operand in self.staged and operand not in self.elements.rooms:
                if operand is base(b) and not self._fits(operand):
                    continue  # part by part, below
                self.fill(operand)
                temporary.append(operand)
        self.statement(lambda: self._dot(op, result, addend, name))
        for operand in temporary:
            del self.elements.rooms[operand]
        if temporary:
            self.top = top

    def _fits(self, value: Value) -> bool:
        rows, columns = squares(value)
        needs = rows * (columns * value.dtype.bytes + 16)
        return self.plan.early or self.top + needs <= STAGE_LIMIT

    def _dot(self, op: Op, result: Value, addend: Value | None, name: str) -> None:
        self.noted_line()
        (m, k), n = op.operands[0].shape, op.operands[1].shape[1]
        tile = self.elements.in_matrices(result)
        sums = name if tile else self.name("sums")
        rows, columns = self.family.rows_held(m), self.family.columns_held(n)[0]
        sizes = "".join(f"[{size}]" for size in (rows, columns) if size > 1)
        if not tile:
            self.line(f"simdgroup_float8x8 {sums}{sizes};")
        self._start(result if tile else None, sums, m, n, addend)
        b = base(op.operands[1])
        pairs = [sums]
        if k >= LONG and addend is None:
            pairs.append(self.name(f"{sums}_odd"))
            self.line(f"simdgroup_float8x8 {pairs[1]}{sizes};")
            self._start(None, pairs[1], m, n, None)
        if b in self.staged and b not in self.elements.rooms:
            self._in_parts(op, pairs[:1], b)
        else:
            self._multiply(op, pairs, -(-k // 8), "")
        if len(pairs) > 1:
            both = f"{pairs[0]}#.thread_elements()[e] += {pairs[1]}#.thread_elements()[e];"
            self._each_square(m, n, f"UNROLL for (int e = 0; e < 2; ++e) {both}")
        if not tile:
            i, j, e = ("i" if rows > 1 else ""), ("j" if columns > 1 else ""), "e"
            place = "".join(f"[{v}]" for v in (i, j) if v)
            place = place if m > 1 else place.replace("[i]", "[0]")
            place = place if n > 1 else place.replace("[j]", "[0]")
            self.assign(result, name, lambda p: f"{sums}{place}.thread_elements()[{e if n > 1 else '0'}]")
        self.last = None

    def _each_square(self, m: int, n: int, text: str) -> None:
        """A line for every square of sums; # is its index."""
        loops = [("i", self.family.rows_held(m)), ("j", self.family.columns_held(n)[0])]
        index = "".join(f"[{v}]" for v, count in loops if count > 1)
        head = "".join(f"UNROLL for (int {v} = 0; {v} < {count}; ++{v}) " for v, count in loops if count > 1)
        self.line(head + text.replace("#", index))

    def _start(self, result: Value | None, sums: str, m: int, n: int, addend: Value | None) -> None:
        if addend is None:
            self._each_square(m, n, f"{sums}# = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);")
            return
        if result is not None:
            axis = self.axis(addend)
            self.assign(result, sums, lambda p: self.elements.at(addend, p, axis))
            return
        rows, columns = self.family.rows_held(m), self.family.columns_held(n)[0]
        point = self.point(self.family, Shape(max(m, 2), max(n, 2)))
        point = Point(point.row if m > 1 else ZERO, point.column if n > 1 else ZERO)
        self.elements.touched.clear()
        first = self.elements.at(addend, point)
        self.settle()
        place = "".join(f"[{v}]" for v, count in (("i", rows), ("j", columns)) if count > 1)
        loops = [(v, count) for v, count in (("i", rows), ("j", columns), ("e", 2)) if count > 1]
        head = "".join(f"UNROLL for (int {v} = 0; {v} < {count}; ++{v}) " for v, count in loops)
        self.line(f"{head}{sums}{place}.thread_elements()[e] = {first};")

    # ---- multiplying -------------------------------------------------------------------------------------------------

    def _multiply(
        self, op: Op, sums: list[str], count: int, part: str, room: Room | None = None, bound: str = ""
    ) -> None:
        """sums += a b over `count` squares of k; with a `part`, from there on, b being in `room`."""
        a, b = op.operands
        m, n, kind = a.shape[0], b.shape[1], type_of(a)
        rows, columns = self.family.rows_held(m), self.family.columns_held(n)[0]
        held = self._held_matrices(a)
        step = len(sums)
        elements = self.elements
        elements.touched.clear()
        at = "kk" if not part else f"({part} + kk)"
        bodies = []
        for turn in range(step):
            square = at if turn == 0 else f"({at} + 1)"
            inner = "kk" if turn == 0 else "kk + 1"
            odd = turn > 0 and count % 2 == 1
            left = self._left(a, square, inner, held)
            right = self._right(b, square, inner, room)
            bodies.append((left, right, sums[turn], odd))
        self.settle()
        whole = "UNROLL " if held or not self._from_rooms(op, room) else ""
        limit = bound or str(count)
        self.open(
            f"{whole}for (int kk = 0; kk < {limit}; kk += {step})"
            if step > 1
            else f"{whole}for (int kk = 0; kk < {limit}; ++kk)"
        )
        if not held:
            self.line(f"simdgroup_{kind}8x8 left{f'[{rows}]' if rows > 1 else ''};")
        self.line(f"simdgroup_{type_of(b)}8x8 right;")
        for left, right, target, odd in bodies:
            if odd:
                self.open(f"if (kk + 1 < {count})")
            self._turn(left, right, target, held, m, n, rows, columns)
            if odd:
                self.close()
        self.close()

    def _turn(
        self, left: list[str], right: list[str], target: str, held: str, m: int, n: int, rows: int, columns: int
    ) -> None:
        if not held:
            if rows > 1:
                self.unrolled("i", rows)
            for text in left:
                self.line(text)
            if rows > 1:
                self.close()
        if columns > 1:
            self.unrolled("j", columns)
        over = self.family.columns_over
        partly = over > 1 and -(-n // 8) % over != 0
        if partly:
            self.open(f"if ({scaled('8 * sg', 'j' if columns > 1 else '0', 8 * over)} < {n})")
        for text in right:
            self.line(text)
        place = "".join(f"[{v}]" for v, c in (("i", rows), ("j", columns)) if c > 1)
        mine = left[0] if held else "left[i]" if rows > 1 else "left"
        line = f"simdgroup_multiply_accumulate({target}{place}, {mine}, right, {target}{place});"
        self.line(f"UNROLL for (int i = 0; i < {rows}; ++i) {line}" if rows > 1 else line)
        self.close(bool(partly) + (columns > 1))

    def _held_matrices(self, a: Value) -> str:
        """The name of a left operand that is in this simdgroup's registers as matrices."""
        elements = self.elements
        alone = self.family.columns_over == 1 and a in elements.names and elements.in_matrices(a)
        return elements.names[a] if alone and not a.shape[1] % 8 else ""

    def _in_squares(self, value: Value) -> bool:
        """Whether a tile is in threadgroup memory with all of its 8x8 squares."""
        return value in self.elements.rooms and (value in self.staged or not any(n % 8 for n in value.shape))

    def _from_rooms(self, op: Op, room: Room | None) -> bool:
        """Whether both operands are read from memory, so that the loop need not be unrolled."""
        in_memory = [self._in_squares(base(v)) or self._direct(v) for v in op.operands]
        return in_memory[0] and (in_memory[1] or room is not None)

    def _left(self, a: Value, square: str, inner: str, held: str) -> list[str]:
        m, k = a.shape
        if held:
            rows, columns = self.family.rows_held(m), self.family.columns_held(k)[0]
            return [held + ("[i]" if rows > 1 else "") + (f"[{square}]" if columns > 1 else "")]
        target = "left" + ("[i]" if self.family.rows_held(m) > 1 else "")
        row = scaled(
            "8 * sg" if self.family.rows_over > 1 else "0", "i" if "[i]" in target else "0", 8 * self.family.rows_over
        )
        row = row.removeprefix("0 + ")
        if self._in_squares(base(a)) and m > 1:
            return [self._load(target, a, row, _times8(square))]
        direct = self._direct_load(target, a, row, _times8(square)) if m % (8 * self.family.rows_over) == 0 else None
        if direct is not None:
            return [direct]
        # A single k is not spread over lanes: only the first column of the square has it.
        lane = "(fn - 8 * sg)" if self.family.columns_over > 1 else "fn"
        column = f"{_times8(square)} + {lane} + e"
        point = self.point(self.family, Shape(m, 1))
        own = self.family.columns_over == 1
        place = Coordinate(column, self.family if own else None, COLUMN, (square, "e") if own else None)
        text = self.elements.at(a, Point(point.row, place if k > 1 else ZERO))
        text = f"{column} < {k} ? {text} : {type_of(a)}(0)" if k % 8 else text
        return [f"UNROLL for (int e = 0; e < 2; ++e) {target}.thread_elements()[e] = {text};"]

    def _right(self, b: Value, square: str, inner: str, room: Room | None) -> list[str]:
        k, n = b.shape
        over = self.family.columns_over
        j = "j" if self.family.columns_held(n)[0] > 1 else "0"
        column = scaled("8 * sg" if over > 1 else "0", j, 8 * over).removeprefix("0 + ")
        if room is not None:
            return [self._load("right", b, _times8(inner), column, room)]
        if self._in_squares(base(b)) and n > 1:
            return [self._load("right", b, _times8(square), column)]
        direct = self._direct_load("right", b, _times8(square), column)
        if direct is not None:
            return [direct]
        lane = "(fm - 8 * sg)" if self.family.rows_over > 1 else "fm"
        row = f"{_times8(square)} + {lane}"
        own = self.family.rows_over == 1
        place = Coordinate(row, self.family if own else None, ROW, (square,) if own else None)
        index = (j, "e")
        across = Coordinate(self.family.column(index, n), self.family, COLUMN, index)
        text = self.elements.at(b, Point(place if k > 1 else ZERO, across if n > 1 else ZERO))
        tests = ([f"{row} < {k}"] if k % 8 else []) + ([f"{across.text} < {n}"] if n % 8 and n > 1 else [])
        text = f"{' && '.join(tests)} ? {text} : {type_of(b)}(0)" if tests else text
        return [f"UNROLL for (int e = 0; e < 2; ++e) right.thread_elements()[e] = {text};"]

    def _load(self, target: str, operand: Value, row: str, column: str, room: Room | None = None) -> str:
        """A square from threadgroup memory."""
        room = room or self.elements.rooms[base(operand)]
        if room not in self.elements.touched:
            self.elements.touched.append(room)
        turned = operand.kind == "trans"
        first, second = (column, row) if turned else (row, column)
        return self._square(target, _offset(room.name, first, str(room.width), second), str(room.width), operand)

    def _direct(self, operand: Value) -> bool:
        """Whether whole squares can be loaded from device memory: no bounds to test, columns side by side."""
        value, op = base(operand), base(operand).op
        if op is None or op.kind != "load" or value in self.elements.names or op not in self.elements.slices:
            return False
        if len(value.shape) != 2 or value.shape[0] % 8 or value.shape[1] % 8 or any(op.attrs["checked"]):
            return False
        dims = [n for n, extent in enumerate(op.attrs["extents"]) if extent is not None]
        return bool(op.attrs["tensor"].unit == dims[1])

    def _direct_load(self, target: str, operand: Value, row: str, column: str) -> str | None:
        if not self._direct(operand) or min(operand.shape) == 1:
            return None
        op = base(operand).op
        assert op is not None
        tensor = self.elements.tensors[op.attrs["tensor"].index]
        dims = [n for n, extent in enumerate(op.attrs["extents"]) if extent is not None]
        stride = tensor.strides[dims[0]].removesuffix("L")
        turned = operand.kind == "trans"
        first, second = (column, row) if turned else (row, column)
        return self._square(target, _offset(self.elements.slices[op][0], first, stride, second), stride, operand)

    def _square(self, target: str, place: str, stride: str, operand: Value) -> str:
        turned = operand.kind == "trans"
        if self.elements.memory_type(operand.dtype) != type_of(operand):
            self.elements.helpers.add("load_square")
            return f"load_square({target}, {place}, {stride}, lane, {str(turned).lower()});"
        return f"simdgroup_load({target}, {place}, {stride}{', ulong2(0), true' if turned else ''});"

    # ---- a right operand that does not fit ---------------------------------------------------------------------------

    def _in_parts(self, op: Op, sums: list[str], b: Value) -> None:
        """Stages as much of k at a time as fits."""
        turned = op.operands[1].kind == "trans"
        rows, columns = squares(b)
        depth, wide, size = (columns, rows, b.dtype.bytes) if turned else (rows, columns, b.dtype.bytes)
        per, fixed = (wide * size, 16 * wide) if turned else (wide * size + 16, 0)
        step = (STAGE_LIMIT - self.top - fixed) // (8 * per) * 8
        if step < 8:
            raise DeviceLimit(
                f"{self.title} needs {self.top + 8 * per + fixed} bytes of threadgroup memory; use smaller blocks"
            )
        top = self.top
        room = self.room_for(b, wide if turned else step, step if turned else wide)
        held = "" if self._in_squares(base(op.operands[0])) else "UNROLL "
        self.open(f"{held}for (int k0 = 0; k0 < {depth}; k0 += {step})")
        self.reads.append((room.start, room.end))  # by the turn before
        self.fill_from_memory(
            b, room, wide if turned else step, step if turned else wide, *(("", "k0") if turned else ("k0", ""))
        )
        self.will_read(room)
        bound = f"min({step // 8}, ({depth} - k0) / 8)" if depth % step else str(step // 8)
        self._multiply(op, sums, step // 8, "k0 / 8", room, bound)
        self.close()
        self.top = top


def _times8(square: str) -> str:
    return {"0": "0"}.get(square, f"8 * {square}")


def _offset(pointer: str, row: str, stride: str, column: str) -> str:
    terms = [pointer]
    if row != "0":
        terms.append(f"({row}) * {stride}" if " " in row else f"{row} * {stride}")
    if column != "0":
        terms.append(column)
    return " + ".join(terms)
