"""The recorded form of generated text: a line for each case and stage with two digests and a count of what is in it.

`text` is the digest of the text as it is; `code` is the digest of the text with local names replaced by numbers, so
that a rename changes the first alone. The counts show in review what a change of code did.

    python tests/golden/snapshot.py               compare with golden.txt, report what differs
    python tests/golden/snapshot.py --refresh     write golden.txt anew
    python tests/golden/snapshot.py --texts DIR   also write every text to DIR, to be compared with diff -r
"""

from __future__ import annotations

import argparse
import ast
import builtins
import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

RECORD = Path(__file__).with_name("golden.txt")
# What is counted in a text, by stage.
COUNTED = {
    "ir": r"\b(dot|load|gather|store|reduce|for|if|exp2)\b\(",
    "llvm": r"\b(call|load|store|br|phi|fmul|fadd|shufflevector)\b",
    "metal": r"\b(simdgroup_multiply_accumulate|threadgroup_barrier|exp2|for|if)\b",
    "triton": r"\b(tl\.dot|tl\.load|tl\.store|tl\.exp2|for|if)\b",
    "gluon": r"\b(warpgroup_mma|async_copy_global_to_shared|mbarrier\.wait|mbarrier\.arrive|gl\.exp2|for|if)\b",
}
C_TYPES = r"(?:u?(?:char|short|int|long)|float|half|bfloat|bool|auto|void|simdgroup_\w+)"
LINE = re.compile(r"(?P<case>\S+) \| (?P<stage>[^|]+) \| (?P<text>\w+) \| (?P<code>\w+) \| (?P<counts>.*)")


class Entry(NamedTuple):
    text: str
    code: str
    counts: str


# ---- local names as numbers ------------------------------------------------------------------------------------------


def nameless(stage: str, text: str) -> str:
    """The text with names that only it defines replaced by numbers, in order of their first appearance."""
    family = stage.split()[0]
    if stage.endswith("ir"):
        return _numbered(text, r"[%@][\w.]+|(?<=kernel )\w+|(?<=name=)\w+", lambda word: True)
    if family == "llvm":
        return _numbered(text, r"[%@][\w.]+", lambda word: not word.startswith("@llvm."))
    if family == "metal":
        text = re.sub(r" *//.*", "", text)  # lines of the author's source
        declared = set(re.findall(rf"\b{C_TYPES}\d?(?:x\d)?(?:<[^>]*>)?\s*[*&]?\s*(?:const\s+)?(\w+)", text))
        return _numbered(text, r"\b[A-Za-z_]\w*\b", declared.__contains__)
    return _nameless_python(text) if text.startswith('"""') else text


def _numbered(text: str, names: str, ours: Callable[[str], bool]) -> str:
    seen: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        word = match[0]
        return seen.setdefault(word, f"n{len(seen)}") if ours(word) else word

    return re.sub(names, number, text)


class _Renamer(ast.NodeTransformer):
    def __init__(self, kept: set[str]) -> None:
        self.kept, self.seen = kept, dict[str, str]()

    def name(self, word: str) -> str:
        return word if word in self.kept else self.seen.setdefault(word, f"n{len(self.seen)}")

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self.name(node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg = self.name(node.arg)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name = self.name(node.name)
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """Names in `do_not_specialize=[...]` are names, too."""
        if isinstance(node.value, str) and node.value.isidentifier():
            node.value = self.name(node.value)
        return node


def _nameless_python(text: str) -> str:
    tree = ast.parse(text)
    tree.body = tree.body[1:]  # the docstring, which names the kernel and its schedule
    imports = (ast.Import, ast.ImportFrom)
    imported = {a.asname or a.name for node in ast.walk(tree) if isinstance(node, imports) for a in node.names}
    return ast.unparse(_Renamer(imported | set(dir(builtins))).visit(tree))


# ---- the record ------------------------------------------------------------------------------------------------------


def entry(stage: str, text: str) -> Entry:
    pattern = COUNTED["ir" if stage.endswith("ir") else stage.split()[0]]
    counts: dict[str, int] = {"lines": text.count("\n")}
    for word in re.findall(pattern, text):
        counts[word] = counts.get(word, 0) + 1
    if text.startswith("not rendered"):
        return Entry(_digest(text), _digest(text), text)
    listing = " ".join(f"{word.rpartition('.')[2]}:{n}" for word, n in sorted(counts.items()))
    return Entry(_digest(text), _digest(nameless(stage, text)), listing)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]


BACKENDS = ("cpu", "metal", "nvidia")


def generated(*backends: str) -> Iterator[tuple[str, str, str]]:
    """Case, stage and text of everything, or of what is for some backends."""
    from golden.cases import cases
    from golden.renderings import texts

    for backend in backends or BACKENDS:
        for case in cases(backend):
            for stage, text in texts(backend, case):
                yield case.name, stage, text


def recorded() -> dict[tuple[str, str], Entry]:
    lines = RECORD.read_text().splitlines() if RECORD.exists() else []
    matches = [match for line in lines if (match := LINE.fullmatch(line))]
    return {(m["case"], m["stage"]): Entry(m["text"], m["code"], m["counts"]) for m in matches}


def backend_of(stage: str) -> str:
    family = stage.split()[0]
    return {"metal": "metal", "nvidia": "nvidia", "triton": "nvidia", "gluon": "nvidia"}.get(family, "cpu")


def differences(found: dict[tuple[str, str], Entry], *backends: str) -> list[str]:
    """A line for each case and stage whose text is not what was recorded."""
    known = {key: old for key, old in recorded().items() if backend_of(key[1]) in (backends or BACKENDS)}
    lines = []
    for key in sorted(known.keys() | found.keys()):
        old, new = known.get(key), found.get(key)
        if old == new:
            continue
        if old is None or new is None:
            said = "is gone" if new is None else "is new"
        elif old.code == new.code:
            said = "names only"
        else:
            said = f"code: {old.counts} -> {new.counts}"
        lines.append(f"{key[0]} | {key[1]}: {said}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--refresh", action="store_true", help="write golden.txt anew")
    parser.add_argument("--texts", type=Path, help="also write every text to this folder")
    options = parser.parse_args()
    found = {}
    for case, stage, text in generated():
        found[case, stage] = entry(stage, text)
        if options.texts:
            path = options.texts / case / stage.replace(" ", "_")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    lines = differences(found)
    print("\n".join(lines) or "no difference", f"\n{len(found)} texts, {len(lines)} differ")
    if options.refresh:
        RECORD.write_text("".join(f"{c} | {s} | {e.text} | {e.code} | {e.counts}\n" for (c, s), e in found.items()))
    return 1 if lines and not options.refresh else 0


if __name__ == "__main__":
    sys.exit(main())
