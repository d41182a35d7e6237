"""What is checked in a group of ranks. Each check runs on every rank and returns the problems it found."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from cases import SEQUENCES, Sequence

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


def run(sequence: Sequence, method: str, layout: str, **more: Any) -> dict[str, torch.Tensor]:
    """Output, logsumexp and gradients of this rank's part."""
    given = on_rank(sequence, layout)
    do, dlse = given.pop("do"), given.pop("dlse")
    for tensor in given.values():
        tensor.requires_grad_()
    options = {**sequence.options, "documents": sequence.documents, "length": sequence.N, **more}
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
    again = run(sequence, method, layout)
    problems = [f"{name} has other bits in a second run" for name in first if not torch.equal(first[name], again[name])]
    for name, tensor in whole(first, layout, sequence.N).items():
        verdict = registry.judge(name, registry.from_device(tensor), exact[name], naive[name])
        if not verdict.ok:
            problems.append(f"{method} {layout} {name}: error {verdict.error}, {verdict.allowed} is allowed")
    return problems


def _checked(sequence: Sequence) -> Check:
    def compared(rank: int, ranks: int) -> list[str]:
        return [p for method in METHODS for layout in LAYOUTS for p in compare(sequence, method, layout)]

    return compared


for _sequence in SEQUENCES:
    check(name=_sequence.name)(_checked(_sequence))
