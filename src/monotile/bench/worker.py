"""Times rows on a number of threads, in a process of its own: NumPy's thread count is fixed when NumPy is loaded.

Prints a JSON object a line, one for each row.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from .limits import probes
from .rows import ROWS, Case, Row

ROUNDS, QUICK_ROUNDS = 25, 7
TINY = 1e-30
SETTLE_S = 0.05  # NumPy's threads spin for about 20 ms after their work and would take the processors from the next


def names(threads: int, only: str) -> list[str]:
    return [row.name for row in ROWS if (threads == 1 or row.every_processor) and only.lower() in row.name.lower()]


def measure(row: Row, threads: int, rounds: int) -> dict[str, Any]:
    case = row.make(np.random.default_rng(zlib.crc32(row.name.encode())), threads)
    accuracy = check(row.name, case)
    limits = probes(case.limit, threads) if case.limit else []
    entries = {"monotile": case.run, **case.peers} | {p.name: p.run for p in limits}
    times = interleave(entries, rounds, threads > 1)
    found = {name: summary(t, case.calls) for name, t in times.items() if name in ("monotile", *case.peers)}
    best = found["monotile"]["best_s"]
    result: dict[str, Any] = {"name": row.name, "threads": threads, "rounds": rounds, "note": case.note, **accuracy}
    result["times"] = found
    result["ratios"] = {name: found[name]["best_s"] / best for name in case.peers}
    if limits:
        rates = {p.name: p.work / min(times[p.name]) for p in limits}
        result["limit"] = {"kind": case.limit, "rates_per_s": rates, "rate_per_s": case.work / best}
    return result


def check(name: str, case: Case) -> dict[str, float]:
    """At most twice as far from float64 as the definition in the same type is; raises where not. Outputs are poisoned
    first."""

    def error(run: Callable[[], object]) -> float:
        case.output.fill(np.nan)
        run()
        return float(np.abs(case.output - case.exact).max())

    errors = {"error": error(case.run)}
    if "NumPy" in case.peers:
        errors["numpy_error"] = error(case.peers["NumPy"])
    naive = errors.get("numpy_error", 0.0)
    if case.naive is not None:
        naive = errors["naive_error"] = float(np.abs(case.naive() - case.exact).max())
    if not errors["error"] <= 2 * naive + TINY:  # also where it is NaN
        raise AssertionError(f"{name}: the error is {errors['error']}, that of the definition in this type {naive}")
    return errors


def interleave(entries: dict[str, Callable[[], object]], rounds: int, settle: bool) -> dict[str, list[float]]:
    """Every entry once a round, so that a slow moment of the machine meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in entries}
    for number in range(rounds + 1):
        for name, run in entries.items():
            if settle:
                time.sleep(SETTLE_S)
                run()
            begin = time.perf_counter()
            run()
            if number:  # the first round only warms up
                times[name].append(time.perf_counter() - begin)
    return times


def summary(times: list[float], calls: int) -> dict[str, float]:
    """Seconds for one call; the spread is the distance between the quartiles, as a part of the median."""
    first, median, third = statistics.quantiles(times, n=4)
    return {"best_s": min(times) / calls, "median_s": median / calls, "spread": (third - first) / median}


def main() -> None:
    request = json.loads(sys.argv[1])
    threads, rounds = request["threads"], QUICK_ROUNDS if request["quick"] else ROUNDS
    wanted = names(threads, request["only"])
    for row in ROWS:
        if row.name in wanted:
            print(json.dumps(measure(row, threads, rounds)), flush=True)


if __name__ == "__main__":
    main()
