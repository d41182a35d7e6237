"""`monotile.flex` beside torch's FlexAttention: mods written with torch functions, block masks of both, gradients."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from monotile.errors import BadOption, HeadsDoNotDivide, MaskShape, NoGradient
from usable import DEVICE, ON_GPU

torch: Any = pytest.importorskip("torch", reason="these are tests of monotile.flex")
from torch.nn.attention import flex_attention as torchs  # noqa: E402

from monotile.flex import and_masks, create_block_mask, flex_attention, or_masks  # noqa: E402

if ON_GPU:
    torch.set_default_device(DEVICE)
N = 160
GENERATOR = torch.Generator(DEVICE).manual_seed(0)
Q, K, V = (torch.randn(2, h, N, 16, generator=GENERATOR) for h in (4, 2, 2))
BIAS, SLOPES = torch.randn(2 * N, generator=GENERATOR), torch.rand(4, generator=GENERATOR)
DOCUMENT = torch.arange(N).expand(2, N) // torch.tensor([[37], [50]])


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.abs(q_idx - kv_idx) <= 20


def prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx < 10 + h


def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return DOCUMENT[b, q_idx] == DOCUMENT[b, kv_idx]


def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + BIAS[q_idx - kv_idx + N]


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - SLOPES[h] * (q_idx - kv_idx)


def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 20.0 * torch.tanh(score / 20.0)


def hiding(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where(q_idx >= kv_idx, score, -float("inf"))


def distance(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + (q_idx - kv_idx) / 8


def hiding_by_a_tensor(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    hidden = torch.tensor(-1e9, dtype=score.dtype, device=score.device)
    return torch.where(q_idx > kv_idx, score, torch.where(q_idx == kv_idx, torch.tensor(2.0), hidden))


def filled(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    bounded = score.masked_fill(q_idx < kv_idx, -1e9) + torch.full_like(score, 0.5) * h
    return torch.masked_fill(bounded, kv_idx == 3, float("-inf")) + torch.zeros_like(score)


def stepped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.floor(4 * score) / 4 + 0.1 * torch.round(score) + torch.nn.functional.sigmoid(score)


def counted(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Comparisons as 0 and 1, beside floats, whole numbers and constants."""
    near = (q_idx - kv_idx < 9) * 0.5 - 0.25 * (q_idx == kv_idx)
    return score * (1 - (kv_idx == 7)) + near + (q_idx > kv_idx) / 4 + ENABLED * score + (h + (q_idx > 5)) * 0.125


ENABLED = True
MASKS = {
    "causal": causal,
    "causal window": and_masks(causal, window),
    "prefix": or_masks(causal, prefix),
    "documents": torchs.and_masks(causal, document),
}


@pytest.fixture(autouse=True)
def without_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's formula is computed as it is, which takes a tenth of the time."""
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.mark.parametrize(
    "score_mod", [relative, alibi, capped, hiding, distance, hiding_by_a_tensor, filled, stepped, counted]
)
def test_score_mods(score_mod: Any) -> None:
    wanted = torchs.flex_attention(Q, K, V, score_mod, enable_gqa=True, scale=0.2)
    assert torch.allclose(flex_attention(Q, K, V, score_mod, enable_gqa=True, scale=0.2), wanted, atol=1e-5)


@pytest.mark.parametrize("name", MASKS)
def test_mask_mods(name: str) -> None:
    """The block mask is torch's or monotile's; results and logsumexp are the same."""
    sides = 2 if name == "documents" else None, 4 if name == "prefix" else None, N, N
    theirs = torchs.create_block_mask(MASKS[name], *sides, device=DEVICE)
    request = torchs.AuxRequest(lse=True)
    wanted, aux = torchs.flex_attention(Q, K, V, None, theirs, enable_gqa=True, return_aux=request)
    for blocks in (theirs, create_block_mask(MASKS[name], *sides, device=DEVICE, BLOCK_SIZE=64)):
        o, found = flex_attention(Q, K, V, None, blocks, enable_gqa=True, return_aux=request)
        assert torch.allclose(o, wanted, atol=1e-5)
        assert torch.allclose(found.lse, aux.lse, atol=1e-5) and found.max_scores is None


def test_gradients_on_the_cpu() -> None:
    """Which torch refuses to compute there."""
    q, k, v = (t[:1].clone().requires_grad_() for t in (Q, K, V))
    o, lse = flex_attention(q, k, v, relative, create_block_mask(causal, None, None, N, N), None, True, True)
    ((o * o).sum() + lse.sum()).backward()
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    key, value = (t.repeat_interleave(2, 1) for t in wide[1:])
    i, j = torch.arange(N)[:, None], torch.arange(N)[None]
    s = relative(wide[0] @ key.mT / 4.0, 0, 0, i, j).masked_fill(i < j, -torch.inf)
    (((s.softmax(-1) @ value) ** 2).sum() + s.logsumexp(-1).sum()).backward()
    for found, wanted in zip((q, k, v), wide, strict=True):
        assert torch.allclose(found.grad.double(), wanted.grad, atol=2e-5)


def test_partials_and_objects_are_functions_too() -> None:
    def shown(left: int, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx - kv_idx <= left

    plain = create_block_mask(and_masks(causal, window), None, None, N, N)
    partly = create_block_mask(and_masks(causal, functools.partial(shown, 20)), None, None, N, N)
    wanted = flex_attention(Q, K, V, alibi, plain, enable_gqa=True)
    assert torch.equal(flex_attention(Q, K, V, functools.partial(alibi), partly, enable_gqa=True), wanted)


def test_a_block_mask_of_listed_blocks() -> None:
    """Blocks that torch's mask does not list are hidden, and its function is not asked about full ones."""
    columns = torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    one, none = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, dtype=torch.int32)
    block = torch.arange(N) // 128
    diagonal = block[:, None] == block[None]
    i, j = torch.arange(N)[:, None], torch.arange(N)[None]
    for lists, mask_mod, seen in (
        ((one, columns, none, columns), None, diagonal),
        ((one, columns, none, columns), causal, diagonal & (i >= j)),
        ((none, columns, one, columns), causal, diagonal),
    ):
        blocks = torchs.BlockMask.from_kv_blocks(*lists, mask_mod=mask_mod, seq_lengths=(N, N))
        wanted = torch.nn.functional.scaled_dot_product_attention(Q, K, V, seen, enable_gqa=True)
        assert torch.allclose(flex_attention(Q, K, V, None, blocks, enable_gqa=True), wanted, atol=1e-5)


def test_mistakes() -> None:
    blocks = create_block_mask(causal, None, None, N, N)
    with pytest.raises(HeadsDoNotDivide, match="enable_gqa"):
        flex_attention(Q, K, V)
    with pytest.raises(MaskShape, match="block mask is for"):
        flex_attention(Q[:, :, :9], K, V, None, blocks, enable_gqa=True)
    with pytest.raises(BadOption, match="max_scores"):
        flex_attention(K, K, V, return_aux=torchs.AuxRequest(max_scores=True))
    with pytest.raises(BadOption, match="is a Python function, found int"):
        flex_attention(K, K, V, 3)
    with pytest.raises(BadOption, match="sliced"):
        flex_attention(K, K, V, None, torchs.create_block_mask(causal, None, None, N, N, device=DEVICE)[:, :, :1])
    learned = torch.zeros(N, requires_grad=True)

    def trained(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + learned[kv_idx]

    with pytest.raises(NoGradient):
        flex_attention(K.clone().requires_grad_(), K, V, trained)
