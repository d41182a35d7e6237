"""`monotile.torch` beside torch's own functions: shapes, broadcasting, masks, heads, errors."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import numpy as np
import pytest

from monotile.errors import ArgumentKind, BadOption, HeadsDoNotDivide, MaskShape, MonotileError
from usable import DEVICE, ON_GPU

torch: Any = pytest.importorskip("torch", reason="these are tests of monotile.torch")
from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402

import monotile.torch  # noqa: E402

if ON_GPU:
    torch.set_default_device(DEVICE)
F = torch.nn.functional
torchs = F.scaled_dot_product_attention


def draw(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(len(shape) + sum(shape))).to(dtype)


def same(q: Any, k: Any, v: Any, **options: Any) -> None:
    wide = {n: o.double() if isinstance(o, torch.Tensor) and o.is_floating_point() else o for n, o in options.items()}
    wanted = torchs(q.double(), k.double(), v.double(), **wide)
    found = monotile.torch.scaled_dot_product_attention(q, k, v, **options)
    assert found.shape == wanted.shape and found.dtype == q.dtype
    assert (found.double() - wanted).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((2, 4, 9, 16), (2, 4, 13, 16), (2, 4, 13, 24)),
        ((4, 9, 16), (4, 13, 16), (4, 13, 16)),
        ((9, 16), (13, 16), (13, 16)),
        ((3, 2, 4, 9, 16), (3, 2, 4, 13, 16), (3, 2, 4, 13, 16)),
        ((3, 1, 4, 9, 16), (1, 2, 4, 13, 16), (3, 2, 4, 13, 8)),
        ((1, 4, 9, 16), (5, 4, 13, 16), (5, 4, 13, 16)),
        ((2, 4, 9, 16), (2, 1, 13, 16), (2, 1, 13, 16)),
        ((2, 1, 9, 16), (2, 4, 13, 16), (2, 4, 13, 16)),
    ],
    ids=str,
)
def test_shapes_broadcast_as_torchs(q: Any, k: Any, v: Any) -> None:
    same(draw(*q), draw(*k), draw(*v))
    same(draw(*q), draw(*k), draw(*v), is_causal=True, scale=0.3)


@pytest.mark.parametrize("shape", [(9, 13), (1, 13), (4, 9, 13), (2, 1, 9, 13), (2, 4, 9, 13), (2, 1, 1, 13)], ids=str)
def test_masks(shape: tuple[int, ...]) -> None:
    q, k, v = draw(2, 4, 9, 16), draw(2, 4, 13, 16), draw(2, 4, 13, 16)
    same(q, k, v, attn_mask=draw(*shape) > -0.7)
    same(q, k, v, attn_mask=draw(*shape))


def test_a_mask_of_more_dimensions() -> None:
    q, k = draw(3, 1, 4, 9, 16), draw(2, 4, 13, 16)
    same(q, k, k, attn_mask=draw(3, 2, 4, 9, 13))
    same(q, k, k, attn_mask=draw(2, 1, 9, 13))
    with pytest.raises(MaskShape, match="broadcast"):
        monotile.torch.scaled_dot_product_attention(q, k, k, attn_mask=draw(5, 1, 9, 13))


def test_grouped_heads() -> None:
    same(draw(2, 6, 9, 16), draw(2, 2, 13, 16), draw(2, 2, 13, 16), enable_gqa=True)
    with pytest.raises(HeadsDoNotDivide, match="enable_gqa"):
        monotile.torch.scaled_dot_product_attention(draw(2, 6, 9, 16), draw(2, 2, 13, 16), draw(2, 2, 13, 16))


def test_what_is_refused_is_named() -> None:
    q = draw(1, 2, 5, 16)
    with pytest.raises(BadOption, match="dropout"):
        monotile.torch.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
    with pytest.raises(BadOption, match="is_causal"):
        monotile.torch.scaled_dot_product_attention(q, q, q, attn_mask=draw(5, 5), is_causal=True)
    with pytest.raises(MonotileError, match="dimensions"):
        monotile.torch.scaled_dot_product_attention(draw(5), draw(5), draw(5))


def test_under_an_existing_model() -> None:
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    layer.train()
    x = draw(2, 7, 32).requires_grad_()
    wanted = layer(x)
    calls = []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return monotile.torch.scaled_dot_product_attention(*args, **options)

    with monotile.torch.sdpa():
        assert F.scaled_dot_product_attention is monotile.torch.scaled_dot_product_attention
        F.scaled_dot_product_attention = counted
        found = layer(x)
    assert F.scaled_dot_product_attention is torchs and calls
    assert (found - wanted).abs().max() < 1e-5
    (gradient,), (exact,) = torch.autograd.grad(found.sum(), x), torch.autograd.grad(wanted.sum(), x)
    assert (gradient - exact).abs().max() < 1e-5


@pytest.mark.parametrize(("keys", "values"), [(2, 3), (6, 2), (2, 6), (1, 3), (3, 1)])
def test_heads_of_keys_and_values_that_differ(keys: int, values: int) -> None:
    q, k, v = draw(2, 6, 5, 16), draw(2, keys, 7, 16), draw(2, values, 7, 8)
    found = monotile.torch.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert (found - torchs(q, k, v, enable_gqa=True)).abs().max() < 1e-5
    if keys == 6:
        with pytest.raises(HeadsDoNotDivide, match="enable_gqa=True"):
            monotile.torch.scaled_dot_product_attention(q, k, v)
        with pytest.raises(HeadsDoNotDivide, match="must divide"):
            monotile.torch.scaled_dot_product_attention(q, k, draw(2, 4, 7, 8), enable_gqa=True)


def test_torch_is_back_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), monotile.torch.sdpa():
        _ = 1 // 0
    assert F.scaled_dot_product_attention is torchs


# ---- masks and classes that say what torch's function means ----------------------------------------------------------


@pytest.mark.parametrize("lengths", [(7, 9), (9, 9), (1, 9)], ids=str)
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_causal_biases(make: Any, lengths: tuple[int, int]) -> None:
    bias, q = make(*lengths), draw(1, 2, lengths[0], 8)
    k, v = draw(1, 2, lengths[1], 8), draw(1, 2, lengths[1], 8) * 2.0
    wanted = torchs(q, k, v, attn_mask=bias)
    found = [monotile.torch.scaled_dot_product_attention(q, k, v, bias)]
    with monotile.torch.sdpa():
        found.append(F.scaled_dot_product_attention(q, k, v, attn_mask=bias))
    compiled = torch.compile(monotile.torch.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    found.append(compiled(q, k, v, bias))
    for o in found:
        assert type(o) is torch.Tensor and (o - wanted).abs().max() < 1e-5


def test_a_causal_bias_of_other_lengths() -> None:
    """torch does not read the lengths of one that begins at the upper left."""
    q, k = draw(1, 2, 7, 8), draw(1, 2, 9, 8)
    found = monotile.torch.scaled_dot_product_attention(q, k, k, causal_upper_left(20, 30))
    assert (found - torchs(q, k, k, causal_upper_left(20, 30))).abs().max() < 1e-5
    with pytest.raises(MaskShape, match="3 queries and 9 keys"):
        monotile.torch.scaled_dot_product_attention(q, k, k, causal_lower_right(3, 9))
    with pytest.raises(BadOption, match="is_causal"):
        monotile.torch.scaled_dot_product_attention(q, k, k, causal_lower_right(7, 9), is_causal=True)


@pytest.mark.parametrize("function", [monotile.attention, monotile.decode_partials])
def test_a_causal_bias_is_no_mask_elsewhere(function: Any) -> None:
    q, k = draw(1, 2, 7, 8), draw(1, 2, 9, 8)
    function(q, k, k, mask=torch.ones(7, 9, dtype=torch.bool))  # a plan of such a call is kept
    with pytest.raises(ArgumentKind, match="causal='lower_right'"):
        function(q, k, k, mask=causal_lower_right(7, 9))


class Handled(torch.Tensor):
    """A tensor that says what torch's function means on it, as torch's guide to extending it does."""

    seen: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torchs:
            cls.seen.append((len(args), kwargs))
            return "handled"
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_class_with_a_torch_function_is_asked() -> None:
    q = draw(1, 2, 5, 8)
    special = q.as_subclass(Handled)
    with monotile.torch.sdpa():
        assert F.scaled_dot_product_attention(special, q, q) == "handled"
        assert F.scaled_dot_product_attention(q, q, q, torch.ones(5, 5).as_subclass(Handled), scale=2.0) == "handled"
    assert Handled.seen[0] == (3, {}) and Handled.seen[1][1]["scale"] == 2.0
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.equal(monotile.torch.scaled_dot_product_attention(special, q, q), monotile.attention(q, q, q))


def test_classes_without_one_are_computed() -> None:
    class Named(torch.Tensor):
        pass

    q = draw(1, 2, 5, 8)
    found = monotile.torch.scaled_dot_product_attention(q.as_subclass(Named), q, q)
    assert type(found) is Named and torch.equal(torch.Tensor(found), monotile.attention(q, q, q))
    with torch.device(DEVICE), monotile.torch.sdpa():  # a mode, which sees every function of torch's
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), monotile.attention(q, q, q))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("function", [monotile.attention, monotile.torch.scaled_dot_product_attention])
def test_a_class_that_takes_no_operator(function: Any) -> None:
    q = draw(1, 2, 5, 8)
    with pytest.raises(ArgumentKind, match="MaskedTensor"):
        function(q, torch.masked.masked_tensor(q, q > 0), q)


@pytest.mark.parametrize("wrong", [None, [1.0], np.ones((1, 2, 5, 8), np.float32)], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("n", range(3))
def test_what_is_no_tensor(wrong: Any, n: int) -> None:
    from monotile.flash_attn import flash_attn_func
    from monotile.flex import flex_attention

    given = [draw(1, 2, 5, 8)] * 3
    given[n] = wrong
    for function in (monotile.torch.scaled_dot_product_attention, flex_attention, flash_attn_func):
        with pytest.raises(ArgumentKind, match="must be a torch tensor"):
            function(*given)


# ---- regions ---------------------------------------------------------------------------------------------------------


def test_regions_that_overlap() -> None:
    first, second = monotile.torch.sdpa(), monotile.torch.sdpa()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert F.scaled_dot_product_attention is monotile.torch.scaled_dot_product_attention
    second.__exit__(None, None, None)
    assert F.scaled_dot_product_attention is torchs


def test_regions_of_several_threads() -> None:
    together, wrong = threading.Barrier(4), []

    def work() -> None:
        together.wait()
        for _ in range(300):
            with monotile.torch.sdpa():
                if F.scaled_dot_product_attention is not monotile.torch.scaled_dot_product_attention:
                    wrong.append(threading.get_ident())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and F.scaled_dot_product_attention is torchs


def test_a_region_in_a_compiled_graph() -> None:
    """Around a compiled call it is part of what torch compiles for; inside one torch goes on without compiling it."""
    q = draw(1, 2, 5, 8)

    def model(q: Any) -> Any:
        return F.scaled_dot_product_attention(q, q, q)

    def inside(q: Any) -> Any:
        with monotile.torch.sdpa():
            return model(q)

    graphs: list[Any] = []
    compiled = torch.compile(model, fullgraph=True, backend=lambda graph, _: graphs.append(graph.code) or graph)
    with monotile.torch.sdpa():
        assert (compiled(q) - model(q)).abs().max() < 1e-5
    assert "monotile.attention" in graphs[0]
    with pytest.raises(torch._dynamo.exc.Unsupported, match="around the call"):
        torch.compile(inside, backend="aot_eager", fullgraph=True)(q)
    assert torch.equal(torch.compile(inside, backend="aot_eager")(q), inside(q))
    assert F.scaled_dot_product_attention is torchs


def test_the_module() -> None:
    module = monotile.torch.Attention(32, 4, kv_heads=2, causal=True)
    x = draw(2, 9, 32)
    parts = module.qkv(x).view(2, 9, 8, 8).transpose(1, 2)
    q, k, v = parts.split([4, 2, 2], dim=1)
    wanted = module.out(torchs(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).reshape(2, 9, 32))
    assert (module(x) - wanted).abs().max() < 1e-5
    module(x).sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    compiled = torch.compile(module, fullgraph=True, backend="inductor" if ON_GPU else "aot_eager")
    assert (compiled(x) - wanted).abs().max() < 1e-5
    with pytest.raises(HeadsDoNotDivide, match="divisor"):
        monotile.torch.Attention(32, 4, kv_heads=3)


class Bias(torch.nn.Module):  # type: ignore[misc]
    """A score_mod with a table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(9.0))

    def forward(self, score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + self.table[j]


def test_options_of_the_module_are_registered() -> None:
    sinks = torch.nn.Parameter(torch.ones(4))
    module = monotile.torch.Attention(32, 4, sinks=sinks, score_mod=Bias())
    assert dict(module.named_parameters())["sinks"] is sinks
    assert {"sinks", "score_mod.table"} <= set(module.state_dict())
    module(draw(2, 9, 32)).sum().backward()
    assert sinks.grad is not None
    fixed = monotile.torch.Attention(32, 4, sinks=torch.zeros(4))
    assert "sinks" in dict(fixed.named_buffers()) and "sinks" not in dict(fixed.named_parameters())
    fixed.load_state_dict({**fixed.state_dict(), "sinks": torch.full((4,), 9.0)})
    plain = monotile.torch.Attention(32, 4)
    plain.load_state_dict({name: value for name, value in fixed.state_dict().items() if name != "sinks"})
    x = draw(2, 9, 32)
    assert not torch.equal(fixed(x), plain(x))
    assert fixed.to(torch.bfloat16).sinks.dtype is torch.bfloat16
    assert fixed(x.to(torch.bfloat16)).dtype is torch.bfloat16
