"""Cures for words that do not exist: where a word is imported from, the one that was probably meant, or what to write
in its place."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from . import vocabulary

WORDS = (*vocabulary.__all__, "kernel")
# What to write for functions that are no words, because they are made of words.
INSTEAD = {
    "all": "min(x, axis=1) of bools", "amax": "max(x, axis=1)", "amin": "min(x, axis=1)",
    "any": "max(x, axis=1) of bools", "clamp": "minimum(maximum(x, low), high)",
    "clip": "minimum(maximum(x, low), high)", "einsum": "dot(a, b)", "gelu": "0.5 * x * (1.0 + erf(x * 0.70710678))",
    "load": "t[rows]", "log10": "log2(x) * 0.30103", "log1p": "log(1.0 + x)", "expm1": "exp(x) - 1.0",
    "matmul": "dot(a, b)", "mean": "sum(x, axis=1) / x.shape[1]", "ones": "full(shape, 1.0)",
    "pow": "x ** n, or exp2(y * log2(x)) for x > 0", "power": "x ** n, or exp2(y * log2(x)) for x > 0",
    "relu": "maximum(x, 0.0)", "rsqrt": "1 / sqrt(x)", "sign": "where(x < 0.0, -1.0, 1.0)",
    "silu": "x * sigmoid(x)", "softmax": "e = exp(x - max(x, axis=1)[:, None]), then e / sum(e, axis=1)[:, None]",
    "softplus": "maximum(x, 0.0) + log(1.0 + exp(-abs(x)))", "square": "x * x", "store": "t[rows] = x",
    "swish": "x * sigmoid(x)", "tan": "sin(x) / cos(x)", "transpose": "x.T",
    "zeros_like": "zeros(x.shape, x.dtype)",
}  # fmt: skip


def unknown_name(name: str, known: Iterable[str], *, called: bool) -> str:
    """Return the cure for a name that nothing defines; `known` are the names that the kernel can see."""
    if name in WORDS:
        return f"import it: from monotile.language import {name}"
    if called:
        return unknown_word(name, known)
    near = _nearest(name, (*known, *WORDS))
    return "import or define it before this line" + (f"; did you mean {near}?" if near else "")


def unknown_word(name: str, known: Iterable[str] = ()) -> str:
    """Return the cure for a function that is called and that neither the language nor the kernel's file has."""
    near = _nearest(name, (*known, *WORDS))
    if name in INSTEAD:
        return f"there is no word {name!r}: write {INSTEAD[name]}"
    if near:
        return f"there is no word {name!r}: did you mean {near}? Or define a function of that name"
    return f"there is no word {name!r}: define a function of that name, made of the words of monotile.language"


def unsupported_function(name: str) -> str:
    """Return the cure for a Python function that cannot be called with run-time values."""
    if name in vocabulary.__all__:
        return f"use monotile.language.{name}"
    if name in INSTEAD:
        return f"write {INSTEAD[name]}"
    return "use the words of monotile.language, or a plain Python helper function"


def wrong_arguments(name: str, shown: str, keywords: Iterable[str]) -> str:
    """Return the cure for a word's call whose arguments do not fit, `shown` being those it takes."""
    given = set(keywords)
    if given & {"keepdims", "keepdim"}:
        whole = f"{name}(axis=1)" if name.startswith(".") else f"{name}(x, axis=1)"
        return f"leave it out and add the side again: {whole}[:, None], or [None, :] for axis=0"
    if "dim" in given and "axis" in shown:
        return f"write axis= for dim=: {name}({shown})"
    return f"write {name}({shown})"


def _nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that a misspelt one most probably is."""
    found = difflib.get_close_matches(name, sorted(set(known)), n=1, cutoff=0.75)
    return found[0] if found else None
