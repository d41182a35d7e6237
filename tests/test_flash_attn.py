"""`monotile.flash_attn` beside a plain float64 formula: layouts, alignments, alibi, packed sequences, caches."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from monotile.errors import ArgumentKind, ArgumentRank, ArgumentShape, BadOption, MixedDTypes, NoGradient
from usable import DEVICE, ON_GPU

torch: Any = pytest.importorskip("torch", reason="these are tests of monotile.flash_attn")
import monotile.flash_attn  # noqa: E402
from monotile.flash_attn import (  # noqa: E402
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

if ON_GPU:
    torch.set_default_device(DEVICE)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1), "softmax_scale": 0.3},
    "causal window": {"causal": True, "window_size": (3, 5), "softcap": 4.0},
}


def draw(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(sum(shape)))


def reference(
    q: Any, k: Any, v: Any, *, causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    softmax_scale: float | None = None, alibi_slopes: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Attention of one sequence (N, H, D), in float64, and its logsumexp (H, N)."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    s = torch.einsum("ihd,jhd->hij", q, k) * (softmax_scale or q.shape[-1] ** -0.5)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    at = torch.arange(len(q))[:, None] + len(k) - len(q)
    j = torch.arange(len(k))[None]
    if alibi_slopes is not None:
        s = s - alibi_slopes.double()[:, None, None] * (at - j).abs()
    left, right = window_size
    hidden = (j > at) if causal else torch.zeros_like(at - j, dtype=torch.bool)
    hidden = hidden | ((j < at - left) & (left >= 0)) | ((j > at + right) & (right >= 0))
    s = s.masked_fill(hidden, -torch.inf)
    o = torch.einsum("hij,jhd->ihd", s.softmax(-1).nan_to_num(), v)
    return o, s.logsumexp(-1)


def close(found: Any, wanted: Any) -> None:
    assert found.shape == wanted.shape
    assert torch.allclose(found.double(), wanted, atol=1e-5, rtol=1e-5)


def each(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    """The reference of every sequence of a batch."""
    slopes = options.pop("alibi_slopes", None)
    found = []
    for b in range(len(q)):
        own = {} if slopes is None else {"alibi_slopes": slopes if slopes.dim() == 1 else slopes[b]}
        found.append(reference(q[b], k[b], v[b], **options, **own))
    return torch.stack([o for o, _ in found]), torch.stack([lse for _, lse in found])


@pytest.mark.parametrize("name", OPTIONS)
def test_dense(name: str) -> None:
    """Queries stand at the last keys; results are (B, N, H, D) and the logsumexp (B, H, N)."""
    q, k, v = draw(2, 5, 4, 16), draw(2, 9, 2, 16), draw(2, 9, 2, 16)
    o, lse, weights = flash_attn_func(q, k, v, return_attn_probs=True, **OPTIONS[name])
    wanted = each(q, k, v, **OPTIONS[name])
    close(o, wanted[0])
    close(lse, wanted[1])
    assert weights is None
    assert (flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **OPTIONS[name]) == o).all()


def test_more_queries_than_keys() -> None:
    """The first queries then see nothing, and give 0."""
    q, k = draw(2, 9, 4, 16), draw(2, 5, 2, 16)
    o = flash_attn_func(q, k, k, causal=True)
    close(o, each(q, k, k, causal=True)[0])
    assert (o[:, :4] == 0).all() and o.is_contiguous()


def test_alibi_and_gradients() -> None:
    """Slopes of heads, or of heads and batches; the cap is applied before them."""
    qkv = draw(2, 7, 3, 4, 16)
    options = {"causal": True, "softcap": 3.0, "alibi_slopes": draw(4).abs()}
    close(flash_attn_qkvpacked_func(qkv, **options), each(*qkv.unbind(2), **options)[0])
    options["alibi_slopes"] = draw(2, 4).abs()
    qkv.requires_grad_()
    wide = qkv.detach().double().requires_grad_()
    wanted, _ = each(*wide.unbind(2), **options)
    o = flash_attn_qkvpacked_func(qkv, **options)
    close(o, wanted.detach())
    (o * o).sum().backward()
    (wanted * wanted).sum().backward()
    close(qkv.grad, wide.grad)


# ---- packed sequences ------------------------------------------------------------------------------------------------

ENDS_Q, ENDS_K = [0, 3, 3, 5, 10], [0, 4, 6, 12, 18]


def sequences(q: Any, k: Any, v: Any, ends_k: list[int], **options: Any) -> tuple[Any, Any]:
    slopes = options.pop("alibi_slopes", None)
    found = []
    for n, (a, b, c, d) in enumerate(zip(ENDS_Q, ENDS_Q[1:], ends_k, ends_k[1:], strict=False)):
        own = {} if slopes is None else {"alibi_slopes": slopes[n]}
        found.append(reference(q[a:b], k[c:d], v[c:d], **options, **own))
    return torch.cat([o for o, _ in found]), torch.cat([lse for _, lse in found], 1)


@pytest.mark.parametrize("name", [*OPTIONS, "alibi"])
def test_packed_sequences(name: str) -> None:
    options = OPTIONS.get(name, {"alibi_slopes": draw(4, 4).abs(), "causal": True})
    q, kv = draw(10, 4, 16), draw(18, 2, 2, 16)
    k, v = kv.unbind(1)
    ends = torch.tensor(ENDS_Q, dtype=torch.int32), torch.tensor(ENDS_K, dtype=torch.int32)
    o, lse, _ = flash_attn_varlen_func(q, k, v, *ends, 5, 6, return_attn_probs=True, **options)
    wanted = sequences(q, k, v, ENDS_K, **options)
    close(o, wanted[0])
    close(lse, wanted[1])
    assert (flash_attn_varlen_kvpacked_func(q, kv, *ends, 5, 6, **options) == o).all()


def test_gradients_of_packed_sequences() -> None:
    qkv = draw(10, 3, 4, 16).requires_grad_()
    wide = qkv.detach().double().requires_grad_()
    ends = torch.tensor(ENDS_Q, dtype=torch.int32)
    (flash_attn_varlen_qkvpacked_func(qkv, ends, 5, causal=True) ** 2).sum().backward()
    (sequences(*wide.unbind(1), ENDS_Q, causal=True)[0] ** 2).sum().backward()
    close(qkv.grad, wide.grad)


@pytest.mark.parametrize("name", [*OPTIONS, "alibi"])
def test_packed_queries_against_pages(name: str) -> None:
    options = OPTIONS.get(name, {"alibi_slopes": draw(4, 4).abs(), "causal": True})
    pages_k, pages_v = draw(9, 4, 2, 16), draw(9, 4, 2, 8)
    table = torch.tensor([[8, 0], [1, 1], [3, 7], [2, 5]])
    lengths = torch.tensor(ENDS_K).diff()
    q, ends = draw(10, 4, 16), [torch.tensor(e, dtype=torch.int32) for e in (ENDS_Q, ENDS_K)]
    given: dict[str, Any] = {**options, "block_table": table, "return_attn_probs": True}
    o, lse, _ = flash_attn_varlen_func(q, pages_k, pages_v, *ends, 5, 6, **given)
    k, v = (
        torch.cat([p[t].flatten(0, 1)[:n] for t, n in zip(table, lengths, strict=True)]) for p in (pages_k, pages_v)
    )
    wanted = sequences(q, k, v, ENDS_K, **options)
    close(o, wanted[0])
    close(lse, wanted[1])
    for error, message, wrong in (
        (ArgumentShape, "block_table is .4, pages., found .2, 2.", table[:2]),
        (MixedDTypes, "block_table holds whole numbers", table.float()),
    ):
        with pytest.raises(error, match=message):
            flash_attn_varlen_func(q, pages_k, pages_v, *ends, 5, 6, **given | {"block_table": wrong})


# ---- caches ----------------------------------------------------------------------------------------------------------


def rotated(x: Any, cos: Any, sin: Any, start: int, step: int, interleaved: bool) -> Any:
    """Rotary embedding of x (N, H, D) from position `start` on, one number at a time."""
    x, half = x.double(), cos.shape[1]
    found = x.clone()
    for n in range(len(x)):
        c, s = cos[start + n * step].double(), sin[start + n * step].double()
        for p in range(half):
            a, b = (2 * p, 2 * p + 1) if interleaved else (p, p + half)
            found[n, :, a] = x[n, :, a] * c[p] - x[n, :, b] * s[p]
            found[n, :, b] = x[n, :, a] * s[p] + x[n, :, b] * c[p]
    return found


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_append_with_rotary(interleaved: bool, causal: bool) -> None:
    """Three new keys behind 4 and 7, with padding on the left, in rows of the cache that are named."""
    q, new_k, new_v = draw(2, 3, 4, 16), draw(2, 3, 2, 16), draw(2, 3, 2, 8)
    k_cache, v_cache, angles = draw(5, 12, 2, 16), draw(5, 12, 2, 8), draw(20, 4)
    before = k_cache.clone(), v_cache.clone()
    rows, lengths, left = torch.tensor([3, 1]), torch.tensor([4, 7], dtype=torch.int32), torch.tensor([1, 0])
    o, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, new_k, new_v, angles.cos(), angles.sin(), lengths, rows, left, causal=causal,
        rotary_interleaved=interleaved, return_softmax_lse=True,
    )  # fmt: skip
    for b, (row, n, pad) in enumerate(zip(rows.tolist(), lengths.tolist(), left.tolist(), strict=True)):
        turn = angles.cos(), angles.sin(), n - pad
        k = torch.cat([before[0][row, pad:n].double(), rotated(new_k[b], *turn, 1, interleaved)])
        v = torch.cat([before[1][row, pad:n], new_v[b]])
        wanted = reference(rotated(q[b], *turn, int(causal), interleaved), k, v, causal=causal)
        close(o[b], wanted[0])
        close(lse[b], wanted[1])
        close(k_cache[row, n : n + 3], k[-3:])
        before[0][row, n : n + 3], before[1][row, n : n + 3] = k_cache[row, n : n + 3], new_v[b]
    assert (k_cache == before[0]).all() and (v_cache == before[1]).all()  # nothing else was written


def test_one_length_for_all() -> None:
    q, k, v = draw(2, 1, 4, 16), draw(2, 12, 2, 16), draw(2, 12, 2, 16)
    close(flash_attn_with_kvcache(q, k, v, cache_seqlens=7, causal=True), each(q, k[:, :7], v[:, :7])[0])
    o = flash_attn_with_kvcache(q, k, v)
    close(o, each(q, k, v)[0])
    assert o.is_contiguous()


def test_pages() -> None:
    """New keys are written into the pages that a block table names."""
    q, new, pages = draw(2, 2, 4, 16), draw(2, 2, 2, 16), draw(6, 4, 2, 16)
    table, lengths = torch.tensor([[5, 0], [2, 3]], dtype=torch.int32), torch.tensor([3, 6], dtype=torch.int32)
    before, values = pages.clone(), pages.clone()
    o = flash_attn_with_kvcache(q, pages, values, new, new, cache_seqlens=lengths, block_table=table, causal=True)
    for b, n in enumerate(lengths.tolist()):
        k = torch.cat([before[table[b]].flatten(0, 1)[:n], new[b]])
        close(o[b], reference(q[b], k, k, causal=True)[0])
    assert (pages[5, 3] == new[0, 0]).all() and (pages[0, 0] == new[0, 1]).all() and (pages == values).all()
    assert int((pages != before).any(-1).any(-1).sum()) == 4


# ---- errors and names ------------------------------------------------------------------------------------------------


def test_mistakes() -> None:
    q, k = draw(2, 5, 4, 16), draw(2, 9, 2, 16)
    with pytest.raises(BadOption, match="no dropout"):
        flash_attn_func(q, k, k, dropout_p=0.1)
    with pytest.raises(ArgumentRank, match="batch, length, heads"):
        flash_attn_func(q[0], k, k)
    with pytest.raises(ArgumentShape, match="alibi_slopes"):
        flash_attn_func(q, k, k, alibi_slopes=draw(3))
    if not ON_GPU:  # where what tensors hold is not read: that would wait
        with pytest.raises(ArgumentShape, match="10 rows"):
            flash_attn_varlen_func(q.flatten(0, 1), k[0], k[0], torch.tensor([0, 9]), torch.tensor([0, 9]), 9, 9)
        with pytest.raises(ArgumentShape, match="room for 9"):
            flash_attn_with_kvcache(q, k, k.clone(), k, k, cache_seqlens=torch.tensor([1, 0]))
    with pytest.raises(BadOption, match="cache_seqlens"):
        flash_attn_with_kvcache(q, k, k.clone(), k, k)
    with pytest.raises(NoGradient):
        flash_attn_with_kvcache(q.requires_grad_(), k, k)


def test_what_lies_outside_a_cache_is_not_stored() -> None:
    """Entries that are no page, and positions before and behind a sequence, as in `paged_append`."""
    q, new, pages = draw(2, 1, 4, 16), draw(2, 1, 2, 16), draw(5, 8, 2, 16)
    three = torch.tensor([3, 3], dtype=torch.int32)
    for entry, start in ((-1, three), (99, three), (2**32, three), (0, torch.tensor([-1, 3]))):
        table, k, v = torch.tensor([[entry], [2]]), pages.clone(), pages.clone()
        flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=start, block_table=table)
        for cache in (k, v):
            assert (cache[2, 3] == new[1, 0]).all()
            cache[2, 3] = pages[2, 3]
            assert torch.equal(cache, pages)


def test_new_keys_that_lie_in_the_cache() -> None:
    k, v = draw(1, 8, 2, 16), draw(1, 8, 2, 16)
    wanted = k[0, 0].clone()
    flash_attn_with_kvcache(k[:, :1], k, v, k[:, :1], v[:, :1], cache_seqlens=5)
    assert torch.equal(k[0, 5], wanted)


def test_mistakes_of_a_cache() -> None:
    q, new, cache, cos = draw(2, 1, 4, 16), draw(2, 1, 2, 16), draw(2, 8, 2, 16), draw(20, 4)
    given: dict[str, Any] = {"k": new, "v": new, "cache_seqlens": 3}
    mistakes: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (BadOption, "holds 0 to 8 keys", {"cache_seqlens": -3}),
        (BadOption, "holds 0 to 8 keys", {"cache_seqlens": 9}),
        (BadOption, "whole number or a tensor", {"cache_seqlens": 3.0}),
        (BadOption, "given together", {**given, "rotary_cos": cos}),
        (BadOption, "given together", {**given, "rotary_sin": cos}),
        (ArgumentShape, "have 3 positions", {**given, "rotary_cos": cos[:3], "rotary_sin": cos[:3]}),
        (ArgumentShape, "'v' is .batch, new", {**given, "v": new[:, :, :1]}),
        (ArgumentShape, "'k' is .batch, new", {**given, "k": new[0]}),
        (ArgumentShape, "alibi_slopes", {"alibi_slopes": torch.ones(3, 4, device=q.device)}),
        (MixedDTypes, "its cache torch.float32", {**given, "k": new.half()}),
        (MixedDTypes, "whole numbers", {"block_table": torch.zeros(2, 1, device=q.device)}),
        (ArgumentKind, "'block_table' must be a torch tensor, found list", {"block_table": [[0], [1]]}),
        (BadOption, "window_size is a pair", {"window_size": None}),
    ]
    for error, message, options in mistakes:
        with pytest.raises(error, match=message):
            flash_attn_with_kvcache(q, cache, cache.clone(), **options)
    with pytest.raises(ArgumentKind, match="'q' must be a torch tensor, found ndarray"):
        flash_attn_func(q.cpu().numpy(), cache, cache)


@pytest.mark.skipif(ON_GPU, reason="of the check on a CPU")
def test_packed_sequences_in_a_compiled_graph() -> None:
    x, ends = draw(10, 2, 16), torch.tensor(ENDS_Q, dtype=torch.int32)

    def call(x: Any) -> Any:
        return flash_attn_varlen_func(x, x, x, ends, ends, 5, 5, causal=True)

    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(x), call(x))


def test_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """`import flash_attn` finds these functions; a FlashAttention that is there is left alone."""
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    if not monotile.flash_attn.install():
        pytest.skip("FlashAttention is installed")
    from flash_attn import flash_attn_func as found
    from flash_attn.flash_attn_interface import flash_attn_varlen_func as packed

    assert found is flash_attn_func and packed is flash_attn_varlen_func
    assert monotile.flash_attn.install()
