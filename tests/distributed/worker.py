"""Run the checks of attention across ranks with Gloo, and write what was found as JSON.

    python tests/distributed/worker.py RESULTS.json WORLD_SIZE

Processes are forked from this one, which has loaded torch and started no thread."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import cases
import checks

TIMEOUT = timedelta(seconds=60)


def run_rank(rank: int, ranks: int, folder: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    found = {}
    for name in names:
        start = time.perf_counter()
        try:
            problems = checks.CHECKS[name](rank, ranks)
        except Exception:
            problems = [traceback.format_exc()]
        found[name] = {"problems": problems, "seconds": time.perf_counter() - start}
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
        if problems:
            break  # other ranks may be elsewhere
    os._exit(0)  # a group whose rank has died must not be waited for


def run_world(ranks: int, folder: str, names: list[str]) -> dict[str, Any]:
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=run_rank, args=(rank, ranks, folder, names)) for rank in range(ranks)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    found: dict[str, Any] = {name: {"problems": [], "seconds": 0.0} for name in names}
    for rank in range(ranks):
        path = Path(folder, f"{rank}.json")
        results = json.loads(path.read_text()) if path.exists() else {}
        for name in names:
            if name not in results and not (name in checks.FATAL and rank in checks.FATAL[name](ranks)):
                found[name]["problems"].append(f"rank {rank} did not get there")
            for problem in results.get(name, {}).get("problems", []):
                found[name]["problems"].append(f"rank {rank}: {problem}")
            found[name]["seconds"] = max(found[name]["seconds"], results.get(name, {}).get("seconds", 0.0))
    return found


def main(path: str, ranks: int) -> None:
    for sequence in cases.SEQUENCES:
        _ = sequence.results  # computed once for all ranks
    names = [name for name in checks.CHECKS if ranks in checks.worlds(name)]
    with tempfile.TemporaryDirectory() as folder:
        Path(path).write_text(json.dumps(run_world(ranks, folder, names), indent=1))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
