"""Build LLVM IR text: typed registers, counted loops, branches and variables.

Indices are i64 and may be Python ints, which fold as they are combined. A `Reg` is a typed value that is either
uniform (one scalar for all lanes) or a vector of `lanes` elements; arithmetic on uniform registers stays scalar until
it meets a vector.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from .shared_code import CodePart, SharedCode

Index = int | str
IMPURE = ("load", "call")  # instructions that may give another result the next time


@dataclass(frozen=True)
class Reg:
    text: str
    type: str  # float, i32, i64, i1
    vector: bool = False


@dataclass(frozen=True)
class Var:
    """A mutable variable on the stack, which LLVM turns into registers."""

    name: str
    type: str


def float_literal(value: float) -> str:
    """Spell a float constant as LLVM does: the bits of the double equal to it."""
    (single,) = struct.unpack("<f", struct.pack("<f", value)) if abs(value) < 3.5e38 or value != value else (value,)
    return f"0x{struct.unpack('<Q', struct.pack('<d', single))[0]:016X}"


class Emitter:
    """Build the text of one function."""

    def __init__(self, lanes: int, *, has_scalef: bool = False, has_half: bool = False) -> None:
        self.lanes = lanes
        self.has_scalef = has_scalef  # the processor has VSCALEFPS
        self.has_half = has_half  # and converts vectors of float16
        self.declarations: set[str] = set()
        self.entry: list[str] = []
        self.constants: dict[str, str] = {}  # names of constants in memory, by type and value
        self.lines: list[str] = []
        self.sums: dict[str, tuple[str, int]] = {}  # indices that were made by adding a constant to another
        self.parts: list[CodePart] = []  # that may share code with others
        self._depth = 0  # of the part that is emitted
        self.current = "entry"
        self._count = 0
        self._known: list[dict[str, str]] = [
            {}
        ]  # registers of pure instructions, by loop or branch; the innermost last

    # ---- text --------------------------------------------------------------------------------------------------------

    def fresh(self, stem: str = "v") -> str:
        self._count += 1
        return f"%{stem}{self._count}"

    def op(self, text: str) -> str:
        """Append an instruction and return its result. The same instruction again is the same register wherever the
        first one has run: LLVM would take as long to find that out as to do anything else."""
        return self._result(text) if text.startswith(IMPURE) else self._once(text)

    def _once(self, text: str) -> str:
        for known in self._known:
            if text in known:
                return known[text]
        self._known[-1][text] = name = self._result(text)
        return name

    def _result(self, text: str) -> str:
        name = self.fresh()
        self.lines.append(f"  {name} = {text}")
        return name

    def do(self, text: str) -> None:
        self.lines.append(f"  {text}")

    def label(self) -> str:
        self._count += 1
        return f"L{self._count}"

    def place(self, label: str) -> None:
        self.lines.append(f"{label}:")
        self.current = label

    def jump(self, label: str) -> None:
        self.do(f"br label %{label}")

    def branch(self, condition: str, yes: str, no: str) -> None:
        self.do(f"br i1 {condition}, label %{yes}, label %{no}")

    def call(self, result: str, name: str, *args: tuple[str, str], flags: str = "") -> str:
        """Call an intrinsic; arguments are (type, value)."""
        self.declarations.add(f"declare {result} @{name}({', '.join(t for t, _ in args)})")
        text = f"call {flags + ' ' if flags else ''}{result} @{name}({', '.join(f'{t} {v}' for t, v in args)})"
        if result == "void":
            self.do(text)
            return ""
        return self.op(text)

    def constant(self, text: str) -> str:
        """Return the name of a constant in memory, given its type and value."""
        return self.constants.setdefault(text, f"@constant{len(self.constants)}")

    # ---- i64 indices -------------------------------------------------------------------------------------------------

    def add(self, a: Index, b: Index) -> Index:
        if isinstance(a, int) and isinstance(b, int):
            return a + b
        if a == 0 or b == 0:
            return b if a == 0 else a
        result = self.op(f"add nsw i64 {a}, {b}")
        if isinstance(a, str) and isinstance(b, int):
            self.sums[result] = a, b
        return result

    def base_and_offset(self, index: Index) -> tuple[Index, int]:
        """Return an index as a sum of one that is known at run time, or 0, and a constant."""
        return (0, index) if isinstance(index, int) else self.sums.get(index, (index, 0))

    def sub(self, a: Index, b: Index) -> Index:
        if isinstance(a, int) and isinstance(b, int):
            return a - b
        return a if b == 0 else self.op(f"sub nsw i64 {a}, {b}")

    def mul(self, a: Index, b: Index) -> Index:
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        if a == 0 or b == 0:
            return 0
        if a == 1 or b == 1:
            return b if a == 1 else a
        return self.op(f"mul nsw i64 {a}, {b}")

    def compare(self, predicate: str, a: Index, b: Index) -> str:
        return self.op(f"icmp {predicate} i64 {a}, {b}")

    def extreme(self, which: str, a: Index, b: Index) -> Index:
        """Return the larger ("smax") or the smaller ("smin") of two indices."""
        return self.call("i64", f"llvm.{which}.i64", ("i64", str(a)), ("i64", str(b)))

    def all(self, conditions: list[str]) -> str | None:
        result: str | None = None
        for condition in conditions:
            result = condition if result is None else self.op(f"and i1 {result}, {condition}")
        return result

    # ---- memory ------------------------------------------------------------------------------------------------------

    def element(self, pointer: str, index: Index, type_: str) -> str:
        return pointer if index == 0 else self.op(f"getelementptr {type_}, ptr {pointer}, i64 {index}")

    def load(self, pointer: str, type_: str, align: int) -> str:
        return self.op(f"load {type_}, ptr {pointer}, align {align}")

    def load_once(self, pointer: str, type_: str, align: int) -> str:
        """Load what does not change while the same register is in use for it."""
        return self._once(f"load {type_}, ptr {pointer}, align {align}")

    def store(self, value: str, pointer: str, type_: str, align: int) -> None:
        self.do(f"store {type_} {value}, ptr {pointer}, align {align}")

    # ---- variables, loops, branches ----------------------------------------------------------------------------------

    def var(self, type_: str, initial: str) -> Var:
        name = self.fresh("p")
        self.entry.append(f"  {name} = alloca {type_}")
        variable = Var(name, type_)
        self.set(variable, initial)
        return variable

    def get(self, variable: Var) -> str:
        return self.op(f"load {variable.type}, ptr {variable.name}")

    def set(self, variable: Var, value: str) -> None:
        self.do(f"store {variable.type} {value}, ptr {variable.name}")

    def loop(self, low: Index, high: Index, step: int, body: Callable[[Index], None]) -> None:
        """Emit `for i in range(low, high, step): body(i)`, without a loop if it runs once."""
        if isinstance(low, int) and isinstance(high, int):
            if low >= high:
                return
            if low + step >= high:
                body(low)
                return
        before, head, end = self.current, self.label(), self.label()
        if isinstance(low, int) and isinstance(high, int):
            self.jump(head)
        else:
            self.branch(self.compare("slt", low, high), head, end)
        self.place(head)
        self._known.append({})
        counter, slot = self.fresh("i"), len(self.lines)
        self.lines.append("")
        body(counter)
        following = self.add(counter, step)
        self.branch(self.compare("slt", following, high), head, end)
        self.lines[slot] = f"  {counter} = phi i64 [ {low}, %{before} ], [ {following}, %{self.current} ]"
        self._known.pop()
        self.place(end)

    def when(self, condition: str, yes: Callable[[], None], no: Callable[[], None] | None = None) -> None:
        then, end = self.label(), self.label()
        other = self.label() if no else end
        self.branch(condition, then, other)
        for label, side in ((then, yes), (other, no)):
            if side is not None:
                self.place(label)
                self._known.append({})
                side()
                self._known.pop()
                self.jump(end)
        self.place(end)

    def part(self, emit: Callable[[], None]) -> None:
        """Emit a part of the function that may share its code with another one (shared_code.py). It leaves its results
        in memory, and computes again what others have computed: then it is the same text wherever it is."""
        start, end = self.label(), self.label()
        self.jump(start)
        first = len(self.lines)
        self.place(start)
        known, self._known = self._known, [{}]
        self._depth += 1
        emit()
        self._depth -= 1
        self._known = known
        self.parts.append(CodePart(first, len(self.lines), self._depth))
        self.jump(end)
        self.place(end)

    # ---- registers ---------------------------------------------------------------------------------------------------

    def vector_type(self, type_: str) -> str:
        return f"<{self.lanes} x {type_}>"

    def type_of(self, reg: Reg) -> str:
        return self.vector_type(reg.type) if reg.vector else reg.type

    def number(self, value: float | int | bool, type_: str) -> Reg:
        if type_ == "float":
            return Reg(float_literal(float(value)), type_)
        return Reg(str(bool(value)).lower() if type_ == "i1" else str(int(value)), type_)

    def splat(self, reg: Reg) -> Reg:
        """Broadcast a uniform register to a vector."""
        if reg.vector:
            return reg
        if not reg.text.startswith("%"):
            return Reg(f"splat ({reg.type} {reg.text})", reg.type, True)
        whole = self.vector_type(reg.type)
        first = self.op(f"insertelement {whole} poison, {reg.type} {reg.text}, i64 0")
        mask = f"<{self.lanes} x i32> zeroinitializer"
        return Reg(self.op(f"shufflevector {whole} {first}, {whole} poison, {mask}"), reg.type, True)

    def alike(self, *regs: Reg) -> tuple[Reg, ...]:
        """Broadcast the uniform registers if any of them is a vector."""
        return tuple(self.splat(r) for r in regs) if any(r.vector for r in regs) else regs

    def binary(self, instruction: str, a: Reg, b: Reg, result: str | None = None) -> Reg:
        a, b = self.alike(a, b)
        return Reg(self.op(f"{instruction} {self.type_of(a)} {a.text}, {b.text}"), result or a.type, a.vector)

    def unary(self, instruction: str, a: Reg) -> Reg:
        return Reg(self.op(f"{instruction} {self.type_of(a)} {a.text}"), a.type, a.vector)

    def convert(self, instruction: str, a: Reg, type_: str) -> Reg:
        to = self.vector_type(type_) if a.vector else type_
        return Reg(self.op(f"{instruction} {self.type_of(a)} {a.text} to {to}"), type_, a.vector)

    def intrinsic(self, name: str, *args: Reg, result: str | None = None, flags: str = "") -> Reg:
        """Call llvm.NAME on registers of one type, with the suffix for that type."""
        args = self.alike(*args)
        first = args[0]
        out = Reg("", result or first.type, first.vector)
        suffix = self.suffix(out) if result is None else f"{self.suffix(out)}.{self.suffix(first)}"
        typed = [(self.type_of(a), a.text) for a in args]
        return Reg(self.call(self.type_of(out), f"llvm.{name}.{suffix}", *typed, flags=flags), out.type, out.vector)

    def suffix(self, reg: Reg) -> str:
        short = "f32" if reg.type == "float" else reg.type
        return f"v{self.lanes}{short}" if reg.vector else short

    def fma(self, a: Reg, b: Reg, c: Reg) -> Reg:
        return self.intrinsic("fma", a, b, c)

    def select(self, condition: Reg, yes: Reg, no: Reg) -> Reg:
        yes, no = self.alike(yes, no)
        if condition.vector:
            yes, no = self.splat(yes), self.splat(no)
        kind = self.type_of(yes)
        text = f"select {self.type_of(condition)} {condition.text}, {kind} {yes.text}, {kind} {no.text}"
        return Reg(self.op(text), yes.type, yes.vector)

    def shuffle(self, a: str, b: str, type_: str, picks: list[int]) -> str:
        mask = ", ".join(f"i32 {p}" for p in picks)
        kind = self.vector_type(type_)
        return self.op(f"shufflevector {kind} {a}, {kind} {b}, <{len(picks)} x i32> <{mask}>")

    def iota(self) -> Reg:
        return Reg("<" + ", ".join(f"i32 {i}" for i in range(self.lanes)) + ">", "i32", True)

    def share(self, arguments: dict[str, str], attributes: str) -> list[str]:
        """Let equal parts share code; return the texts of the functions that they become."""
        return SharedCode(self.entry, self.lines, self.parts, arguments, attributes).functions

    def function(self, header: str) -> str:
        """Return the text of the finished function."""
        return "\n".join([f"{header} {{", "entry:", *self.entry, *self.lines, "}"]) + "\n"
