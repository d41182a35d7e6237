"""The kernels whose generated text is recorded: every library kernel over a matrix of options, dtypes and head sizes.

Block sizes depend on the backend and the head size alone, never on the machine that makes the text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from monotile import ir
from monotile.backends.choices import Choices
from monotile.backends.metal.choices import MetalChoices
from monotile.backends.nvidia.choices import NvidiaChoices
from monotile.dtypes import BY_NAME, DType, bool_, float32, uint8
from monotile.kernels import examples
from monotile.kernels.attention import DENSE, attention
from monotile.kernels.backward import backward_keys, backward_queries
from monotile.kernels.mask_blocks import mask_blocks
from monotile.kernels.merge import merge, merge_lse
from monotile.kernels.scores import Options
from monotile.runtime.tensors import View, dense
from problems import problem


class Case(NamedTuple):
    """A specialised kernel and the facts that schedules are chosen by."""

    name: str
    kernel: ir.Kernel
    head_size: int = 0
    options: Options | None = None
    mask: str = ""  # "", "bool" or a dtype


def tensor(dtype: DType, *shape: int) -> View:
    return View(dtype, shape, dense(shape), "cpu")


def alibi(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score - 0.125 * (h + 1) * (i - j)


def even_keys(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (j % 2 == 0) | (i == j)


B, HQ, HKV, NQ, NK = 2, 4, 2, 200, 333
PLAIN = Options()
# name: options, mask dtype ("" for none), with sinks, with lse
OPTIONS: dict[str, tuple[Options, str, bool, bool]] = {
    "full": (PLAIN, "", False, False),
    "full_lse": (PLAIN, "", False, True),
    "causal": (Options(causal="lower_right"), "", False, False),
    "upper_left": (Options(causal="upper_left"), "", False, True),
    "window": (Options(left=64, right=8), "", False, False),
    "causal_window": (Options(causal="lower_right", left=100), "", False, True),
    "softcap": (Options(softcap=30.0), "", False, False),
    "softcap_lse": (Options(softcap=30.0, causal="lower_right"), "", False, True),
    "sinks": (Options(causal="lower_right"), "", True, True),
    "negative": (Options(negative=True), "", False, False),
    "bool_mask": (PLAIN, "bool", False, False),
    "bool_mask_causal": (Options(causal="lower_right"), "bool", True, True),
    "additive_mask": (PLAIN, "float32", False, False),
    "additive_mask_softcap": (Options(softcap=20.0, left=50), "float16", False, True),
    "score_mod": (Options(score_mod=alibi), "", False, True),
    "mask_mod": (Options(mask_mod=even_keys, causal="lower_right"), "", False, False),
}
# (options, dtype, D, Dv): every option at D 128 in bfloat16, and head sizes and dtypes for a few of them.
MATRIX = [(name, "bfloat16", 128, 128) for name in OPTIONS]
MATRIX += [(name, "float32", 64, 64) for name in ("full_lse", "causal", "bool_mask_causal", "additive_mask", "window")]
MATRIX += [(name, "float16", 256, 256) for name in ("causal", "softcap", "bool_mask")]
MATRIX += [("causal", "float16", 64, 64), ("window", "bfloat16", 64, 64), ("bool_mask", "bfloat16", 64, 64)]
MATRIX += [("full", "bfloat16", 512, 512), ("causal", "bfloat16", 80, 80), ("causal_window", "float32", 192, 128)]
DECODE = [(name, "bfloat16", 128, 128) for name in OPTIONS if not name.endswith("_lse")]
DECODE += [("causal", "float32", 64, 64), ("bool_mask", "float32", 64, 64), ("full", "bfloat16", 512, 512)]
DECODE += [("full", "float16", 256, 256), ("window", "float32", 80, 80)]
PACKED = [(name, "bfloat16", 128, 128) for name in ("full", "causal", "window", "bool_mask", "mask_mod")]
PACKED += [("causal", "float32", 64, 64), ("bool_mask", "float32", 64, 64), ("window", "float16", 256, 256)]
BACKWARD = [("full", "float32", 64, 64), ("causal", "bfloat16", 128, 128), ("bool_mask_causal", "float32", 64, 64)]
BACKWARD += [("additive_mask_softcap", "float16", 80, 96)]
PACKED_16 = [("full", "bfloat16", 128, 128), ("causal", "bfloat16", 128, 128), ("sinks", "float32", 64, 64)]


def mask_dtype(name: str) -> DType:
    return bool_ if name == "bool" else BY_NAME[name]


def attention_blocks(backend: str, head_size: int, dtype: DType) -> tuple[int, int]:
    """(BR, BK) of rows that are not packed. Metal's threadgroup memory takes fewer keys."""
    if backend == "metal":
        chosen = MetalChoices().attention(problem(head_size, dtype.name))
        return chosen.row_block, chosen.key_block
    if backend == "nvidia" and dtype.bytes == 4:
        blocks = NvidiaChoices().row_blocks(problem(head_size, dtype.name)).blocks
        return blocks["BR"] or 0, blocks["BK"] or 0
    return (64, 128) if head_size <= 128 else (64, 64)


