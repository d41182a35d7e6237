"""`monotile tune`: search for the fastest block sizes and schedules of the library's kernels on this machine's GPU.

Each candidate's result is compared with float64 before it is timed. Candidates that cannot fit are never compiled.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ... import backends, dtypes
from ...backends.choices import AttentionProblem, Choice, row_block
from ...backends.nvidia import tuning
from ...backends.nvidia.backend import BACKEND
from ...backends.nvidia.choices import split_length
from ...backends.nvidia.device import Gpu
from ...backends.nvidia.schedule import SHARED_BYTES, Schedule, choose
from ...backends.nvidia.triton.padding import padded
from ...backends.nvidia.tuning import Key
from ...errors import MonotileError
from ...kernels.attention import DENSE
from ...kernels.attention import attention as attention_kernel
from ...kernels.scores import Options
from ...launch.kernel import Kernel
from ...library import ops, registry
from .. import suite
from ..rows import Sample
from . import exact, rows
from .device import CudaTimer

if TYPE_CHECKING:
    from rich.console import Console

HEAD_SIZES = (64, 80, 96, 128, 192, 256, 512)
DTYPES = ("bfloat16", "float16", "float32")
ROWS, KEYS, WARPS, STAGES = (64, 128), (32, 64, 128), (4, 8), (1, 2, 3, 4)
PLAIN_FORMS = ((True, False), (True, True), (False, False))  # tensor_descriptors, warp_specialize
CONSUMERS = (3, 2, 1)
MAX_CONSUMER_REGISTERS, CTA_REGISTERS = 240, 15 << 12  # of a consumer thread, and of all consumers of a CTA
DECODE_KEYS, DECODE_WARPS = (16, 32, 64, 128), (2, 4, 8)
MAX_REGISTERS = 255  # of a thread
FINALISTS, SCREENING, ROUNDS = 4, 3, 15
MIN_GAIN = 0.02  # below this a choice is not kept
PLAIN = Options(None, None, None, None, None, None)
CAUSAL = PLAIN._replace(causal="lower_right")


@dataclass(frozen=True)
class Work:
    """One thing to tune: a kernel at a head size, on inputs large enough to fill a GPU."""

    key: Key
    heads: tuple[int, int]
    Nq: int
    Nk: int

    @property
    def name(self) -> str:
        return f"{self.key.kernel} D{self.key.head_size} {self.key.dtype}"


@dataclass
class Outcome:
    work: Work
    before: Choice
    before_s: float
    best: Choice
    best_s: float
    tried: int = 0
    refused: dict[str, str] = field(default_factory=dict)  # candidates that did not run or were wrong, and why

    @property
    def gain(self) -> float:
        return self.before_s / self.best_s - 1

    @property
    def kept(self) -> bool:
        return self.best != self.before and self.gain > MIN_GAIN


# ---- candidates ------------------------------------------------------------------------------------------------------


def shared_bytes(BQ: int, BK: int, head_size: int, element_bytes: int, chosen: Schedule) -> int:
    """Return a lower bound of the shared memory that the operands of dots take: the queries of every consumer, and K
    and V once a stage. Plain Triton can keep K and V in one buffer if there is one stage."""
    side, stages = padded(head_size) * element_bytes, chosen.num_stages
    tiles = 1 if stages == 1 and not chosen.consumers else 2 * stages
    return BQ * side * max(1, chosen.consumers) + BK * side * tiles


def fits(BQ: int, BK: int, head_size: int, element_bytes: int, chosen: Schedule, most: int = SHARED_BYTES) -> bool:
    """True if shared memory holds the operands, and registers the accumulators."""
    accumulators = BQ * padded(head_size) // (32 * chosen.num_warps)
    available = min(MAX_REGISTERS, chosen.registers if chosen.consumers else MAX_REGISTERS)
    return accumulators < available and shared_bytes(BQ, BK, head_size, element_bytes, chosen) <= most


def candidates(key: Key, base: Schedule | None = None, most: int = SHARED_BYTES) -> Iterator[Choice]:
    """Yield choices that may fit, the likely ones first. Other fields of `base` stay as they are."""
    size, base = dtypes.BY_NAME[key.dtype].bytes, base or Schedule()
    if key.kernel == "decode":
        for BK, warps, stages in itertools.product(DECODE_KEYS[::-1], DECODE_WARPS, STAGES[::-1]):
            chosen = replace(base, num_warps=warps, num_stages=stages)
            if shared_bytes(0, BK, key.head_size, size, chosen) <= most:
                yield Choice({"BK": BK}, chosen)
        return
    for BQ, BK, chosen in _forward_space(base, gluon=size == 2):
        if fits(BQ, BK, key.head_size, size, chosen, most):
            yield Choice({"BR": BQ, "BK": BK}, chosen)


def _forward_space(base: Schedule, *, gluon: bool) -> Iterator[tuple[int, int, Schedule]]:
    """Yield (BQ, BK, schedule): Gluon with producer and consumer warps (16-bit dtypes only), then plain Triton with
    descriptors, with warp specialisation, and with neither."""
    plain = replace(base, consumers=0, warp_specialize=False, peel=True, tensor_descriptors=False)
    for consumers, BK, warps, stages in itertools.product(CONSUMERS if gluon else (), KEYS[::-1], WARPS, STAGES[1::-1]):
        most = min(MAX_CONSUMER_REGISTERS, CTA_REGISTERS // (32 * warps * consumers) // 8 * 8)
        for registers in (most, most - 8):  # with all of them the assembler sometimes finds a slower order
            chosen = replace(plain, consumers=consumers, registers=registers)
            yield ROWS[0], BK, replace(chosen, num_warps=warps, num_stages=stages)
    for (tma, special), BQ, BK, warps, stages in itertools.product(
        PLAIN_FORMS, ROWS[::-1], KEYS[::-1], WARPS, STAGES[::-1]
    ):
        if stages > 1 or not special:
            words = {"warp_specialize": special, "peel": not special, "tensor_descriptors": tma}
            yield BQ, BK, replace(plain, num_warps=warps, num_stages=stages, **words)


def search(
    work: Work, before: Choice, others: Iterable[Choice], *, measure: Callable[[list[Choice]], list[list[float]]],
    wrong: Callable[[Choice], str | None], seconds: float, step: Callable[[], None] = lambda: None,
) -> Outcome:  # fmt: skip
    """Time every candidate once, until the time is up; then the fastest and the previous choice in alternation."""
    begin = time.perf_counter()
    outcome = Outcome(work, before, 0.0, before, 0.0)
    found: list[tuple[float, Choice]] = []
    for choice in others:
        if time.perf_counter() - begin > seconds:
            break
        step()
        outcome.tried += 1
        problem = wrong(choice)
        if problem is not None:
            outcome.refused[describe(choice)] = problem
        elif choice != before:
            found.append((min(measure([choice] * SCREENING)[0]), choice))
    found.sort(key=lambda pair: pair[0])
    last = [before, *(choice for _, choice in found[:FINALISTS])]
    medians = [statistics.median(times) for times in measure(last * ROUNDS)]
    outcome.before_s = medians[0]
    outcome.best_s, outcome.best = min(zip(medians, last, strict=True), key=lambda pair: pair[0])
    return outcome


def describe(choice: Choice) -> str:
    s = choice.schedule
    words = [f"{n} {size}" for n, size in choice.blocks.items()] + [f"{s.num_warps} warps", f"{s.num_stages} stages"]
    if s.consumers:
        words.append(f"{s.consumers} consumers, {s.registers} registers")
    flags = ("warp_specialize", "tensor_descriptors")
    return ", ".join(words + [name.replace("_", " ") for name in flags if getattr(s, name)])


# ---- on a GPU --------------------------------------------------------------------------------------------------------


class Bench:
    """Runs the candidates for the forward kernel. CUDA calls go through the benchmark's device."""

    kernel: Kernel = attention_kernel
    cold = False  # True to flush the L2 cache before each call

    def __init__(self, work: Work, gpu: CudaTimer) -> None:
        key = work.key
        shape = rows.GpuShape(1, work.heads, work.Nq, work.Nk, key.head_size, work.Nq > 1, dtype=key.dtype)
        self.gpu, self.inputs = gpu, rows.make(shape, gpu.name)
        self.sample: Sample = exact.sample(self.inputs)
        self.scale, self.device = key.head_size**-0.5, str(self.inputs.q.device)
        (B, Hq, Nq, D), Hkv = self.inputs.q.shape, self.inputs.k.shape[1]
        element = dtypes.BY_NAME[key.dtype]
        self.problem = AttentionProblem(self.device, element, B, Hq, Hkv, Nq, work.Nk, D)

    def arguments(self, choice: Choice) -> tuple[Any, ...]:
        """The arguments of one call, with new outputs."""
        import torch

        q, k, v = self.inputs.q, self.inputs.k, self.inputs.v
        none = (None,) * 3
        return q, k, v, *none, torch.empty_like(q), None, *none, *DENSE, self.scale, q.shape[2], 0, 0

    def constants(self) -> dict[str, Any]:
        return {"options": CAUSAL}

    def chosen(self) -> Choice:
        """The choice that a call of the library makes now."""
        return BACKEND.choices.row_blocks(replace(self.problem, keys=2**20))  # as for long sequences

    def result(self, arguments: tuple[Any, ...]) -> Any:
        return arguments[6]

    def usual(self) -> Choice:
        """The same with the backend's rule in place of a missing schedule."""
        found = self.chosen()
        if found.schedule is not None:
            return found
        made = type(self).kernel.ir(*self.arguments(found), **self.constants(), **found.blocks)
        return Choice(found.blocks, choose(BACKEND.lower(made)))

    def run(self, choice: Choice) -> tuple[Any, ...]:
        arguments = self.arguments(choice)
        words = {**self.constants(), **choice.blocks}
        type(self).kernel(*arguments, **words, backend="nvidia", schedule=choice.schedule)
        return arguments

    def wrong(self, choice: Choice) -> str | None:
        """Return why a candidate is refused: it does not compile or run, or its result is too far from float64."""
        try:
            with exact.poisoned():
                out = self.result(self.run(choice))
            self.gpu.synchronize()
        except (MonotileError, RuntimeError) as error:
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if not bool(out.isfinite().all()):
            return "some elements were not written"
        verdict = registry.judge("out", self.sample.take(out), self.sample.exact, self.sample.naive)
        return None if verdict.ok else f"the error is {verdict.error}, at most {verdict.allowed} is allowed"

    def measure(self, rounds: list[Choice]) -> list[list[float]]:
        """Return the seconds of each call, by candidate in the order in which they first appear."""
        distinct = list({describe(choice): choice for choice in rounds}.values())
        times = self.gpu.timings([partial(self.run, choice) for choice in rounds], cold=self.cold)
        return [[t for t, c in zip(times, rounds, strict=True) if c == choice] for choice in distinct]


