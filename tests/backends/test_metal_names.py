"""An author's names and lines never change what Metal text does: reserved words, other alphabets, line ends."""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monotile import metal
from monotile.backends.metal import names
from monotile.backends.metal.backend import MetalBackend
from monotile.backends.metal.render import render
from monotile.backends.metal.runner import build
from monotile.cli import catalogue, inspection
from monotile.cli.request import Request

needs_runner = pytest.mark.skipif(metal.why_not() is not None, reason=str(metal.why_not()))
MACROS = ("INT8_MAX", "UINT64_MAX", "INTPTR_MIN", "UINT_FAST8_MAX", "INT32_C", "SIZE_MAX", "METAL_CONST", "NULL")
WORDS = sorted(
    {*names.RESERVED, "float4", "packed_half4", "float4x4", "simd_sum", "uint64_t", "M_PI_F", "FLT_MAX", *MACROS}
)
ODD = [
    "größe",
    "変数",
    "_x",
    "__FILE__",
    "a__b",
    "x_p",
    "x_s0",
    "x_n0",
    "x_2",
    "x_r1",
    "y_p",
    "buffer_0",
    "buffer_0_shape",
]
TAKEN = {"words", "decorate", "Tensor", "Const", "print"}  # by the module that is written
SOURCE = """from monotile.language import Const, Tensor, dot, kernel, maximum
import monotile.language as words

@kernel
def {kernel}({tensor}: Tensor["{dim} {dim}"], y: Tensor["{dim} {dim}"], {scalar}: float, *, {dim}: Const):
    {local} = words.exp2({tensor}[:, :]) + {scalar}
    y[:, :] = maximum(dot({local}, {local}), 0.0) + {local} * words.exp2({local})
"""
PLAIN = {"kernel": "plain", "tensor": "t", "dim": "N", "scalar": "s", "local": "v"}


def module(folder: Path, text: str) -> Any:
    path = folder / "written.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("written", path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def text_of(kernel: Any, *arrays: Any, **consts: Any) -> str:
    return render(MetalBackend().lower(kernel.ir(*arrays, **consts))).source


def many(kernel: str, tensors: list[str], scalars: list[str], local: list[str]) -> str:
    """A kernel with these names, each of which it reads after all are declared."""
    rows = list(zip(tensors, scalars, local, strict=True))
    declared = ", ".join(f'{name}: Tensor["N"]' for name in tensors) + "".join(f", {name}: float" for name in scalars)
    lines = [f"{v} = words.maximum(words.exp2({t}[:]) + {s}, 0.0).sum(axis=0)" for t, s, v in rows]
    total = " + ".join(local)
    body = "\n    ".join([*lines, f"target_[:] = target_[:] * ({total}) + words.tanh({total})"])
    head = "from monotile.language import Const, Tensor, kernel as decorate\nimport monotile.language as words\n"
    return f'{head}\n@decorate\ndef {kernel}({declared}, target_: Tensor["N"], *, N: Const):\n    {body}\n'


@needs_runner
def test_no_word_of_cpp_or_metal_is_declared(tmp_path: Path) -> None:
    """Every reserved word as a kernel, tensor, scalar and variable; the texts are compiled together."""
    x, step = np.ones(16, np.float32), 10
    usable = [word for word in [*WORDS, *ODD] if not keyword.iskeyword(word) and word not in TAKEN]
    usable += [f"filler{n}" for n in range(-len(usable) % step)]
    chunks = [usable[n : n + step] for n in range(0, len(usable), step)]
    texts = []
    for n, chunk in enumerate(chunks):
        kernel, others = chunk[0], (chunks[n - 1], chunks[n - 2])
        made = vars(module(tmp_path, many(kernel, chunk, *others)))[kernel]
        found = text_of(made, *[x] * step, *[1.0] * step, x)
        assert found.isascii(), chunk
        texts.append(f"namespace n{n} {{\n{found.partition('using namespace metal;')[2]}\n}}")
    assert len(texts) > 30
    joined = "\n".join(re.sub(r"#define UNROLL.*|\[\[.*?\]\]", "", text) for text in texts)
    (tmp_path / "all.cpp").write_text(f'#include "metal_shim.h"\n#define UNROLL\nusing namespace metal;\n{joined}')
    command = [*build.compiler().command, *build.COMMON, *build.DEFINES, f"-I{build.HERE}"]
    build._run([*command, "-S", "-emit-llvm", "all.cpp", "-o", "all.ll"], str(tmp_path))


