"""What this machine can do at best, measured in the same rounds as the rows: multiply-adds, and copying memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends.cpu import jit, pool
from ..backends.cpu.target import Target, target
from ..kernels import examples

ITERATIONS = 100_000
COPY_SIDE = 4096


@dataclass
class Probe:
    """Work of known size that nothing but the machine slows down."""

    name: str
    run: Callable[[], object]
    work: float


def probes(kind: str, threads: int) -> list[Probe]:
    """Those for a kind of work. The limit is the best rate any of them reaches."""
    return _multiply_add(threads) if kind == "flop" else _copies(threads)


def _copies(threads: int) -> list[Probe]:
    x = np.ones((COPY_SIDE, COPY_SIDE), np.float32)
    y = np.zeros_like(x)
    kernel = Probe("copy kernel", lambda: examples.copy(x, y, BC=COPY_SIDE, threads=threads), 2.0 * x.nbytes)
    return [kernel, Probe("np.copyto", lambda: np.copyto(y, x), 2.0 * x.nbytes)]


def _multiply_add(threads: int) -> list[Probe]:
    machine = target(jit.host())
    chains = 24 if machine.name in ("avx512", "neon") else 12  # of 32 and of 16 vector registers
    code = jit.load_object(jit.compile_object(_multiply_add_text(machine, chains)))
    kernel, programs = code.address("kernel"), code.address("programs")
    args: Any = (ctypes.c_int64 * 2)(threads, ITERATIONS)

    def run() -> None:
        # `code` is held by this function: its addresses stay valid as long as the probe does.
        assert code is not None
        pool.run(kernel, programs, ctypes.addressof(args), machine.lanes * 4, threads)

    return [Probe("multiply-add", run, 2.0 * machine.lanes * chains * ITERATIONS * threads)]


def _splat(value: int, lanes: int) -> str:
    return f"<{', '.join([f'float {value}.0'] * lanes)}>"


def _multiply_add_text(machine: Target, chains: int) -> str:
    """A loop of independent chains a = a * x + x, more of them than a multiply-add takes cycles."""
    vector = f"<{machine.lanes} x float>"
    fma = f"@llvm.fmuladd.v{machine.lanes}f32"
    # Chains that began alike would be one chain to the compiler.
    starts = [f"  %a{n} = phi {vector} [ {_splat(n, machine.lanes)}, %entry ], [ %b{n}, %loop ]" for n in range(chains)]
    steps = [f"  %b{n} = call {vector} {fma}({vector} %a{n}, {vector} %x, {vector} %x)" for n in range(chains)]
    sums = ["  %s0 = fadd " + f"{vector} %b0, %b0"]
    sums += [f"  %s{n} = fadd {vector} %s{n - 1}, %b{n}" for n in range(1, chains)]
    return "\n".join(
        [
            f"declare {vector} {fma}({vector}, {vector}, {vector})",
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
