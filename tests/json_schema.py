"""The part of JSON Schema that the manifest's schema uses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

TYPES = {"object": dict, "array": list, "string": str, "integer": int, "null": type(None)}
KNOWN = {
    "$schema", "$defs", "$ref", "title", "type", "const", "enum", "required", "properties", "additionalProperties",
    "items", "anyOf", "pattern", "minLength", "minItems", "maxItems", "minimum", "maximum",
}  # fmt: skip


def mistakes(value: Any, schema: Any, root: Any = None, at: str = "") -> Iterator[str]:
    """Yield what is wrong with a value, by place."""
    root = schema if root is None else root
    assert schema.keys() <= KNOWN, f"{at}: {schema.keys() - KNOWN} would not be checked"
    if "$ref" in schema:
        yield from mistakes(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root, at)
    if "anyOf" in schema and all(list(mistakes(value, each, root, at)) for each in schema["anyOf"]):
        yield f"{at}: {value!r} is none of the kinds"
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(isinstance(value, TYPES[kind]) and not isinstance(value, bool) for kind in kinds):
        yield f"{at}: {value!r} is no {' or '.join(kinds)}"
        return
    if value != schema.get("const", value) or value not in schema.get("enum", [value]):
        yield f"{at}: {value!r} is not allowed"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{at}: {value!r} does not match"
    size = len(value) if isinstance(value, str | list) else value if isinstance(value, int) else 0
    low = max(schema.get(word, size) for word in ("minimum", "minItems", "minLength"))
    high = min(schema.get(word, size) for word in ("maximum", "maxItems"))
    if not low <= size <= high:
        yield f"{at}: {value!r} is too short, long, small or great"
    if isinstance(value, list):
        for n, item in enumerate(value):
            yield from mistakes(item, schema.get("items", {}), root, f"{at}[{n}]")
    if isinstance(value, dict):
        yield from (f"{at}: {name} is missing" for name in schema.get("required", ()) if name not in value)
        others = schema.get("additionalProperties", {})
        for name, item in value.items():
            known = schema.get("properties", {}).get(name, others)
            if known is False:
                yield f"{at}.{name} is not described"
            else:
                yield from mistakes(item, known, root, f"{at}.{name}")
