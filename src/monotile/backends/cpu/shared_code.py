"""Shared code: parts of a function that differ in what they read alone become one function.

A loop that is split, and whose body has a case for each kind of block, repeats its nests: masked attention has six
copies of the dot with the values. LLVM would compile each of them. A part begins at a label and leaves its results in
memory, so it can be a function; registers of others that it reads are its parameters.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import chain

LEAST = 80  # lines of a part that are worth a call
LABEL = re.compile(r"^L\d+(?=:)", re.MULTILINE)
NAME = re.compile(r"%[\w.]+")
RESULT = re.compile(r"  (%[\w.]+) = (.*)")
SCALAR = re.compile(r"\b(?:ptr|float|i64|i32|i16|i8|i1)\b")
EVERYWHERE = ("%ones", "%few", "%every")  # registers that each function makes for itself (vectors.py)
OUTSIDE = -1


@dataclass(frozen=True)
class CodePart:
    """Lines of a function: from a label up to the jump behind the part."""

    start: int
    end: int
    depth: int  # in how many other parts it is


@dataclass(frozen=True)
class NumberedCode:
    """A part with numbers for names: equal for parts that can share code."""

    parameters: tuple[str, ...]  # types of registers of others
    variables: tuple[str, ...]  # types of variables that no other part has
    body: str


def scalar_type(instruction: str) -> str | None:
    """Return the type of an instruction's result; None for a vector."""
    kind, _, rest = instruction.partition(" ")
    if kind in ("alloca", "getelementptr", "icmp", "fcmp"):
        type_ = "i1" if kind in ("icmp", "fcmp") else "ptr"
        return type_ if kind == "alloca" or "<" not in rest else None
    if kind == "select":
        rest = rest.partition(", ")[2]
    elif kind == "extractelement":
        rest = rest.partition(" x ")[2]
    elif kind != "call":
        rest = rest.rpartition(" to ")[2]
    found = SCALAR.search(rest)
    return found[0] if found is not None and "<" not in rest[: found.start()] else None


class SharedCode:
    """Replace the parts of a function that others equal by calls; `functions` has the texts of what they call."""

    def __init__(
        self, entry: list[str], lines: list[str], parts: list[CodePart], arguments: dict[str, str], attributes: str
    ) -> None:
        self.functions: list[str] = []
        self._entry, self._lines, self._attributes = entry, lines, attributes
        self._types, self._variables = dict(arguments), dict[str, str]()
        for depth in sorted({part.depth for part in parts}, reverse=True):  # what is inside others first
            self._parts = self._candidates([part for part in parts if part.depth == depth])
            if self._parts and not self._variables:
                self._read_results()
            self._users = self._find_users() if self._parts else {}
            self._share()
        lines[:] = [line for line in lines if line]

    def _candidates(self, parts: list[CodePart]) -> list[CodePart]:
        """Return the parts that are long enough and have as many lines as another one."""
        lengths = [sum(map(bool, self._lines[part.start : part.end])) for part in parts]
        counts = Counter(lengths)
        return [part for part, n in zip(parts, lengths, strict=True) if n >= LEAST and counts[n] > 1]

    def _read_results(self) -> None:
        """Find the types of scalar registers, and of the function's variables."""
        for line in chain(self._entry, self._lines):
            match = RESULT.match(line)
            type_ = scalar_type(match[2]) if match is not None else None
            if match is not None and type_ is not None:
                self._types[match[1]] = type_
                if match[2].startswith("alloca "):
                    self._variables[match[1]] = match[2].removeprefix("alloca ")

    def _find_users(self) -> dict[str, int]:
        """Return for each name the number of the part that has it, or OUTSIDE."""
        users: dict[str, int] = {}
        at = 0
        for number, part in enumerate(self._parts):
            users |= dict.fromkeys(NAME.findall("\n".join(self._lines[at : part.start])), OUTSIDE)
            for name in set(NAME.findall("\n".join(self._lines[part.start : part.end]))):
                users[name] = number if users.get(name, number) == number else OUTSIDE
            at = part.end
        return users | dict.fromkeys(NAME.findall("\n".join(self._lines[at:])), OUTSIDE)

    def _share(self) -> None:
        found: dict[NumberedCode, list[tuple[CodePart, list[str]]]] = {}
        for number, part in enumerate(self._parts):
            form, arguments = self._form(number, part)
            if form is not None:
                found.setdefault(form, []).append((part, arguments))
        calls: list[tuple[CodePart, str]] = []
        for form, copies in found.items():
            if len(copies) < 2:
                continue
            name = f"@part{len(self.functions)}"
            self.functions.append(self._function(name, form))
            for part, arguments in copies:
                typed = ", ".join(f"{t} {a}" for t, a in zip(form.parameters, arguments, strict=True))
                calls.append((part, f"  call void {name}({typed})"))
        for part, call in calls:  # empty lines keep the numbers of others as they are
            self._lines[part.start + 1 : part.end] = [call] + [""] * (part.end - part.start - 2)

    def _form(self, number: int, part: CodePart) -> tuple[NumberedCode | None, list[str]]:
        """Return a part with its names numbered, and the names of its parameters; None if others read its registers or
        it reads vectors of others."""
        lines = [line for line in self._lines[part.start : part.end] if line]
        first = f"%{lines[0][:-1]}"  # which the line before jumps to
        made = {match[1] for line in lines if (match := RESULT.match(line))}
        if any(self._users[name] != number for name in made):
            return None, []
        made |= {f"%{line[:-1]}" for line in lines if line.endswith(":")}
        numbers: dict[str, str] = {name: name for name in EVERYWHERE} | {first: "%first"}
        parameters, variables = list[str](), list[str]()

        def number_of(name: str) -> str:
            if name not in numbers:
                own = name in self._variables and self._users[name] == number
                kind, known = ("v", variables) if own else ("a", parameters)
                if name in made:
                    numbers[name] = f"%n{len(numbers)}"
                else:
                    numbers[name] = f"%{kind}{len(known)}"
                    known.append(name)
            return numbers[name]

        body = NAME.sub(lambda match: number_of(match[0]), "\n".join(lines))
        body = LABEL.sub(lambda match: number_of(f"%{match[0]}")[1:], body)
        if not all(name in self._types for name in parameters):
            return None, []
        types = tuple(self._types[name] for name in parameters)
        return NumberedCode(types, tuple(self._variables[name] for name in variables), body), parameters

    def _function(self, name: str, form: NumberedCode) -> str:
        typed = ", ".join(f"{type_} %a{n}" for n, type_ in enumerate(form.parameters))
        variables = [f"  %v{n} = alloca {type_}" for n, type_ in enumerate(form.variables)]
        masks = [line for line in self._entry if line.startswith(tuple(f"  {name} =" for name in EVERYWHERE))]
        return "\n".join(
            [
                f"define internal void {name}({typed}) noinline {self._attributes} {{",
                "entry:",
                *variables,
                *(masks if "%every" in form.body else []),
                "  br label %first",
                form.body,
                "  ret void",
                "}\n",
            ]
        )
