"""What holds of gradients whatever the numbers are: identities, finite differences in float64, and autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import monotile
from arrays import Array
from kernels.cases import normal, qkv
from monotile.backends.interpreter import evaluate
from monotile.kernels import reference
from monotile.kernels.attention import DENSE, attention
from monotile.kernels.backward import backward_keys, backward_queries, row_deltas
from monotile.kernels.option_gradients import mask_gradient, sink_gradient
from monotile.kernels.scores import Options


def gradients(q: Array, k: Array, v: Array, do: Array, backend: str, **options: Any) -> monotile.Gradients:
    o, lse = monotile.attention(q, k, v, return_lse=True, backend=backend, **options)
    return monotile.attention_backward(do, q, k, v, o, lse, backend=backend, **options)


def near(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def test_gradients_are_linear_in_do(backend: str) -> None:
    q, k, v = qkv(40, 70, Hq=4, Hkv=2)
    first, second = normal(*q.shape, seed=5), normal(*q.shape, seed=6)
    a, b, both = (gradients(q, k, v, do, backend, causal=True) for do in (first, second, 2 * first - second))
    near(both[:3], [2 * x - y for x, y in zip(a[:3], b[:3], strict=True)])


def test_score_gradients_of_a_row_sum_to_zero(backend: str) -> None:
    """Without sinks. A vector added to all keys moves all scores of a row alike, so that the gradients of all keys that
    every row sees sum to zero; with a sink they do not."""
    q, k, v = qkv(40, 70)
    do = normal(*q.shape, seed=5)
    found = gradients(q, k, v, do, backend)
    np.testing.assert_allclose(found.dk.sum(axis=2), 0, atol=1e-4)
    assert np.abs(gradients(q, k, v, do, backend, sinks=normal(2)).dk.sum(axis=2)).max() > 1e-2
    bias = gradients(q, k, v, do, backend, mask=np.zeros((40, 1), np.float32))
    np.testing.assert_allclose((q * bias.dq).sum(), (k * bias.dk).sum(), rtol=1e-3, atol=1e-3)


def test_mask_gradients_of_a_row_sum_to_zero(backend: str) -> None:
    q, k, v = qkv(40, 70)
    o, lse = monotile.attention(q, k, v, mask=normal(40, 70), return_lse=True, backend=backend)
    do = normal(*q.shape, seed=5)
    found = monotile.attention_backward(do, q, k, v, o, lse, mask=normal(40, 70), mask_grad=True, backend=backend)
    assert found.dmask is not None
    np.testing.assert_allclose(found.dmask.sum(axis=1), 0, atol=2e-5)


def test_permuted_keys_have_permuted_gradients(backend: str) -> None:
    q, k, v = qkv(40, 70)
    do, order = normal(*q.shape, seed=5), np.random.default_rng(0).permutation(70)
    plain, moved = gradients(q, k, v, do, backend), gradients(q, k[:, :, order], v[:, :, order], do, backend)
    near(moved[:3], (plain.dq, plain.dk[:, :, order], plain.dv[:, :, order]))


def test_groups_are_repeated_heads(backend: str) -> None:
    q, k, v = qkv(40, 70, Hq=6, Hkv=2)
    do = normal(*q.shape, seed=5)
    found = gradients(q, k, v, do, backend, causal=True)
    apart = gradients(q, k.repeat(3, axis=1), v.repeat(3, axis=1), do, backend, causal=True)
    near(found[:3], (apart.dq, *(x.reshape(1, 2, 3, 70, 16).sum(axis=2) for x in (apart.dk, apart.dv))))


def test_keys_in_two_calls_have_the_gradients_of_one(backend: str) -> None:
    """With the merged output and logsumexp, each part gives its own keys' gradients and its share of the queries'."""
    q, k, v = qkv(40, 70)
    do = normal(*q.shape, seed=5)
    whole = gradients(q, k, v, do, backend)
    parts = [(k[:, :, :30], v[:, :, :30]), (k[:, :, 30:], v[:, :, 30:])]
    outs = [monotile.attention(q, *part, return_lse=True, backend=backend) for part in parts]
    o, lse = monotile.merge_lse(*(np.stack(x, axis) for x, axis in zip(zip(*outs, strict=True), (3, 3), strict=True)))
    first, second = (monotile.attention_backward(do, q, *part, o, lse, backend=backend) for part in parts)
    dk, dv = (np.concatenate(x, axis=2) for x in ((first.dk, second.dk), (first.dv, second.dv)))
    near((first.dq + second.dq, dk, dv), whole[:3])


# ---- finite differences in float64 -----------------------------------------------------------------------------------

SHAPE = {"B": 1, "Hq": 4, "Hkv": 2, "Nq": 9, "Nk": 12, "D": 5, "Dv": 3}
CASES: dict[str, tuple[Options, bool, bool]] = {  # options, with an additive mask, with sinks
    "plain": (Options(), False, False),
    "causal": (Options(causal="lower_right"), False, False),
    "softcap": (Options(softcap=1.5, left=4), True, False),
    "sinks": (Options(causal="upper_left", negative=True), False, True),
    "mask": (Options(mask_mod=lambda b, h, i, j: (i + j) % 3 != 0), True, True),
}


class Float64:
    """Attention and its gradients by the kernels, evaluated by the interpreter in float64."""

    def __init__(self, options: Options, masked: bool, sunk: bool) -> None:
        rng = np.random.default_rng(3)
        B, H, G, N, M, D, Dv = SHAPE.values()
        sides = {"q": (B, H, N, D), "k": (B, G, M, D), "v": (B, G, M, Dv)}
        sides |= {"mask": (B, H, N, M)} if masked else {}
        sides |= {"sinks": (H,)} if sunk else {}
        self.options, self.scale = options, -0.4 if options.negative else 0.4
        self.inputs = {name: rng.standard_normal(side) for name, side in sides.items()}
        self.do, self.dlse = rng.standard_normal((B, H, N, Dv)), rng.standard_normal((B, H, N))

    def run(self, kernel: Any, arrays: list[Array | None], scalars: list[Any], **consts: Any) -> None:
        narrow = [None if a is None else a.astype(np.float32) for a in arrays]
        present = [a for a in arrays if a is not None]
        evaluate(kernel.ir(*narrow, *scalars, **consts), present, scalars, float64=True)

    def forward(self, inputs: dict[str, Array]) -> tuple[Array, Array]:
        q, k, v = (inputs[n] for n in "qkv")
        o, lse = np.full(self.do.shape, np.nan), np.full(self.dlse.shape, np.nan)
        arrays = [q, k, v, inputs.get("mask"), None, inputs.get("sinks"), o, lse, None, None, None, *DENSE]
        self.run(attention, arrays, [self.scale, q.shape[2], 0, 0], options=self.options, BR=4, BK=8)
        return o, lse

    def loss(self, inputs: dict[str, Array]) -> float:
        o, lse = self.forward(inputs)
        return float((o * self.do).sum() + (np.where(lse == -np.inf, 0, lse) * self.dlse).sum())

    def gradients(self) -> dict[str, Array]:
        q, k, v, mask, sinks = (self.inputs.get(n) for n in ("q", "k", "v", "mask", "sinks"))
        o, lse = self.forward(self.inputs)
        delta = np.full(lse.shape, np.nan)
        found = {f"d{n}": np.full(x.shape, np.nan) for n, x in self.inputs.items()}
        consts: dict[str, Any] = {"options": self.options, "BR": 4, "BK": 8}
        scores, scale = [self.do, q, k, v, mask, None, lse, delta, None, None, None], [self.scale]
        self.run(row_deltas, [self.do, o, self.dlse, delta], [], BR=4)
        self.run(backward_queries, [*scores, found["dq"]], scale, **consts)
        self.run(backward_keys, [*scores, found["dk"], found["dv"], None, None], scale, **consts)
        again = {name: np.full_like(found[name], np.nan) for name in ("dk", "dv", "dq")}
        self.run(backward_keys, [*scores, *again.values(), None], scale, **consts)
        for name, gradient in again.items():
            np.testing.assert_allclose(gradient, found[name], rtol=1e-12, atol=1e-14)
        if mask is not None:
            arrays = [self.do, q, k, v, mask, lse, delta, found["dmask"]]
            self.run(mask_gradient, arrays, scale, **consts, summed=(False,) * 4)
        if sinks is not None:
            self.run(sink_gradient, [sinks, lse, delta, found["dsinks"]], [], BR=4)
        return found


@pytest.mark.parametrize("name", CASES)
def test_finite_differences(name: str) -> None:
    """Central differences of the forward kernel against the backward kernels, both without rounding."""
    problem = Float64(*CASES[name])
    found, rng, h = problem.gradients(), np.random.default_rng(4), 1e-5
    for argument, x in problem.inputs.items():
        for _ in range(2):
            direction = rng.standard_normal(x.shape)
            ends = [problem.loss(problem.inputs | {argument: x + step * direction}) for step in (h, -h)]
            slope = (ends[0] - ends[1]) / (2 * h)
            assert abs(slope - (found[f"d{argument}"] * direction).sum()) < 1e-7 * max(1.0, abs(slope)), argument


# ---- the definition itself -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "causal", "softcap", "mask", "sinks"])
def test_the_definition_is_what_autograd_computes(name: str) -> None:
    """In float64, by torch: all rows see some key, since torch has no answer for others."""
    torch = pytest.importorskip("torch")
    q, k, v = (x.astype(np.float64) for x in qkv(7, 9, 5, B=2, Hq=4, Hkv=2, Dv=3))
    do, dlse = normal(2, 4, 7, 3, seed=5).astype(np.float64), normal(2, 4, 7, seed=6).astype(np.float64)
    mask, sinks = normal(4, 7, 9, seed=8).astype(np.float64), normal(4, seed=9).astype(np.float64)
    options: dict[str, Any] = {"causal": {"causal": True}, "softcap": {"softcap": 0.7}, "sinks": {"sinks": sinks}}.get(
        name, {}
    )
    options |= {"mask": mask} if name == "mask" else {}
    tensors = {n: torch.from_numpy(x).requires_grad_() for n, x in {"q": q, "k": k, "v": v, "mask": mask}.items()}
    logits = torch.from_numpy(sinks).requires_grad_()
    keys, values = (tensors[n].repeat_interleave(2, dim=1) for n in "kv")
    S = tensors["q"] @ keys.swapaxes(2, 3) * 5**-0.5
    S = torch.tanh(S / 0.7) * 0.7 if name == "softcap" else S
    S = S + tensors["mask"] if name == "mask" else S
    S = S.masked_fill(~torch.from_numpy(reference.visible(7, 9, name == "causal")), -torch.inf)
    every = torch.cat([S, logits[None, :, None, None].expand(2, 4, 7, 1)], 3) if name == "sinks" else S
    lse = torch.logsumexp(every, 3)
    o = torch.exp(S - lse[..., None]) @ values
    ((o * torch.from_numpy(do)).sum() + (lse * torch.from_numpy(dlse)).sum()).backward()
    found = reference.attention_backward(
        do, q, k, v, o.detach().numpy(), lse.detach().numpy(), dlse=dlse, mask_grad=name == "mask", **options
    )
    for gradient in found:
        tensor = logits if gradient == "dsinks" else tensors[gradient[1:]]
        np.testing.assert_allclose(found[gradient], tensor.grad.numpy(), rtol=1e-10, atol=1e-12)
