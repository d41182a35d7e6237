"""Ragged and paged attention: each sequence as if it were alone, whatever lies around it; mistakes, and bad contents
that must do no harm. The registered cases check how exact they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import monotile
from monotile import errors
from monotile.kernels.balance import balance
from monotile.kernels.scores import Options
from monotile.library import registry
from monotile.library.guarded import GuardedArray, Placement, guarded_results
from usable import ON_GPU, WITH_METAL, usable

Array = np.ndarray[Any, Any]
Inputs = dict[str, Any]
ON_ALL = pytest.mark.parametrize("backend", [b for b in usable(*WITH_METAL) if b != "interpreter"])
RAGGED = next(case for case in registry.CHECKS if case.op == "attention_varlen")
GRADIENTS = next(case for case in registry.CHECKS if case.op == "attention_varlen_backward")
PAGED, LONG = [case for case in registry.CHECKS if case.op == "attention_paged"][:2]


def run_guarded(function: Callable[..., Any], inputs: Inputs, writes: tuple[str, ...] = (), **run: Any) -> Any:
    """Call with arrays between poisoned neighbours; nothing outside of arrays may be written, and no input."""
    on_gpu = ON_GPU and run["backend"] == "nvidia"
    arrays = [GuardedArray.make(n, a, Placement(), on_gpu=on_gpu) for n, a in inputs.items() if hasattr(a, "dtype")]
    with guarded_results() as results:
        found = function(**inputs | {a.name: a.given for a in arrays}, **run)
    assert not results.written_outside()
    assert [a.name for a in arrays if a.changed()] == list(writes)
    return found


# ---- contents that are wrong -----------------------------------------------------------------------------------------

OFFSETS = ([5, 3, 1, -4, 90], [0, 2**31 - 1, -(2**31), 17, 4], [-1, -1, -1, -1, -1], [999, 999, 999, 999, 999])


@ON_ALL
def test_wrong_offsets_do_no_harm(backend: str) -> None:
    inputs = RAGGED.inputs()
    for offsets in OFFSETS:
        for name in ("q_offsets", "k_offsets"):
            wrong = inputs | {name: np.array(offsets, inputs[name].dtype)}
            run_guarded(monotile.attention_varlen, wrong, return_lse=True, backend=backend)
            with pytest.raises(errors.BadOffsets, match=name):
                monotile.attention_varlen(**wrong, backend=backend, check=True)
    inputs = GRADIENTS.inputs()
    o, lse = monotile.attention_varlen(**registry.forward_inputs(inputs), return_lse=True)
    for offsets in OFFSETS:
        wrong = (
            inputs
            | {"o": o, "lse": lse}
            | {name: np.array(offsets, inputs[name].dtype) for name in ("q_offsets", "k_offsets")}
        )
        run_guarded(monotile.attention_varlen_backward, wrong, backend=backend)
        with pytest.raises(errors.BadOffsets, match="q_offsets"):
            monotile.attention_varlen_backward(**wrong, backend=backend, check=True)


@ON_ALL
def test_wrong_lengths_and_pages_do_no_harm(backend: str) -> None:
    inputs = PAGED.inputs()
    capacity = inputs["page_table"].shape[1] * inputs["k_pages"].shape[1]
    for lengths in ([capacity + 1, 2**31 - 1, 0, 1], [-1, -(2**31), 5, 2]):
        wrong = inputs | {"lengths": np.array(lengths, np.int32)}
        run_guarded(monotile.attention_paged, wrong, return_lse=True, backend=backend)
        with pytest.raises(errors.BadPages, match=r"lengths\[0\]"):
            monotile.attention_paged(**wrong, backend=backend, check=True)
    for page in (-1, len(inputs["k_pages"]), 2**31 - 1):
        wrong = inputs | {"page_table": inputs["page_table"].copy()}
        wrong["page_table"][-1, 1] = page
        run_guarded(monotile.attention_paged, wrong, return_lse=True, backend=backend)
        with pytest.raises(errors.BadPages, match=r"page_table\[3, 1\]"):
            monotile.attention_paged(**wrong, backend=backend, check=True)


@ON_ALL
def test_wrong_lengths_of_balanced_splits_do_no_harm(backend: str) -> None:
    inputs = LONG.inputs()
    for lengths in ([2**31 - 1, -5], [0, 0]):
        wrong = inputs | {"lengths": np.array(lengths, np.int32)}
        run_guarded(monotile.attention_paged, wrong, return_lse=True, backend=backend)


@ON_ALL
def test_wrong_places_are_not_appended_to(backend: str) -> None:
    """No token is stored in a page that the table does not name, not even in page 0."""
    pages = np.zeros((3, 4, 1, 16), np.float32)
    new = np.ones((4, 1, 2, 16), np.float32)
    table = np.array([[0, 1]] * 3 + [[-1, 3]], np.int32)
    lengths = np.array([-2, 8, 2**31 - 1, 3], np.int32)
    inputs = {"k_pages": pages, "v_pages": pages, "page_table": table, "lengths": lengths, "k_new": new, "v_new": new}
    run_guarded(monotile.paged_append, inputs, backend=backend)
    for bad, said in ((lengths, r"lengths\[0\]"), (np.array([0, 0, 7, 0], np.int32), r"lengths\[2\]")):
        with pytest.raises(errors.BadPages, match=said):
            monotile.paged_append(**inputs | {"lengths": bad}, check=True)
    ends = inputs | {"lengths": np.array([0, 3, 6, 100], np.int32), "k_pages": pages.copy(), "v_pages": pages.copy()}
    run_guarded(monotile.paged_append, ends, ("k_pages", "v_pages"), backend=backend)


# ---- properties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[100] * 128 + [100_000], [7] * 70, [0, 0, 0], [90_000, 1, 80_000]], ids=len)
def test_splits_are_balanced_whatever_the_lengths(lengths: list[int]) -> None:
    """All splits fit the slots that the host knows of, none is long, and no key is left out."""
    wanted, least, BK = 66, 2, 64
    plan = np.full((4, len(lengths)), -1, np.int32)
    scalars = 4, 1, 2**20, wanted, least
    balance(plan, None, None, np.array(lengths, np.int32), *scalars, options=Options(), BR=4, BK=BK)
    first_slot, first_block, splits, per_split = plan
    blocks = -(-np.array(lengths) // BK)
    np.testing.assert_array_equal(first_slot, np.cumsum(splits) - splits)
    assert splits.sum() <= wanted + len(lengths) and not first_block.any() and splits.min() == 1
    assert (splits * per_split >= blocks).all() and ((splits - 1) * per_split < np.maximum(blocks, 1)).all()
    assert per_split.max() <= max(least, blocks.sum() / wanted + 1)


def test_neighbours_do_not_matter() -> None:
    """A sequence has the same bits alone and among others, whose values may be NaN."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((70, 2, 16)).astype(np.float32) for _ in range(3))
    ends = np.array([0, 20, 50, 70], np.int32)
    found = monotile.attention_varlen(q, k, v, ends, ends, causal=True)
    for array in (q, k, v):
        array[:20], array[50:] = np.nan, np.nan
    alone = monotile.attention_varlen(q, k, v, ends, ends, causal=True)
    np.testing.assert_array_equal(alone[20:50], found[20:50])
    assert np.isnan(alone[:20]).all() and np.isnan(alone[50:]).all()


