"""Functions without gradients in traces: torch.compile in one graph, export, fake and meta tensors."""

from __future__ import annotations

from typing import Any

import pytest

import monotile
from monotile import MonotileError
from usable import DEVICE

torch = pytest.importorskip("torch")
import monotile.library.varlen_operator  # noqa: E402
from monotile.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache  # noqa: E402
from monotile.library import mod_table  # noqa: E402

TABLE = torch.tensor([[2, 0, 1], [5, 4, 3]], dtype=torch.int32, device=DEVICE)
LENGTHS = torch.tensor([17, 9], dtype=torch.int32, device=DEVICE)


def randoms(*shape: int, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(DEVICE)


Q, K, V = randoms(2, 4, 3, 16), randoms(6, 8, 2, 16, seed=1), randoms(6, 8, 2, 24, seed=2)
KEYS = randoms(2, 2, 1300, 16, seed=3)


def in_one_graph(function: Any) -> Any:
    torch.compiler.reset()  # which counts the graphs of a function's source over all tests
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


ENDS = torch.tensor([0, 1, 6], dtype=torch.int32, device=DEVICE)
ROWS = randoms(6, 4, 16)  # one query of the first sequence, five of the second


def test_attention_paged_of_rows() -> None:
    def step(q: Any, k: Any, v: Any, table: Any, lengths: Any, ends: Any) -> Any:
        options: Any = {"window": (9, 0), "score_mod": bent, "return_lse": True, "q_offsets": ends}
        return monotile.attention_paged(q * 2.0, k, v, table, lengths, **options)

    same(in_one_graph(step)(ROWS, K, V, TABLE, LENGTHS, ENDS), step(ROWS, K, V, TABLE, LENGTHS, ENDS))
    quantized = [monotile.quantize(x, "int8") for x in (K, V)]
    with torch.autocast(DEVICE, torch.bfloat16):
        for pages in ((K, V), quantized):
            plain = step(ROWS, *pages, TABLE, LENGTHS, ENDS)
            assert plain[0].dtype == torch.bfloat16
            same(in_one_graph(step)(ROWS, *pages, TABLE, LENGTHS, ENDS), plain)
    with pytest.raises(Exception, match="has no gradient"):
        in_one_graph(step)(ROWS.clone().requires_grad_(), K, V, TABLE, LENGTHS, ENDS)
    with pytest.raises(MonotileError, match="has no gradient"):
        step(ROWS.clone().requires_grad_(), K, V, TABLE, LENGTHS, ENDS)


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
    operators, scoring = torch.ops.monotile, ("True", None, None, None, None, 0, None, None, [])
    torch.library.opcheck(operators.attention_paged, (Q, K, V, TABLE, LENGTHS, None, None, *scoring))
    torch.library.opcheck(operators.attention_paged, (ROWS, K, V, TABLE, LENGTHS, None, ENDS, *scoring))
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
    o, lse = monotile.attention_paged(ROWS.to("meta"), k, v, table, lengths, q_offsets=ENDS.to("meta"), return_lse=True)
    assert o.shape == (6, 4, 24) and lse.shape == (4, 6) and o.is_meta and lse.is_meta
    states = monotile.decode_partials(q, keys, keys)
    assert states.o.shape == (2, 4, 3, 3, 16) and monotile.merge(*states)[1].shape == (2, 4, 3)
    with pytest.raises(MonotileError, match="'q' has no memory"):
        monotile.attention_paged(q, K, V, TABLE, LENGTHS)


@pytest.mark.parametrize(
    ("given", "said"), [({"check": True}, "check=True reads table"), ({"grad": True}, "has no gradient")]
)
def test_what_a_trace_refuses(given: dict[str, bool], said: str) -> None:
    q = Q.clone().requires_grad_(given.get("grad", False))
    with pytest.raises(Exception, match=said):
        in_one_graph(lambda q: monotile.attention_paged(q, K, V, TABLE, LENGTHS, check="check" in given))(q)


SLOPES = randoms(4, seed=6).abs()
LEFT = torch.tensor([1, 4], device=DEVICE)
CACHES: dict[str, Any] = {
    "pages": {"block_table": TABLE, "cache_seqlens": LENGTHS},
    "rows": {"cache_seqlens": LENGTHS},
    "chosen rows": {"cache_seqlens": LENGTHS, "cache_batch_idx": torch.tensor([4, 1], device=DEVICE)},
    "one length": {"cache_seqlens": 5},
    "one length, left padding": {"cache_seqlens": 5, "cache_leftpad": LEFT},
    "rows, left padding": {"cache_seqlens": LENGTHS, "cache_leftpad": LEFT, "window_size": (6, 0)},
    "rows, alibi": {"cache_seqlens": LENGTHS, "alibi_slopes": SLOPES},
    "rows, left padding, alibi": {"cache_seqlens": LENGTHS, "cache_leftpad": LEFT, "alibi_slopes": SLOPES},
    "pages, alibi": {"block_table": TABLE, "cache_seqlens": LENGTHS, "alibi_slopes": SLOPES, "softcap": 3.0},
    "one length, alibi": {"cache_seqlens": 5, "alibi_slopes": SLOPES},
}


@pytest.mark.parametrize("case", CACHES)
@pytest.mark.parametrize("rotary", [False, True])
def test_flash_attn_with_kvcache(case: str, rotary: bool) -> None:
    angles = randoms(64, 4, seed=7)

    def step(q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, cos: Any, sin: Any, given: Any) -> Any:
        options = {"causal": True, **given} | ({"rotary_cos": cos, "rotary_sin": sin} if rotary else {})
        return flash_attn_with_kvcache(q, k_cache, v_cache, k=k, v=v, **options)

    shape = (6, 8) if "pages" in case else (6, 40) if case == "chosen rows" else (2, 40)
    traced = [randoms(*shape, 2, 16, seed=n) for n in (1, 2)]
    plain = [t.clone() for t in traced]
    given = randoms(2, 3, 4, 16), randoms(2, 3, 2, 16, seed=8), randoms(2, 3, 2, 16, seed=9)
    q, *new = given
    rest = angles.cos(), angles.sin(), CACHES[case]
    found = in_one_graph(step)(q, *traced, *new, *rest)
    torch.testing.assert_close(found, step(q, *plain, *new, *rest))
    same(traced, plain)


@pytest.mark.parametrize("alibi", [False, True])
def test_packed_queries_against_pages(alibi: bool) -> None:
    """As a server calls it: chunks of prompts beside decode. One graph serves other lengths."""

    def step(q: Any, k: Any, v: Any, ends: Any, ends_k: Any, table: Any) -> Any:
        options: Any = {"causal": True, "window_size": (7, 0), "alibi_slopes": SLOPES if alibi else None}
        return flash_attn_varlen_func(q, k, v, ends, ends_k, 5, 17, block_table=table, **options)

    compiled = in_one_graph(step)
    for ends_k in ([0, 17, 26], [0, 3, 27]):
        given = ROWS, K, V, ENDS, torch.tensor(ends_k, dtype=torch.int32, device=DEVICE), TABLE
        same([compiled(*given)], [step(*given)])


@pytest.mark.parametrize("softcap", [0.0, 2.5])
def test_alibi_and_its_gradients(softcap: float) -> None:
    """The slopes are a tensor of the graph."""
    ends, slopes = torch.tensor([0, 5, 5, 12], device=DEVICE), randoms(3, 4, seed=6).abs()

    def packed(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        options: Any = {"causal": True, "softcap": softcap, "alibi_slopes": slopes * 2.0}
        return flash_attn_varlen_func(q, k, v, ends, ends, 7, 7, **options)

    def dense(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        parts = [t[None].expand(3, -1, -1, -1) for t in (q, k, v)]
        return flash_attn_func(*parts, causal=True, softcap=softcap, alibi_slopes=slopes * 2.0)

    for function in (packed, dense):
        found = []
        for run in (in_one_graph(function), function):
            leaves = [randoms(12, heads, 16, seed=heads).requires_grad_() for heads in (4, 2, 2)]
            o = run(*leaves, slopes)
            (o * randoms(*o.shape, seed=9)).sum().backward()
            found.append([o.detach(), *(t.grad for t in leaves)])
        same(*found)


def test_operators_that_read_tensors_of_the_graph_keep_torchs_rules() -> None:
    q = [randoms(1, 2, 6, 16, seed=n).requires_grad_() for n in range(3)]
    number = mod_table._number_in_graph(scaled_by, 1, None, -1)
    options = ("True", None, None, None, None, number, None, None, [SLOPES])
    torch.library.opcheck(torch.ops.monotile.attention_reading, (*q, None, None, *options))
    ends = torch.tensor([0, 2, 6], device=DEVICE)
    rows = [t.detach()[0].transpose(0, 1).contiguous().requires_grad_() for t in q]
    torch.library.opcheck(torch.ops.monotile.attention_varlen_reading, (*rows, ends, ends, None, *options))


def scaled_by(slopes: Any) -> Any:
    def scaled(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score * slopes[h]

    return scaled


# ---- quantised keys and values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("formats", [("int8", "aura4"), ("int4_zero_point", None), (None, "fp8_e4m3")])
def test_quantised_keys_and_values(formats: tuple[str | None, str | None]) -> None:
    """Their fields are arguments of the operators, as those of a cache that changes."""
    stored: Any = [x if f is None else monotile.quantize(x, f) for x, f in zip((KEYS, KEYS), formats, strict=True)]
    pages: Any = [x if f is None else monotile.quantize(x, f) for x, f in zip((K, K), formats, strict=True)]

    def dense(q: Any, k: Any, v: Any) -> Any:
        o, lse = monotile.attention(q * 2.0, k, v, causal=True, score_mod=bent, return_lse=True)
        return o + 1.0, lse, *monotile.decode_partials(q, k, v, softcap=4.0)

    def paged(q: Any, k: Any, v: Any) -> Any:
        return monotile.attention_paged(q * 2.0, k, v, TABLE, LENGTHS, window=(9, 0), return_lse=True)

    def packed(q: Any, k: Any, v: Any) -> Any:
        ends = torch.tensor([0, 5, 24, 48], device=DEVICE)
        return monotile.attention_varlen(q * 2.0, k, v, ends, ends, causal=True, return_lse=True)

    rows: Any = [
        x if f is None else monotile.quantize(x, f) for x, f in zip((K.flatten(0, 1),) * 2, formats, strict=True)
    ]
    queries = randoms(48, 4, 16, seed=4)
    same(in_one_graph(packed)(queries, *rows), packed(queries, *rows))
    same(in_one_graph(dense)(Q, *stored), dense(Q, *stored))
    same(in_one_graph(paged)(Q, *pages), paged(Q, *pages))


def test_quantised_pages_are_written_in_place() -> None:
    def step(k: Any, v: Any, new: Any) -> Any:
        monotile.paged_append(k, v, TABLE, LENGTHS, new, new)
        return monotile.attention_paged(Q, k, v, TABLE, LENGTHS + 3)

    new, caches = randoms(2, 2, 3, 16, seed=4), []
    for run in (in_one_graph(step), step):
        k, v = monotile.quantize(K, "int4_zero_point"), monotile.quantize(K, "int8")
        caches.append([run(k, v, new), *k.fields().values(), *v.fields().values()])
    same(*caches)
    assert not torch.equal(caches[0][-1], monotile.quantize(K, "int8").scales)


@pytest.mark.parametrize("format", ["int8", "int4", "int4_zero_point", "fp8_e5m2", "aura3"])
def test_quantize_in_a_graph(format: str) -> None:
    def step(q: Any, k: Any) -> Any:
        K = monotile.quantize(k * 2.0, format)
        return monotile.attention(q, K, K), K.dequantize(), *K.fields().values()

    same(in_one_graph(step)(Q, KEYS), step(Q, KEYS))


def test_operators_of_quantised_keys_keep_torchs_rules() -> None:
    cache = monotile.quantize(KEYS, "int8")
    in_one_graph(lambda q: monotile.attention(q, cache, cache))(Q)  # which defines them
    operators, scoring = torch.ops.monotile, ("True", None, None, None, None, 0, None, None, [])
    fields = (cache.codes, cache.scales, None, "int8", 16, "float32")
    torch.library.opcheck(operators.attention_quantized, (Q, *fields, *fields, None, None, *scoring))
    torch.library.opcheck(operators.decode_partials_quantized, (Q, *fields, *fields, None, 3, *scoring))
    pages = monotile.quantize(K, "int8")
    fields = (pages.codes, pages.scales, None, "int8", 16, "float32")
    row = (*(t.flatten(0, 1) for t in fields[:2]), *fields[2:])
    ends = torch.tensor([0, 5, 24, 48], device=DEVICE)
    torch.library.opcheck(
        operators.attention_varlen_quantized, (randoms(48, 4, 16), *row, *row, ends, ends, None, *scoring)
    )
    places = TABLE, LENGTHS
    for q, offsets in ((Q, None), (ROWS, ENDS)):
        given = q, *fields, *fields, *places, None, offsets
        torch.library.opcheck(operators.attention_paged_quantized, (*given, *scoring))
    k, v = ((pages.codes.clone(), pages.scales.clone(), None, "int8", 16) for _ in range(2))
    new = randoms(2, 2, 3, 16, seed=4)
    torch.library.opcheck(operators.paged_append_quantized, (*k, *v, *places, new, new, None, None))
    monotile.quantize(K.to("meta"), "int8")  # which defines the next two
    torch.library.opcheck(operators.quantize, (K, "int4_zero_point", 8, None, 1e38, 8))
    torch.library.opcheck(operators.dequantize, (pages.codes, pages.scales, None, "integers", 16, 16, 8, "float32"))


def test_quantised_calls_on_meta_tensors() -> None:
    q, keys = Q.to("meta"), KEYS.to("meta")
    cache = monotile.quantize(keys, "int4")
    o, lse = monotile.attention(q, cache, keys, return_lse=True)
    assert o.shape == (2, 4, 3, 16) and lse.shape == (2, 4, 3) and o.is_meta
    assert cache.dequantize().shape == keys.shape
    with pytest.raises(MonotileError, match="'q' has no memory"):
        monotile.attention(q, monotile.quantize(KEYS, "int4"), KEYS)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda q, k: monotile.attention(q.requires_grad_(), monotile.quantize(k, "int8"), k), "has no gradient"),
        (lambda q, k: monotile.quantize(k, "int8", check=True).codes, "check=True reads x"),
        (lambda q, k: monotile.quantize(k, "int9").codes, "format must be one of"),
        (lambda q, k: monotile.quantize(k, "int8", group=5).codes, "group must divide the 16 numbers"),
    ],
)
def test_what_a_trace_of_quantised_keys_refuses(call: Any, said: str) -> None:
    with pytest.raises(Exception, match=said):
        in_one_graph(call)(Q.clone(), KEYS)


def test_autocast_in_a_graph() -> None:
    cache = monotile.quantize(KEYS, "int8")

    def step(q: Any) -> Any:
        with torch.autocast(DEVICE, torch.bfloat16):
            return [monotile.attention(q, cache, cache), monotile.decode_partials(q, KEYS, KEYS).o]

    found = in_one_graph(step)(Q)
    assert found[0].dtype == torch.bfloat16
    same(found, step(Q))
