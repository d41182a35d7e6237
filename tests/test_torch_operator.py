"""Attention in torch: gradients, traces, autocast. Every result is compared with the formula in float64."""

from __future__ import annotations

from typing import Any

import pytest

import monotile
from monotile.errors import CapturedChanged, MonotileError, NoGradient
from monotile.language import tanh, where
from usable import DEVICE, ON_GPU

torch: Any = pytest.importorskip("torch", reason="these are tests of the torch operator")
from torch.utils.checkpoint import checkpoint  # noqa: E402

if ON_GPU:
    torch.set_default_device(DEVICE)
COMPILER = "inductor" if ON_GPU else "aot_eager"
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def leaves(dtype: Any = torch.float32, Hq: int = 4, Hkv: int = 2, Nq: int = 9, Nk: int = 13, D: int = 16) -> list[Any]:
    generator = torch.Generator(DEVICE).manual_seed(5)
    shapes = (2, Hq, Nq, D), (2, Hkv, Nk, D), (2, Hkv, Nk, D)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def formula(q: Any, k: Any, v: Any, mask: Any = None, sinks: Any = None, causal: bool = False, bend: Any = None) -> Any:
    """Attention and its logsumexp by torch operations in float64."""
    q, k, v = (t.double() for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    S = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    S = S if bend is None else bend(S)
    if mask is not None:
        S = S + mask.double() if mask.is_floating_point() else S.masked_fill(~mask, -torch.inf)
    if causal:
        seen = torch.ones(S.shape[2:], dtype=torch.bool).tril(S.shape[3] - S.shape[2])
        S = S.masked_fill(~seen, -torch.inf)
    every = S if sinks is None else torch.cat((S, sinks.double()[:, None, None].expand(*S.shape[:3], 1)), 3)
    lse = torch.logsumexp(every, 3)
    return torch.exp(S - lse[..., None]) @ v, lse


def gradients(loss: Any, tensors: list[Any]) -> list[Any]:
    return list(torch.autograd.grad(loss, tensors))


def weighted(o: Any, lse: Any = None) -> Any:
    """A loss in which every element of the result has a weight of its own."""
    weights = torch.cos(torch.arange(o.numel(), dtype=torch.float64)).reshape(o.shape)
    loss = (o.double() * weights).sum()
    return loss if lse is None else loss + (lse.double() * weights[..., 0]).sum()


def close(found: list[Any], wanted: list[Any], dtype: Any = torch.float32) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        scale = max(1.0, float(b.abs().max()))
        assert float((a.double() - b.double()).abs().max()) <= TOLERANCE[dtype] * scale


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_q_k_and_v(dtype: Any, causal: bool) -> None:
    tensors = leaves(dtype)
    o, lse = monotile.attention(*tensors, causal=causal, return_lse=True)
    assert o.requires_grad and lse.requires_grad and o.dtype == dtype and lse.dtype == torch.float32
    found = gradients(weighted(o, lse), tensors)
    close(found, gradients(weighted(*formula(*tensors, causal=causal)), tensors), dtype)


def test_gradients_of_a_mask_and_of_sinks() -> None:
    tensors = leaves()
    mask = torch.randn(1, 4, 9, 13).requires_grad_()
    sinks = torch.randn(4).requires_grad_()
    every = [*tensors, mask, sinks]
    found = gradients(weighted(monotile.attention(*tensors, mask=mask, sinks=sinks)), every)
    close(found, gradients(weighted(formula(*tensors, mask=mask, sinks=sinks)[0]), every))


MODS: dict[str, tuple[Any, Any]] = {
    "alibi": (lambda s, b, h, i, j: s - 0.1 * abs(i - j), lambda s, h, i, j: s - 0.1 * (i - j).abs()),
    "a square": (lambda s, b, h, i, j: s * s * 0.5 + s, lambda s, h, i, j: s * s * 0.5 + s),
    "a cap": (lambda s, b, h, i, j: 3.0 * tanh(s / 3.0), lambda s, h, i, j: 3.0 * torch.tanh(s / 3.0)),
    "a branch": (lambda s, b, h, i, j: where(s > 0.0, s, 0.3 * s), lambda s, h, i, j: torch.where(s > 0, s, 0.3 * s)),
    "by head and row": (
        lambda s, b, h, i, j: s * (1.0 + 0.1 * h) + 0.01 * i,
        lambda s, h, i, j: s * (1 + 0.1 * h) + 0.01 * i,
    ),
}


@pytest.mark.parametrize(("name", "softcap"), [(name, (None, 5.0)[n % 2]) for n, name in enumerate(MODS)])
def test_gradients_through_a_score_mod(name: str, softcap: float | None) -> None:
    tensors = leaves(Nq=37, Nk=41)
    mod, same = MODS[name]
    h, i, j = torch.arange(4)[:, None, None], torch.arange(37)[:, None], torch.arange(41)

    def bend(S: Any) -> Any:
        bent = same(S, h, i, j)
        return bent if softcap is None else softcap * torch.tanh(bent / softcap)

    found = gradients(weighted(monotile.attention(*tensors, score_mod=mod, softcap=softcap)), tensors)
    close(found, gradients(weighted(formula(*tensors, bend=bend)[0]), tensors))


def test_some_inputs_need_no_gradient() -> None:
    q, k, v = leaves()
    alone = gradients(weighted(monotile.attention(q, k.detach(), v.detach())), [q])
    close(alone, gradients(weighted(formula(q, k, v)[0]), [q]))


def test_values_that_lie_in_the_keys() -> None:
    """As in MLA, where both gradients flow into one tensor."""
    q, k, _ = leaves()
    found = gradients(weighted(monotile.attention(q, k, k[..., :8])), [q, k])
    close(found, gradients(weighted(formula(q, k, k[..., :8])[0]), [q, k]))


def test_activation_checkpointing() -> None:
    tensors = leaves()
    plain = gradients(weighted(monotile.attention(*tensors)), tensors)
    o = checkpoint(monotile.attention, *tensors, use_reentrant=False)
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(weighted(o), tensors), strict=True))


