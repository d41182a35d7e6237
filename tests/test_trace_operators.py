"""Functions without gradients in traces: torch.compile in one graph, export, fake and meta tensors."""

from __future__ import annotations

from typing import Any

import pytest

import monotile
from monotile import MonotileError
from usable import DEVICE

torch = pytest.importorskip("torch")
from monotile.flash_attn import flash_attn_with_kvcache  # noqa: E402

TABLE = torch.tensor([[2, 0, 1], [5, 4, 3]], dtype=torch.int32, device=DEVICE)
LENGTHS = torch.tensor([17, 9], dtype=torch.int32, device=DEVICE)


def randoms(*shape: int, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


Q, K, V = randoms(2, 4, 3, 16), randoms(6, 8, 2, 16, seed=1), randoms(6, 8, 2, 24, seed=2)
KEYS = randoms(2, 2, 1300, 16, seed=3)


def in_one_graph(function: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def same(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def bent(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score * 0.5 + (j % 3)


def test_attention_paged() -> None:
    def step(q: Any, k: Any, v: Any, table: Any, lengths: Any) -> Any:
        options: Any = {"window": (9, 0), "score_mod": bent, "return_lse": True}
        return monotile.attention_paged(q * 2.0, k, v, table, lengths, **options)

    same(in_one_graph(step)(Q, K, V, TABLE, LENGTHS), step(Q, K, V, TABLE, LENGTHS))


def test_paged_append_writes_in_place() -> None:
    def step(k: Any, v: Any, new_k: Any, new_v: Any) -> Any:
        monotile.paged_append(k, v, TABLE, LENGTHS, new_k, new_v)
        return monotile.attention_paged(Q, k, v, TABLE, LENGTHS + 3)

    new = randoms(2, 2, 3, 16, seed=4), randoms(2, 2, 3, 24, seed=5)
    traced, plain = (K.clone(), V.clone()), (K.clone(), V.clone())
    same([in_one_graph(step)(*traced, *new)], [step(*plain, *new)])
    same(traced, plain)
    assert not torch.equal(traced[0], K)


def test_decode_partials_and_merge_at_changing_lengths() -> None:
    def step(q: Any, k: Any, dtype: Any) -> Any:
        return monotile.merge(*monotile.decode_partials(q, k, k, causal=True), dtype=dtype)

    compiled = in_one_graph(step)
    for n in (1300, 700, 513, 512):  # 3, 2, 2 and 1 splits
        keys = KEYS[:, :, :n]
        same(compiled(Q, keys, torch.float16), step(Q, keys, torch.float16))


def test_merge_lse() -> None:
    def step(q: Any, k: Any) -> Any:
        parts = [monotile.attention(q, part, part, return_lse=True) for part in (k[:, :, :600], k[:, :, 600:])]
        return monotile.merge_lse([o for o, _ in parts], [lse for _, lse in parts])

    same(in_one_graph(step)(Q, KEYS), step(Q, KEYS))


def test_operators_keep_torchs_rules() -> None:
    in_one_graph(lambda q: monotile.attention_paged(q, K, V, TABLE, LENGTHS))(Q)  # which defines them
    operators, scoring = torch.ops.monotile, ("True", None, None, None, None, 0, None, None)
    torch.library.opcheck(operators.attention_paged, (Q, K, V, TABLE, LENGTHS, None, *scoring))
    torch.library.opcheck(operators.decode_partials, (Q, KEYS, KEYS, None, 3, *scoring))
    new = randoms(2, 2, 3, 16, seed=4), randoms(2, 2, 3, 24, seed=5)
    torch.library.opcheck(operators.paged_append, (K.clone(), V.clone(), TABLE, LENGTHS, *new, None, None))
    states = monotile.decode_partials(Q, KEYS, KEYS)
    torch.library.opcheck(operators.merge, (*states, "bfloat16", None, None))
    torch.library.opcheck(operators.merge_lse, (states.o, states.m, None, None))


def test_export() -> None:
    class Model(torch.nn.Module):  # type: ignore[misc]
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return monotile.attention_paged(q, k, v, TABLE, LENGTHS)

    exported = torch.export.export(Model(), (Q, K, V)).module()
    same([exported(Q, K, V)], [monotile.attention_paged(Q, K, V, TABLE, LENGTHS)])


def test_meta_tensors_have_shapes() -> None:
    q, k, v, table, lengths, keys = (t.to("meta") for t in (Q, K, V, TABLE, LENGTHS, KEYS))
    o, lse = monotile.attention_paged(q, k, v, table, lengths, return_lse=True)
    assert o.shape == (2, 4, 3, 24) and lse.shape == (2, 4, 3) and o.is_meta and lse.is_meta
    states = monotile.decode_partials(q, keys, keys)
    assert states.o.shape == (2, 4, 3, 3, 16) and monotile.merge(*states)[1].shape == (2, 4, 3)
    with pytest.raises(MonotileError, match="'q' has no memory"):
        monotile.attention_paged(q, K, V, TABLE, LENGTHS)


@pytest.mark.parametrize("quantised", ["attention", "attention_paged", "decode_partials"])
def test_quantised_calls_end_a_graph(quantised: str) -> None:
    """They are called between two graphs; with fullgraph=True torch says why there are two."""
    pages, cache = monotile.quantize(K, "int8"), monotile.quantize(KEYS, "int8")
    calls: dict[str, Any] = {
        "attention": lambda q: monotile.attention(q * 2.0, cache, cache) + 1.0,
        "attention_paged": lambda q: monotile.attention_paged(q * 2.0, pages, pages, TABLE, LENGTHS) + 1.0,
        "decode_partials": lambda q: monotile.decode_partials(q * 2.0, cache, cache).o + 1.0,
    }
    call = calls[quantised]
    same([torch.compile(call, backend="aot_eager")(Q)], [call(Q)])
    torch.compiler.reset()
    with pytest.raises(Exception, match="Quantized keys and values is no operator"):
        in_one_graph(call)(Q)


@pytest.mark.parametrize(
    ("given", "said"), [({"check": True}, "check=True reads table"), ({"grad": True}, "has no gradient")]
)
def test_what_a_trace_refuses(given: dict[str, bool], said: str) -> None:
    q = Q.clone().requires_grad_(given.get("grad", False))
    with pytest.raises(Exception, match=said):
        in_one_graph(lambda q: monotile.attention_paged(q, K, V, TABLE, LENGTHS, check="check" in given))(q)


CACHES: dict[str, Any] = {
    "pages": {"block_table": TABLE, "cache_seqlens": LENGTHS},
    "rows": {"cache_seqlens": LENGTHS},
    "chosen rows": {"cache_seqlens": LENGTHS, "cache_batch_idx": torch.tensor([4, 1], device=DEVICE)},
    "one length": {"cache_seqlens": 5},
}


@pytest.mark.parametrize("case", CACHES)
@pytest.mark.parametrize("rotary", [False, True])
def test_flash_attn_with_kvcache(case: str, rotary: bool) -> None:
    angles = randoms(64, 4, seed=7)

    def step(q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, cos: Any, sin: Any) -> Any:
        options = {"causal": True, **CACHES[case]} | ({"rotary_cos": cos, "rotary_sin": sin} if rotary else {})
        return flash_attn_with_kvcache(q, k_cache, v_cache, k=k, v=v, **options)

    shape = (6, 8) if case == "pages" else (6, 40) if case == "chosen rows" else (2, 40)
    traced = [randoms(*shape, 2, 16, seed=n) for n in (1, 2)]
    plain = [t.clone() for t in traced]
    given = randoms(2, 3, 4, 16), randoms(2, 3, 2, 16, seed=8), randoms(2, 3, 2, 16, seed=9)
    q, *new = given
    found = in_one_graph(step)(q, *traced, *new, angles.cos(), angles.sin())
    torch.testing.assert_close(found, step(q, *plain, *new, angles.cos(), angles.sin()))
    same(traced, plain)
