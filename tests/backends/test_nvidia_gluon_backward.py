"""What the Gluon modules of attention's backward pass compute, in Python (gluon_in_python.py)."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="tiles are torch tensors here")
import torch

from backends import gluon_in_python
from backends.nvidia_kernels import compiled, lowered
from monotile.backends.nvidia.gluon import support
from monotile.backends.nvidia.program import NvidiaProgram
from monotile.backends.nvidia.schedule import Schedule
from monotile.kernels.backward import backward_keys, backward_queries
from monotile.kernels.scores import Options
from monotile.kernels.visibility import FULL, HIDDEN, PARTIAL

needs_gluon = pytest.mark.skipif(not support.version_supported(), reason="the Gluon text is for another Triton")
NAN = float("nan")


def gradients(
    schedule: Schedule, *, D: int = 64, Dv: int = 64, heads: tuple[int, int] = (1, 1), rows: int = 130, keys: int = 150,
    blocks: tuple[int, int] = (64, 64), owns: str = "keys", unseen: float = 0.0, mask: Any = None, **options: Any,
) -> float:  # fmt: skip
    """Return the greatest error of the gradients that the module of a schedule gives. `unseen` is what q and do hold in
    rows that see no key."""
    torch.manual_seed(0)
    q, do = (torch.randn(1, heads[0], rows, n).bfloat16() for n in (D, Dv))
    k, v = (torch.randn(1, heads[1], keys, n).bfloat16() for n in (D, Dv))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    K, V = (x.repeat_interleave(heads[0] // heads[1], 1) for x in wide[1:])
    shown = seen(rows, keys, **options)
    shown = shown if mask is None else shown & documents(0, 0, *grid(rows, keys))
    S = (wide[0] @ K.transpose(2, 3) * D**-0.5).masked_fill(~shown, -torch.inf)
    O = torch.softmax(S, 3).nan_to_num(0) @ V
    (O * do.double()).sum().backward()
    lse, delta = torch.logsumexp(S, 3).detach().float(), (O * do.double()).sum(3).detach().float()
    for x in (q, do):
        x[:, :, ~shown.any(1)] = unseen

    block_map = map_of(rows, keys, blocks, heads[0], options.get("mask_mod", documents))
    block_map = block_map if mask is not None or "mask_mod" in options else None
    if mask is not None:  # its kind: bool, or float for an additive one
        hides = documents(0, 0, *grid(rows, keys)).expand(1, heads[0], rows, keys).contiguous()
        mask = hides if mask is bool else torch.where(hides, 0.0, -torch.inf).bfloat16()
    given = {"do": do, "q": q, "k": k, "v": v, "mask": mask, "block_map": block_map, "lse": lse, "delta": delta}
    names = ("dq",) if owns == "queries" else ("dk", "dv")
    results = {name: torch.full_like(of, NAN) for name, of in zip(("dq", "dk", "dv"), (q, k, v), strict=True)}
    tensors = given | {"q_offsets": None, "k_offsets": None, "spans": None} | {name: results[name] for name in names}
    if owns == "keys":
        tensors |= {"dq": None, "workspace": None}
    kernel = backward_queries if owns == "queries" else backward_keys
    constants = {"options": Options(**options), "D": D, "Dv": Dv, "BR": blocks[0], "BK": blocks[1]}
    form = lowered(kernel.ir(*tensors.values(), D**-0.5, **constants))
    program = NvidiaProgram(form, schedule)
    assert program.path.pipeline is not None, program.why_plain
    gluon_in_python.run(form, program.schedule, program.default.source, tensors, {"scale": D**-0.5})
    exact = dict(zip(("dq", "dk", "dv"), (x.grad for x in wide), strict=True))
    return max(float((tensors[name].double() - exact[name].nan_to_num(0)).abs().max()) for name in names)


def grid(rows: int, keys: int) -> tuple[Any, Any]:
    return torch.arange(rows)[:, None], torch.arange(keys)[None, :]


def map_of(rows: int, keys: int, blocks: tuple[int, int], heads: int, mask_mod: Any) -> Any:
    """Return the block map of a mask_mod."""
    counts = [-(-n // size) for n, size in zip((rows, keys), blocks, strict=True)]
    found = torch.full((1, heads, *counts), FULL, dtype=torch.uint8)
    for n in range(counts[0]):
        for m in range(counts[1]):
            i = torch.arange(n * blocks[0], min(rows, (n + 1) * blocks[0]))[:, None]
            j = torch.arange(m * blocks[1], min(keys, (m + 1) * blocks[1]))[None, :]
            visible = mask_mod(0, 0, i, j)
            if not visible.all():
                found[..., n, m] = PARTIAL if visible.any() else HIDDEN
    return found


def documents(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i // 90 == j // 90


def seen(rows: int, keys: int, causal: str | None = None, left: int | None = None, mask_mod: Any = None) -> Any:
    i, j = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)[None, :]
    found = torch.ones(rows, keys, dtype=torch.bool)
    found &= (j <= i) if causal else found
    found &= mask_mod(0, 0, torch.arange(rows)[:, None], j) if mask_mod is not None else found
    return found & (j >= i - left) if left is not None else found


CASES: dict[str, tuple[Schedule, dict[str, Any]]] = {
    "keys": (Schedule(4, 2, consumers=2), {}),
    "keys, causal": (Schedule(4, 2, consumers=2), {"causal": "lower_right"}),
    "keys of a group": (Schedule(4, 2, consumers=2), {"heads": (6, 2)}),
    "keys of a group, causal, overlapped": (
        Schedule(4, 3, consumers=3),
        {"heads": (2, 1), "causal": "lower_right", "rows": 200},
    ),
    "keys, rows that see none": (
        Schedule(4, 2, consumers=2),
        {"causal": "lower_right", "rows": 200, "keys": 70, "unseen": NAN},
    ),
    "keys, many rows": (Schedule(4, 2, consumers=2), {"rows": 400, "D": 96}),
    "keys, a window": (Schedule(4, 2, consumers=2), {"causal": "lower_right", "left": 40}),
    "keys of other sizes": (Schedule(4, 2, consumers=2), {"D": 96, "Dv": 32}),
    "keys, more rows at a time": (Schedule(4, 2, consumers=2), {"blocks": (128, 64), "causal": "lower_right"}),
    "keys, warps that share rows": (Schedule(8, 1, consumers=1), {"D": 256, "Dv": 256, "causal": "lower_right"}),
    "keys of a group, documents": (
        Schedule(4, 2, consumers=2),
        {"heads": (4, 2), "rows": 300, "keys": 300, "mask_mod": documents},
    ),
    "keys, documents, causal, three slots": (
        Schedule(4, 3, consumers=2),
        {"rows": 300, "keys": 270, "mask_mod": documents, "causal": "lower_right"},
    ),
    "queries, documents": (
        Schedule(4, 2, consumers=3),
        {"owns": "queries", "rows": 300, "keys": 300, "mask_mod": documents, "causal": "lower_right"},
    ),
    "keys of a group, a bool mask": (
        Schedule(4, 2, consumers=2),
        {"heads": (2, 1), "rows": 136, "keys": 192, "mask": bool, "unseen": NAN},
    ),
    "keys, an additive mask, causal": (
        Schedule(4, 2, consumers=2),
        {"rows": 136, "keys": 200, "mask": float, "causal": "lower_right"},
    ),
    "queries, a bool mask": (Schedule(4, 2, consumers=2), {"owns": "queries", "keys": 192, "mask": bool}),
    "one key": (Schedule(4, 2, consumers=2), {"rows": 3, "keys": 1}),
    "queries": (Schedule(4, 2, consumers=2), {"owns": "queries"}),
    "queries, causal, overlapped": (
        Schedule(4, 3, consumers=3),
        {"owns": "queries", "causal": "lower_right", "heads": (4, 2)},
    ),
    "queries that see no key": (
        Schedule(4, 2, consumers=2),
        {"owns": "queries", "causal": "lower_right", "rows": 200, "keys": 70, "unseen": 0.0},
    ),
    "queries, a window": (Schedule(4, 2, consumers=2), {"owns": "queries", "causal": "lower_right", "left": 40}),
    "queries, more keys at a time": (
        Schedule(4, 2, consumers=2),
        {"owns": "queries", "blocks": (64, 128), "keys": 300},
    ),
}


@compiled
@needs_gluon
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    schedule, given = CASES[name]
    assert gradients(schedule, **given) < 0.03
