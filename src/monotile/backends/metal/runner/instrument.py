"""Add the shader's line to every memory hook in LLVM IR."""

from __future__ import annotations

import re

HOOK = re.compile(
    r"call (void|ptr) @__asan_(load|store|memcpy|memmove|memset)(\d+|N|)(?:_noabort)?\((.*?)\)((?: #\d+)?(?:, !.*)?)$"
)
DEBUG = re.compile(r"!dbg !(\d+)")
NODE = re.compile(
    r"^!(\d+) = (?:distinct )?!(DILocation|DIFile|DISubprogram|DILexicalBlock|DILexicalBlockFile)\((.*)\)$"
)
DECLARATIONS = """
declare void @mt_load(i64, i64, i32)
declare void @mt_store(i64, i64, i32)
declare ptr @mt_memcpy(ptr, ptr, i64, i32)
declare ptr @mt_memset(ptr, i32, i64, i32)
"""


class DebugLines:
    """Maps debug locations to lines of the shader; inlined library code has the line that called it."""

    def __init__(self, text: str, file: str) -> None:
        self.nodes: dict[str, tuple[str, str]] = {}
        for line in text.splitlines():
            if line.startswith("!") and (match := NODE.match(line)):
                self.nodes[match[1]] = (match[2], match[3])
        name = f'filename: "{file}"'
        self.files = {key for key, (kind, body) in self.nodes.items() if kind == "DIFile" and name in body}

    def of(self, location: str) -> int:
        while location in self.nodes:
            body = self.nodes[location][1]
            if self._in_shader(_field(body, "scope")):
                return int(re.search(r"line: (\d+)", body)[1]) if "line: " in body else 0  # type: ignore[index]
            location = _field(body, "inlinedAt")
        return 0

    def _in_shader(self, scope: str) -> bool:
        return scope in self.nodes and _field(self.nodes[scope][1], "file") in self.files


def _field(body: str, name: str) -> str:
    match = re.search(rf"\b{name}: !(\d+)", body)
    return match[1] if match else ""


def add_lines(text: str, file: str) -> str:
    """Return LLVM IR in which every hook call passes its line. An access that the compiler merged from several has no
    line of its own and gets that of the code before it."""
    lines, recent, out = DebugLines(text, file), 0, []
    for line in text.splitlines():
        if line.startswith("define "):
            recent = 0
        location = DEBUG.search(line)
        recent = lines.of(location[1]) or recent if location else recent
        if "@__asan_" not in line:
            out.append(line)
        elif not line.startswith("declare "):
            out.append(HOOK.sub(lambda match, at=recent: _with_line(match, at), line))  # type: ignore[misc]
    return "\n".join(out) + DECLARATIONS


def _with_line(match: re.Match[str], line: int) -> str:
    result, name, size, arguments, tail = match.groups()
    name = name.replace("memmove", "memcpy")
    count = f", i64 {size}" if size.isdigit() else ""
    return f"call {result} @mt_{name}({arguments}{count}, i32 {line}){tail}"