@needs_runner
@pytest.mark.parametrize("place", ["tensor", "scalar", "local"])
@pytest.mark.parametrize("word", ["größe", "mutable", "fmax", "x_p", "y_p"])
def test_names_change_no_result(place: str, word: str, tmp_path: Path) -> None:
    if word == "y_p" and place == "tensor":
        return
    x = np.random.default_rng(0).random((16, 16), np.float32)
    found = []
    for text in (SOURCE.format(**PLAIN), SOURCE.format(**{**PLAIN, place: word})):
        y = metal.poisoned((16, 16), np.float32)
        module(tmp_path, text).plain(x, y, 1.0, backend="metal")
        found.append(y)
    np.testing.assert_array_equal(*found)


CONTINUED = """from monotile.language import Const, Tensor, dot, kernel

@kernel
def continued(x: Tensor["N N"], y: Tensor["N N"], *, N: Const):
    a = x[:, :] + \\
        1.0
    b = dot(a, a) + \\
        a  # größer ??/
    y[:, :] = b
"""


@needs_runner
def test_a_line_that_ends_in_a_backslash(tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((32, 32), np.float32)
    y = metal.poisoned((32, 32), np.float32)
    kernel = module(tmp_path, CONTINUED).continued
    kernel(x, y, backend="metal")
    a = x.astype(np.float64) + 1
    np.testing.assert_allclose(y, a @ a + a, rtol=1e-5)
    comments = re.findall(r"//.*", text_of(kernel, x, y))
    assert any("dot(a, a)" in line for line in comments) and not any(line.endswith(("\\", "/")) for line in comments)


@pytest.mark.parametrize("line", ["a = b \\", "a = b \\  ", "a = b ??/", "a = b \\\\", "a = b # ö\f"])
def test_comments(line: str) -> None:
    found = names.comment(line)
    assert found.startswith("// a = b") and found.isascii() and found.isprintable() and found[-1] not in "\\/?"


def test_distinct_names_stay_distinct(tmp_path: Path) -> None:
    source = SOURCE.replace('y: Tensor["{dim} {dim}"]', 'grö: Tensor["N N"], gru00f6: Tensor["N N"]').replace(
        "y[", "grö["
    )
    kernel = module(tmp_path, source.format(**PLAIN)).plain
    lowered = MetalBackend().lower(kernel.ir(*[np.ones((8, 8), np.float32)] * 3, 1.0))
    assert sorted(names.tensor_names(lowered).values()) == ["gru00f6", "gru00f6_2", "t"]


@pytest.mark.parametrize("name", catalogue.kernels())
def test_what_the_text_calls_is_reserved(name: str) -> None:
    """No variable of an author can hide a function that generated text calls."""
    form, _ = inspection.specialised(catalogue.kernels()[name], Request({}, {}, {}), "metal", None)
    source = render(MetalBackend().lower(form)).source
    words = set(
        re.findall(r"\b([A-Za-z_]\w*)\s*[(<](?!<)", re.sub(r"//.*|#.*|\[\[.*?\]\]|\.thread_elements", "", source))
    )
    own = {names.safe(name), "_Pragma", "T", "P"}
    variables = set(re.findall(r"\b(\w+) <[= ]", source))
    assert {word for word in words - own - variables if not names.is_reserved(word)} == set()
