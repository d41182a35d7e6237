"""Parse a preprocessed shader: its kernels with their parameters, and the same text as C++."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .report import ShaderError

TOKEN = re.compile(
    r"""\#[^\n]*|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[A-Za-z_]\w*|\.?\d(?:[eEpP][+-]|[\w.])*|\s+|::|->|\[\[|[^\w\s]"""
)
SPACES = {"device", "threadgroup", "constant", "thread"}
CLOSERS = {"(": ")", "[": "]", "{": "}"}
BYTE_TYPES = {"char", "uchar", "bool", "int8_t", "uint8_t"}
SWIZZLE = re.compile(r"[xyzw]{2,4}|rgba?|bgra?|rg")
COMPONENTS = {"x": 0, "y": 1, "z": 2, "w": 3, "r": 0, "g": 1, "b": 2, "a": 3}
SHORT_LITERAL = re.compile(r"(\d*\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)([hH]|bf|BF)")


@dataclass(frozen=True)
class ShaderArgument:
    """A parameter of a kernel: what is bound to it, and how it is declared."""

    name: str
    role: str  # "buffer", "threadgroup", or the attribute of a thread's position or of a size
    index: int
    reference: bool
    read_only: bool
    constant: bool
    byte_type: bool


@dataclass(frozen=True)
class ShaderKernel:
    """A kernel; `expression` names it in C++, with the template arguments of an instance."""

    name: str
    expression: str
    arguments: tuple[ShaderArgument, ...]


@dataclass(frozen=True)
class ParsedShader:
    text: str
    kernels: dict[str, ShaderKernel]
    variables: tuple[str, ...]  # threadgroup variables, in order of their allocation index


def tokenize(text: str) -> list[str]:
    return TOKEN.findall(text)


def read(preprocessed: str) -> ParsedShader:
    tokens = tokenize(preprocessed)
    kernels = _find_kernels(tokens)
    tokens = _drop_repeats(tokens)
    tokens = _function_constants(tokens)
    tokens = _strip_attributes(tokens)
    tokens, variables = _threadgroup_variables(tokens)
    return ParsedShader("".join(_spell(tokens)), kernels, tuple(variables))


def constants_text(constants: Mapping[int, bool | int | float]) -> str:
    """Return the function constants as C++; one without a value is 0."""
    lines = ["template <int> constexpr int mt_constant = 0;", "template <int> constexpr bool mt_given = false;"]
    for index, value in sorted(constants.items()):
        literal = str(value).lower() if isinstance(value, bool) else repr(value) + "f" * isinstance(value, float)
        lines.append(f"template <> constexpr auto mt_constant<{int(index)}> = {literal};")
        lines.append(f"template <> constexpr bool mt_given<{int(index)}> = true;")
    return "\n".join(lines)


def entry_text(kernel: ShaderKernel) -> str:
    """Return the function that the runtime calls for every thread."""
    return f'extern "C" void mt_entry() {{ {kernel.expression}({", ".join(map(_binding, kernel.arguments))}); }}'


def _binding(argument: ShaderArgument) -> str:
    if argument.role not in ("buffer", "threadgroup"):
        return f"mt::{argument.role}()"
    source = "mt_buffer" if argument.role == "buffer" else "mt_threadgroup_argument"
    kind = "Reference" if argument.reference else "Pointer"
    return f"mt::{kind}{{mt::{source}({argument.index})}}"


# ---- tokens ----------------------------------------------------------------------------------------------------------


def _significant(tokens: list[str], start: int, step: int = 1) -> int:
    """Return the next index from `start` that is not white space or a line marker."""
    while 0 <= start < len(tokens) and (tokens[start].isspace() or tokens[start].startswith("#")):
        start += step
    return start


