"""Check and time rows on one thread count, in a process of its own: NumPy's thread count is fixed when it is loaded.

Prints one line of JSON for each row. A row with a wrong result is not timed: its object says what was wrong.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from ..errors import MonotileError
from ..library import registry
from ..runtime import arrays
from . import peers, suite
from .limits import probes
from .rows import Array, Row, Sample, TimedCall

TINY = 1e-30
SETTLE_S = 0.05  # threads of NumPy and torch spin for about 20 ms after their work and would occupy the processors
WARM_S = 0.05  # shorter calls get an untimed call before each timed one, so that caches are warm
LEAST_S = 0.002  # a timing shorter than this is made of several calls
MORE_TRIALS = 3  # of the variants of the torch call
RETRY_WITHIN, COMPETE_WITHIN = 5.0, 1.5  # multiples of the fastest trial: slower variants are dropped
SAME_WORK = 0.25  # relative to the largest result: a peer with a larger error computes something else
SAME_RESULT = ("NumPy", "slice")  # peers that must compute the row's result


@dataclass(frozen=True)
class RoundLimits:
    """Rounds of a row: until there are `most`, or `seconds` have passed and there are `least`."""

    most: int
    least: int
    seconds: float


class Timing(NamedTuple):
    """Seconds of one call: elapsed, and processor time of this process."""

    wall: float
    cpu: float


FULL, QUICK = RoundLimits(25, 4, 2.0), RoundLimits(7, 3, 0.25)


def measure(row: Row, threads: int, rounds: RoundLimits) -> dict[str, Any]:
    """Check a row, time it beside its peers and the probes of its limits, and return its report."""
    result: dict[str, Any] = {"name": row.name, "threads": threads, "tags": dict(row.tags)}
    call = row.make(np.random.default_rng(zlib.crc32(row.name.encode())), threads)
    try:
        result |= check(row.name, call)
    except (AssertionError, MonotileError) as error:
        return result | {"wrong": str(error)}
    if call.steps:
        return result | measure_steps(call, threads, rounds)
    entries = {"monotile": call.run, **call.peers}
    if call.torch:
        result["torch"] = choose(call.torch, call.sample)
        entries |= {f"torch {way}": call.torch[way] for way in result["torch"]["contenders"]}
    limits = {kind: probes(kind, threads) for kind in call.work}
    probing = {p.name: p.run for found in limits.values() for p in found}
    times = interleave(entries | probing, rounds, settle=threads > 1)
    summaries = {name: summary(times[name], call.calls) for name in entries}
    variants = {name: summaries.pop(name) for name in list(summaries) if name.startswith("torch ")}
    if variants:
        fastest = min(variants, key=lambda name: variants[name]["best_s"])
        summaries["torch"], result["torch"]["way"] = variants[fastest], fastest.removeprefix("torch ")
    best = summaries["monotile"]["best_s"]
    result |= {"rounds": len(times["monotile"]), "note": call.note, "times": summaries}
    result["ratios"] = {name: t["best_s"] / best for name, t in summaries.items() if name != "monotile"}
    result["limits"] = [
        {
            "kind": kind,
            "rates_per_s": {p.name: p.work / min(times[p.name]).wall for p in found},
            "rate_per_s": work / best,
        }
        for (kind, found), work in zip(limits.items(), call.work.values(), strict=True)
    ]
    return result


def measure_steps(call: TimedCall, threads: int, rounds: RoundLimits) -> dict[str, Any]:
    """Time the calls of a sweep in the same rounds. The time of the row is that of all its calls."""
    rounds = replace(rounds, least=2 * rounds.least)  # the worst of many ratios is sensitive to a slow moment
    times = interleave({str(size): run for size, run in call.steps.items()}, rounds, settle=threads > 1)
    whole = [Timing(sum(t.wall for t in one), sum(t.cpu for t in one)) for one in zip(*times.values(), strict=True)]
    best = {size: min(times[str(size)]).wall for size in call.steps}
    return {
        "rounds": len(whole),
        "note": call.note,
        "times": {"monotile": summary(whole, 1)},
        "ratios": {},
        "steps": [{"size": size, "best_s": seconds} for size, seconds in best.items()],
        "worst_step": worst_step(best),
    }


def worst_step(best: Mapping[int, float]) -> dict[str, float]:
    """Return the step of a sweep with the largest cliff: how many times as long one more of the size takes.

    From a to b = a + 1 the cliff is the ratio of the times. In a longer step, a to b - 1 may take (b - 1) / a times as
    long, as the work does, and the cliff is what remains of the ratio.
    """
    sizes = list(best)
    steps = [(best[b] / best[a] * a / (b - 1), best[b] / best[a], a, b) for a, b in itertools.pairwise(sizes)]
    cliff, ratio, a, b = max(steps)
    return {"cliff": cliff, "ratio": ratio, "from": a, "to": b}


# ---- checking --------------------------------------------------------------------------------------------------------


def check(name: str, call: TimedCall) -> dict[str, float]:
    """Poison the output, run, and raise unless the error is at most twice that of the formula in the same dtype."""
    if call.sample is not None:
        return _check_sample(name, call, call.sample)
    output, exact = call.output, call.exact
    assert output is not None and exact is not None, f"{name} has nothing to check"

    def error(run: Callable[[], object]) -> float:
        output.fill(np.nan)
        run()
        return float(np.abs(output - exact).max())

    errors = {"error": error(call.run)}
    if "NumPy" in call.peers:
        errors["numpy_error"] = error(call.peers["NumPy"])
    naive = errors.get("numpy_error", 0.0)
    if call.naive is not None:
        naive = errors["naive_error"] = float(np.abs(call.naive() - exact).max())
    if not errors["error"] <= 2 * naive + registry.FEW_ULPS * float(np.abs(exact).max()):  # also where it is NaN
        raise AssertionError(f"{name}: the error is {errors['error']}, that of the definition in this type {naive}")
    return errors


def _check_sample(name: str, call: TimedCall, sample: Sample) -> dict[str, float]:
    with poisoned():
        found = sample.take(call.run())
    verdict = registry.judge("out", found, sample.exact, sample.naive)
    if not verdict.ok:
        raise AssertionError(f"{name}: the error is {verdict.error}, at most {verdict.allowed} is allowed")
    errors = {"error": verdict.error, "allowed": verdict.allowed}
    for peer in call.peers:
        errors[f"{peer.lower()}_error"] = distance(sample, call.peers[peer]())
    for peer in SAME_RESULT:
        assert not errors.get(f"{peer.lower()}_error", 0.0) > SAME_WORK, f"{name}: {peer} computes something else"
    return errors


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill what ops.py allocates with NaN or the largest integer: a kernel must overwrite all of it."""

    def allocate(self: arrays.Numpy, template: Any) -> tuple[Any, int]:
        found, address = plain(self, template)
        found.fill(255 if found.dtype.kind in "ub" else np.nan)
        return found, address

    plain = arrays.Numpy.allocate
    with mock.patch.object(arrays.Numpy, "allocate", allocate):
        yield