def test_without_gradients_nothing_is_tracked() -> None:
    tensors = leaves()
    for region in (torch.no_grad, torch.inference_mode):
        with region():
            assert not monotile.attention(*tensors).requires_grad
    assert not monotile.attention(*[t.detach() for t in tensors]).requires_grad


# ---- torch's transforms ----------------------------------------------------------------------------------------------


def test_torch_func_grad() -> None:
    tensors = leaves()
    plain = [t.detach() for t in tensors]
    found = torch.func.grad(lambda *t: weighted(monotile.attention(*t)), argnums=(0, 1, 2))(*plain)
    close(list(found), gradients(weighted(formula(*tensors)[0]), tensors))


@pytest.mark.parametrize("batched", [False, True], ids=["three dimensions", "four dimensions"])
def test_torch_vmap(batched: bool) -> None:
    q, k, v = (t.detach() if batched else t.detach()[0] for t in leaves())
    queries = torch.stack([q, q * 2.0, -q], dim=1)
    mask = torch.randn(9, 13)
    found = torch.vmap(lambda t: monotile.attention(t, k, v, mask=mask), in_dims=1, out_dims=1)(queries)
    alone = [monotile.attention(t, k, v, mask=mask) for t in queries.unbind(1)]
    close([found], [torch.stack(alone, dim=1)])


def test_gradients_of_each_sample() -> None:
    """vmap of a gradient: a gradient of k for every q."""
    q, k, v = (t.detach() for t in leaves())
    queries = torch.stack([q, q * 2.0, -q])

    def loss(k: Any, q: Any) -> Any:
        return weighted(monotile.attention(q, k, v, causal=True))

    found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(k, queries)
    k.requires_grad_()
    close([found], [torch.stack([gradients(loss(k, each), [k])[0] for each in queries])])


