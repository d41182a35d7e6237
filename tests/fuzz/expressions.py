"""Random elementwise functions as Python text, which monotile and torch both understand."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

UNARY = ("-{}", "abs({})", "tanh({})", "sigmoid({})", "erf({})", "sin({})", "cos({})", "(tanh({})) ** 3",
         "exp(minimum({}, 2.0))", "exp2(tanh({}))", "log({} * {} + 0.5)",
         "log2(abs({}) + 1.0)",
         "sqrt({})", "sqrt(abs({}))", "sqrt({} * {} + 1.0)", "reciprocal(abs({}) + 0.5)",
         "1.0 / ({} - 0.3)", "log({})", "float(int({}))", "helper({})", "(lambda t: t * t)({})",
         "{}")  # fmt: skip
BINARY = ("{} + {}", "{} - {}", "{} * {}", "{} / ({} + 4.0)", "maximum({}, {})", "minimum({}, {})",
          "fma({}, {}, u)")  # fmt: skip
# Tests of two expressions would be decided by rounding where they are equal, as s and log(exp(s)) are.
TESTS = ("{} < 0.37", "{} >= -0.61", "({} < 1.13) & (s > -1.07)", "({} == 0.5) | (u > 0.21)", "~({} < 0.0031)")
NUMBERS = ("0.0", "0.5", "1.0", "-0.75", "2.0", "scale")


def expression(rng: random.Random, depth: int, names: tuple[str, ...]) -> str:
    """Return an expression of a float tile."""

    def part() -> str:
        return expression(rng, depth - 1, names)

    def part_or_number() -> str:
        return part() if rng.random() < 0.8 else rng.choice(NUMBERS)

    if depth == 0 or rng.random() < 0.1:
        return rng.choice(names)
    roll = rng.random()
    if roll < 0.4:
        form = rng.choice(UNARY)
        inside = part() if form.count("{}") == 1 else rng.choice(names)
        return "(" + form.replace("{}", f"({inside})") + ")"
    if roll < 0.75:
        return "(" + rng.choice(BINARY).format(part(), part_or_number()) + ")"
    test = rng.choice(TESTS).format(part())
    return f"where({test}, {part()}, {part_or_number()})"


def function(rng: random.Random, name: str) -> str:
    """Return the text of f(s, u, scale): local names, perhaps a branch at compile time, and a result."""
    lines = [f"def {name}(s, u, scale):", f"    a = {expression(rng, 2, ('s', 's', 'u'))} + 0.0 * s"]
    lines += [f"    b = {expression(rng, 3, ('s', 'a', 'u'))}"]
    if rng.random() < 0.3:
        lines += [f"    if {rng.choice(('True', 'False'))}:", f"        b = {expression(rng, 2, ('a', 's'))}"]
    return "\n".join([*lines, f"    return {expression(rng, 3, ('s', 'a', 'b', 'u'))} + 0.0 * s"])


def text(seed: int, count: int) -> str:
    rng = random.Random(seed)
    functions = [function(rng, f"f{n}") for n in range(count)]
    helper = "def helper(x):\n    y = x * 0.5\n    return maximum(y, x - 1.0)"
    return "\n\n\n".join(["from words import *", helper, *functions]) + "\n"


def load(source: str, path: Path, words: dict[str, Any]) -> dict[str, Any]:
    """Run the text with these words. The compiler reads it again from the file."""
    path.write_text(source)
    names = dict(words)
    exec(compile(source.replace("from words import *", ""), str(path), "exec"), names)
    return names


def torch_words(torch: Any) -> dict[str, Any]:
    def tensor(x: Any) -> Any:
        return x if isinstance(x, torch.Tensor) else torch.tensor(float(x), dtype=torch.float64)

    def lifted(function: Any) -> Any:
        return lambda *args: function(*map(tensor, args))

    def ignoring_nan(function: Any) -> Any:
        return lifted(lambda a, b: function(torch.where(a.isnan(), b, a), torch.where(b.isnan(), a, b)))

    names = ("abs", "cos", "erf", "sigmoid", "sin", "exp", "exp2", "log", "log2", "reciprocal", "sqrt", "tanh")
    words = {name: lifted(getattr(torch, name)) for name in names}
    words["maximum"], words["minimum"] = ignoring_nan(torch.maximum), ignoring_nan(torch.minimum)
    words["where"] = lambda test, a, b: torch.where(test, tensor(a), tensor(b))
    words["fma"] = lifted(lambda a, b, c: a * b + c)
    words["int"] = lifted(lambda x: torch.nan_to_num(x).trunc().clamp(-(2**31), 2**31 - 1).to(torch.int64))
    words["float"] = lifted(lambda x: x.to(torch.float64))
    return words


def points(count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Points of both signs, which float32 has."""
    rng = np.random.default_rng(count)
    return rng.normal(0, 1.5, count).astype(np.float32).astype(np.float64)