def distance(sample: Sample, result: Any) -> float:
    """Return the largest error relative to the largest result."""
    found: Array = sample.take(peers.to_numpy(result)).astype(np.float64)
    return float(np.abs(found - sample.exact).max() / max(float(np.abs(sample.exact).max()), TINY))


def choose(variants: Mapping[str, Callable[[], Any]], sample: Sample | None) -> dict[str, Any]:
    """Try every variant of the torch call; those that may be the fastest take part in the rounds."""
    assert sample is not None
    trials: dict[str, float] = {}
    errors, failed = {}, {}
    for name, run in variants.items():
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
    for _ in range(MORE_TRIALS if len(trials) > 1 else 0):  # one slow moment must not decide
        for name in near(trials, RETRY_WITHIN):
            trials[name] = min(trials[name], _time(variants[name], 1).wall)
    return {"contenders": near(trials, COMPETE_WITHIN), "trials_s": trials, "errors": errors, "failed": failed}


def near(trials: Mapping[str, float], factor: float) -> list[str]:
    """Return the names whose time is at most `factor` times the fastest."""
    return [name for name, seconds in trials.items() if seconds <= factor * min(trials.values())]


# ---- timing ----------------------------------------------------------------------------------------------------------


def interleave(
    entries: Mapping[str, Callable[[], object]], rounds: RoundLimits, *, settle: bool
) -> dict[str, list[Timing]]:
    """Time every entry once per round, so that a slow moment of the machine affects all of them."""
    times: dict[str, list[Timing]] = {name: [] for name in entries}
    usual = {name: _time(run, 1).wall for name, run in entries.items()}
    for name, run in entries.items():
        if usual[name] < WARM_S:  # the first call compiles, the second wakes threads
            run()
            usual[name] = _time(run, 1).wall
    begin = time.perf_counter()
    for number in range(rounds.most):
        if number >= rounds.least and time.perf_counter() - begin > rounds.seconds:
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
    """Summarise timings as seconds per call; the spread is the interquartile range relative to the median."""
    first, median, third = statistics.quantiles([t.wall for t in times], n=4, method="inclusive")
    best, cpu = min(t.wall for t in times), min(t.cpu for t in times)
    found = {"best_s": best / calls, "median_s": median / calls, "spread": (third - first) / median}
    # Windows counts a process's time in steps of 16 ms, which are longer than a timing.
    return found if sys.platform == "win32" else {**found, "cpu_s": cpu / calls}


def main() -> None:
    request = json.loads(sys.argv[1])
    threads, rounds = request["threads"], QUICK if request["quick"] else FULL
    wanted = suite.select(threads, request["only"], request["quick"])
    if any(row.tags for row in wanted) and peers.torch_version() is not None:
        peers.set_threads(threads)
    for row in wanted:
        print(json.dumps(measure(row, threads, rounds)), flush=True)


if __name__ == "__main__":
    main()
