"""Checks wgmma's descriptors in machine code for sm_90, without a GPU.

A wgmma reads its operands in shared memory by 64-bit descriptors, which the assembler builds in uniform registers: the
tile's address in the low word, its strides and swizzle in the high word. ptxas 12.8 was seen to build some from a wrong
register, and such an instruction then reads outside shared memory. Here constants are propagated through the uniform
registers of a kernel's SASS: every high word that is found must be one that the PTX asks for, every address one inside
the kernel's shared memory. What depends on memory or on a loop is unknown and not checked; `Report` counts both."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORD = 2**32
SHARED_BASE = 0x400  # what CUDA keeps for itself at the beginning of shared memory
LINE = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(?:@(!?U?P\w+)\s+)?(\S+)\s*([^;]*);")
DESCRIPTOR = re.compile(r"gdesc\[UR(\d+)\]")
PTX_CONSTANT = re.compile(r"(?:or\.b64|add\.s64)\s+%rd\d+, %rd\d+, (-?\d+);")

Words = dict[str, int | None]  # registers with their values; None: unknown


@dataclass(frozen=True)
class Instruction:
    address: int
    guard: str
    op: str
    operands: tuple[str, ...]


@dataclass
class Report:
    wrong: list[str] = field(default_factory=list)
    checked: int = 0  # descriptors whose high word was found
    unknown: int = 0


def check(made: Any) -> Report:
    """Check what Triton compiled for sm_90."""
    program = [
        Instruction(int(a, 16), g or "", op, _split(rest)) for a, g, op, rest in LINE.findall(disassembled(made))
    ]
    wanted = {(int(c) % 2**64) >> 32 for c in PTX_CONSTANT.findall(made.asm["ptx"])}
    report = Report()
    for instruction, words in _states(program):
        if instruction.op.startswith("HGMMA"):
            _check_wgmma(instruction, words, wanted, made.metadata.shared, report)
    return report


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",")) if text.strip() else ()


def _check_wgmma(found: Instruction, words: Words, wanted: set[int], shared: int, report: Report) -> None:
    """The operands of gdesc[URn] are described in URn and URn+1 (left) and URn+2 and URn+3 (right); a left operand in
    registers leaves the first two unused."""
    place = next(n for n, operand in enumerate(found.operands) if operand.startswith("gdesc"))
    match = DESCRIPTOR.match(found.operands[place])
    assert match is not None
    first = int(match[1])
    for low_register in (first, first + 2) if place == 1 else (first + 2,):
        low, high = words.get(f"UR{low_register}"), words.get(f"UR{low_register + 1}")
        if high is None:
            report.unknown += 1
            continue
        report.checked += 1
        where = f"/*{found.address:04x}*/ {found.op} with descriptor {high:#010x}:{low if low is None else hex(low)}"
        if high not in wanted:
            report.wrong.append(f"{where}: the PTX has no such strides")
        elif low is not None and not SHARED_BASE <= (low & 0x3FFF) << 4 < SHARED_BASE + shared:
            report.wrong.append(f"{where}: outside shared memory")


def _states(program: list[Instruction]) -> list[tuple[Instruction, Words]]:
    """Every instruction that can be reached, with what is known of the registers before it."""
    index = {found.address: n for n, found in enumerate(program)}
    before: dict[int, Words] = {0: {"URZ": 0, "RZ": 0}}
    todo = [0]
    while todo:
        at = todo.pop()
        after = _execute(program[at], before[at])
        for following in _successors(program, index, at):
            known = before.get(following)
            if known is None:
                before[following] = dict(after)
                todo.append(following)
                continue
            changed = [r for r in known if known[r] is not None and after.get(r) != known[r]]
            for register in changed:
                known[register] = None
            missing = [r for r in after if r not in known]
            for register in missing:  # not written on another path
                known[register] = after[register] if register not in known else None
            if changed or missing:
                todo.append(following)
    return [(program[at], words) for at, words in sorted(before.items())]


def _successors(program: list[Instruction], index: dict[int, int], at: int) -> list[int]:
    found = program[at]
    targets = [int(o, 16) for o in found.operands if o.startswith("0x")] if "BRA" in found.op else []
    ends = (
        found.op in ("EXIT", "BRA", "RET.REL.NODEC") and not found.guard and not any("P" in o for o in found.operands)
    )
    following = [index[t] for t in targets if t in index]
    return following + ([at + 1] if not ends and at + 1 < len(program) else [])


def _execute(found: Instruction, before: Words) -> Words:
    """Return what is known after an instruction."""
    if not found.operands or found.op.startswith(("ST", "RED", "BAR")):
        return before
    match = re.fullmatch(r"(U?R)(\d+)(?:\.reuse)?", found.operands[0])
    if match is None:
        return before
    after = dict(before)
    values = _computed(found, before, after)
    width = 4 if found.op.startswith(("LD", "HGMMA")) else 2 if ".64" in found.op or ".WIDE" in found.op else 1
    for n in range(width):
        register, value = f"{match[1]}{int(match[2]) + n}", values[n] if n < len(values) else None
        after[register] = value if not found.guard or before.get(register) == value else None
    return after


def _computed(found: Instruction, words: Words, after: Words) -> list[int | None]:
    """Return the words of an instruction's result; carries go to `after`."""
    op, (_, *rest) = found.op, found.operands
    sources = [o for o in rest if not re.fullmatch(r"!?U?P(T|\d)", o)]
    values = [_value(o, words) for o in sources]
    if op in ("UIADD3", "UIADD3.X"):
        carries = [o for o in rest if re.fullmatch(r"UP\d", o)]
        carry = words.get(carries[0], 0) or 0 if op == "UIADD3.X" and carries else 0
        if op == "UIADD3" and carries:  # of an unknown address: no carry, addresses are small
            after[carries[0]] = 0 if None in values else int(sum(v or 0 for v in values) >= WORD)
        return [None if None in values else (sum(v or 0 for v in values) + carry) % WORD]
    if op == "UIADD3.64":
        pairs = [_pair(o, words) for o in sources]
        lows, highs = [p[0] for p in pairs], [p[1] for p in pairs]
        carry = 0 if None in lows else sum(v or 0 for v in lows) // WORD
        return [
            None if None in lows else sum(v or 0 for v in lows) % WORD,
            None if None in highs else (sum(v or 0 for v in highs) + carry) % WORD,
        ]
    if op == "S2UR":
        return [0 if rest[0] == "SR_CgaCtaId" else None]
    if None in values:
        return [None]
    return [_of_known(op, [v or 0 for v in values])]


