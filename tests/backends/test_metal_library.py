"""Every op of the library with every option, as Metal source, compiled in safe and in fast math: correct, and in safe
math the same bits in every order of threads. Fast math changes digits, not accesses: one order is enough."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from backends.metal_orders import forget, in_every_order
from monotile import metal
from monotile.library import registry

pytestmark = pytest.mark.skipif(metal.why_not() is not None, reason=str(metal.why_not()))


@pytest.fixture(autouse=True)
def forget_afterwards() -> Iterator[None]:
    yield
    forget()


@pytest.mark.parametrize(("fast_math", "orders"), [(False, metal.ORDERS), (True, ("shuffled",))], ids=["safe", "fast"])
@pytest.mark.parametrize("case", registry.CHECKS, ids=lambda case: case.name)
def test_case_in_every_order(
    case: registry.Case, fast_math: bool, orders: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if fast_math and case.op == "attention_backward" and case.sizes.D > 96:
        pytest.skip("smaller heads have the same code, but for the lengths of its loops")
    op, inputs = registry.OPS[case.op], case.inputs()
    call = partial(op.run, inputs, backend="metal", threads=None)
    found = in_every_order(call, monkeypatch, fast_math=fast_math, orders=orders)
    exact, naive = op.exact(inputs), op.naive(inputs)
    for name, result in found.items():
        verdict = registry.judge(name, result, exact[name], naive[name])
        assert verdict.ok, f"{name}: the error is {verdict.error}, {verdict.allowed} is allowed"