def test_compiled_in_one_graph() -> None:
    tensors = leaves()

    def model(q: Any, k: Any, v: Any) -> Any:
        return monotile.attention(q * 2.0, k, v, causal=True, window=(4, 0)) + 1.0

    compiled = torch.compile(model, fullgraph=True, backend=COMPILER)
    assert torch.equal(compiled(*tensors), model(*tensors))
    found = gradients(weighted(compiled(*tensors)), tensors)
    assert all(torch.equal(a, b) for a, b in zip(found, gradients(weighted(model(*tensors)), tensors), strict=True))
    with torch.no_grad():
        assert torch.equal(compiled(*tensors), model(*tensors))


def test_a_score_mod_in_a_compiled_graph() -> None:
    tensors = leaves()

    def bend(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score * 2.0

    compiled = torch.compile(lambda *t: monotile.attention(*t, score_mod=bend), fullgraph=True, backend=COMPILER)
    assert torch.equal(compiled(*tensors), monotile.attention(*tensors, score_mod=bend))


def test_the_operator_keeps_torchs_rules() -> None:
    monotile.attention(*leaves())  # which defines it
    options = ("True", None, None, None, None, 0, None, None)
    torch.library.opcheck(torch.ops.monotile.attention, (*leaves(), None, None, *options))
    mask, sinks = torch.randn(9, 13).requires_grad_(), torch.randn(4).requires_grad_()
    torch.library.opcheck(torch.ops.monotile.attention, (*leaves(), mask, sinks, *options))


def test_fake_tensors_have_shapes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = torch.empty(2, 4, 9, 16), torch.empty(2, 2, 13, 16), torch.empty(2, 2, 13, 24)
        o, lse = monotile.attention(q, k, v, return_lse=True)
    assert o.shape == (2, 4, 9, 24) and lse.shape == (2, 4, 9) and lse.dtype == torch.float32


def test_export() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return monotile.attention(q, k, v, causal=True)

    tensors = tuple(t.detach() for t in leaves())
    exported = torch.export.export(Model(), tensors)
    assert torch.equal(exported.module()(*tensors), monotile.attention(*tensors, causal=True))


CALLS: dict[str, Any] = {
    "attention": lambda q, k, v: monotile.attention(q, k, v, causal=True),
    "attention with a mod": lambda q, k, v: monotile.attention(q, k, v, score_mod=lambda s, b, h, i, j: s * 0.5),
    "attention_varlen": lambda q, k, v: monotile.attention_varlen(
        *[t[0].transpose(0, 1) for t in (q, k, v)], torch.tensor([0, 9]), torch.tensor([0, 13])
    ),
    "decode_partials": lambda q, k, v: monotile.decode_partials(q, k, v, splits=2).o,
    "merge": lambda q, k, v: monotile.merge(k, v[..., 0], v[..., 1].exp())[0],
}


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("case", CALLS)
def test_make_fx(case: str, mode: str) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    tensors = [t.detach() for t in leaves()]
    graph = make_fx(CALLS[case], tracing_mode=mode)(*tensors)
    assert f"torch.ops.monotile.{case.split()[0]}.default" in graph.code
    again = [t * 0.7 for t in tensors]
    assert torch.equal(graph(*again), CALLS[case](*again))


def test_dispatch_modes_see_the_operator() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Listing(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    tensors = [t.detach() for t in leaves()]
    with Listing():
        found = monotile.attention(*tensors)
    assert seen == ["monotile.attention.default"] and torch.equal(found, monotile.attention(*tensors))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("case", ["attention", "attention with a mod", "attention_varlen"])
def test_torch_jit_trace(case: str) -> None:
    tensors = [t.detach() for t in leaves()]
    traced = torch.jit.trace(CALLS[case], tensors)
    again = [t * 0.7 for t in tensors]
    assert torch.equal(traced(*again), CALLS[case](*again))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_what_torch_jit_trace_would_not_record() -> None:
    tensors = [t.detach() for t in leaves()]
    for case in ("decode_partials", "merge"):
        with pytest.raises(MonotileError, match=r"torch\.jit\.trace would not record"):
            torch.jit.trace(CALLS[case], tensors)
    with pytest.raises(MonotileError, match="up to 4"):
        torch.jit.trace(lambda *t: monotile.attention(*t), [t[None] for t in tensors])


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_gradients_of_a_recorded_mod() -> None:
    """The graph reads arrays as they are when it runs; it has gradients until they change."""
    tensors, bias = leaves(), torch.randn(13)

    def biased(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score * bias[j]

    def call(q: Any, k: Any, v: Any) -> Any:
        return monotile.attention(q, k, v, score_mod=biased)

    traced = torch.jit.trace(call, tensors, check_trace=False)
    close(gradients(weighted(traced(*tensors)), tensors), gradients(weighted(call(*tensors)), tensors))
    bias += 1.0
    found = traced(*tensors)
    assert torch.equal(found, call(*tensors))
    with pytest.raises(CapturedChanged, match="record it again"):
        gradients(weighted(found), tensors)


@pytest.mark.parametrize("grad", [False, True])
def test_autocast(grad: bool) -> None:
    tensors = leaves() if grad else [t.detach() for t in leaves()]
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        found = monotile.attention(*tensors)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, monotile.attention(*[t.to(torch.bfloat16) for t in tensors]))
    if grad:
        assert all(g.dtype == torch.float32 for g in gradients(weighted(found), tensors))


# ---- mistakes --------------------------------------------------------------------------------------------------------


def test_a_second_derivative_is_an_error() -> None:
    tensors = leaves()
    first = torch.autograd.grad(weighted(monotile.attention(*tensors)), tensors, create_graph=True)
    with pytest.raises(NoGradient, match="second derivative"):
        torch.autograd.grad(first[0].sum(), tensors)


def test_a_gradient_of_a_captured_tensor_is_an_error() -> None:
    bias = torch.zeros(13).requires_grad_()

    def biased(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + bias[j]

    with pytest.raises(NoGradient, match="detach"):
        monotile.attention(*leaves(), score_mod=biased)


def test_bad_arguments_are_errors_of_monotiles() -> None:
    q, k, v = leaves()
    with pytest.raises(MonotileError, match="heads"):
        monotile.attention(q[:, :3], k, v)
    with pytest.raises(MonotileError, match="float64"):
        monotile.attention(q.double(), k.double(), v.double())
    with pytest.raises(MonotileError, match="causal"):
        monotile.attention(q, k, v, causal="left")
    with pytest.raises(MonotileError, match="window"):
        monotile.attention(q, k, v, window=3)


def test_functions_without_a_gradient_say_so() -> None:
    q, k, v = leaves()
    with pytest.raises(NoGradient, match="decode_partials"):
        monotile.decode_partials(q, k, v)
    with torch.no_grad():
        monotile.decode_partials(q, k, v)


def test_gradients_themselves_have_none() -> None:
    """Called directly, as in the backward of a function of one's own."""
    x, do = leaves(Hkv=4, Nk=9)[0], torch.ones(2, 4, 9, 16)
    offsets = torch.tensor([0, 9], dtype=torch.int32)
    with torch.no_grad():
        o, lse = monotile.attention(x, x, x, return_lse=True)
        dense = monotile.attention_backward(do, x, x, x, o, lse)
        rows = [t[0].transpose(0, 1) for t in (do, x, x, x, o)]
        ragged = monotile.attention_varlen_backward(*rows, lse[0], offsets, offsets)
    close([t.transpose(0, 1) for t in ragged[:3]], [t[0] for t in dense[:3]])
    plain = x.detach()
    for given in ((do, x, plain, plain, o), (do.requires_grad_(), plain, plain, plain, o)):
        with pytest.raises(NoGradient, match="attention_backward has no gradient"):
            monotile.attention_backward(*given, lse)
        with pytest.raises(NoGradient, match="attention_varlen_backward has no gradient"):
            monotile.attention_varlen_backward(*[t[0].transpose(0, 1) for t in given], lse[0], offsets, offsets)


def test_a_function_of_ones_own() -> None:
    class Own(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            o, lse = monotile.attention(q, k, v, return_lse=True)
            ctx.save_for_backward(q, k, v, o, lse)
            return o

        @staticmethod
        def backward(ctx: Any, do: Any) -> Any:
            return tuple(monotile.attention_backward(do, *ctx.saved_tensors)[:3])

    tensors = leaves()
    found = gradients(weighted(Own.apply(*tensors)), tensors)
    close(found, gradients(weighted(monotile.attention(*tensors)), tensors))


# ---- forward mode ----------------------------------------------------------------------------------------------------

OFFSETS = torch.tensor([0, 5], dtype=torch.int32)
FORWARD_MODE: dict[str, Any] = {
    "attention's q": lambda x: monotile.attention(x, x.detach(), x.detach()),
    "attention's v": lambda x: monotile.attention(x.detach(), x.detach(), x),
    "attention's mask": lambda x: monotile.attention(*[torch.ones(1, 2, 5, 8)] * 3, mask=x[..., :5]),
    "attention_varlen": lambda x: monotile.attention_varlen(*[x[0].transpose(0, 1)] * 3, OFFSETS, OFFSETS),
    "decode_partials": lambda x: monotile.decode_partials(x, x, x).o,
    "merge": lambda x: monotile.merge(x, x[..., 0], x[..., 0])[0],
    "merge_lse": lambda x: monotile.merge_lse(x[None], torch.zeros(1, 1, 2, 5))[0],
    "attention_backward": lambda x: monotile.attention_backward(x, x, x, x, x, torch.zeros(1, 2, 5)).dq,
    "attention_varlen_backward": lambda x: (
        monotile.attention_varlen_backward(*[x[0].transpose(0, 1)] * 5, torch.zeros(2, 5), OFFSETS, OFFSETS).dq
    ),
    "attention_paged": lambda x: monotile.attention_paged(x, x, x, OFFSETS[None, :1], OFFSETS[1:]),
}


@pytest.mark.parametrize("case", FORWARD_MODE)
def test_a_tangent_is_refused(case: str) -> None:
    x = torch.rand(1, 2, 5, 8)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NoGradient, match="no forward-mode derivative"):
        FORWARD_MODE[case](torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
    with pytest.raises(NoGradient, match="no forward-mode derivative"):
        torch.func.jvp(FORWARD_MODE[case], (x,), (x,))


def test_a_hessian_is_refused() -> None:
    x = torch.rand(1, 2, 5, 8)
    for case in ("attention's q", "attention_varlen"):
        with pytest.raises(NoGradient, match="no forward-mode derivative"):
            torch.func.hessian(lambda x, case=case: FORWARD_MODE[case](x).sum())(x)


def test_a_dual_level_without_tangents_changes_nothing() -> None:
    x = torch.rand(1, 2, 5, 8)
    expected = monotile.attention(x, x, x)
    with torch.autograd.forward_ad.dual_level():
        assert torch.equal(monotile.attention(x, x, x), expected)
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with torch.inference_mode():  # where torch has no tangents either
            assert torch.equal(monotile.attention(dual, x, x), expected)


@pytest.mark.parametrize("function", [monotile.attention, monotile.decode_partials])
def test_a_captured_gradient_is_refused_though_no_argument_has_one(function: Any) -> None:
    x, bias = torch.rand(1, 2, 5, 8), torch.zeros(5).requires_grad_()

    def biased(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + bias[j]

    with pytest.raises(NoGradient, match="detach"):
        function(x, x, x, score_mod=biased)
    with torch.no_grad():
        function(x, x, x, score_mod=biased)


def test_a_function_without_a_rule_for_vmap_says_so() -> None:
    x = torch.rand(3, 1, 2, 5, 8)
    with pytest.raises(MonotileError, match=r"torch\.func"):
        torch.vmap(lambda x: monotile.decode_partials(x, x, x).o)(x)
