"""Every op of the library with every option, as Metal source: correct, and the same bits in every order of threads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from monotile import backends, metal
from monotile.backends.metal import backend as metal_backend
from monotile.cli import catalogue
from monotile.library import ops, registry

pytestmark = pytest.mark.skipif(metal.why_not() is not None, reason=str(metal.why_not()))


def forget() -> None:
    """Drop the programs compiled for another order."""
    backends.get.cache_clear()
    for kernel in catalogue.kernels().values():
        kernel._programs.clear()
        kernel._plans.clear()
    for op in (ops._ATTENTION, ops._PARTIALS, ops._MERGE, ops._MERGE_LSE, ops._MASK_BLOCKS):
        op.calls.clear()


@pytest.fixture(autouse=True)
def forget_afterwards() -> Iterator[None]:
    yield
    forget()


@pytest.mark.parametrize("case", registry.CHECKS, ids=lambda case: case.name)
def test_case_in_every_order(case: registry.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    op, inputs = registry.OPS[case.op], case.inputs()
    found = []
    for order in metal.ORDERS:
        forget()
        monkeypatch.setattr(metal_backend, "BACKEND", metal_backend.MetalBackend(order))
        found.append(op.run(inputs, backend="metal", threads=None))
    exact, naive = op.exact(inputs), op.naive(inputs)
    for name, first in found[0].items():
        verdict = registry.judge(name, first, exact[name], naive[name])
        assert verdict.ok, f"{name}: the error is {verdict.error}, {verdict.allowed} is allowed"
        for other in found[1:]:
            np.testing.assert_array_equal(first.view(np.uint8), other[name].view(np.uint8))