def attention_cases(backend: str) -> Iterator[Case]:
    """Rows of one query head over all keys."""
    for name, dtype_name, D, Dv in MATRIX:
        options, mask, with_sinks, with_lse = OPTIONS[name]
        dtype = BY_NAME[dtype_name]
        BR, BK = attention_blocks(backend, max(D, Dv), dtype)
        maps = ("", "_coarse") if mask else ("",)
        for suffix in maps:
            covered = bool(mask) and not suffix
            kernel = attention.ir(
                tensor(dtype, B, HQ, NQ, D), tensor(dtype, B, HKV, NK, D), tensor(dtype, B, HKV, NK, Dv),
                tensor(mask_dtype(mask), B, HQ, NQ, NK) if mask else None,
                tensor(uint8, B, HQ, -(-NQ // BR), -(-NK // BK)) if mask or options.mask_mod else None,
                tensor(float32, HQ) if with_sinks else None, tensor(dtype, B, HQ, NQ, Dv),
                tensor(float32, B, HQ, NQ) if with_lse else None, None, None, None, *DENSE, 0.1, NQ, 0, 0,
                options=options, BR=BR, BK=BK, covered=covered,
            )  # fmt: skip
            yield Case(f"attention/{name}{suffix}/{dtype_name}/{D}x{Dv}", kernel, max(D, Dv), options, mask)


def packed_case(kind: str, row: tuple[str, str, int, int], queries: int, blocks: tuple[int, int]) -> Iterator[Case]:
    """Rows of a KV head's group, with the keys in splits and with all keys at once (`_whole`)."""
    name, dtype_name, D, Dv = row
    options, mask, with_sinks, with_lse = OPTIONS[name]
    dtype, R, (BR, BK) = BY_NAME[dtype_name], HQ // HKV * queries, blocks
    per_split = max(1, 128 // BK)
    for suffix, S in (("", -(-NK // (per_split * BK))), ("_whole", 0)):
        kernel = attention.ir(
            tensor(dtype, B, HKV, R, D), tensor(dtype, B, HKV, NK, D), tensor(dtype, B, HKV, NK, Dv),
            tensor(mask_dtype(mask), B, HQ, queries, NK) if mask else None, None,
            tensor(float32, HQ) if with_sinks and not S else None, tensor(dtype, B, HKV, R, Dv) if not S else None,
            tensor(float32, B, HKV, R) if with_lse and not S else None,
            tensor(float32, B, HKV, R, S, Dv) if S else None, tensor(float32, B, HKV, R, S) if S else None,
            tensor(float32, B, HKV, R, S) if S else None, *DENSE, 0.1, queries, 0, per_split,
            options=options, BR=BR, BK=BK, packed=True,
        )  # fmt: skip
        yield Case(f"{kind}/{name}{suffix}/{dtype_name}/{D}x{Dv}", kernel, max(D, Dv), options, mask)


def decode_cases() -> Iterator[Case]:
    """Few rows, which are multiplied without matrix units."""
    for row in DECODE:
        yield from packed_case("decode", row, 2, (4, 64 if row[2] <= 128 else 32))


def packed_cases(backend: str) -> Iterator[Case]:
    """As many rows as a block for matrix units has, of several query heads."""
    for row in PACKED:
        BR, BK = attention_blocks(backend, max(row[2:]), BY_NAME[row[1]])
        yield from packed_case("packed", row, 48, (BR, BK))
    for row in PACKED_16:
        _, BK = attention_blocks(backend, max(row[2:]), BY_NAME[row[1]])
        yield from packed_case("packed_16", row, 7, (16, BK))


def backward_cases(backend: str) -> Iterator[Case]:
    """The kernels of the backward pass: dq, dk and dv, and on a CPU all of them in one (`_all`)."""
    for name, dtype_name, D, Dv in BACKWARD:
        options, mask, _, _ = OPTIONS[name]
        dtype, found = BY_NAME[dtype_name], problem(max(D, Dv), dtype_name)
        chosen = {"metal": MetalChoices(), "nvidia": NvidiaChoices()}.get(backend, Choices()).attention_backward(found)
        assert chosen.rows is not None
        q, do, rows = tensor(dtype, B, HQ, NQ, D), tensor(dtype, B, HQ, NQ, Dv), tensor(float32, B, HQ, NQ)
        k, v = tensor(dtype, B, HKV, NK, D), tensor(dtype, B, HKV, NK, Dv)
        for kind, blocks in (("queries", chosen.rows), ("keys", chosen.keys), ("keys_all", chosen.keys)):
            sizes = {"BR": blocks.row_block, "BK": blocks.key_block} if backend != "cpu" else {"BR": 64, "BK": 64}
            block_map = tensor(uint8, B, HQ, -(-NQ // sizes["BR"]), -(-NK // sizes["BK"]))
            masks = (tensor(mask_dtype(mask), B, HQ, NQ, NK), block_map) if mask else (None, None)
            scores, consts = (do, q, k, v, *masks, rows, rows, None, None, None), {"options": options, **sizes}
            if kind == "queries":
                kernel = backward_queries.ir(*scores, q, 0.1, **consts)
            elif kind == "keys":
                kernel = backward_keys.ir(*scores, k, v, None, None, 0.1, **consts)
            elif backend == "cpu":
                workspace = tensor(float32, B, HQ, NQ, D) if dtype is not float32 else None
                kernel = backward_keys.ir(*scores, k, v, q, workspace, 0.1, **consts)
            else:
                continue
            yield Case(f"backward_{kind}/{name}/{dtype_name}/{D}x{Dv}", kernel, max(D, Dv))


def merge_cases() -> Iterator[Case]:
    R, S, D = 10, 7, 96
    parts = tensor(float32, R, S, D), tensor(float32, R, S), tensor(float32, R, S)
    for span in (None, 32):
        for with_sinks in (False, True):
            sinks = tensor(float32, 5) if with_sinks else None
            name = f"merge/{'sinks' if with_sinks else 'plain'}/span_{span}"
            out, lse = tensor(BY_NAME["bfloat16"], R, D), tensor(float32, R)
            yield Case(name, merge.ir(*parts, sinks, out, lse, 2, BS=16, SPAN=span))
        outs, lses = tensor(BY_NAME["float16"], R, S, D), tensor(float32, R, S)
        total, out = tensor(float32, R), tensor(BY_NAME["float16"], R, D)
        yield Case(f"merge_lse/plain/span_{span}", merge_lse.ir(outs, lses, out, total, BS=16, SPAN=span))


def mask_cases() -> Iterator[Case]:
    for dtype in ("bool", "float32", "float16"):
        for covered in (False, True):
            for strip, span in ((8, None), (64, 512)):
                mask, block_map = tensor(mask_dtype(dtype), B, HQ, NQ, NK), tensor(uint8, B, HQ, 4, 6)
                kernel = mask_blocks.ir(mask, block_map, BQ=64, BK=64, STRIP=strip, SPAN=span, covered=covered)
                yield Case(f"mask_blocks/{'fine' if covered else 'coarse'}_strip_{strip}/{dtype}", kernel)


def example_cases() -> Iterator[Case]:
    for dtype_name in ("float32", "bfloat16"):
        dtype = BY_NAME[dtype_name]
        square, row = tensor(dtype, 100, 100), tensor(dtype, 100)
        yield Case(f"copy/{dtype_name}", examples.copy.ir(square, square))
        yield Case(f"matmul/{dtype_name}", examples.matmul.ir(square, square, square))
        yield Case(f"matmul_bias_tanh/{dtype_name}", examples.matmul_bias_tanh.ir(square, square, row, square))
        yield Case(f"row_softmax/{dtype_name}", examples.row_softmax.ir(square, square))
        yield Case(f"rms_norm/{dtype_name}", examples.rms_norm.ir(square, row, square, 1e-5))


def cases(backend: str) -> Iterator[Case]:
    """Every kernel, specialised as for a call on one backend."""
    yield from attention_cases(backend)
    yield from decode_cases()
    yield from packed_cases(backend)
    yield from backward_cases(backend)
    yield from merge_cases()
    yield from mask_cases()
    yield from example_cases()