def _closing(tokens: list[str], start: int) -> int:
    """Return the index of the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(tokens)):
        token = tokens[i]
        if token == "[[":
            depth += 2
        elif token in "([{" and token:
            depth += 1
        elif token in ")]}" and token:
            depth -= 1
            if depth == 0:
                return i
    raise ShaderError(f"the shader's text ends inside a bracket {tokens[start]!r}")


def _blank(tokens: list[str], start: int, end: int) -> None:
    """Remove tokens; line numbers stay."""
    for i in range(start, end):
        if not tokens[i].startswith("#"):
            tokens[i] = "\n" * tokens[i].count("\n") if "\n" in tokens[i] else ""


def _split(tokens: list[str], separator: str = ",") -> Iterator[list[str]]:
    depth = 0
    part: list[str] = []
    for token in tokens:
        if token == "[[":
            depth += 2
        elif token in ("(", "[", "{", "<"):
            depth += 1
        elif token in (")", "]", "}", ">"):
            depth -= 1
        if token == separator and depth == 0:
            yield part
            part = []
        else:
            part.append(token)
    if "".join(part).strip():
        yield part


def _words(tokens: list[str]) -> list[str]:
    return [token for token in tokens if not token.isspace() and not token.startswith("#")]


# ---- kernels ---------------------------------------------------------------------------------------------------------


def _find_kernels(tokens: list[str]) -> dict[str, ShaderKernel]:
    found: dict[str, ShaderKernel] = {}
    instances: list[tuple[str, str]] = []
    hosts: list[str] = []
    i = 0
    while i < len(tokens):
        token = tokens[i]
        if token == "[[":
            end = _closing(tokens, i)
            inner = _words(tokens[i + 1 : end - 1])
            if inner[:1] == ["host_name"]:
                hosts.append(inner[2].strip('"'))
            if "kernel" not in inner:
                i = end + 1
                continue
            i = end
            token = "kernel"
        if token == "kernel":
            start = _significant(tokens, i + 1)
            while tokens[start] == "[[":
                start = _significant(tokens, _closing(tokens, start) + 1)
            if tokens[start] == "decltype":
                end = _closing(tokens, _significant(tokens, start + 1))
                inside = _words(tokens[start:end])[2:]
                instances += [(hosts.pop(), " ".join(inside))] if hosts else []
            elif tokens[start] == "void":
                _read_kernel(tokens, start, hosts, found, instances)
            hosts.clear()
        i += 1
    for host, expression in instances:
        base = expression.split("<")[0].split("::")[-1].strip()
        if base in found:
            found[host] = ShaderKernel(host, expression, found[base].arguments)
    return found


def _read_kernel(
    tokens: list[str], start: int, hosts: list[str], found: dict[str, ShaderKernel], instances: list[tuple[str, str]]
) -> None:
    """Read a definition `void name(...)` or an instance `void name<...>(...);`."""
    opening = tokens.index("(", start)
    words = _words(tokens[start + 1 : opening])
    name = "".join(words[:1])
    if len(words) > 1:
        instances += [(hosts[-1], " ".join(words))] if hosts else []
        return
    arguments = _read_arguments(tokens[opening + 1 : _closing(tokens, opening)])
    for known_as in {name, *hosts}:
        found[known_as] = ShaderKernel(known_as, name, arguments)


def _read_arguments(tokens: list[str]) -> tuple[ShaderArgument, ...]:
    arguments: list[ShaderArgument] = []
    for part in _split(tokens):
        attributes: dict[str, int] = {}
        plain = list(part)
        while "[[" in plain:
            start = plain.index("[[")
            end = _closing(plain, start)
            for attribute in _split(plain[start + 1 : end - 1]):
                words = _words(attribute)
                attributes[words[0]] = int(words[2]) if len(words) == 4 and words[2].isdigit() else 0
            del plain[start : end + 1]
        arguments.append(_argument(_words(plain), attributes, arguments))
    return tuple(arguments)


def _argument(words: list[str], attributes: dict[str, int], before: list[ShaderArgument]) -> ShaderArgument:
    names = [word for word in words if re.match(r"[A-Za-z_]\w*$", word)]
    name = names[-1]
    constant = "constant" in words
    role = next((word for word in attributes if word != "function_constant"), "")
    if not role and {"device", "constant", "threadgroup"} & set(words):
        role = "threadgroup" if "threadgroup" in words else "buffer"
        attributes = {role: sum(argument.role == role for argument in before)}
    if not role:
        raise ShaderError(f"the kernel's parameter {name!r} has no attribute, so nothing says what it is bound to")
    return ShaderArgument(
        name=name,
        role=role,
        index=attributes[role],
        reference="&" in words,
        read_only=constant or "const" in words,
        constant=constant,
        byte_type=bool(BYTE_TYPES & set(words)),
    )


# ---- the same text as C++ --------------------------------------------------------------------------------------------


def _definitions(tokens: list[str]) -> Iterator[tuple[int, int]]:
    """Yield the range of each declaration or definition at the top level."""
    i = _significant(tokens, 0)
    start = i
    while i < len(tokens):
        token = tokens[i]
        if token in ("(", "[", "[["):
            i = _closing(tokens, i)
        elif token == "{":
            i = _closing(tokens, i)
            following = _significant(tokens, i + 1)
            if following < len(tokens) and tokens[following] == ";":
                i = following
            yield start, i + 1
            start = _significant(tokens, i + 1)
        elif token == ";":
            yield start, i + 1
            start = _significant(tokens, i + 1)
        i += 1


def _drop_repeats(tokens: list[str]) -> list[str]:
    """Remove instances with a host name, and definitions that differ from an earlier one only in address spaces."""
    tokens = list(tokens)
    seen: set[str] = set()
    for start, end in list(_definitions(tokens)):
        words = _words(tokens[start:end])
        if words[0] == "template" and "host_name" in words[:6]:
            _blank(tokens, start, end)
            continue
        if not SPACES & set(words):
            continue
        neutral = " ".join(
            "const" if word == "constant" else word for word in words if word not in SPACES - {"constant"}
        )
        if neutral in seen:
            _blank(tokens, start, end)
        seen.add(neutral)
    return tokens


def _function_constants(tokens: list[str]) -> list[str]:
    tokens = list(tokens)
    for i, token in enumerate(tokens):
        if token != "[[":
            continue
        end = _closing(tokens, i)
        words = _words(tokens[i + 1 : end - 1])
        semicolon = _significant(tokens, end + 1)
        if words[:1] != ["function_constant"] or tokens[semicolon] != ";":
            continue
        name = tokens[_significant(tokens, i - 1, -1)]
        index = "(" + " ".join(words[2:-1]) + ")"
        start = max(j for j in range(i) if tokens[j] == "constant")
        _blank(tokens, i, semicolon)
        tokens[start] = "constexpr"
        tokens[i] = f" = mt_constant<{index}>; static constexpr bool mt_defined_{name} = mt_given<{index}>"
    return tokens


def _strip_attributes(tokens: list[str]) -> list[str]:
    tokens = list(tokens)
    for i, token in enumerate(tokens):
        if token == "[[":
            _blank(tokens, i, _closing(tokens, i) + 1)
    return tokens


def _threadgroup_variables(tokens: list[str]) -> tuple[list[str], list[str]]:
    """Turn `threadgroup float x[4];` into a reference to memory that the threads of the group share."""
    tokens = list(tokens)
    names: list[str] = []
    depth = 0
    for i, token in enumerate(tokens):
        depth += (token == "(") - (token == ")")
        if token != "threadgroup" or depth:
            continue
        before = _significant(tokens, i - 1, -1)
        if before >= 0 and tokens[before] not in ";{}":
            continue
        end = tokens.index(";", i)
        words = _words(tokens[i + 1 : end])
        if "*" in words[: words.index("[") if "[" in words else None] or "&" in words or "=" in words:
            continue
        out, base = [], ""
        for part in map(_words, _split(tokens[i + 1 : end])):
            bracket = part.index("[") if "[" in part else len(part)
            name, sides = part[bracket - 1], " ".join(part[bracket:])
            base = " ".join(part[: bracket - 1]) or base
            kind = f"mt_type_{len(names)}"
            out.append(
                f"using {kind} = {base} {sides}; {kind} &{name} = mt::threadgroup_variable<{kind}>({len(names)})"
            )
            names.append(name)
        _blank(tokens, i, end)
        tokens[i] = "; ".join(out)
    return tokens, names


def _spell(tokens: list[str]) -> Iterator[str]:
    """Rewrite swizzles and half and bfloat literals for C++."""
    for i, token in enumerate(tokens):
        before = tokens[i - 1] if i else ""
        after = tokens[i + 1] if i + 1 < len(tokens) else ""
        if before in (".", "->") and after != "(" and SWIZZLE.fullmatch(token):
            yield f"template mt_swizzle<{', '.join(str(COMPONENTS[letter]) for letter in token)}>()"
        elif literal := SHORT_LITERAL.fullmatch(token):
            yield f"{'half' if literal[2] in 'hH' else 'bfloat'}({literal[1]}f)"
        else:
            yield token
