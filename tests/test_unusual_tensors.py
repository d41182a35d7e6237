"""Tensors that are no block of strided elements: every function refuses each with one clear error, or is right."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monotile
from monotile import errors
from monotile.language import Tensor, arange, kernel

torch = pytest.importorskip("torch")
import monotile.flash_attn  # noqa: E402
import monotile.flex  # noqa: E402
import monotile.torch  # noqa: E402

SHAPE = (1, 2, 16, 16)


class Subclass(torch.Tensor):  # type: ignore[misc]
    pass


def plain() -> Any:
    return torch.linspace(-1, 1, 512).reshape(SHAPE)


def freed() -> Any:
    tensor = plain()
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(plain())


def nested(layout: Any) -> Any:
    return torch.nested.nested_tensor([plain()[0]], layout=layout)


def unaligned() -> Any:
    found = np.zeros(2049, np.uint8)[1:].view(np.float32)
    return torch.from_numpy(found).reshape(SHAPE)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "fake": (fake, "has no memory"),
    "meta": (lambda: plain().to("meta"), "has no memory"),
    "freed": (freed, "has no memory"),
    "all zeros without memory": (lambda: torch._efficientzerotensor(SHAPE), "has no memory"),
    "sparse": (lambda: plain().to_sparse(), "not an ordinary strided tensor"),
    "compressed": (lambda: plain()[0, 0].to_sparse_csr(), "not an ordinary strided tensor|heads, head size"),
    "nested": (lambda: nested(torch.strided), "nested tensor"),
    "jagged": (lambda: nested(torch.jagged), "nested tensor"),
    "quantised": (lambda: torch.quantize_per_tensor(plain(), 0.1, 0, torch.qint8), "has dtype torch.qint8"),
    "complex": (lambda: plain().to(torch.complex64), "has dtype torch.complex64"),
    "negative": (lambda: torch._neg_view(plain()), "not an ordinary strided tensor"),
    "conjugate": (lambda: plain().to(torch.complex64).conj().imag, "not an ordinary strided tensor"),
    "unaligned": (unaligned, "not aligned to its elements"),
}


@kernel
def copy(x: Tensor["B H N D"], y: Tensor["B H N D"]):
    y[0, 0, arange(16), arange(16)] = x[0, 0, arange(16), arange(16)]


LSE = torch.zeros(SHAPE[:3])
USES: dict[str, Callable[[Any], Any]] = {
    "attention's q": lambda t: monotile.attention(t, plain(), plain()),
    "attention's v": lambda t: monotile.attention(plain(), plain(), t),
    "torch's attention": lambda t: monotile.torch.scaled_dot_product_attention(t, plain(), plain()),
    "flash_attn": lambda t: monotile.flash_attn.flash_attn_func(plain(), t, plain()),
    "a cache of flash_attn": lambda t: monotile.flash_attn.flash_attn_with_kvcache(
        plain(), t, plain(), cache_seqlens=2
    ),
    "flex_attention": lambda t: monotile.flex.flex_attention(plain(), plain(), t),
    "attention's mask": lambda t: monotile.attention(plain(), plain(), plain(), mask=t),
    "attention's score_mod": lambda t: monotile.attention(
        plain(), plain(), plain(), score_mod=lambda s, b, h, i, j: s + t[b, h, i, j]
    ),
    "decode_partials": lambda t: monotile.decode_partials(plain(), t, plain()),
    "merge": lambda t: monotile.merge(t, LSE, LSE),
    "merge_lse": lambda t: monotile.merge_lse([t, t], [LSE, LSE]),
    "attention_backward's do": lambda t: monotile.attention_backward(t, plain(), plain(), plain(), plain(), LSE),
    "attention_backward's k": lambda t: monotile.attention_backward(plain(), plain(), t, plain(), plain(), LSE),
    "a kernel's input": lambda t: copy(t, torch.zeros(SHAPE)),
    "a kernel's output": lambda t: copy(plain(), t),
}


@pytest.mark.parametrize("use", USES)
def test_one_clear_error_each(use: str) -> None:
    """After a call with plain tensors of the same shape, which is prepared."""
    USES[use](plain())
    for kind, (make, message) in REFUSED.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of prototype features
            tensor = make()
        with pytest.raises(errors.MonotileError, match=message):
            USES[use](tensor)
            pytest.fail(kind)


@pytest.mark.parametrize("use", USES)
def test_subclasses_and_parameters_are_tensors(use: str) -> None:
    expected = USES[use](plain())
    for tensor in (plain().as_subclass(Subclass), torch.nn.Parameter(plain(), requires_grad=False)):
        found = USES[use](tensor)
        if expected is not None:
            parts = [expected] if isinstance(expected, torch.Tensor) else [e for e in expected if e is not None]
            others = [found] if isinstance(found, torch.Tensor) else [f for f in found if f is not None]
            assert all(torch.equal(e, f.as_subclass(torch.Tensor)) for e, f in zip(parts, others, strict=True))


# ---- what torch itself reads -----------------------------------------------------------------------------------------

READ_BY_TORCH = """
import torch, monotile, monotile.flex, monotile.torch, warnings
from dataclasses import replace
from monotile.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask

