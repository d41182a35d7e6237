"""score_mod and mask_mod written for torch's FlexAttention compile as they are, and mean what they mean there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

import monotile
from monotile import errors
from usable import IN_MEMORY, ON_GPU, usable

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

B, H, N, D = 2, 4, 150, 16
torch.manual_seed(0)
if ON_GPU:
    torch.set_default_device("cuda")
Q, K, V = (torch.randn(B, H, N, D) for _ in range(3))
DOCUMENT = torch.sort(torch.randint(0, 4, (N,))).values
OF_BATCH = torch.sort(torch.randint(0, 4, (B, N))).values
ALLOWED = torch.rand(B, H, N, N) < 0.5
LENGTH, GAIN, BIAS, SLOPES = torch.tensor(17), torch.tensor(0.3), torch.randn(N, N), torch.rand(H)
torch.set_default_device(None)
Mod = Callable[..., Any]
# The front end turns a function into IR that backends share: the cpu compiles some that differ in what they read.
COMPILED = ("documents of a batch", "a mask", "where", "extrema", "bias", "softcap", "div", "clamp, rsqrt, square",
            "activations", "log1p, expm1, log10", "division", "powers")  # fmt: skip


def on_backends(names: Iterable[str]) -> list[tuple[str, str]]:
    """Names of functions with each backend that is to run them; tensors on a GPU are for nvidia alone."""
    found = usable(*(("nvidia",) if ON_GPU else IN_MEMORY))
    return [(name, backend) for backend in found for name in names if backend != "cpu" or name in COMPILED]


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def in_document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return DOCUMENT[q_idx] == DOCUMENT[kv_idx]


def all_of(*mask_mods: Mod) -> Mod:
    """As torch.nn.attention.flex_attention.and_masks has it."""

    def both(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        result = b.new_ones((), dtype=torch.bool)
        for mask in mask_mods:
            result = result & mask(b, h, q_idx, kv_idx)
        return result

    return both


MASKS: dict[str, Mod] = {
    "documents": in_document,
    "documents of a batch": lambda b, h, q, k: OF_BATCH[b, q] == OF_BATCH[b, k],
    "prefix": lambda b, h, q, k: (k < LENGTH) | (q >= k),
    "a mask": lambda b, h, q, k: ALLOWED[b, h, q, k],
    "method abs": lambda b, h, q, k: (q - k).abs() <= 20,
    "abs": lambda b, h, q, k: torch.abs(q - k) <= 20,
    "not": lambda b, h, q, k: ~((q > k) & (k % 3 == 0)),
    "where": lambda b, h, q, k: torch.where(h < 2, q >= k, q <= k),
    "and_masks": all_of(causal, in_document),
    "logical": lambda b, h, q, k: torch.logical_or(q >= k, torch.logical_not((k // 7 % 2).bool())),
    "extrema": lambda b, h, q, k: torch.maximum(q, k) - torch.minimum(q, k) < 9,
    "dilated": lambda b, h, q, k: torch.remainder(torch.sub(q, k), 5).eq(0),
}
SCORES: dict[str, Mod] = {
    "alibi": lambda s, b, h, q, k: s + (k - q) * SLOPES[h],
    "alibi by exp2": lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / H)),
    "softcap": lambda s, b, h, q, k: 20.0 * torch.tanh(s / 20.0),
    "bias": lambda s, b, h, q, k: s + BIAS[q, k],
    "sigmoid and a number": lambda s, b, h, q, k: s * torch.sigmoid(s) + GAIN,
    "causal": lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
    "to": lambda s, b, h, q, k: s + (q - k).abs().to(torch.float32) * 0.1,
    "exp": lambda s, b, h, q, k: s + torch.exp(-(q - k).abs().float()),
    "clamp, rsqrt, square": lambda s, b, h, q, k: torch.clamp(s, -1.0, 1.0) + torch.rsqrt((q - k).square() + 1.0),
    "log of positions": lambda s, b, h, q, k: torch.minimum(s, torch.log(q + k + 1)),
    "div": lambda s, b, h, q, k: s + torch.div(q, k + 1) - torch.sqrt(q),
    "the least number": lambda s, b, h, q, k: torch.where(q >= k, s, torch.finfo(s.dtype).min),
    "the least of a type": lambda s, b, h, q, k: s.masked_fill(q < k, torch.finfo(torch.float32).min),
    "relu and sign": lambda s, b, h, q, k: torch.relu(s) + 0.1 * torch.sign(q - k) - s.sign().relu(),
    "activations": lambda s, b, h, q, k: F.silu(s) + F.gelu(s) - F.softplus(s) + F.leaky_relu(s) + F.relu6(s),
    "gelu by tanh": lambda s, b, h, q, k: F.gelu(s, approximate="tanh") + F.softplus(s, beta=2.0),
    "log1p, expm1, log10": lambda s, b, h, q, k: torch.log1p(s * s) + torch.expm1(-s.abs()) + torch.log10(s * s + 1.0),
    "bounds": lambda s, b, h, q, k: torch.clamp_min(s, -0.5) + s.clamp_max(0.5) + torch.max(s, -s) - torch.min(s, -s),
    "remainders": lambda s, b, h, q, k: s + torch.fmod(q - k, 3) - torch.remainder(s, 0.75) + torch.fmod(s, 0.75),
    "division": lambda s, b, h, q, k: (
        s + torch.div(q - k, 7, rounding_mode="floor") - torch.div(q - k, 7, rounding_mode="trunc")
    ),
    "powers": lambda s, b, h, q, k: torch.pow(s, 2) + (s * s + 1.0).pow(0.3) + torch.pow(0.5, (q - k).abs()),
    "casts": lambda s, b, h, q, k: s + (q - k).type_as(s) * 0.1 + s.new_full((), 2.0) * s.new_tensor(0.5),
    "tests": lambda s, b, h, q, k: torch.where(torch.isfinite(s) & ~torch.isnan(s) & ~s.isinf(), s, 0.0),
    "xor and where": lambda s, b, h, q, k: s.where(torch.logical_xor(q > k, k % 2 == 0), 0.5),
    "factors": lambda s, b, h, q, k: torch.add(s, s, alpha=0.5) - torch.sub(s, 1.0, alpha=2) + torch.frac(s),
}


def positions() -> tuple[Any, ...]:
    b, h, i, j = (torch.arange(n, device=Q.device) for n in (B, H, N, N))
    return b[:, None, None, None], h[:, None, None], i[:, None], j


def exact(scores: Any) -> Any:
    """Attention in float64; a row that sees nothing is zero."""
    return torch.softmax(scores, -1).nan_to_num(0.0) @ V.double()


def products() -> Any:
    return Q.double() @ K.double().mT / math.sqrt(D)


KEEP_NAN: dict[str, Callable[..., Any]] = {
    "clamp": lambda s, b, h, q, k: torch.clamp(s, -0.5, 0.5),
    "clamp of one side": lambda s, b, h, q, k: s.clamp(min=0.1).clamp_max(2.0),
    "maximum": lambda s, b, h, q, k: torch.maximum(s * 0.5, s),
    "minimum": lambda s, b, h, q, k: torch.min(torch.tensor(0.3), s),
    "relu": lambda s, b, h, q, k: torch.relu(s) + F.relu6(s),
    "NumPy": lambda s, b, h, q, k: np.clip(np.maximum(s, 0.1), -1.0, 2.0),
}


@pytest.mark.parametrize(("name", "backend"), on_backends(KEEP_NAN))
def test_bounds_keep_nan(name: str, backend: str) -> None:
    """As these functions do in their libraries; `fmax` and `fmin` do not."""
    q = Q.clone()
    q[:, :, 3] = math.nan
    found = monotile.attention(q, K, V, score_mod=KEEP_NAN[name], backend=backend)
    assert found[:, :, 3].isnan().all() and not found[:, :, :3].isnan().any() and not found[:, :, 4:].isnan().any()


@pytest.mark.parametrize(("name", "backend"), on_backends(MASKS))
def test_masks(name: str, backend: str) -> None:
    mod = MASKS[name]
    seen = mod(*positions()).expand(B, H, N, N)
    found = monotile.attention(Q, K, V, mask_mod=mod, backend=backend)
    torch.testing.assert_close(found.double(), exact(products().masked_fill(~seen, -math.inf)), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("name", "backend"), on_backends(SCORES))
def test_scores(name: str, backend: str) -> None:
    mod = SCORES[name]
    found = monotile.attention(Q, K, V, score_mod=mod, backend=backend)
    expected = exact(mod(products(), *positions()).double())
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-5)


DIFFERENTIABLE = [
    "the least number",
    "relu and sign",
    "activations",
    "log1p, expm1, log10",
    "bounds",
    "powers",
    "factors",
]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.skipif(ON_GPU, reason="of derivatives, which all backends share")
def test_derivatives(name: str) -> None:
    """The compiler's, against torch's own in float64."""
    mod, parts = SCORES[name], [t[:1, :2, :40].clone() for t in (Q, K, V)]
    found = [t.requires_grad_() for t in parts]
    wide = [t.detach().double().requires_grad_() for t in parts]
    b, h, i, j = (torch.arange(n) for n in (1, 2, 40, 40))
    scores = mod(wide[0] @ wide[1].mT / math.sqrt(D), b[:, None, None, None], h[:, None, None], i[:, None], j)
    (torch.softmax(scores, -1) @ wide[2]).square().sum().backward()
    monotile.attention(*found, score_mod=mod).square().sum().backward()
    for a, c in zip(found, wide, strict=True):
        torch.testing.assert_close(a.grad.double(), c.grad, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("backend", [name for _, name in on_backends(["where"])])
def test_numbers_that_are_none(backend: str) -> None:
    """isnan, isinf and isfinite of NaN and infinities, which the compiler must not fold."""
    special = torch.tensor([1.0, math.inf, -math.inf, math.nan], device=Q.device)
    tests: dict[str, Mod] = {
        "isnan": lambda s, b, h, q, k: torch.where(torch.isnan(special[k]), 1.0, 0.0),
        "isinf": lambda s, b, h, q, k: torch.where(torch.isinf(special[k]), 1.0, 0.0),
        "isfinite": lambda s, b, h, q, k: torch.where(special[k].isfinite(), 1.0, 0.0),
        "nan_to_num": lambda s, b, h, q, k: torch.nan_to_num(special[k], nan=0.25, posinf=2.0, neginf=-2.0),
        "sign": lambda s, b, h, q, k: torch.sign(torch.where(k == 3, 0.0, special[k])),
    }
    q, k = Q[:1, :1, :1], torch.zeros_like(K[:1, :1, :4])
    v = torch.eye(4, 16, device=Q.device)[None, None]
    for name, mod in tests.items():
        values = {"nan_to_num": [1.0, 2.0, -2.0, 0.25], "sign": [1.0, 1.0, -1.0, 0.0]}.get(name)
        wanted = torch.tensor(values) if values else getattr(torch, name)(special.cpu()).float()
        found = monotile.attention(q, k, v, score_mod=mod, backend=backend)[0, 0, 0, :4]
        torch.testing.assert_close(found.cpu(), torch.softmax(wanted, -1), atol=1e-6, rtol=0)


def test_numpy_functions_mean_the_same() -> None:
    slopes = SLOPES.cpu().numpy()
    given = [x.cpu().numpy() for x in (Q, K, V)]
    found = monotile.attention(
        *given,
        score_mod=lambda s, b, h, q, k: s + np.where(q > k, np.tanh(s), np.abs(q - k) * slopes[h]),
        mask_mod=lambda b, h, q, k: np.logical_or(np.greater_equal(q, k), np.equal(np.minimum(q, k), 0)),
    )
    _, h, i, j = positions()
    scores = products()
    scores = scores + torch.where(i > j, torch.tanh(scores), (i - j).abs() * SLOPES[h])
    seen = (i >= j) | (torch.minimum(i, j) == 0)
    torch.testing.assert_close(
        torch.from_numpy(found).double(), exact(scores.masked_fill(~seen, -math.inf)).cpu(), atol=2e-6, rtol=1e-5
    )


def test_a_captured_number_is_read_at_every_call() -> None:
    limit = torch.tensor(10, device=Q.device)
    outs = []
    for value in (10, 30, 10):
        limit.fill_(value)
        outs.append(monotile.attention(Q, K, V, mask_mod=lambda b, h, q, k: k < limit))
        torch.testing.assert_close(outs[-1], monotile.attention(Q, K[:, :, :value], V[:, :, :value]), atol=2e-6, rtol=0)
    assert torch.equal(outs[0], outs[2])


def test_a_number_and_an_array_of_one_element_are_told_apart() -> None:
    def below(limit: Any) -> Mod:
        return lambda b, h, q, k: k < limit

    monotile.attention(Q, K, V, mask_mod=below(torch.tensor(10, device=Q.device)))
    with pytest.raises(errors.BadOperand, match="load a tile first"):
        monotile.attention(Q, K, V, mask_mod=below(torch.tensor([10], device=Q.device)))


@pytest.mark.parametrize(
    ("mod", "error"),
    [
        (lambda s, b, h, q, k: torch.sinh(s), errors.NotCallable),
        (lambda s, b, h, q, k: s.to("cpu"), errors.WrongCall),
        (lambda s, b, h, q, k: s.to(torch.float64), errors.WrongCall),
        (lambda s, b, h, q, k: s.cumprod(0), errors.UnknownAttribute),
        (lambda s, b, h, q, k: s.cumsum(0), errors.NotElementwise),
        (lambda s, b, h, q, k: s - s.max(axis=1)[:, None], errors.NotElementwise),
        (lambda s, b, h, q, k: torch.where(s), errors.WrongCall),
        (lambda s, b, h, q, k: torch.logical_not(s, k), errors.WrongCall),
        (lambda s, b, h, q, k: F.elu(s), errors.NotCallable),
        (lambda s, b, h, q, k: torch.pow(s, s), errors.UnsupportedPython),
        (lambda s, b, h, q, k: torch.div(s, 2, rounding_mode="up"), errors.WrongCall),
        (lambda s, b, h, q, k: s + torch.finfo(torch.int32).min, errors.WrongCall),
        (lambda s, b, h, q, k: s.double(), errors.UnknownAttribute),
    ],
    ids=[
        "sinh",
        "a device",
        "float64",
        "cumprod",
        "cumsum",
        "maximum",
        "one argument",
        "two arguments",
        "elu",
        "pow",
        "rounding_mode",
        "finfo",
        "double",
    ],
)
def test_what_does_not_compile(mod: Mod, error: type[Exception]) -> None:
    with pytest.raises(error) as found:
        monotile.attention(Q, K, V, score_mod=mod)
    assert "^" in str(found.value) and "cure" in str(found.value) and "_has_torch" not in str(found.value)


@pytest.mark.parametrize(
    "option, mod, found, cure",
    [
        ("score_mod", lambda s: s, "does not take 5 positional arguments", "score_mod(score, b, h, q_idx, kv_idx)"),
        ("mask_mod", lambda b, h, i: i > 0, "does not take 4 positional arguments", "mask_mod(b, h, q_idx, kv_idx)"),
        ("score_mod", lambda s, b, h, i, j: None, "returns the new score, a number, found None", "return it"),
        ("score_mod", lambda s, b, h, i, j: s > 0, "the new score, a number, found a tile bool", "where"),
        ("mask_mod", lambda b, h, i, j: 3.0 * i, "returns True where a key is visible, found a", "compare"),
    ],
)
def test_mods_that_do_not_fit_are_shown(option: str, mod: Mod, found: str, cure: str) -> None:
    """The error underlines the function, not the line of the library that calls it."""
    with pytest.raises(errors.WrongCall) as caught:
        monotile.attention(Q, K, V, **{option: mod})
    error = caught.value
    assert found in error.found and cure in error.cure
    assert error.loc is not None and error.loc.file == "test_torch_mods.py"
    assert error.loc.text[error.loc.column :].startswith("lambda")
