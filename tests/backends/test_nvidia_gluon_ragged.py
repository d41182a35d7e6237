"""What Gluon modules compute for sequences that lie one after the other, in Python (gluon_in_python.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="tiles are torch tensors here")
import torch

from backends import gluon_in_python
from backends.nvidia_kernels import compiled, lowered
from monotile.backends.nvidia.gluon import support
from monotile.backends.nvidia.program import NvidiaProgram
from monotile.backends.nvidia.schedule import Schedule
from monotile.kernels.attention import NOT_QUANTIZED, attention
from monotile.kernels.backward import backward_keys, backward_queries
from monotile.kernels.scores import Options
from monotile.kernels.spans import FIELDS, count_of_spans, sequence_spans

needs_gluon = pytest.mark.skipif(not support.version_supported(), reason="the Gluon text is for another Triton")
NAN = float("nan")
LENGTHS = ((70, 100), (0, 30), (130, 130), (5, 0), (1, 64), (64, 129))  # queries and keys of sequences
BEHIND = (9, 20)  # positions behind the last sequence


def spans_of(ends: list[Any], size: int, behind: tuple[int, int] = BEHIND) -> Any:
    """Return the table of spans of the first of two sides."""
    totals = [int(e[-1]) + more for e, more in zip(ends, behind, strict=True)]
    table = np.full((FIELDS, count_of_spans(totals[0], len(ends[0]) - 1, size)), -1, np.int32)
    sequence_spans(table, *(e.numpy() for e in ends), *totals, size=size)
    return torch.from_numpy(table)


def run(kernel: Any, schedule: Schedule, tensors: dict[str, Any], scalars: dict[str, Any], **constants: Any) -> None:
    form = lowered(kernel.ir(*tensors.values(), *scalars.values(), **constants))
    program = NvidiaProgram(form, schedule)
    assert program.path.pipeline is not None, program.why_plain
    gluon_in_python.run(form, program.schedule, program.default.source, tensors, scalars)


class Ragged:
    """Sequences of random numbers, and NaN behind the last."""

    def __init__(self, D: int, Dv: int, heads: tuple[int, int], **options: Any) -> None:
        torch.manual_seed(0)
        self.ends = [torch.tensor([0, *np.cumsum([n[side] for n in LENGTHS])], dtype=torch.int32) for side in (0, 1)]
        Tq, Tk = (int(e[-1]) + more for e, more in zip(self.ends, BEHIND, strict=True))
        self.q, self.do = (torch.randn(1, heads[0], Tq, n).bfloat16() for n in (D, Dv))
        self.k, self.v = (torch.randn(1, heads[1], Tk, n).bfloat16() for n in (D, Dv))
        for x, ends in ((self.q, 0), (self.do, 0), (self.k, 1), (self.v, 1)):
            x[:, :, int(self.ends[ends][-1]) :] = NAN
        self.D, self.Dv, self.options, self.group = D, Dv, options, heads[0] // heads[1]

    def sequences(self) -> Any:
        for s, (Nq, Nk) in enumerate(LENGTHS):
            starts = [int(e[s]) for e in self.ends]
            yield slice(starts[0], starts[0] + Nq), slice(starts[1], starts[1] + Nk), seen(Nq, Nk, **self.options)

    def exact(self) -> dict[str, Any]:
        """Return the output, its logsumexp, and the gradients; 0 behind the last sequence."""
        wide = {name: getattr(self, name).double().nan_to_num(0).requires_grad_() for name in ("q", "k", "v")}
        o = torch.zeros(*self.q.shape[:3], self.Dv).double()
        lse = torch.zeros(self.q.shape[:3]).double()
        for rows, keys, visible in self.sequences():
            K, V = (wide[name][:, :, keys].repeat_interleave(self.group, 1) for name in ("k", "v"))
            S = wide["q"][:, :, rows] @ K.transpose(2, 3) * self.D**-0.5
            S = S.masked_fill(~visible, -torch.inf)
            o[:, :, rows] = torch.softmax(S, 3).nan_to_num(0) @ V
            lse[:, :, rows] = torch.logsumexp(S, 3)
        (o * self.do.double().nan_to_num(0)).sum().backward()
        found = {f"d{name}": x.grad.nan_to_num(0) for name, x in wide.items()}
        return found | {"o": o.detach(), "lse": lse.detach()}


def seen(rows: int, keys: int, causal: str | None = None, left: int | None = None) -> Any:
    i, j = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)[None, :]
    found = torch.ones(rows, keys, dtype=torch.bool)
    found &= (j <= i) if causal else found
    return found & (j >= i - left) if left is not None else found


def largest_error(found: Any, exact: Any) -> float:
    return float((found.double() - exact).abs().max()) if not found.isnan().any() else NAN


FORWARD: dict[str, tuple[Schedule, dict[str, Any]]] = {
    "plain": (Schedule(4, 2, consumers=2, edge_stages=1), {}),
    "causal, three consumers": (Schedule(4, 3, consumers=3), {"causal": "lower_right"}),
    "a window": (Schedule(4, 2, consumers=2), {"causal": "lower_right", "left": 40}),
    "one consumer, a side in pieces": (Schedule(4, 2, consumers=1), {"D": 96, "Dv": 32, "heads": (2, 1)}),
}


@compiled
@needs_gluon
@pytest.mark.parametrize("name", FORWARD)
def test_output(name: str) -> None:
    schedule, given = FORWARD[name]
    D, Dv, heads = given.get("D", 64), given.get("Dv", 64), given.get("heads", (1, 1))
    options = {n: x for n, x in given.items() if n in ("causal", "left")}
    of = Ragged(D, Dv, heads, **options)
    o = torch.full((*of.q.shape[:3], Dv), NAN).bfloat16()
    size = 64 * schedule.consumers
    tensors = {"q": of.q, "k": of.k, "v": of.v, "mask": None, "block_map": None, "sinks": None, "o": o, "lse": None}
    tensors |= dict.fromkeys(("split_o", "split_m", "split_l"))
    tensors |= {"q_offsets": of.ends[0], "k_offsets": of.ends[1], "spans": spans_of(of.ends, size)}
    tensors |= dict.fromkeys(("k_pages", "v_pages", "page_table", "lengths", "plan", "slot_o", "slot_m", "slot_l"))
    tensors |= dict(zip(("kc", "ks", "kz", "vc", "vs", "vz"), NOT_QUANTIZED, strict=True))
    scalars = {"scale": D**-0.5, "queries": of.q.shape[2], "first_block": 0, "blocks_per_split": 0}
    constants = {"options": Options(**options), "D": D, "Dv": Dv, "BR": 64, "BK": 32, "together": schedule.consumers}
    run(attention, schedule, tensors, scalars, **constants)
    assert largest_error(o, of.exact()["o"]) < 0.02


BACKWARD: dict[str, tuple[Schedule, dict[str, Any]]] = {
    "queries": (Schedule(4, 2, consumers=2), {"owns": "queries"}),
    "queries, causal": (Schedule(4, 3, consumers=3), {"owns": "queries", "causal": "lower_right", "heads": (2, 1)}),
    "keys of a group": (Schedule(4, 2, consumers=2), {"heads": (4, 2)}),
    "keys, causal": (Schedule(4, 2, consumers=2), {"causal": "lower_right"}),
    "keys, a window, one consumer": (Schedule(4, 2, consumers=1), {"causal": "lower_right", "left": 40}),
    "keys, warps that share rows": (Schedule(8, 1, consumers=1), {"D": 256, "Dv": 256, "causal": "lower_right"}),
}


@compiled
@needs_gluon
@pytest.mark.parametrize("name", BACKWARD)
def test_gradients(name: str) -> None:
    schedule, given = BACKWARD[name]
    D, Dv, heads = given.get("D", 64), given.get("Dv", 64), given.get("heads", (1, 1))
    options = {n: x for n, x in given.items() if n in ("causal", "left")}
    of = Ragged(D, Dv, heads, **options)
    exact = of.exact()
    delta = (exact["o"] * of.do.double()).sum(3).float()
    of_queries = given.get("owns") == "queries"
    ends = of.ends if of_queries else of.ends[::-1]
    names = ("dq",) if of_queries else ("dk", "dv")
    tensors = {"do": of.do, "q": of.q, "k": of.k, "v": of.v, "mask": None, "block_map": None}
    tensors |= {"lse": exact["lse"].float(), "delta": delta, "q_offsets": of.ends[0], "k_offsets": of.ends[1]}
    tensors |= {"spans": spans_of(ends, 64 * schedule.consumers, BEHIND if of_queries else BEHIND[::-1])}
    results = {n: torch.full_like(getattr(of, n[1]), NAN) for n in names}
    tensors |= results if of_queries else results | {"dq": None, "workspace": None}
    constants = {"options": Options(**options), "D": D, "Dv": Dv, "BR": 64, "BK": 64, "together": schedule.consumers}
    run(backward_queries if of_queries else backward_keys, schedule, tensors, {"scale": D**-0.5}, **constants)
    for n, found in results.items():
        assert largest_error(found, exact[n]) < 0.03, n