def test_tokens_appended_are_seen() -> None:
    """Decoding step by step in pages is causal attention over all tokens."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 2, 11, 16)).astype(np.float32) for _ in range(3))
    k_pages, v_pages = (np.full((5, 3, 2, 16), np.nan, np.float32) for _ in range(2))
    table, lengths = np.array([[3, 0, 4, 1]], np.int32), np.zeros(1, np.int32)
    found = []
    for n in range(11):
        new = slice(n, n + 1)
        monotile.paged_append(k_pages, v_pages, table, lengths, k[:, :, new], v[:, :, new], check=True)
        lengths += 1
        found.append(monotile.attention_paged(q[:, :, new], k_pages, v_pages, table, lengths, check=True))
    np.testing.assert_allclose(np.concatenate(found, 2), monotile.attention(q, k, v, causal=True), rtol=2e-6, atol=2e-6)
    assert np.isnan(k_pages[2]).all()


def test_values_in_the_columns_of_keys() -> None:
    rng = np.random.default_rng(2)
    q, k = (rng.standard_normal((40, 1, 24)).astype(np.float32) for _ in range(2))
    ends = np.array([0, 13, 40], np.int64)
    shared, apart = (monotile.attention_varlen(q, k, v, ends, ends) for v in (k[..., :16], k[..., :16].copy()))
    np.testing.assert_allclose(shared, apart, rtol=1e-6, atol=1e-6)


@ON_ALL
def test_positions_behind_the_last_sequence(backend: str) -> None:
    """They belong to no sequence: rows see nothing, gradients are zero, and what is there does not matter."""
    inputs = GRADIENTS.inputs()
    rows, keys = inputs["q_offsets"][-1], inputs["k_offsets"][-1]
    rest = {n: inputs[n] for n in ("q_offsets", "k_offsets", "causal")}
    arrays = {n: np.concatenate([inputs[n], np.full_like(inputs[n][:3], np.nan)]) for n in ("q", "k", "v", "do")}
    arrays["do"][rows:] = 0
    do = arrays.pop("do")
    o, lse = monotile.attention_varlen(**arrays, **rest, return_lse=True, backend=backend)
    found = monotile.attention_varlen_backward(do, **arrays, o=o, lse=lse, **rest, backend=backend)
    assert not o[rows:].any() and (lse[:, rows:] == -np.inf).all()
    assert not (found.dq[rows:].any() or found.dk[keys:].any() or found.dv[keys:].any())
    assert all(np.isfinite(x).all() for x in (o, *found[:3]))


def test_gradients_in_torch() -> None:
    """Those of each sequence alone; also in the transforms and traces that an operator must stand."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    ends = torch.tensor([0, 5, 5, 20, 23], dtype=torch.int32), torch.tensor([0, 9, 11, 31, 31])
    shapes = (23, 4, 16), (31, 2, 16), (31, 2, 8), (4,)
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]

    def together(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return monotile.attention_varlen(q, k, v, *ends, causal=True, sinks=sinks, return_lse=True)

    def alone(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        found = []
        for a, b, c, d in zip(ends[0], ends[0][1:], ends[1], ends[1][1:], strict=False):
            S = torch.einsum("ihd,jhd->hij", q[a:b], k[c:d].repeat_interleave(2, 1)) / 4
            S = S.masked_fill(~torch.ones(S.shape[1:], dtype=torch.bool).tril(d - c - b + a), -torch.inf)
            lse = torch.cat((S, sinks[:, None, None].expand(4, b - a, 1)), 2).logsumexp(2)
            o = torch.einsum("hij,jhd->ihd", torch.exp(S - lse[..., None]), v[c:d].repeat_interleave(2, 1))
            found.append((o, lse))
        return torch.cat([o for o, _ in found]), torch.cat([lse for _, lse in found], 1)

    def loss(call: Any) -> Any:
        return lambda *given: sum((x * torch.cos(torch.arange(x.numel())).view(x.shape)).sum() for x in call(*given))

    wanted = torch.autograd.grad(loss(alone)(*leaves), leaves)
    for found in (
        torch.autograd.grad(loss(together)(*leaves), leaves),
        torch.func.grad(loss(together), argnums=(0, 1, 2, 3))(*[t.detach() for t in leaves]),
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6)
    given = *leaves[:3], *ends, leaves[3], "True", None, None, None, None, 0, None, None
    torch.library.opcheck(torch.ops.monotile.attention_varlen, given, test_utils=("test_schema", "test_faketensor"))
    with pytest.raises(errors.ArgumentKind, match="vmap"):
        torch.vmap(lambda q: monotile.attention_varlen(q, *leaves[1:3], *ends))(torch.stack([leaves[0]] * 2))


# ---- mistakes --------------------------------------------------------------------------------------------------------

Q, ENDS = np.zeros((6, 2, 8), np.float32), np.array([0, 2, 6], np.int32)
RAGGED_MISTAKES = [
    ({"q": Q[None]}, errors.ArgumentRank, "positions of all sequences"),
    ({"q_offsets": ENDS.astype(np.float32)}, errors.MixedDTypes, "int32 or int64"),
    ({"k_offsets": ENDS[:2]}, errors.ArgumentShape, "B [+] 1"),
    ({"q_offsets": ENDS[None]}, errors.ArgumentShape, "B [+] 1"),
    ({"q_offsets": ENDS[:1], "k_offsets": ENDS[:1]}, errors.ArgumentShape, "no sequence"),
    ({"k": Q[..., :4]}, errors.HeadSize, "head size"),
    ({"v": Q[:5]}, errors.LengthsDiffer, "positions"),
    ({"mask_mod": 3}, errors.BadOption, "mask_mod"),
    ({"sinks": np.zeros(3, np.float32)}, errors.ArgumentShape, "sinks"),
]


@pytest.mark.parametrize(("given", "error", "said"), RAGGED_MISTAKES)
def test_mistakes_of_attention_varlen(given: Inputs, error: type[Exception], said: str) -> None:
    call = {"q": Q, "k": Q, "v": Q, "q_offsets": ENDS, "k_offsets": ENDS}
    with pytest.raises(error, match=said):
        monotile.attention_varlen(**call | given)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"do": Q[:5]}, errors.ArgumentShape, "the output"),
        ({"o": Q.astype(np.float16)}, errors.MixedDTypes, "element type"),
        ({"lse": np.zeros((6, 2), np.float32)}, errors.ArgumentShape, r"\(2, 6\)"),
        ({"dlse": np.zeros((2, 6), np.float16)}, errors.MixedDTypes, "float32"),
        ({"k_offsets": ENDS[:2]}, errors.ArgumentShape, "B [+] 1"),
    ],
)
def test_mistakes_of_attention_varlen_backward(given: Inputs, error: type[Exception], said: str) -> None:
    call = {n: Q for n in ("do", "q", "k", "v", "o")} | {"q_offsets": ENDS, "k_offsets": ENDS}
    with pytest.raises(error, match=said):
        monotile.attention_varlen_backward(**call | {"lse": np.zeros((2, 6), np.float32)} | given)


