# ruff: noqa: UP037 (a tensor annotation such as Tensor["N"] names dimensions, not types)
"""The verifier: every rule of docs/internals/ir.md has a broken kernel here."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from monotile import ir
from monotile.dtypes import bool_, float16, float32, int8, int32, int64
from monotile.errors import InternalError
from monotile.ir import Block, Kernel, Op, Tensor, Type, Value, verify
from monotile.language import Const, arange, blocks, dot, kernel, program_id, zeros
from monotile.language import Tensor as Shape

X = Tensor("x", 0, float32, ("M", "N"), unit=1, strides=(None, 1))


class Draft:
    """A kernel under construction: each call appends an op and returns its result."""

    def __init__(self) -> None:
        self.kernel = Kernel("draft", (X,), (("s", int32),))

    def op(
        self, kind: str, *operands: Value, types: tuple[Type, ...] = (), blocks: tuple[Block, ...] = (), **attrs
    ) -> Op:
        op = Op(kind, operands, attrs, types, blocks)
        self.kernel.body.ops.append(op)
        return op

    def tile(self, *shape: int, dtype=float32) -> Value:
        kind = {"float": 1.0, "int": 1, "bool": True}[dtype.kind]
        scalar = self.op("const", types=(Type(dtype),), value=kind).result
        return self.op("broadcast", scalar, types=(Type(dtype, shape),)).result if shape else scalar

    def check(self) -> None:
        self.op("yield")
        verify.check(self.kernel, "a test")


def loop(d: Draft, body: Block, init: Value | None = None, **attrs) -> Op:
    inits = () if init is None else (init,)
    zero = d.tile(dtype=int32)
    return d.op("for", zero, zero, *inits, types=tuple(v.type for v in inits), blocks=(body,), **({"step": 1} | attrs))


def yielding(*params: Type, ops: tuple[Op, ...] = (), values: tuple[Value, ...] = ()) -> Block:
    block = Block(params)
    block.ops = [*ops, Op("yield", values)]
    return block


F2 = Type(float32, (4, 4))
INT, BOOL, F32 = Type(int32), Type(bool_), Type(float32)


def leaked(d: Draft) -> None:
    inner = Op("const", (), {"value": 1.0}, (F32,))
    loop(d, yielding(INT, ops=(inner,)))
    d.op("neg", inner.result, types=(F32,))


def early(d: Draft) -> None:
    later = Op("const", (), {"value": 1.0}, (F32,))
    d.op("neg", later.result, types=(F32,))
    d.kernel.body.ops.append(later)


def twice(d: Draft) -> None:
    d.kernel.body.ops.append(d.tile().op)


def stolen(d: Draft) -> None:
    op = d.op("const", types=(F32,), value=1.0)
    op.results = (Value(F32, Op("const")),)


def visible_in_if(d: Draft) -> None:
    test = d.tile(dtype=bool_)
    d.op("if", test, blocks=(yielding(ops=(Op("visible", (test,)),)), yielding()))


def program_in_loop(d: Draft) -> None:
    loop(d, yielding(INT, ops=(Op("program_id", (d.tile(dtype=int32),), {}, (INT,)),)))


def two_programs(d: Draft) -> None:
    for _ in range(2):
        d.op("program_id", d.tile(dtype=int32), types=(INT,))


def load(d: Draft, starts: int = 2, extents=(4, 4), checked=(True, True), type_: Type = F2, tensor: Tensor = X) -> None:
    at = [d.tile(dtype=int32) for _ in range(starts)]
    d.op("load", *at, types=(type_,), tensor=tensor, extents=extents, checked=checked)


def store(d: Draft, value: Type) -> None:
    at = [d.tile(dtype=int32) for _ in range(2)]
    d.op("store", d.tile(*value.shape, dtype=value.dtype), *at, tensor=X, extents=(4, None), checked=(True, True))


BROKEN: dict[str, tuple[Callable[[Draft], object], str]] = {
    "kind": (lambda d: d.op("frobnicate"), "not a kind"),
    "leaked": (leaked, "outside the block"),
    "early": (early, "before it is defined"),
    "twice": (twice, "defined twice"),
    "stolen": (stolen, "owned by its op"),
    "operand count": (lambda d: d.op("add", d.tile(), types=(F32,)), "takes 2"),
    "result count": (lambda d: d.op("neg", d.tile()), "has 1 result"),
    "mixed dtypes": (lambda d: d.op("add", d.tile(), d.tile(dtype=int32), types=(F32,)), "one dtype"),
    "narrow": (lambda d: d.op("add", *[d.tile(dtype=float16)] * 2, types=(Type(float16),)), "narrow"),
    "compare": (lambda d: d.op("lt", d.tile(), d.tile(), types=(F32,)), "wrong dtype"),
    "float mod": (lambda d: d.op("mod", d.tile(), d.tile(), types=(F32,)), "for integers"),
    "int exp": (lambda d: d.op("exp", d.tile(dtype=int32), types=(INT,)), "for float32"),
    "and": (lambda d: d.op("and", *[d.tile(dtype=int32)] * 2, types=(INT,)), "for bool"),
    "bool add": (lambda d: d.op("add", *[d.tile(dtype=bool_)] * 2, types=(BOOL,)), "not for bool"),
    "side": (lambda d: d.op("neg", d.tile(3, 4), types=(F2,)), "each side"),
    "rank": (lambda d: d.op("neg", d.tile(4), types=(F2,)), "rank of the result"),
    "where": (lambda d: d.op("where", *[d.tile()] * 3, types=(F32,)), "condition"),
    "rank 3": (lambda d: d.tile(2, 2, 2), "two dimensions"),
    "empty side": (lambda d: d.tile(0), "at least 1"),
    "const": (lambda d: d.op("const", types=(F32,), value=1), "Python float"),
    "param": (lambda d: d.op("param", types=(INT,), name="t"), "names a scalar"),
    "param dtype": (lambda d: d.op("param", types=(F32,), name="s"), "declared dtype"),
    "dim": (lambda d: d.op("dim", types=(INT,), tensor=X, axis=2), "dimension of the tensor"),
    "arange": (lambda d: d.op("arange", types=(Type(int64, (4,)),)), "int32 tile"),
    "expand": (lambda d: d.op("expand", d.tile(4), types=(Type(float32, (4, 1)),), position=0), "one side of 1"),
    "trans": (lambda d: d.op("trans", d.tile(4), types=(Type(float32, (4,)),)), "rank 2"),
    "broadcast": (lambda d: d.op("broadcast", d.tile(), types=(Type(int32, (4,)),)), "keeps the dtype"),
    "fold": (lambda d: d.op("reduce", d.tile(4), types=(F32,), fold="product", axis=0), "sum, max or min"),
    "axis": (lambda d: d.op("reduce", d.tile(4), types=(F32,), fold="sum", axis=1), "axis"),
    "bool sum": (lambda d: d.op("reduce", d.tile(4, dtype=bool_), types=(BOOL,), fold="sum", axis=0), "not for bool"),
    "reduced": (lambda d: d.op("reduce", d.tile(4), types=(Type(float32, (4,)),), fold="sum", axis=0), "removes"),
    "dot": (lambda d: d.op("dot", d.tile(4, 3), d.tile(4, 3), types=(F2,)), r"\(m, k\)"),
    "int dot": (lambda d: d.op("dot", *[d.tile(4, 4, dtype=int32)] * 2, types=(F2,)), "float dtype"),
    "dot result": (lambda d: d.op("dot", *[d.tile(4, 4)] * 2, types=(Type(float16, (4, 4)),)), "gives float32"),
    "load starts": (lambda d: load(d, starts=1), "one start"),
    "load extents": (lambda d: load(d, extents=(4,)), "one extent"),
    "load checked": (lambda d: load(d, checked=(True,)), "one checked"),
    "load type": (lambda d: load(d, extents=(4, None)), "extents"),
    "extent": (lambda d: load(d, extents=(4, 0)), "at least 1"),
    "stranger": (lambda d: load(d, tensor=Tensor("z", 5, float32, ("M", "N"))), "one of the kernel's"),
    "store dtype": (lambda d: store(d, Type(float16, (4,))), "stored value"),
    "store shape": (lambda d: store(d, F2), "stored value"),
    "gather": (lambda d: d.op("gather", *[d.tile(4)] * 2, types=(Type(float32, (4,)),), tensor=X), "integer"),
    "step": (lambda d: loop(d, yielding(INT), step=0), "positive int"),
    "loop parameters": (lambda d: loop(d, yielding()), "block of a for takes"),
    "loop yield": (lambda d: loop(d, yielding(INT, F32), d.tile()), "yield must have the types"),
    "no yield": (lambda d: loop(d, Block((INT,))), "end in a yield"),
    "middle yield": (lambda d: d.op("yield"), "last op"),
    "if": (lambda d: d.op("if", d.tile(dtype=int8), blocks=(yielding(), yielding())), "bool scalar"),
    "one block": (lambda d: d.op("if", d.tile(dtype=bool_), blocks=(yielding(),)), "number of blocks"),
    "if yield": (
        lambda d: d.op("if", d.tile(dtype=bool_), types=(F32,), blocks=(yielding(), yielding())),
        "yield must",
    ),
    "visible": (lambda d: d.op("visible", d.tile(dtype=bool_)), "block of a for"),
    "visible in if": (visible_in_if, "block of a for"),
    "program in loop": (program_in_loop, "top level"),
    "two programs": (two_programs, "at most once"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name: str) -> None:
    breakage, rule = BROKEN[name]
    draft = Draft()
    breakage(draft)
    with pytest.raises(InternalError, match=rule) as caught:
        draft.check()
    assert "'a test'" in str(caught.value) and "draft" in str(caught.value)


def test_a_sound_draft_passes() -> None:
    draft = Draft()
    load(draft)
    loop(draft, yielding(INT))
    draft.check()


@kernel
def sample(x: Shape["M N"], y: Shape["M"], *, BN: Const = 8):
    i = program_id(x.shape[0])
    acc = zeros((1, 1))
    for j in blocks(x.shape[1], BN, lambda cols: cols < 20):
        row = x[i, j + arange(BN)][None, :]
        if i > 3:
            acc += dot(row, row.T)
    y[i] = acc.sum(axis=1).max(axis=0)


def test_the_message_names_the_authors_line() -> None:
    x = np.zeros((4, 4), np.float32)
    broken = sample.ir(x, x[0].copy())
    (product,) = [op for op in ir.walk(broken.body) if op.kind == "dot"]
    product.operands = product.operands[:1]
    with pytest.raises(InternalError, match=r"(?s)'peel'.*dot\(.*test_verify.py, line \d+: acc \+= dot\(row, row.T\)"):
        verify.check(broken, "peel")
