"""Gives every memory hook in LLVM's text the line of the shader it stands on."""

from __future__ import annotations

import re

HOOK = re.compile(
    r"call void @__asan_(load|store)(\d+|N)_noabort\(i64 ([^,)]+)(?:, i64 ([^)]+))?\)(.*)$|"
    r"call ptr @__asan_(memcpy|memmove|memset)\((.*?)\)(, !dbg.*| #.*|)$"
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


class Lines:
    """Lines of the shader by debug location; inlined library code counts as the line that called it."""

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
    lines = Lines(text, file)

    def replace(match: re.Match[str]) -> str:
        tail = match[5] if match[1] else match[8]
        location = DEBUG.search(tail)
        line = lines.of(location[1]) if location else 0
        if match[1]:
            size = match[4] if match[2] == "N" else match[2]
            return f"call void @mt_{match[1]}(i64 {match[3]}, i64 {size}, i32 {line}){tail}"
        name = "memset" if match[6] == "memset" else "memcpy"
        return f"call ptr @mt_{name}({match[7]}, i32 {line}){tail}"

    out = [HOOK.sub(replace, line) if "@__asan_" in line else line for line in text.splitlines()]
    kept = [line for line in out if not re.match(r"declare .*@__asan_(load|store|mem)", line)]
    return "\n".join(kept) + DECLARATIONS
