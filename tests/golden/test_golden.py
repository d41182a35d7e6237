"""Generated text is what was recorded. A deliberate change is recorded with `make golden` and named in its commit."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="rendering for nvidia asks for Triton's version")
from golden import snapshot


@pytest.mark.parametrize("backend", snapshot.BACKENDS)
def test_generated_text_is_as_recorded(backend: str) -> None:
    found = {(case, stage): snapshot.entry(stage, text) for case, stage, text in snapshot.generated(backend)}
    lines = snapshot.differences(found, backend)
    assert lines == [], "\n".join([*lines, "see tests/golden/snapshot.py; record deliberate changes with make golden"])


def test_a_rename_changes_no_code() -> None:
    """The digest of code does not see local names, and sees everything else."""
    before = '"""a"""\n\ndef kernel(q, arms):\n    return tl.load(q + arms)\n'
    assert snapshot.nameless("triton", before) == snapshot.nameless("triton", before.replace("arms", "cases"))
    assert snapshot.nameless("triton", before) != snapshot.nameless("triton", before.replace("load", "store"))
    metal = "float own = exp2(x);\nfloat y = own * own;\n"
    assert snapshot.nameless("metal", metal) == snapshot.nameless("metal", metal.replace("own", "private"))
    assert snapshot.nameless("metal", metal) != snapshot.nameless("metal", metal.replace("exp2", "log2"))
    llvm = "%a = fadd float %b, %b\n"
    assert snapshot.nameless("llvm avx2", llvm) == snapshot.nameless("llvm avx2", llvm.replace("%b", "%c"))
    assert snapshot.nameless("llvm avx2", llvm) != snapshot.nameless("llvm avx2", llvm.replace("fadd", "fsub"))
