"""Mistakes in calls with Quantized arrays, which anyone may have made: each is one of monotile's errors, says what was
expected, what was found and what to do, and nothing is written before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import monotile
from monotile import errors
from monotile.dtypes import float8_e5m2, to_numpy
from monotile.errors import MonotileError


def paged(q: Any) -> Any:
    """Pages of 4 positions, of which only the first two are taken."""
    pages = monotile.quantize(np.ones((3, 4, 1, 16), np.float32), "int8")
    part = replace(pages, codes=pages.codes[:, :2], scales=pages.scales[:, :2])
    return monotile.attention_paged(q, part, part, np.zeros((1, 1), np.int32), np.ones(1, np.int32))


def append(pages: Any, new: Any) -> None:
    monotile.paged_append(pages, pages, np.zeros((1, 1), np.int32), np.zeros(1, np.int32), new, new)


MISTAKES: list[tuple[Any, str]] = [
    (lambda x: monotile.quantize(x, "int5"), "format must be one of int8"),
    (lambda x: monotile.quantize(x, "int8", group=5), "group must divide the 16"),
    (lambda x: monotile.quantize(x, "aura4", group=8), "one norm for a row"),
    (lambda x: monotile.quantize(x * np.nan, "int8", check=True), "NaN or infinity"),
    (lambda x: monotile.quantize(x.astype(np.int32), "int8"), "cast it"),
    (lambda x: monotile.quantize(x[0, 0, 0], "int8"), "(..., N, D)"),
    (lambda x: monotile.attention(x, replace(monotile.quantize(x, "int4"), size=15), x), "head size"),
    (lambda x: monotile.attention(x, replace(monotile.quantize(x, "int8"), format="int4"), x), "codes of int4"),
    (lambda x: monotile.attention(x, replace(monotile.quantize(x, "int8"), format="fp8_e4m3"), x), "float8_e4m3fn"),
    (paged, "one after the other: copy"),
    (lambda x: append(monotile.quantize(x, "int8"), x[..., :8]), "(B, 4, N, 16) for these pages"),
]


@pytest.mark.parametrize(("call", "words"), MISTAKES)
def test_mistakes(call: Any, words: str) -> None:
    with pytest.raises(MonotileError) as error:
        call(np.ones((1, 2, 4, 16), np.float32))
    assert words in str(error.value)


# ---- fields that do not belong together ------------------------------------------------------------------------------

X = np.random.default_rng(0).standard_normal((1, 2, 4, 16), dtype=np.float32)
K = monotile.quantize(X, "int8")
FP8, AURA = monotile.quantize(X, "fp8_e4m3"), monotile.quantize(X, "aura4")
TABLE, NONE = np.zeros((1, 1), np.int32), np.zeros(1, np.int32)
ENDS = np.array([0, 2], np.int32)
USES: dict[str, Callable[[Any], Any]] = {
    "dequantize": lambda x: x.dequantize(),
    "attention": lambda x: monotile.attention(X, x, K),
    "attention's values": lambda x: monotile.attention(X, X, x),
    "decode_partials": lambda x: monotile.decode_partials(X, x, x),
    "attention_varlen": lambda x: monotile.attention_varlen(X[0], x, x, ENDS, ENDS),
    "attention_paged": lambda x: monotile.attention_paged(X, x, K, TABLE, NONE),
    "paged_append": lambda x: monotile.paged_append(K, x, TABLE, NONE, X, X),
}
FIELDS: dict[str, tuple[Any, dict[str, Any], type[MonotileError], str]] = {
    "no codes": (K, {"codes": None}, errors.ArgumentKind, "the codes of a Quantized must be an array, found NoneType"),
    "no scales": (K, {"scales": None}, errors.ArgumentKind, "the scales of a Quantized must be an array"),
    "a list": (K, {"scales": [1.0]}, errors.ArgumentKind, "must be an array, found list; make it with quantize"),
    "a number": (K, {"codes": 1.0}, errors.ArgumentKind, "must be an array, found float"),
    "scales without dimensions": (K, {"scales": np.array(1.0, np.float32)}, errors.ArgumentShape, r"found \(\)"),
    "scales of fewer rows": (K, {"scales": K.scales[:, :1]}, errors.ArgumentShape, r"4, 1\), found \(1, 1, 4, 1\)"),
    "two norms": (AURA, {"scales": np.repeat(AURA.scales, 2, -1)}, errors.ArgumentShape, "scales of aura4 have shape"),
    "a size in words": (K, {"size": "16"}, errors.BadOption, "an int from 1 up; found '16'"),
    "no size": (K, {"size": None}, errors.BadOption, "found None"),
    "a size with a point": (K, {"size": 16.0}, errors.BadOption, r"found 16\.0"),
    "another float": (K, {"dtype": "float64"}, errors.BadOption, "one of 'float32', .*; found 'float64'"),
    "no dtype": (K, {"dtype": None}, errors.BadOption, "dtype of a Quantized"),
    "a type": (K, {"dtype": np.float32}, errors.BadOption, "found <class 'numpy.float32'>"),
    "integers": (K, {"dtype": "int32"}, errors.BadOption, "found 'int32'"),
    "unsigned codes": (K, {"codes": K.codes.view(np.uint8)}, errors.MixedDTypes, "must be int8, found uint8"),
    "narrow scales": (K, {"scales": K.scales.astype(np.float16)}, errors.MixedDTypes, "scales of int8 must be float32"),
    "wide scales": (K, {"scales": K.scales.astype(np.float64)}, errors.MixedDTypes, "found float64"),
    "float codes": (K, {"codes": X}, errors.MixedDTypes, "found float32; make it with quantize"),
    "the other fp8": (FP8, {"format": "fp8_e5m2"}, errors.MixedDTypes, "must be float8_e5m2, found float8_e4m3fn"),
    "codes of the other fp8": (
        FP8, {"codes": FP8.codes.view(to_numpy(float8_e5m2))}, errors.MixedDTypes, "must be float8_e4m3fn"
    ),
    "no format": (K, {"format": None}, errors.BadOption, "format must be one of int8"),
}  # fmt: skip


@pytest.mark.parametrize("case", FIELDS)
@pytest.mark.sampled(1)
def test_fields_are_checked_at_every_use(case: str) -> None:
    made, changes, error, said = FIELDS[case]
    wrong, before = replace(made, **changes), K.codes.copy()
    for name, use in USES.items():
        x = wrong
        if name == "attention_varlen":  # (positions, heads, size)
            fields = {n: a[0] if getattr(a, "ndim", 0) > 1 else a for n, a in wrong.fields().items()}
            x = replace(wrong, **fields)
        with pytest.raises(error, match=None if name == "attention_varlen" else said):
            use(x)
    assert np.array_equal(K.codes, before)


def test_the_shape_of_what_has_none() -> None:
    for changes in ({"codes": None}, {"codes": [1]}, {"size": "16"}, {"size": None}):
        with pytest.raises(MonotileError, match="of a Quantized"):
            _ = replace(K, **changes).shape


def test_fields_of_two_libraries() -> None:
    torch = pytest.importorskip("torch")
    for x in (replace(K, scales=torch.ones(1, 2, 4, 1)), replace(K, codes=torch.ones(1, 2, 4, 16, dtype=torch.int8))):
        for name in ("dequantize", "attention", "paged_append"):
            with pytest.raises(errors.ArgumentKind, match="pass arrays of one library"):
                USES[name](x)


# ---- appending -------------------------------------------------------------------------------------------------------


def caches(keys: str | None = "int8", values: str | None = "int4_zero_point") -> list[Any]:
    """Quantised or plain pages (3, 8, 2, 16)."""
    pages = np.random.default_rng(1).standard_normal((3, 8, 2, 16), dtype=np.float32)
    return [pages.copy() if format is None else monotile.quantize(pages, format) for format in (keys, values)]


def fixed(x: Any) -> Any:
    found = x.copy()
    found.flags.writeable = False
    return found


NEW = np.ones((1, 2, 1, 16), np.float32)
PLACES = np.zeros((1, 1), np.int32), np.zeros(1, np.int32)
APPENDED: dict[str, tuple[Callable[[Any, Any], Any], type[MonotileError], str]] = {
    "read-only values": (
        lambda k, v: (k, replace(v, zeros=fixed(v.zeros))), errors.ReadOnlyOutput, "'v_zeros' is written"
    ),
    "read-only keys": (lambda k, v: (replace(k, scales=fixed(k.scales)), v), errors.ReadOnlyOutput, "'k_scales' is"),
    "scales of both": (
        lambda k, v: (k, replace(v, scales=k.scales)), errors.OverlappingOutput, "'k_scales' shares memory with 'v_sc"
    ),
    "one array": (lambda k, v: (k, k), errors.OverlappingOutput, "'k_pages' shares memory with 'v_pages'"),
    "types of values": (
        lambda k, v: (k, replace(v, scales=v.scales.astype(np.float16))), errors.MixedDTypes, "scales of int4"
    ),
    "pages of codes": (
        lambda k, v: (k, replace(v, codes=v.codes[:, :4], scales=v.scales[:, :4], zeros=v.zeros[:, :4])),
        errors.ArgumentShape, "v_pages.shape|1. is 4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", APPENDED)
def test_nothing_is_written_before_all_fields_are_checked(case: str) -> None:
    change, error, said = APPENDED[case]
    k, v = change(*caches())
    arrays = [*k.fields().values(), *v.fields().values()]
    before = [array.copy() for array in arrays]
    with pytest.raises(error, match=said):
        monotile.paged_append(k, v, *PLACES, NEW, NEW)
    assert all(map(np.array_equal, arrays, before))


@pytest.mark.parametrize("plain", ["k", "v"])
def test_plain_pages_beside_quantised_ones(plain: str) -> None:
    """Errors name them as the call does."""
    k, v = caches(None, "int8") if plain == "k" else caches("int8", None)
    new = {"k_new": NEW, "v_new": NEW} | {f"{plain}_new": NEW.astype(np.float16)}
    with pytest.raises(errors.MixedDTypes, match=f"one element type, found {plain}_pages float32, {plain}_new float16"):
        monotile.paged_append(k, v, *PLACES, **new)
    pages = (fixed(k), v) if plain == "k" else (k, fixed(v))
    with pytest.raises(errors.ReadOnlyOutput, match=f"'{plain}_pages' is written"):
        monotile.paged_append(*pages, *PLACES, NEW, NEW)


def test_a_length_that_has_no_place_for_new_tokens() -> None:
    lengths = np.array([3, 8], np.int32)
    for pages in (caches(), caches(None, None)):
        call = *pages, np.zeros((2, 1), np.int32), lengths, *[np.repeat(NEW, 2, 0)] * 2
        with pytest.raises(errors.BadPages, match=r"lengths\[1\] is 8, with the new tokens \(N = 1\) 9; .*: 0 to 8"):
            monotile.paged_append(*call, check=True)
    lengths[1] = 2**31 - 1
    with pytest.raises(errors.BadPages, match=r"\(N = 1\) 2147483648"):
        monotile.paged_append(*call, check=True)
    lengths[1] = -1
    with pytest.raises(errors.BadPages, match=r"lengths\[1\] is -1; "):
        monotile.paged_append(*call, check=True)


# ---- gradients -------------------------------------------------------------------------------------------------------


def gradient_calls(torch: Any) -> dict[str, Callable[[Any], Any]]:
    """Calls with a tensor that is made of the number given to them."""
    q, rows = torch.randn(1, 4, 2, 16), torch.randn(5, 4, 16)
    k, pages = monotile.quantize(torch.randn(1, 2, 20, 16), "int4_zero_point"), torch.randn(3, 8, 2, 16)
    packed, quantized = monotile.quantize(torch.randn(5, 2, 16), "int8"), monotile.quantize(pages, "int8")
    other = monotile.quantize(pages, "int8")
    ends, new = torch.tensor([0, 5]), torch.randn(1, 2, 1, 16)
    places = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([9], dtype=torch.int32)

    def scaled(x: Any, one: Any) -> Any:
        return replace(x, scales=x.scales * one)

    def biased(one: Any) -> Any:
        return lambda score, b, h, i, j: score + one[0]

    return {
        "attention's mask": lambda one: monotile.attention(q, k, k, mask=one.expand(2, 20)),
        "attention's sinks": lambda one: monotile.attention(q, k, k, sinks=one.expand(4)),
        "attention's scales": lambda one: monotile.attention(q, scaled(k, one), k),
        "attention's score_mod": lambda one: monotile.attention(q, k, k, score_mod=biased(one)),
        "partials' mask": lambda one: monotile.decode_partials(q, k, k, mask=one.expand(2, 20)),
        "partials' scales": lambda one: monotile.decode_partials(q, k, scaled(k, one)),
        "varlen's sinks": lambda one: monotile.attention_varlen(rows, packed, packed, ends, ends, sinks=one.expand(4)),
        "varlen's scales": lambda one: monotile.attention_varlen(rows, packed, scaled(packed, one), ends, ends),
        "paged sinks": lambda one: monotile.attention_paged(q, quantized, pages, *places, sinks=one.expand(4)),
        "paged scales": lambda one: monotile.attention_paged(q, pages, scaled(quantized, one), *places),
        "sinks of plain pages": lambda one: monotile.attention_paged(q, pages, pages, *places, sinks=one.expand(4)),
        "scales of pages": lambda one: monotile.paged_append(other, scaled(quantized, one), *places, new, new),
        "new tokens": lambda one: monotile.paged_append(quantized, other, *places, new, new * one),
        "quantize": lambda one: monotile.quantize(pages * one, "int8"),
        "dequantize": lambda one: scaled(quantized, one).dequantize(),
    }


def test_no_gradient_is_lost_in_silence() -> None:
    torch = pytest.importorskip("torch")
    for name, call in gradient_calls(torch).items():
        one = torch.ones(1, requires_grad=True)
        with pytest.raises(errors.NoGradient):
            call(one)
        for region in (torch.no_grad, torch.inference_mode):
            with region():
                call(one)
        if name != "attention's score_mod":  # in a graph a function reads no tensor of it
            torch.compiler.reset()
            with pytest.raises(Exception, match="has no gradient"):
                torch.compile(call, backend="aot_eager", fullgraph=True)(one)


@pytest.mark.parametrize("function", [monotile.attention, monotile.decode_partials])
@pytest.mark.parametrize("quantised", [False, True])
def test_a_gradient_of_what_a_function_reads_is_refused_in_a_graph(function: Any, quantised: bool) -> None:
    torch = pytest.importorskip("torch")
    bias, q = torch.zeros(1, requires_grad=True), torch.randn(1, 2, 5, 16)
    k = monotile.quantize(q, "int8") if quantised else q

    def biased(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + bias[0]

    torch.compiler.reset()
    run = torch.compile(lambda: function(q, k, k, score_mod=biased), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="reads a tensor that requires grad"):
        run()
    with torch.no_grad():
        run()


def test_the_cure_of_quantize_is_to_detach() -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(1, 2, 5, 16, requires_grad=True)
    with pytest.raises(errors.NoGradient, match=r"quantize has no gradient.*x\.detach\(\)"):
        monotile.quantize(x, "aura4")
    assert not monotile.quantize(x.detach(), "aura4").dequantize().requires_grad
