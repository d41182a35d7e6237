"""Attention of one long sequence by several processes, against one process.

    torchrun --nproc-per-node 4 examples/context_parallel.py

Each rank has a part of the sequence. Every method and layout is checked against attention on one rank, and what rank 0
sent and the time of the slowest rank are printed, with what the model of docs/guide/distributed.md says is sent. Ranks
of a laptop share its memory and cores: times show the balance of work, not a network. With --device cuda all ranks
share one GPU, whose tensors Gloo sends through the CPU."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import monotile
import monotile.distributed as md


def slowest(call: Callable[[], torch.Tensor], repeats: int) -> float:
    """Milliseconds of the slowest rank, the best of some runs."""
    best = float("inf")
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        call().sum().item()  # waits for a GPU
        took = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        best = min(best, took.item())
    return best * 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--heads", type=int, nargs=2, default=(8, 2), metavar=("QUERY", "KEY"))
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    if "RANK" not in os.environ:  # started without torchrun: a group of one
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    dist.init_process_group("gloo")
    rank, ranks, (Hq, Hkv), N, D = dist.get_rank(), dist.get_world_size(), given.heads, given.length, given.size

    generator = torch.Generator().manual_seed(0)  # the same on every rank
    q, k, v = (torch.randn(1, h, N, D, generator=generator) for h in (Hq, Hkv, Hkv))
    q, k, v = (x.to(given.device) for x in (q, k, v))
    threads = {"threads": 1} if given.device == "cpu" else {}
    alone = monotile.attention(q, k, v, causal=True, **threads)
    problem = md.ContextProblem(N, ranks, (Hq, Hkv), (D, D), element_bytes=4)
    if rank == 0:
        print(f"{N} positions, {Hq} heads on {Hkv}, size {D}, float32, causal, {ranks} ranks on {given.device}")
        print(f"{'method':<12}{'layout':<12}{'sent':>10}{'model':>10}{'ms':>9}  error")
    for method in ("ring", "all_gather", "all_to_all"):
        for layout in ("zigzag", "contiguous"):
            parts = [md.shard(x, layout) for x in (q, k, v)]

            def call(parts=parts, method=method, layout=layout):
                return md.attention(*parts, causal=True, method=method, layout=layout, length=N, **threads)

            call()  # compiles, and ranks agree
            with md.traffic() as sent:
                o = call()
            error = (md.unshard(o, layout, length=N) - alone).abs().max().item()
            assert error < 1e-4, f"{method} {layout} is {error} off"
            took, model = slowest(call, given.repeats), problem.cost(rank, method, layout).sent
            if rank == 0:
                shown = f"{sent.bytes / 1e6:>9.2f}M{model / 1e6:>9.2f}M{took:>9.1f}"
                print(f"{method:<12}{layout:<12}{shown}  {error:.1e}")
    dist.barrier()  # a rank that ends first takes its connections from under the others
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
