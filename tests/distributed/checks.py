"""What is checked in a group of ranks. Each check runs on every rank and returns the problems it found."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from cases import SEQUENCES, Sequence, distance_bias, every_third

import monotile
import monotile.distributed as md
from monotile.errors import BadOption, MonotileError, RankLost, RanksDiffer
from monotile.library import registry

Check = Callable[[int, int], list[str]]
CHECKS: dict[str, Check] = {}
FATAL: dict[str, Callable[[int], list[int]]] = {}  # ranks that end in a check
_worlds: dict[str, tuple[int, ...]] = {}
EVERY = (1, 2, 3, 4)
METHODS, LAYOUTS = ("ring", "all_gather", "all_to_all"), ("zigzag", "contiguous")


def check(*worlds: int, name: str = "") -> Callable[[Check], Check]:
    def added(function: Check) -> Check:
        CHECKS[name or function.__name__] = function
        _worlds[name or function.__name__] = worlds or EVERY
        return function

    return added


def worlds(name: str) -> tuple[int, ...]:
    return _worlds[name]


# ---- results ---------------------------------------------------------------------------------------------------------


def on_rank(sequence: Sequence, layout: str) -> dict[str, torch.Tensor]:
    """This rank's part of a sequence's arrays."""
    found = {}
    for name, array in sequence.arrays.items():
        whole = torch.from_numpy(array.view("int16")).view(torch.bfloat16) if array.dtype.name == "bfloat16" else (
            torch.from_numpy(array))  # fmt: skip
        found[name] = whole if name == "sinks" else md.shard(whole, layout, dim=2).clone()
    return found


def run(sequence: Sequence, method: str, layout: str) -> dict[str, torch.Tensor]:
    """Output, logsumexp and gradients of this rank's part."""
    given = on_rank(sequence, layout)
    do, dlse = given.pop("do"), given.pop("dlse")
    for tensor in given.values():
        tensor.requires_grad_()
    options = {**sequence.options, "documents": sequence.documents, "length": sequence.N, "backend": sequence.backend}
    o, lse = md.attention(**given, **options, method=method, layout=layout, return_lse=True)
    torch.autograd.backward([o, lse], [do, dlse])
    gradients = {f"d{name}": tensor.grad for name, tensor in given.items()}
    return {"out": o.detach(), "lse": lse.detach(), **gradients}


def whole(found: dict[str, torch.Tensor], layout: str, length: int) -> dict[str, torch.Tensor]:
    joined = {}
    for name, tensor in found.items():
        if name == "dsinks":
            dist.all_reduce(tensor)
            joined[name] = tensor
        else:
            joined[name] = md.unshard(tensor, layout, dim=2, length=length)
    return joined


def compare(sequence: Sequence, method: str, layout: str) -> list[str]:
    exact, naive = sequence.results
    first = run(sequence, method, layout)
    again = run(sequence, method, layout) if sequence.repeated else first
    problems = [f"{name} has other bits in a second run" for name in first if not torch.equal(first[name], again[name])]
    for name, tensor in whole(first, layout, sequence.N).items():
        verdict = registry.judge(name, registry.from_device(tensor), exact[name], naive[name])
        if not verdict.ok:
            problems.append(f"{method} {layout} {name}: error {verdict.error}, {verdict.allowed} is allowed")
    return problems


def _checked(sequence: Sequence) -> Check:
    def compared(rank: int, ranks: int) -> list[str]:
        return [p for method in sequence.methods for layout in LAYOUTS for p in compare(sequence, method, layout)]

    return compared


for _sequence in SEQUENCES:
    check(*_sequence.worlds, name=_sequence.name)(_checked(_sequence))


# ---- what is sent ----------------------------------------------------------------------------------------------------