def _of_known(op: str, values: list[int]) -> int | None:
    a, b, c = [*values, 0, 0, 0][:3]
    if op in ("UMOV", "MOV", "R2UR"):
        return a
    if op == "IMAD.MOV.U32":
        return c
    if op == "USHF.R.U32.HI":
        return c >> b
    if op == "USHF.L.U32":
        return (a << b) % WORD
    if op == "USGXT.U32":
        return a % 2**b
    if op == "ULEA" and len(values) == 3:
        return ((a << c) + b) % WORD
    if op == "ULOP3.LUT" and len(values) >= 4:
        bits = ((values[3] >> ((a >> n & 1) * 4 + (b >> n & 1) * 2 + (c >> n & 1))) & 1 for n in range(32))
        return sum(bit << n for n, bit in enumerate(bits))
    return None


def _pair(operand: str, words: Words) -> tuple[int | None, int | None]:
    """Return the two words of a 64-bit operand."""
    name = operand.lstrip("-")
    if not re.fullmatch(r"UR\d+", name):
        value = _value(name, words) or 0
        low, high = value, 0
    else:
        found = words.get(name), words.get(f"UR{int(name[2:]) + 1}")
        if found[0] is None or found[1] is None:
            return (None, None) if operand.startswith("-") else found
        low, high = found[0], found[1]
    if operand.startswith("-"):
        value = -(high * WORD + low) % WORD**2
        low, high = value % WORD, value // WORD
    return low, high


def _value(operand: str, words: Words) -> int | None:
    operand = operand.removesuffix(".reuse")
    negative, name = operand.startswith("-"), operand.lstrip("-")
    if re.fullmatch(r"0x[0-9a-f]+|\d+", name):
        value: int | None = int(name, 0)
    else:
        value = words.get(name) if name not in ("URZ", "RZ") else 0
    return value if value is None or not negative else -value % WORD


def disassembled(made: Any) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        done = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True)
    return done.stdout