TABLE, PAGES = np.zeros((1, 3), np.int32), np.zeros((2, 4, 2, 8), np.float32)
PAGED_MISTAKES = [
    ({"q": Q}, errors.ArgumentRank, "batch, heads"),
    ({"k_pages": PAGES[0]}, errors.ArgumentRank, "pages"),
    ({"k_pages": PAGES[:, :0], "v_pages": PAGES[:, :0]}, errors.ArgumentShape, "at least one position"),
    ({"k_pages": np.zeros((2, 4, 2, 16), np.float32)[..., ::2]}, errors.ArgumentShape, "stride"),
    ({"v_pages": PAGES[:1]}, errors.ArgumentShape, "2 pages"),
    ({"v_pages": PAGES[:, :3]}, errors.LengthsDiffer, "positions"),
    ({"page_table": TABLE.astype(np.int64)}, errors.MixedDTypes, "int32"),
    ({"page_table": TABLE[0]}, errors.ArgumentShape, "page_table"),
    ({"lengths": np.zeros(2, np.int32)}, errors.ArgumentShape, "lengths"),
    ({"v_pages": PAGES.astype(np.float16)}, errors.MixedDTypes, "one element type"),
]


@pytest.mark.parametrize(("given", "error", "said"), PAGED_MISTAKES)
def test_mistakes_of_attention_paged(given: Inputs, error: type[Exception], said: str) -> None:
    call = {"q": Q[None, :2], "k_pages": PAGES, "v_pages": PAGES, "page_table": TABLE, "lengths": TABLE[0, :1]}
    with pytest.raises(error, match=said):
        monotile.attention_paged(**call | given)


