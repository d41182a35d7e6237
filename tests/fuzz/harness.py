"""Run a program on the interpreter, after the passes, and as compiled code, and compare the outputs."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from monotile import dtypes, ir
from monotile.backends import interpreter
from monotile.backends.cpu import jit, llvm, machine_code
from monotile.backends.cpu.compiler import OPTIONS
from monotile.backends.cpu.host import host
from monotile.backends.cpu.lower import lower
from monotile.backends.cpu.target import UNITS, Target, host_for, target, why_not
from monotile.errors import DeviceLimit
from monotile.passes import pipeline

from .arguments import Program

Array = npt.NDArray[Any]

TARGETS = (target(host()), *(UNITS[name] for name in ("avx2", "neon", "baseline")))
GUARD = 4096


class Different(AssertionError):
    """Two backends gave different outputs."""


class Finding(NamedTuple):
    """What went wrong with a program, and where."""

    stage: str
    kind: str
    message: str


def find(
    program: Program, runners: Mapping[str, Callable[[Program, list[Array]], None]], ran: Counter[str] | None = None
) -> Finding | None:
    """Run a program after the passes and with each of the runners; return the first thing that differs or fails.
    `ran` counts the runners with which it ran and agreed: one for whose device it is too large refuses it."""
    stage = "passes"
    try:
        expected = check(program, ())
        for stage, run in runners.items():
            found = [a.base.copy() for a in program.arguments]
            try:
                run(program, found)
            except DeviceLimit:
                continue
            _compare(program, found, expected, stage)
            if ran is not None:
                ran[stage] += 1
    except Exception as error:
        return Finding(stage, type(error).__name__, str(error)[:500])
    return None


def check(program: Program, targets: Sequence[Target] = TARGETS) -> list[Array]:
    """Compare the passes and compiled code with the interpreter, and return what it gave."""
    expected = [a.base.copy() for a in program.arguments]
    _interpret(program, program.kernel, expected)
    for options in (OPTIONS, pipeline.PipelineOptions(peel_bounds=False), pipeline.PipelineOptions(peel_bounds=True)):
        kernel = ir.copy(program.kernel)
        pipeline.run(kernel, options, lambda name, k: None)  # verified after each pass
        found = [a.base.copy() for a in program.arguments]
        _interpret(program, kernel, found)
        _compare(program, found, expected, f"passes with {options}")
    for each in targets:
        found = [a.base.copy() for a in program.arguments]
        compiled(program, each, found)
        _compare(program, found, expected, each.name)
    return expected


def _interpret(program: Program, kernel: ir.Kernel, bases: list[Array]) -> None:
    views = [a.view(base) for a, base in zip(program.arguments, bases, strict=True)]
    interpreter.evaluate(kernel, views, program.scalars)


def processor_for(unit: str) -> llvm.Host:
    """Return the processor that code of a vector unit is compiled for: the one that users get. Code with NEON's widths
    on another architecture is compiled for AVX2: given AVX-512, LLVM 22 reads registers from 16 up with `vmovmskps`,
    which has no encoding for them."""
    same = "neon" if host().triple.startswith(("aarch64", "arm64")) else "avx2"
    name = same if unit == "neon" else unit
    return host_for(name) if why_not(name) is None else host()


def compiled(program: Program, each: Target, bases: list[Array]) -> None:
    """Run the compiled programs in order, each with scratch full of NaN between guard bytes that must not change."""
    kernel = ir.copy(program.kernel)
    pipeline.run(kernel, OPTIONS)
    lowered = lower(kernel, each, host().triple)
    code = machine_code.load(jit.compile_code(lowered.text, processor_for(each.name)))
    views = [argument.view(base) for argument, base in zip(program.arguments, bases, strict=True)]
    words = [view.ctypes.data for view in views]
    for (_, dtype), value in zip(program.kernel.scalars, program.scalars, strict=True):
        words.append(int(np.float32(value).view(np.int32)) if dtype.is_float else int(value))
    for view in views:
        words += [*view.shape, *(s // view.itemsize for s in view.strides)]
    args = (ctypes.c_int64 * len(words))(*words)
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)(code.address("kernel"))
    count = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(code.address("programs"))
    size = lowered.scratch_bytes
    memory = np.empty(size + 2 * GUARD, np.uint8)
    start = -memory.ctypes.data % 64 + 64
    for index in range(count(ctypes.addressof(args))):
        memory[:] = 0xFF
        run(ctypes.addressof(args), index, memory.ctypes.data + start)
        if not (memory[:start] == 0xFF).all() or not (memory[start + size :] == 0xFF).all():
            raise Different(f"{each.name}: something was written outside the scratch memory")


def _compare(program: Program, found: list[Array], expected: list[Array], stage: str) -> None:
    for argument, mine, right in zip(program.arguments, found, expected, strict=True):
        name = argument.tensor.name
        inside = np.zeros(len(right), bool)
        argument.view(inside)[...] = True
        if not _equal(mine[~inside], right[~inside]).all():
            raise Different(f"{stage}: something was written outside of {name}")
        a, b = argument.view(mine), argument.view(right)
        equal = _equal(a, b)
        if argument.approximate:
            with np.errstate(all="ignore"):
                equal |= np.abs(a - b) <= 1e-5 * np.abs(b) + 1e-6
        if not equal.all():
            at = tuple(int(n) for n in np.argwhere(~equal)[0])
            raise Different(
                f"{stage}: {name}{at} is {a[at]} instead of {b[at]}; {(~equal).sum()} of {equal.size} differ"
            )


def _equal(a: Array, b: Array) -> Array:
    if dtypes.from_numpy(a.dtype) in (dtypes.bfloat16, *dtypes.FP8):
        a, b = a.astype(np.float32), b.astype(np.float32)
    equal = a == b
    if a.dtype.kind == "f":
        equal = equal | (np.isnan(a) & np.isnan(b))
    return np.asarray(equal)