class DecodeBench(Bench):
    """Runs the candidates for decode: one query, many keys, in splits as long as the library's, without the merge."""

    cold = True

    def arguments(self, choice: Choice) -> tuple[Any, ...]:
        import torch

        q, k, v = self.inputs.q, self.inputs.k, self.inputs.v
        (B, Hq, _, D), (_, Hkv, Nk, _) = q.shape, k.shape
        block = choice.blocks["BK"] or 0
        per = split_length(self.problem, block)
        parts = B, Hkv, Hq // Hkv, -(-Nk // per)
        o = torch.empty((*parts, D), dtype=torch.float32, device=q.device)
        m, l = (torch.empty(parts, dtype=torch.float32, device=q.device) for _ in range(2))
        folded, none = q.reshape(B, Hkv, Hq // Hkv, D), (None,) * 5
        return folded, k, v, *none, o, m, l, *DENSE, self.scale, 1, 0, per // block

    def constants(self) -> dict[str, Any]:
        q, k = self.inputs.q, self.inputs.k
        return {"options": PLAIN, "BR": row_block(q.shape[1] // k.shape[1]), "packed": True}

    def chosen(self) -> Choice:
        return BACKEND.choices.few_rows(self.problem, unsplit=False)

    def result(self, arguments: tuple[Any, ...]) -> Any:
        B, Hq, Nq, D = self.inputs.q.shape
        o, m, l = arguments[8:11]
        splits = m.shape[-1]
        parts = o.reshape(B, Hq, Nq, splits, D), m.reshape(B, Hq, Nq, splits), l.reshape(B, Hq, Nq, splits)
        return ops.merge(*parts, dtype=self.inputs.q.dtype, backend="nvidia")[0]


BENCHES = {"attention": Bench, "decode": DecodeBench}


def works(only: str, dtype: str) -> list[Work]:
    if dtype not in DTYPES:
        raise MonotileError(f"the library computes in {', '.join(DTYPES)}, found {dtype!r}")
    everything = [Work(Key("attention", D, dtype), (16, 16), 4096, 4096) for D in HEAD_SIZES]
    everything += [Work(Key("decode", D, dtype), (16, 2) if D > 128 else (32, 8), 1, 65536) for D in HEAD_SIZES]
    found = [work for work in everything if suite.matches(work.name, only)]
    if not found:
        raise MonotileError(f"nothing to tune has words that begin as those of {only!r}; try D128")
    return found


def run(
    console: Console, *, only: str = "", dtype: str = "bfloat16", seconds: float = 60.0, gpu: CudaTimer | None = None
) -> list[Outcome]:
    """Tune, store what gains enough, and show the outcomes."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    wanted = works(only, dtype)
    backends.usable("nvidia")
    gpu = gpu or CudaTimer()
    about = gpu.describe()
    this, most = Gpu(about["name"], about["architecture"]), about.get("shared_bytes", SHARED_BYTES)
    outcomes = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for work in wanted:
            bench = BENCHES[work.key.kernel](work, gpu)
            before = bench.usual()
            others = list(candidates(work.key, before.schedule, most))
            step = partial(progress.advance, progress.add_task(work.name, total=len(others)))
            outcomes.append(
                search(work, before, others, measure=bench.measure, wrong=bench.wrong, seconds=seconds, step=step)
            )
            if outcomes[-1].kept:  # at once: a run that is stopped keeps what it has
                tuning.save(this, {work.key: outcomes[-1].best})
            del bench
            gpu.release()
    show(console, outcomes, this)
    return outcomes


def show(console: Console, outcomes: list[Outcome], gpu: Gpu) -> None:
    from rich.table import Table

    table = Table("kernel", "before", "time", "best", "time", "gain", "tried", "")
    for o in outcomes:
        times = f"{o.before_s * 1e3:.3f} ms", f"{o.best_s * 1e3:.3f} ms"
        mark = "[green]kept[/]" if o.kept else "as before"
        tried = f"{o.tried}, {len(o.refused)} refused"
        table.add_row(
            o.work.name, describe(o.before), times[0], describe(o.best), times[1], f"{o.gain:.0%}", tried, mark
        )
    console.print(table)
    if any(o.kept for o in outcomes):
        console.print(f"calls on {gpu.name} use it: {tuning.path(gpu)}", highlight=False, soft_wrap=True)