def test_mistakes_of_paged_append() -> None:
    new = np.zeros((1, 2, 1, 8), np.float32)
    call = {
        "k_pages": PAGES,
        "v_pages": PAGES,
        "page_table": TABLE,
        "lengths": TABLE[0, :1],
        "k_new": new,
        "v_new": new,
    }
    with pytest.raises(errors.MixedDTypes, match="one element type"):
        monotile.paged_append(**call | {"k_new": new.astype(np.float16)})
    with pytest.raises(errors.MixedDTypes, match="int32"):
        monotile.paged_append(**call | {"lengths": np.zeros(1, np.int64)})
    with pytest.raises(errors.ArgumentShape, match=r"'k_new' must be .B, 2, N, 8."):
        monotile.paged_append(**call | {"k_new": new[0], "check": True})
    with pytest.raises(errors.OverlappingOutput, match="are one array"):
        monotile.paged_append(**call)
    fixed = PAGES.copy()
    fixed.flags.writeable = False
    with pytest.raises(errors.ReadOnlyOutput):
        monotile.paged_append(**call | {"k_pages": fixed})


def test_block_masks_are_for_other_functions() -> None:
    blocks = monotile.block_mask(lambda b, h, i, j: j <= i, None, None, 5, 5)
    x, offsets, lengths = np.ones((5, 2, 8), np.float32), np.array([0, 5], np.int32), np.ones(1, np.int32)
    with pytest.raises(errors.BadOption, match=r"blocks\.mask_mod"):
        monotile.attention_varlen(x, x, x, offsets, offsets, mask_mod=blocks)
    for pages in (PAGES, monotile.quantize(PAGES, "int8")):
        with pytest.raises(errors.BadOption, match=r"blocks\.mask_mod"):
            monotile.attention_paged(Q[None, :2], pages, pages, TABLE, lengths, mask_mod=blocks)


def test_autocast_and_vmap() -> None:
    """q and plain pages are cast as `attention` casts; what has no rule for vmap says so."""
    torch = pytest.importorskip("torch")
    q, pages = torch.ones(1, 2, 1, 16), torch.ones(2, 4, 2, 16)
    K, k = monotile.quantize(pages, "int8"), torch.ones(1, 2, 9, 16)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    calls: dict[str, Callable[[Any], Any]] = {
        "attention_paged": lambda q: monotile.attention_paged(q, pages, pages, table, lengths),
        "attention_paged of codes": lambda q: monotile.attention_paged(q, K, pages, table, lengths),
        "attention on Quantized": lambda q: monotile.attention(q, monotile.quantize(k, "int8"), k),
        "decode_partials": lambda q: monotile.decode_partials(q, k, k),
    }
    for name, call in calls.items():
        with torch.autocast("cpu", torch.bfloat16):
            found = call(q)
            assert name == "decode_partials" or found.dtype == torch.bfloat16
        with pytest.raises(errors.ArgumentKind, match=r"has no rule for torch\.vmap"):
            torch.vmap(call)(q[None])