warnings.simplefilter("ignore")
x, pages = torch.randn(40, 2, 16), torch.randn(5, 8, 2, 16)
off, lengths = torch.tensor([0, 20, 40], dtype=torch.int32), torch.tensor([3] * 5, dtype=torch.int32)
table, q, one = torch.arange(5)[:, None], pages[:, :1], pages[:, :1].transpose(1, 2)
K = monotile.quantize(pages, "int4")
wide = torch.randn(1, 6, 4, 16)

def freed(t):
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t

def cut(t):
    t = t.clone()
    t.untyped_storage().resize_(1)
    return t

def append(**given):
    new = {"k": q, "v": q, "cache_seqlens": lengths, **given}
    return flash_attn_with_kvcache(q, pages.clone(), pages.clone(), **new)

def flex(make):
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, device="cpu")
    blocks.kv_indices = make(blocks.kv_indices)
    wide = torch.randn(1, 2, 256, 16)
    return monotile.flex.flex_attention(wide, wide, wide, block_mask=blocks)

def autocast(call):
    with torch.autocast("cpu", torch.bfloat16):
        return call()

USES = {
    "cu_seqlens_q": lambda f: flash_attn_varlen_func(x, x, x, f(off), off, 20, 20),
    "cu_seqlens_k": lambda f: flash_attn_varlen_func(x, x, x, off, f(off), 20, 20),
    "cache_seqlens": lambda f: flash_attn_with_kvcache(q, pages, pages, cache_seqlens=f(lengths)),
    "block_table": lambda f: flash_attn_with_kvcache(q, pages, pages, cache_seqlens=lengths, block_table=f(table)),
    "k": lambda f: append(k=f(q)),
    "rotary_sin": lambda f: append(rotary_cos=torch.ones(8, 4), rotary_sin=f(torch.ones(8, 4))),
    "codes": lambda f: replace(K, codes=f(K.codes)).dequantize(),
    "scales": lambda f: replace(K, scales=f(K.scales)).dequantize(),
    "block_mask.kv_indices": flex,
    "q_offsets": lambda f: monotile.attention_varlen(x, x, x, f(off), off, check=True),
    "page_table": lambda f: monotile.attention_paged(one, pages, pages, f(table.int()), lengths, check=True),
    "lengths": lambda f: monotile.attention_paged(one, K, pages, table.int(), f(lengths), check=True),
    "value": lambda f: monotile.torch.scaled_dot_product_attention(
        wide, wide[:, :2], f(wide[:, :3].contiguous()), enable_gqa=True
    ),
    "v": lambda f: autocast(lambda: monotile.attention(wide, wide, f(wide))),
    "v_pages": lambda f: autocast(lambda: monotile.attention_paged(one, pages, f(pages), table.int(), lengths)),
}
KINDS = {
    "freed": freed,
    "cut": cut,
    "fake": lambda t: FakeTensorMode().from_tensor(t),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor([t]),
}
for name, use in USES.items():
    use(lambda t: t)
    for kind, make in KINDS.items():
        print(name, kind, flush=True)  # the last line names a crash
        try:
            use(make)
        except monotile.errors.ArgumentKind as error:
            assert name in str(error) or "nested" in str(error), error
        else:
            raise SystemExit("no error")
