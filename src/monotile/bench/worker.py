"""Times rows on a number of threads, in a process of its own: NumPy's thread count is fixed when NumPy is loaded.

Prints a JSON object a line, one for each row. A row with a wrong result is not timed: its object says what was wrong.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from ..errors import MonotileError
from ..library import registry
from ..runtime import arrays
from . import peers, suite
from .limits import probes
from .rows import Array, Case, Row, Sample

TINY = 1e-30
SETTLE_S = 0.05  # threads of NumPy and torch spin for about 20 ms after their work and would take the processors
WARM_S = 0.05  # what is shorter gets an untimed call before each timed one: it is at home in the caches
LEAST_S = 0.002  # a timing shorter than this is made of several calls
MORE_TRIALS, HOPELESS, CLOSE = 3, 5.0, 1.5  # of ways to ask torch; factors of the quickest one's time
SAME_WORK = 0.25  # a peer further off, as a part of the largest result, computes something else


@dataclass(frozen=True)
class Plan:
    """Rounds until there are `most`, or `seconds` have passed and there are `least`."""

    most: int
    least: int
    seconds: float


class Timing(NamedTuple):
    """Of one call: seconds that passed, and seconds the processors worked for this process."""

    wall: float
    cpu: float


FULL, QUICK = Plan(25, 4, 2.0), Plan(7, 3, 0.25)


def measure(row: Row, threads: int, plan: Plan) -> dict[str, Any]:
    result: dict[str, Any] = {"name": row.name, "threads": threads, "tags": dict(row.tags)}
    case = row.make(np.random.default_rng(zlib.crc32(row.name.encode())), threads)
    try:
        result |= check(row.name, case)
    except (AssertionError, MonotileError) as error:
        return result | {"wrong": str(error)}
    entries = {"monotile": case.run, **case.peers}
    if case.torch:
        result["torch"] = choose(case.torch, case.sample)
        entries |= {f"torch {way}": case.torch[way] for way in result["torch"]["contenders"]}
    limits = {kind: probes(kind, threads) for kind in case.work}
    probing = {p.name: p.run for found in limits.values() for p in found}
    times = interleave(entries | probing, plan, settle=threads > 1)
    found = {name: summary(times[name], case.calls) for name in entries if not name.startswith("torch ")}
    asked = {name: summary(times[name], case.calls) for name in entries if name.startswith("torch ")}
    if asked:
        way = min(asked, key=lambda name: asked[name]["best_s"])
        found["torch"], result["torch"]["way"] = asked[way], way.removeprefix("torch ")
    best = found["monotile"]["best_s"]
    result |= {"rounds": len(times["monotile"]), "note": case.note, "times": found}
    result["ratios"] = {name: found[name]["best_s"] / best for name in found if name != "monotile"}
    result["limits"] = [
        {
            "kind": kind,
            "rates_per_s": {p.name: p.work / min(times[p.name]).wall for p in found},
            "rate_per_s": work / best,
        }
        for (kind, found), work in zip(limits.items(), case.work.values(), strict=True)
    ]
    return result


# ---- checking --------------------------------------------------------------------------------------------------------


def check(name: str, case: Case) -> dict[str, float]:
    """At most twice as far from float64 as the definition in the same type is; raises where not. Outputs are poisoned
    first."""
    if case.sample is not None:
        return _check_sample(name, case, case.sample)
    output, exact = case.output, case.exact
    assert output is not None and exact is not None, f"{name} has nothing to check"

    def error(run: Callable[[], object]) -> float:
        output.fill(np.nan)
        run()
        return float(np.abs(output - exact).max())

    errors = {"error": error(case.run)}
    if "NumPy" in case.peers:
        errors["numpy_error"] = error(case.peers["NumPy"])
    naive = errors.get("numpy_error", 0.0)
    if case.naive is not None:
        naive = errors["naive_error"] = float(np.abs(case.naive() - exact).max())
    if not errors["error"] <= 2 * naive + registry.FEW_ULPS * float(np.abs(exact).max()):  # also where it is NaN
        raise AssertionError(f"{name}: the error is {errors['error']}, that of the definition in this type {naive}")
    return errors


def _check_sample(name: str, case: Case, sample: Sample) -> dict[str, float]:
    with poisoned():
        found = sample.take(case.run())
    verdict = registry.judge("out", found, sample.exact, sample.naive)
    if not verdict.ok:
        raise AssertionError(f"{name}: the error is {verdict.error}, at most {verdict.allowed} is allowed")
    errors = {"error": verdict.error, "allowed": verdict.allowed}
    for peer in case.peers:
        errors[f"{peer.lower()}_error"] = distance(sample, case.peers[peer]())
    assert not errors.get("numpy_error", 0.0) > SAME_WORK, f"{name}: NumPy computes something else"
    return errors


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """What ops.py allocates is filled with NaN, or with the largest number: nothing of it may be left."""

    def empty(self: arrays.Numpy, *args: Any) -> Any:
        found = plain(self, *args)
        found.fill(255 if found.dtype.kind in "ub" else np.nan)
        return found

    plain = arrays.Numpy.empty
    with mock.patch.object(arrays.Numpy, "empty", empty):
        yield


def distance(sample: Sample, result: Any) -> float:
    """The largest error, as a part of the largest result."""
    found: Array = sample.take(peers.to_numpy(result)).astype(np.float64)
    return float(np.abs(found - sample.exact).max() / max(float(np.abs(sample.exact).max()), TINY))


def choose(ways: Mapping[str, Callable[[], Any]], sample: Sample | None) -> dict[str, Any]:
    """The ways to ask for the same work that may be the fastest, by trials of each: those take part in the rounds."""
    assert sample is not None
    trials: dict[str, float] = {}
    errors, failed = {}, {}
    for name, run in ways.items():
        try:
            begin = time.perf_counter()
            result = run()
            seconds = time.perf_counter() - begin
        except RuntimeError as error:
            failed[name] = str(error).splitlines()[0]
            continue
        errors[name] = distance(sample, result)
        if errors[name] <= SAME_WORK:
            trials[name] = seconds
    for _ in range(MORE_TRIALS if len(trials) > 1 else 0):  # one slow moment must not choose for torch
        for name in near(trials, HOPELESS):
            trials[name] = min(trials[name], _time(ways[name], 1).wall)
    return {"contenders": near(trials, CLOSE), "trials_s": trials, "errors": errors, "failed": failed}


def near(trials: Mapping[str, float], factor: float) -> list[str]:
    """Those that took at most so many times as long as the quickest."""
    return [name for name, seconds in trials.items() if seconds <= factor * min(trials.values())]


# ---- timing ----------------------------------------------------------------------------------------------------------


def interleave(entries: Mapping[str, Callable[[], object]], plan: Plan, *, settle: bool) -> dict[str, list[Timing]]:
    """Every entry once a round, so that a slow moment of the machine meets all of them."""
    times: dict[str, list[Timing]] = {name: [] for name in entries}
    usual = {name: _time(run, 1).wall for name, run in entries.items()}
    for name, run in entries.items():
        if usual[name] < WARM_S:  # the first call has compiled something, the next wakes threads
            run()
            usual[name] = _time(run, 1).wall
    begin = time.perf_counter()
    for number in range(plan.most):
        if number >= plan.least and time.perf_counter() - begin > plan.seconds:
            break
        for name, run in entries.items():
            if settle:
                time.sleep(SETTLE_S)
            if usual[name] < WARM_S:
                run()
            times[name].append(_time(run, max(1, int(LEAST_S / max(usual[name], 1e-7)))))
    return times


def _time(run: Callable[[], object], calls: int) -> Timing:
    begin, worked = time.perf_counter(), time.process_time()
    for _ in range(calls):
        run()
    return Timing((time.perf_counter() - begin) / calls, (time.process_time() - worked) / calls)


def summary(times: list[Timing], calls: int) -> dict[str, float]:
    """Seconds for one call; the spread is the distance between the quartiles, as a part of the median."""
    first, median, third = statistics.quantiles([t.wall for t in times], n=4, method="inclusive")
    best, cpu = min(t.wall for t in times), min(t.cpu for t in times)
    return {
        "best_s": best / calls,
        "median_s": median / calls,
        "cpu_s": cpu / calls,
        "spread": (third - first) / median,
    }


def main() -> None:
    request = json.loads(sys.argv[1])
    threads, plan = request["threads"], QUICK if request["quick"] else FULL
    wanted = suite.select(threads, request["only"], request["quick"])
    if any(row.tags for row in wanted) and peers.torch_version() is not None:
        peers.set_threads(threads)
    for row in wanted:
        print(json.dumps(measure(row, threads, plan)), flush=True)


if __name__ == "__main__":
    main()
