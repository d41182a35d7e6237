"""Every mistake in a kernel raises its own error, which underlines the right place and names the cure."""

from __future__ import annotations

import inspect
import pickle
import re
import sys
import traceback
from typing import Any

import numpy as np
import pytest

from monotile import errors
from monotile.errors import InternalError, KernelError
from monotile.frontend import cures, library_words, vocabulary
from monotile.frontend.expressions import REDUCTIONS
from monotile.frontend.words import WORDS
from monotile.launch.kernel import Kernel

from . import calls, derivatives, names, python, shapes, signatures
from .catalogue import MISTAKES, Mistake

POISON = 7.0
PARTS = (calls, derivatives, names, python, shapes)


def arguments() -> dict[str, Any]:
    """Return the argument for a parameter of each name."""
    return {
        "x": np.ones((8, 16), np.float32),
        "y": np.full((8, 16), POISON, np.float32),
        "z": np.ones(8, np.float32),
        "c": np.ones((4, 4, 4), np.float32),
        "idx": np.arange(8, dtype=np.int32),
        "k": 3,
        "s": 2.0,
        "flag": True,
        "wide": 2**40,
        "B": 4,
    }


def raised(case: Mistake) -> tuple[KernelError, dict[str, Any]]:
    given = arguments()
    kernel = Kernel(case.function)
    args = [given[p.name] for p in kernel.parameters]
    consts = {n: given[n] for n in kernel.const_names}
    with pytest.raises(errors.MonotileError) as caught:
        kernel(*args, **consts, backend="interpreter")
    assert isinstance(caught.value, KernelError), caught.value
    return caught.value, given


@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: case.function.__name__)
def test_mistake(case: Mistake) -> None:
    error, given = raised(case)
    assert type(error) is case.error, error
    assert error.loc is not None
    assert error.loc.text[error.loc.column : error.loc.end] == case.caret
    for words in case.found:
        assert words in error.found
    for words in case.cure:
        assert words in error.cure
    assert (given["y"] == POISON).all()


@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: case.function.__name__)
def test_message(case: Mistake) -> None:
    """The message has the line, carets exactly under the mistake, and the cure; the traceback, no compiler frames."""
    error, _ = raised(case)
    lines = str(error).splitlines()
    at = next(n for n, line in enumerate(lines) if line.strip() and set(line.strip()) == {"^"})
    carets = lines[at]
    if case.caret.isascii():
        under = lines[at - 1][carets.index("^") : len(carets)]
        assert under == case.caret
    assert len(lines[at - 1]) < 180
    assert f"line {error.loc.line}:" in lines[at - 2]  # type: ignore[union-attr]
    assert lines[-1] == f"  cure: {error.cure}"
    assert "Error" not in error.found
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    assert [f for f in files if "monotile/" in f.replace("\\", "/") and "tests" not in f][1:] == []
    assert error.__cause__ is None
    assert error.__suppress_context__


def test_words_that_cures_name_exist() -> None:
    """What a cure calls is a word, a method of tiles, or a function of Python that kernels have."""
    methods = {f".{name}" for name in (*REDUCTIONS, *library_words.METHODS, "tolist")}
    known = {*vocabulary.__all__, *(f.__name__ for f in WORDS), *methods, "tuple", "f", "lambda"}
    shown = [(cures.unknown_word(name), set[str]()) for name in cures.INSTEAD]
    shown += [(raised(case)[0].cure, set(case.function.__globals__)) for case in MISTAKES]
    for cure, own in shown:
        called = set(re.findall(r"((?:\.|\b)[a-z]\w*)\(", cure))
        assert called <= known | own, cure


def test_every_kernel_error_has_a_case() -> None:
    def leaves(kind: type[KernelError]) -> set[type[KernelError]]:
        return {kind}.union(*(leaves(k) for k in kind.__subclasses__()))

    covered = {case.error for case in MISTAKES} | {errors.BadSignature}
    assert leaves(KernelError) - {KernelError} == covered


def test_every_case_is_in_the_table() -> None:
    filed = {case.function for case in MISTAKES}
    assert len(filed) == len(MISTAKES) == len({f.__name__ for f in filed})
    for part in PARTS:
        assert any(case.function.__module__ == part.__name__ for case in MISTAKES)


def test_helper_calls_are_listed() -> None:
    case = next(c for c in MISTAKES if c.function is calls.mistake_in_a_helper)
    error, _ = raised(case)
    assert "called from calls.py" in str(error) and "helper_with_a_mistake(1)" in str(error)
    case = next(c for c in MISTAKES if c.function is calls.recursion)
    error, _ = raised(case)
    assert "calls further out" in str(error)


def test_errors_survive_pickling() -> None:
    error, _ = raised(MISTAKES[0])
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error)


def test_faults_of_monotile_itself_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("monotile.ir.builder.Builder.binary", broken)
    kernel = Kernel(calls.run_time_division_by_a_constant_zero)
    with pytest.raises(InternalError, match="KeyError"):
        kernel(np.zeros((8, 16), np.float32), 3, backend="interpreter")


@pytest.mark.parametrize("define, found, caret, cure", signatures.CASES)
def test_signature(define: Any, found: str, caret: str | None, cure: str) -> None:
    with pytest.raises(errors.BadSignature) as caught:
        define()
    error = caught.value
    assert found in error.found and cure in error.cure
    if caret is not None:
        assert error.loc is not None
        assert error.loc.text[error.loc.column : error.loc.end] == caret


def test_kernel_without_source() -> None:
    space: dict[str, Any] = {}
    exec("def nowhere(x):\n    pass", space)
    with pytest.raises(errors.NoSource, match="nowhere") as caught:
        Kernel(space["nowhere"])(np.zeros(4, np.float32), backend="interpreter")
    assert "file" in caught.value.cure


def test_deeply_nested_expression(tmp_path: Any) -> None:
    path = tmp_path / "deep.py"
    path.write_text("def deep(y, k: int):\n    y[0, 0] = " + "-(" * 150 + "k" + ")" * 150 + "\n")
    space: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), space)

    def under(frames: int) -> None:
        if frames:
            return under(frames - 1)
        Kernel(space["deep"])(np.zeros((2, 2), np.float32), 1, backend="interpreter")

    with pytest.raises((errors.TooDeep, errors.DTypeMismatch)):
        under(0)
    with pytest.raises(errors.TooDeep, match="nested too deeply"):
        under(sys.getrecursionlimit() - len(inspect.stack()) - 200)


def test_changed_file(tmp_path: Any) -> None:
    path = tmp_path / "changed.py"
    path.write_text("def changed(y):\n    y[0, 0] = 1.0\n")
    space: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), space)
    kernel = Kernel(space["changed"])
    for text, phrase in (("\n\n\ndef other(): pass\n", "has the file changed"), ("def (", "does not parse")):
        path.write_text(text)
        with pytest.raises(errors.NoSource, match=phrase):
            kernel(np.zeros((2, 2), np.float32), backend="interpreter")