@check(2, 3, 4)
def bytes_are_those_of_the_model(rank: int, ranks: int) -> list[str]:
    """Counted in both passes, for every method and layout; and the formulas of the guide where lengths divide."""
    problems = []
    for N, heads, options in ((24 * ranks, (4, 2), {"causal": True}), (31, (6, 3), {"causal": True, "window": (3, 0)})):
        sequence = Sequence("bytes", N, heads, (16, 8), options=options)
        problem = md.ContextProblem(N, ranks, heads, (16, 8), element_bytes=4, **options)
        for method in METHODS:
            for layout in LAYOUTS:
                given = on_rank(sequence, layout)
                q, k, v = (given[name].requires_grad_() for name in "qkv")
                more = {"method": method, "layout": layout, "length": N, "backend": "interpreter", **options}
                md.attention(q, k, v, **more)  # ranks agree in the first call
                with md.traffic() as forward:
                    o = md.attention(q, k, v, **more)
                with md.traffic() as backward:
                    o.backward(given["do"])
                cost = problem.cost(rank, method, layout)
                if (forward.bytes, backward.bytes) != cost[:2]:
                    problems.append(f"{method} {layout} sent {forward} and {backward}, the model says {cost}")
    n, row = 24, 2 * (16 + 8) * 4
    by_hand = {"zigzag": n // 2 * (ranks - 1 + rank) * row, "contiguous": n * (ranks - 1 - rank) * row}
    for layout, expected in by_hand.items():
        found = md.ContextProblem(24 * ranks, ranks, (4, 2), (16, 8), element_bytes=4).cost(rank, "ring", layout).sent
        problems += [f"{layout}: {found} bytes, by hand {expected}"] if found != expected else []
    return problems


@check(2, 4)
def only_ranks_in_reach_are_sent(rank: int, ranks: int) -> list[str]:
    """A window of 5 keys: 5 rows go to the next rank, and none from the last. With a document to each rank nothing is
    sent, with one that ends inside the second rank its keys go there."""
    x, last = torch.ones(1, 1, 16, 8), rank == ranks - 1
    everywhere = tuple(range(0, 16 * ranks + 1, 16))
    cases = (
        ({"window": (5, 0)}, 0 if last else 5),
        ({"documents": everywhere}, 0),
        ({"documents": (0, 20, 16 * ranks)}, {2: (16, 0), 4: (16, 24, 16, 0)}[ranks][rank]),
    )
    problems = []
    for case, rows in cases:
        options = {"causal": True, "layout": "contiguous", "backend": "interpreter", **case}
        md.attention(x, x, x, **options)
        with md.traffic() as found:
            md.attention(x, x, x, **options)
        problems += [] if found.bytes == rows * 16 * 4 else [f"{case}: {found}, expected {rows} rows"]
    return problems


# ---- helpers, decode, torch ------------------------------------------------------------------------------------------


@check()
def parts_and_positions(rank: int, ranks: int) -> list[str]:
    problems = []
    for layout in LAYOUTS:
        for length in (0, 1, 2 * ranks, 13, 24):
            whole_ = torch.arange(length)[:, None].expand(length, 3) * 2.0
            own = md.shard(whole_, layout, dim=0)
            if not torch.equal(own[:, 0], 2.0 * md.positions(length, layout)):
                problems.append(f"{layout} {length}: positions are not those of the part")
            if not torch.equal(md.unshard(own, layout, dim=0, length=length), whole_):
                problems.append(f"{layout} {length}: the whole is not what it was")
    return problems


@check()
def decode_over_ranks(rank: int, ranks: int) -> list[str]:
    """A cache whose keys are dealt out one by one, with any number on a rank; the same bits on all ranks."""
    sequence = Sequence("decode", 29, sinks=True, options={
        "causal": True, "score_mod": distance_bias, "mask_mod": every_third, "softcap": 3.0})  # fmt: skip
    exact, naive = sequence.results
    given = on_rank(sequence, "contiguous") if ranks == 1 else {
        name: torch.from_numpy(array) for name, array in sequence.arrays.items()}  # fmt: skip
    mine = torch.arange(rank, 29, ranks) if ranks < 4 or rank else torch.empty(0, dtype=torch.int64)
    if ranks == 4 and rank == 1:
        mine = torch.cat([mine, torch.arange(0, 29, 4)])  # those of rank 0, which has none
    q, k, v = given["q"][:, :, 26:], given["k"][:, :, mine], given["v"][:, :, mine]
    places = {"q_positions": torch.arange(26, 29), "k_positions": mine, "backend": "interpreter"}
    md.decode(q, k, v, sinks=given["sinks"], **sequence.options, **places)
    with md.traffic() as sent:
        o, lse = md.decode(q, k, v, sinks=given["sinks"], **sequence.options, **places, return_lse=True)
    problems = [] if sent.bytes == (ranks - 1) * 4 * (o.numel() + lse.numel()) else [f"sent {sent}"]
    for name, tensor in (("out", o), ("lse", lse)):
        verdict = registry.judge(name, tensor.numpy(), exact[name][:, :, 26:], naive[name][:, :, 26:])
        problems += [] if verdict.ok else [f"{name}: {verdict}"]
    every = [torch.empty_like(o) for _ in range(ranks)]
    dist.all_gather(every, o)
    return problems + ([] if all(torch.equal(o, other) for other in every) else ["ranks have other bits"])


@check(4)
def a_dimension_of_a_mesh(rank: int, ranks: int) -> list[str]:
    """Two groups of two ranks, each with a sequence of its own."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    x = torch.randn(1, 2, 12, 8, generator=torch.Generator().manual_seed(rank // 2))
    options = {"causal": True, "backend": "interpreter"}
    o = md.attention(*[md.shard(x, group=mesh["context"])] * 3, group=mesh["context"], **options)
    alone = monotile.attention(x, x, x, **options)
    problems = [] if torch.allclose(o, md.shard(alone, group=mesh["context"]), atol=1e-6) else ["another result"]
    try:
        md.attention(x, x, x, group=mesh)
    except MonotileError as error:
        return problems + ([] if "mesh['name']" in str(error) else [str(error)])
    return [*problems, "a mesh of two dimensions is no group"]


@check(2)
def one_node_of_a_compiled_graph(rank: int, ranks: int) -> list[str]:
    sequence = next(s for s in SEQUENCES if s.N % 2)
    given = on_rank(sequence, "zigzag")
    q, k, v = (given[name].requires_grad_() for name in "qkv")

    def step(q: Any, k: Any, v: Any) -> Any:
        return md.attention(q * 1.0, k, v, causal=True, length=sequence.N, backend="interpreter").sin()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    plain = torch.autograd.grad(step(q, k, v).sum(), (q, k, v))
    found = torch.autograd.grad(compiled(q, k, v).sum(), (q, k, v))
    return [] if all(torch.equal(a, b) for a, b in zip(plain, found, strict=True)) else ["other gradients"]


@check(2, 4)
def work_is_balanced(rank: int, ranks: int) -> list[str]:
    problem = md.ContextProblem(4096, ranks, (8, 2), (64, 64))
    work = [problem.cost(r, "ring", "zigzag").flops for r in range(ranks)]
    return [] if max(work) <= 1.05 * min(work) else [f"{work}"]


# ---- faults ----------------------------------------------------------------------------------------------------------


def refused(call: Callable[[], Any], kind: type[Exception], *words: str) -> list[str]:
    """The problems with an error that a call must raise."""
    try:
        call()
    except kind as error:
        return [f"{word!r} is not in {error}" for word in words if word not in str(error)]
    return [f"no {kind.__name__}"]


@check(2, 3, 4)
def different_calls_are_refused_on_every_rank(rank: int, ranks: int) -> list[str]:
    """Before anything but a checksum is sent; the group is as good as before."""
    x, first = torch.ones(1, 2, 6, 8), rank == 0
    cases = {
        "causal": lambda: md.attention(x, x, x, causal=first),
        "key-value heads": lambda: md.attention(x, x[:, :1] if first else x, x[:, :1] if first else x),
        "length": lambda: md.attention(*[x[:, :, :4] if first else x] * 3),
        "method": lambda: md.attention(x, x, x, method="ring" if first else "all_to_all"),
        "mask_mod": lambda: md.attention(x, x, x, mask_mod=every_third if first else distance_mask),
        "function": lambda: md.decode(x, x, x) if first else md.attention(x, x, x),
    }
    problems = [p for word, call in cases.items() for p in refused(call, RanksDiffer, word, "on rank 0")]
    bad = {"window": "wide"} if first else {}
    problems += refused(lambda: md.attention(x, x, x, scale=0.3, **bad), BadOption if first else RanksDiffer)
    o = md.attention(x, x, x, backend="interpreter")
    return problems + ([] if torch.equal(o, x) else ["the group gives other results"])


def distance_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx - kv_idx < 7


@check(2, 3)
def calls_in_another_order_end_with_the_timeout(rank: int, ranks: int) -> list[str]:
    """Both calls are known to all ranks: messages of one are none of the other."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    x = torch.ones(1, 2, 6, 8)
    options = {"group": group, "layout": "contiguous", "backend": "interpreter"}
    for scale in (1.0, 0.5):
        md.attention(x, x, x, scale=scale, **options)
    start = time.monotonic()
    problems = refused(lambda: md.attention(x, x, x, scale=0.5 if rank else 1.0, **options), RankLost, "same order")
    return problems + ([] if time.monotonic() - start < 30 else ["it took longer than the timeout"])


@check(2, 3)
def a_rank_that_dies(rank: int, ranks: int) -> list[str]:
    """The others get an error: at once, or when those that got it have ended."""
    x = torch.ones(1, 2, 6, 8)
    if rank == ranks - 1:
        os._exit(0)
    return refused(lambda: md.attention(x, x, x, backend="interpreter"), RankLost, f"rank {rank} of {ranks}", "died")


FATAL["a_rank_that_dies"] = lambda ranks: [ranks - 1]
