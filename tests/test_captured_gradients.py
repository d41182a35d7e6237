"""What functions read in a call whose gradients torch computes: no gradient is lost, and changes before backward do not
change gradients."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import monotile
from monotile.errors import CapturedChanged, NoGradient
from usable import DEVICE, ON_GPU

torch: Any = pytest.importorskip("torch", reason="these are tests of gradients in torch")

COMPILERS = ("eager", "aot_eager", "inductor") if ON_GPU else ("eager", "aot_eager")
OFFSETS = torch.tensor([0, 4, 9], dtype=torch.int32, device=DEVICE)
Change = Callable[[], object]


def queries() -> Any:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(1, 2, 9, 16, generator=generator).to(DEVICE).requires_grad_()


def packed(q: Any, **mods: Any) -> Any:
    return monotile.attention_varlen(*[q[0].transpose(0, 1)] * 3, OFFSETS, OFFSETS, **mods)


def padded(q: Any, **mods: Any) -> Any:
    return monotile.attention(q, q, q, **mods)


FUNCTIONS = {"attention": padded, "attention_varlen": packed}


def documents(count: int = 3) -> Any:
    return torch.arange(9, device=DEVICE) // count


# ---- what changes before backward ------------------------------------------------------------------------------------


class Prefix:
    """A mask_mod with a number."""

    def __init__(self, length: Any) -> None:
        self.length = length

    def __call__(self, b: Any, h: Any, i: Any, j: Any) -> Any:
        return j < self.length

    def method(self, b: Any, h: Any, i: Any, j: Any) -> Any:
        return j < self.length


class Options:
    """A namespace of numbers that lengths of a tuple are made of."""

    count = 3


LENGTH, SHARED, OPTIONS = 3, Prefix(3), Options()
TABLE = documents()
SETTINGS = types.ModuleType("settings")


def of_an_object() -> tuple[Any, Change]:
    mod = Prefix(3)
    return mod, lambda: setattr(mod, "length", 6)


def of_a_method() -> tuple[Any, Change]:
    owner = Prefix(3)
    return owner.method, lambda: setattr(owner, "length", 6)


def of_an_object_in_a_closure() -> tuple[Any, Change]:
    owner = Prefix(3)
    return lambda b, h, i, j: j < owner.length, lambda: setattr(owner, "length", 6)


def of_a_global_object() -> tuple[Any, Change]:
    SHARED.length = 3
    return lambda b, h, i, j: j < SHARED.length, lambda: setattr(SHARED, "length", 6)


def of_a_global() -> tuple[Any, Change]:
    globals()["LENGTH"] = 3
    return lambda b, h, i, j: j < LENGTH, lambda: globals().update(LENGTH=6)


def of_no_dimensions() -> tuple[Any, Change]:
    length = torch.tensor(3)
    return lambda b, h, i, j: j < length, lambda: length.fill_(6)


def of_numpy() -> tuple[Any, Change]:
    length = np.array(3)
    return lambda b, h, i, j: j < length, lambda: length.fill(6)


def of_a_block_mask() -> tuple[Any, Change]:
    mod, change = of_an_object()
    return monotile.block_mask(mod, None, None, 9, 9), change


NUMBERS = [of_an_object, of_a_method, of_an_object_in_a_closure, of_a_global_object, of_a_global, of_no_dimensions,
           of_numpy, of_a_block_mask]  # fmt: skip


def a_tensor() -> tuple[Any, Change]:
    table = documents()
    return lambda b, h, i, j: table[i] == table[j], lambda: table.zero_()


def an_array() -> tuple[Any, Change]:
    table = documents().numpy(force=True).copy()
    return lambda b, h, i, j: table[i] == table[j], lambda: table.fill(0)


def a_tensor_of_a_block_mask() -> tuple[Any, Change]:
    mod, change = a_tensor()
    return monotile.block_mask(mod, None, None, 9, 9), change


def a_global_tensor() -> tuple[Any, Change]:
    globals()["TABLE"] = documents()
    return lambda b, h, i, j: TABLE[i] == TABLE[j], lambda: globals().update(TABLE=documents(9))


def an_attribute_of_a_module() -> tuple[Any, Change]:
    SETTINGS.length = 3  # type: ignore[attr-defined]
    return lambda b, h, i, j: j < SETTINGS.length, lambda: setattr(SETTINGS, "length", 6)


def a_constant() -> tuple[Any, Change]:
    OPTIONS.count = 3
    return lambda b, h, i, j: j < len((0,) * OPTIONS.count), lambda: setattr(OPTIONS, "count", 6)


def a_bool() -> tuple[Any, Change]:
    owner = Prefix(True)
    return lambda b, h, i, j: j < (3 if owner.length else 6), lambda: setattr(owner, "length", False)


REFUSED = [a_tensor, a_tensor_of_a_block_mask, a_global_tensor, an_attribute_of_a_module, a_constant, a_bool]
if not ON_GPU:
    REFUSED.append(an_array)


def run(function: str, compiler: str | None, mod: Any) -> tuple[Any, Callable[[], Any]]:
    """Call a function and return its output, and what computes a gradient."""
    q = queries()

    def call(q: Any) -> Any:
        return FUNCTIONS[function](q, mask_mod=mod)

    if compiler is not None:
        torch.compiler.reset()
        call = torch.compile(call, fullgraph=True, backend=compiler)
    o = call(q)
    return o, lambda: torch.autograd.grad(o.square().sum(), q, retain_graph=True)[0]


def cases(makers: list[Any]) -> list[Any]:
    whole = [(maker, "attention", compiler) for maker in makers for compiler in (None, *COMPILERS)]
    ragged = [(maker, "attention_varlen", None) for maker in makers if "block_mask" not in maker.__name__]
    return [pytest.param(*case, id=f"{case[0].__name__} {case[1]} {case[2]}") for case in whole + ragged]


@pytest.mark.parametrize(("maker", "function", "compiler"), cases(NUMBERS))
def test_numbers_are_read_when_the_call_is_made(maker: Any, function: str, compiler: str | None) -> None:
    mod, change = maker()
    _, gradient = run(function, compiler, mod)
    before = gradient()
    change()
    assert torch.equal(gradient(), before)
    _, later = run(function, compiler, mod)
    assert not torch.equal(later(), before)


@pytest.mark.parametrize(("maker", "function", "compiler"), cases(REFUSED))
def test_other_changes_before_backward_are_refused(maker: Any, function: str, compiler: str | None) -> None:
    mod, change = maker()
    _, gradient = run(function, compiler, mod)
    gradient()
    change()
    with pytest.raises(CapturedChanged, match="after backward"):
        gradient()
    _, later = run(function, compiler, mod)
    assert bool(later().isfinite().all())


def test_names_that_a_function_does_not_read_may_change() -> None:
    """An attribute with the name of a global."""
    globals()["length"] = object()
    mod = Prefix(3)
    _, gradient = run("attention", None, mod)
    before = gradient()
    globals()["length"] = None
    assert torch.equal(gradient(), before)


def test_a_closure_over_a_loop() -> None:
    q, outputs, expected = queries(), [], []
    for count in (2, 3, 5):
        table = documents(count)
        outputs.append(monotile.attention(q, q, q, mask_mod=lambda b, h, i, j: table[i] == table[j]))  # noqa: B023
        expected.append(torch.autograd.grad(outputs[-1].square().sum(), q, retain_graph=True)[0])
    for o, gradient in zip(outputs, expected, strict=True):
        assert torch.equal(torch.autograd.grad(o.square().sum(), q)[0], gradient)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_runs_of_a_graph_with_other_values_between(compiler: str) -> None:
    """The gradients of the last run are right; torch refuses those of an earlier one."""
    mod, q = Prefix(3), queries()
    torch.compiler.reset()
    call = torch.compile(lambda q: monotile.attention(q, q, q, mask_mod=mod), fullgraph=True, backend=compiler)
    first = call(q)
    mod.length = 6
    second = call(q)
    found = torch.autograd.grad(second.square().sum(), q)[0]
    assert torch.equal(found, torch.autograd.grad(monotile.attention(q, q, q, mask_mod=mod).square().sum(), q)[0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(first.square().sum(), q)


# ---- gradients of what is read ---------------------------------------------------------------------------------------

WEIGHTS = torch.zeros(9, device=DEVICE).requires_grad_()


def learned(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score + WEIGHTS[j]


def states(q: Any, **mods: Any) -> Any:
    q = q.detach()
    return monotile.decode_partials(q, q, q, splits=2, **mods).o


IN_GRAPHS = {**FUNCTIONS, "decode_partials": states}


@pytest.mark.parametrize("function", IN_GRAPHS)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_captured_gradient_is_refused_in_a_graph(function: str, compiler: str) -> None:
    def call(q: Any) -> Any:
        return IN_GRAPHS[function](q, score_mod=learned)

    torch.compiler.reset()
    with pytest.raises(RuntimeError, match=r"NoGradient.*requires grad"):
        torch.compile(call, fullgraph=True, backend=compiler)(queries())
    torch.compiler.reset()
    with pytest.raises(NoGradient, match="requires grad"):
        torch.compile(call, backend=compiler)(queries())
    torch.compiler.reset()
    with torch.no_grad():
        assert torch.equal(torch.compile(call, fullgraph=True, backend=compiler)(queries()), call(queries()))


@pytest.mark.parametrize("function", IN_GRAPHS)
@pytest.mark.parametrize("strict", [False, True])
def test_a_captured_gradient_is_refused_in_an_export(function: str, strict: bool) -> None:
    class Model(torch.nn.Module):  # type: ignore[misc]
        def forward(self, q: Any) -> Any:
            return IN_GRAPHS[function](q, score_mod=learned)

    torch.compiler.reset()
    with pytest.raises(RuntimeError if strict else NoGradient, match="requires grad"):
        torch.export.export(Model(), (queries(),), strict=strict)


def test_a_tensor_that_requires_grad_after_the_graph_is_made() -> None:
    weights = torch.zeros(9, device=DEVICE)

    def biased(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + weights[j]

    torch.compiler.reset()
    call = torch.compile(lambda q: padded(q, score_mod=biased), fullgraph=True, backend="aot_eager")
    call(queries())
    weights.requires_grad_()
    with pytest.raises(NoGradient, match="requires grad"):
        call(queries())
