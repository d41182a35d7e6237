"""Measure the machine's limits in the same rounds as the rows: FMA rate, copy and read bandwidth."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from ..backends.cpu import jit, machine_code, pool
from ..backends.cpu.bf16_pairs import INTRINSIC
from ..backends.cpu.target import Target, processor, target
from ..kernels import examples
from ..language import Const, arange, kernel, program_id

ITERATIONS = 100_000
COPY_SIDE = 4096
READ_BYTES = 1 << 28  # several times the last-level cache that one core can have to itself
READ_WIDTHS = (4096, 65536)
UNITS = {"flop": "GFLOP/s", "pair flop": "GFLOP/s", "copy": "GB/s", "read": "GB/s"}


@dataclass
class Probe:
    """A call with a known amount of work that only the machine limits."""

    name: str
    run: Callable[[], object]
    work: float


def probes(kind: str, threads: int) -> list[Probe]:
    """Return the probes for a kind of work, a key of UNITS. The limit is the best rate of any of them."""
    return PROBES[kind](threads)


def arithmetic(dtype: str) -> str:
    """Return the kind of arithmetic that limits a dtype: bfloat16 may have an instruction for pair products."""
    return "pair flop" if dtype == "bfloat16" and target(processor()).bfloat16_pairs else "flop"


@cache
def last_level_cache() -> int:
    """Return the bytes of the last-level cache; 0 where the system does not report it."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20}[text[-1]] if text[-1] in "KM" else int(text))
    return max(sizes)


@kernel
def row_maximum(x, y, *, C: Const):
    """y = x.max(axis=1): reads every element with next to no arithmetic. Each program owns one row."""
    r = program_id(x.shape[0])
    y[r] = x[r, arange(C)].max(axis=0)


@cache
def _read_source() -> np.ndarray[Any, Any]:
    return np.ones(READ_BYTES // 4, np.float32)


def _reads(threads: int) -> list[Probe]:
    def probe(width: int) -> Probe:
        x = _read_source().reshape(-1, width)
        y = np.empty(x.shape[0], np.float32)
        name = f"maximum of rows of {width}"
        return Probe(name, lambda: row_maximum(x, y, C=width, threads=threads), float(x.nbytes))

    return [probe(width) for width in READ_WIDTHS]


def _copies(threads: int) -> list[Probe]:
    x = np.ones((COPY_SIDE, COPY_SIDE), np.float32)
    y = np.zeros_like(x)
    kernel = Probe("copy kernel", lambda: examples.copy(x, y, BC=COPY_SIDE, threads=threads), 2.0 * x.nbytes)
    return [kernel, Probe("np.copyto", lambda: np.copyto(y, x), 2.0 * x.nbytes)]


def _multiply_add(threads: int, *, pairs: bool = False) -> list[Probe]:
    machine = target(processor())
    chains = 3 * machine.registers // 4
    code = machine_code.load(jit.compile_code(_multiply_add_text(machine, chains, pairs), processor()))
    kernel, programs = code.address("kernel"), code.address("programs")
    args: Any = (ctypes.c_int64 * 2)(threads, ITERATIONS)

    def run() -> None:
        assert code is not None  # the closure keeps the code mapped as long as the probe lives
        pool.run(kernel, programs, ctypes.addressof(args), machine.lanes * 4, threads)

    work = 2.0 * machine.lanes * chains * ITERATIONS * threads
    return [Probe("multiply-add of pairs", run, 2 * work) if pairs else Probe("multiply-add", run, work)]


PROBES: dict[str, Callable[[int], list[Probe]]] = {
    "flop": _multiply_add,
    "pair flop": partial(_multiply_add, pairs=True),
    "copy": _copies,
    "read": _reads,
}


def _splat(value: int, lanes: int) -> str:
    return f"<{', '.join([f'float {value}.0'] * lanes)}>"


def _multiply_add_text(machine: Target, chains: int, pairs: bool) -> str:
    """Write a loop of independent FMA chains, more of them than the FMA latency has cycles.

    Each chain computes a = a * x + x, or adds the products of two bfloat16 pairs to a.
    """
    vector, words = f"<{machine.lanes} x float>", f"<{2 * machine.lanes} x bfloat>"
    fma = f"@{INTRINSIC}" if pairs else f"@llvm.fmuladd.v{machine.lanes}f32"
    kinds = [vector, words, words] if pairs else [vector] * 3
    factors = f"{words} %w, {words} %w" if pairs else f"{vector} %x, {vector} %x"
    # Chains with equal start values would be merged by the compiler.
    starts = [f"  %a{n} = phi {vector} [ {_splat(n, machine.lanes)}, %entry ], [ %b{n}, %loop ]" for n in range(chains)]
    steps = [f"  %b{n} = call {vector} {fma}({vector} %a{n}, {factors})" for n in range(chains)]
    sums = ["  %s0 = fadd " + f"{vector} %b0, %b0"]
    sums += [f"  %s{n} = fadd {vector} %s{n - 1}, %b{n}" for n in range(1, chains)]
    return "\n".join(
        [
            f"declare {vector} {fma}({', '.join(kinds)})",
            "define i64 @programs(ptr %args) {",
            "  %count = load i64, ptr %args",
            "  ret i64 %count",
            "}",
            "define void @kernel(ptr %args, i64 %program, ptr %scratch) {",
            "entry:",
            "  %at = getelementptr i64, ptr %args, i64 1",
            "  %count = load i64, ptr %at",
            "  %small = uitofp i64 %program to float",
            "  %factor = fdiv float %small, 1.0e9",  # known at run time only, and small enough not to overflow
            f"  %one = insertelement {vector} zeroinitializer, float %factor, i32 0",
            f"  %x = shufflevector {vector} %one, {vector} poison, <{machine.lanes} x i32> zeroinitializer",
            f"  %w = bitcast {vector} %x to {words}",
            "  br label %loop",
            "loop:",
            "  %i = phi i64 [ 0, %entry ], [ %next, %loop ]",
            *starts,
            *steps,
            "  %next = add i64 %i, 1",
            "  %more = icmp ult i64 %next, %count",
            "  br i1 %more, label %loop, label %done",
            "done:",
            *sums,
            f"  store volatile {vector} %s{chains - 1}, ptr %scratch, align 4",
            "  ret void",
            "}",
        ]
    )