print("all refused")
"""


def test_no_tensor_without_memory_is_read_by_torch(tmp_path: Path) -> None:
    """In a process of its own, which reading at a null address would end."""
    program = tmp_path / "program.py"
    program.write_text(READ_BY_TORCH)
    found = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert found.stdout.endswith("all refused\n"), found.stdout[-100:] + found.stderr[-2000:]


def test_a_storage_that_was_made_smaller() -> None:
    tensor = torch.zeros(1, 1, 3, 8)
    tensor.untyped_storage().resize_(16)
    with pytest.raises(errors.ArgumentKind, match="'k' reaches beyond its storage"):
        monotile.attention(torch.zeros(1, 1, 3, 8), tensor, torch.zeros(1, 1, 3, 8))


def test_meta_tensors_give_meta_results() -> None:
    found = monotile.attention(*[plain().to("meta") for _ in range(3)])
    assert found.is_meta and found.shape == SHAPE


# ---- arrays of different libraries -----------------------------------------------------------------------------------


def numbers(*shape: int) -> Any:
    return np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)


def whole(*given: int) -> Any:
    return np.array(given, np.int32)


X, ROWS, TOKENS, PAGES = numbers(1, 2, 4, 8), numbers(1, 2, 4), numbers(4, 2, 8), numbers(3, 4, 2, 8)
RAGGED = {"q": TOKENS, "k": TOKENS, "v": TOKENS, "q_offsets": whole(0, 4), "k_offsets": whole(0, 4)}
PLACES = {"page_table": whole(1, 2)[None], "lengths": whole(5)}
CALLS: dict[str, dict[str, Any]] = {
    "attention": {"q": X, "k": X, "v": X, "mask": numbers(4, 4), "sinks": numbers(2)},
    "attention_backward": {"do": X, "q": X, "k": X, "v": X, "o": X, "lse": ROWS, "dlse": ROWS, "mask": numbers(4, 4)},
    "attention_varlen": {**RAGGED, "sinks": numbers(2)},
    "attention_varlen_backward": {"do": TOKENS, **RAGGED, "o": TOKENS, "lse": ROWS[0], "dlse": ROWS[0]},
    "attention_paged": {"q": X, "k_pages": PAGES, "v_pages": PAGES, **PLACES, "sinks": numbers(2)},
    "paged_append": {"k_pages": PAGES, "v_pages": PAGES, **PLACES, "k_new": X, "v_new": X},
    "decode_partials": {"q": X, "k": X, "v": X, "mask": numbers(4, 4)},
    "merge": {"o": X, "m": ROWS, "l": ROWS},
    "merge_lse": {"outs": X, "lses": ROWS},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_of_two_libraries(name: str, dtype: str) -> None:
    """Each argument alone is of another library than the others: every one is refused, and none is read."""
    call = getattr(monotile, name)

    def tensor(array: Any) -> Any:
        found = torch.from_numpy(array.copy())
        return found.to(getattr(torch, dtype)) if found.is_floating_point() else found

    for odd in CALLS[name]:
        both = "a NumPy array and .* a torch tensor|a torch tensor and .* a NumPy array"
        one = {n: tensor(a) if n == odd else a.copy() for n, a in CALLS[name].items()}
        with pytest.raises(errors.ArgumentKind, match=both):
            call(**one)
        with pytest.raises(errors.ArgumentKind, match=both):
            call(**{n: a.copy() if n == odd else tensor(a) for n, a in CALLS[name].items()})


def test_an_operator_takes_tensors_only() -> None:
    x = torch.from_numpy(X).clone().requires_grad_()
    with pytest.raises(errors.ArgumentKind, match="'mask' is a NumPy array and 'q' a torch tensor"):
        monotile.attention(x, x, x, mask=numbers(4, 4))
    with pytest.raises(errors.ArgumentKind, match="'sinks' must be an array, found list"):
        monotile.attention(x, x, x, sinks=[0.0, 0.0])
    tokens = x[0].transpose(0, 1)
    with pytest.raises(errors.ArgumentKind, match="'q_offsets' must be an array, found list"):
        monotile.attention_varlen(tokens, tokens, tokens, [0, 4], [0, 4])


def test_quantised_arrays_of_another_library() -> None:
    k = monotile.quantize(X, "int8")
    with pytest.raises(errors.ArgumentKind, match="'k' is a NumPy array and 'q' a torch tensor"):
        monotile.attention(torch.from_numpy(X), k, k)
    pages = monotile.quantize(PAGES, "int8")
    with pytest.raises(errors.ArgumentKind, match="'k_new' is a torch tensor and 'k_pages' a NumPy array"):
        monotile.paged_append(pages, pages, *PLACES.values(), torch.from_numpy(X), torch.from_numpy(X))


def test_parts_of_two_libraries() -> None:
    with pytest.raises(errors.ArgumentKind, match="'outs' is a torch tensor and 'outs' a NumPy array"):
        monotile.merge_lse([X, torch.from_numpy(X)], [ROWS, ROWS])
