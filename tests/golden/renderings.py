"""Every text that is generated for a case: IR after the passes of each backend, LLVM for each vector unit, Metal,
Triton and Gluon."""

from __future__ import annotations

from collections.abc import Iterator

from golden.cases import Case
from monotile import ir
from monotile.backends.choices import Choice
from monotile.backends.cpu.compiler import OPTIONS as CPU_PASSES
from monotile.backends.cpu.lower import lower as lower_cpu
from monotile.backends.cpu.target import UNITS
from monotile.backends.metal.backend import MetalBackend
from monotile.backends.metal.render import render as render_metal
from monotile.backends.nvidia import measured
from monotile.backends.nvidia.backend import BACKEND as NVIDIA
from monotile.backends.nvidia.gluon.module import pipeline_of, render_gluon
from monotile.backends.nvidia.schedule import Schedule, choose
from monotile.backends.nvidia.triton.module import TritonSource, render_triton
from monotile.passes import pipeline

TARGETS = tuple(UNITS[name] for name in ("avx2", "avx512", "avx512-amx", "neon"))
TRIPLES = {"neon": "aarch64-unknown-linux-gnu"}
EVERY_TARGET = (
    "attention/causal/",
    "attention/full_lse/",
    "decode/full/",
    "decode/bool_mask/",
    "packed/causal/",
    "merge",
    "matmul/",
)


def texts(backend: str, case: Case) -> Iterator[tuple[str, str]]:
    """Pairs of a stage and its text."""
    return {"cpu": cpu_texts, "metal": metal_texts, "nvidia": nvidia_texts}[backend](case)


def cpu_texts(case: Case) -> Iterator[tuple[str, str]]:
    yield "ir", ir.show(case.kernel)
    kernel = ir.copy(case.kernel)
    pipeline.run(kernel, CPU_PASSES, lambda name, k: None)  # verified after each pass
    yield "cpu ir", ir.show(kernel)
    for target in TARGETS:
        if target.name == "avx512" or case.name.startswith(EVERY_TARGET):
            triple = TRIPLES.get(target.name, "x86_64-unknown-linux-gnu")
            yield f"llvm {target.name}", lower_cpu(ir.copy(kernel), target, triple).text


def metal_texts(case: Case) -> Iterator[tuple[str, str]]:
    kernel = MetalBackend().lower(case.kernel)
    yield "metal ir", ir.show(kernel)
    yield "metal", render_metal(kernel, True).source


def nvidia_texts(case: Case) -> Iterator[tuple[str, str]]:
    kernel = NVIDIA.lower(case.kernel)
    yield "nvidia ir", ir.show(kernel)
    yield "triton", source(kernel, render_triton(kernel, choose(kernel)))
    for name, schedule in schedules(case).items():
        if not schedule.consumers:
            yield f"triton {name}", source(kernel, render_triton(kernel, schedule))
            continue
        pipeline = pipeline_of(kernel)
        if isinstance(pipeline, str):
            yield f"gluon {name}", f"not rendered: {pipeline}"
        else:
            yield f"gluon {name}", source(kernel, render_gluon(kernel, schedule, pipeline))


def source(kernel: ir.Kernel, rendered: TritonSource) -> str:
    """The module without the fingerprint in the function's name, which changes with every change of the compiler."""
    return rendered.text.replace(rendered.name, kernel.name)


def schedules(case: Case) -> dict[str, Schedule]:
    """The schedules measured on sm_90 that a call like this one may get."""
    if case.options is None or "float32" in case.name.split("/")[2:3]:
        return {}
    if case.name.startswith("decode"):
        return {"sm_90": _up_to(case.head_size, measured.decode_table(unsplit="_whole" in case.name))}
    masked = bool(case.mask)
    unseen = case.options.left is not None or case.options.causal == "upper_left"
    if masked or unseen or case.options.mask_mod is not None:
        return {"sm_90": _up_to(case.head_size, measured.zeroing_table(masked))}
    tables = {"sm_90": measured.forward_table(False), "sm_90 persistent": measured.forward_table(True)}
    found = {name: _up_to(case.head_size, table) for name, table in tables.items()}
    return found if found["sm_90"] != found["sm_90 persistent"] else {"sm_90": found["sm_90"]}


def _up_to(head_size: int, table: tuple[tuple[int, Choice], ...]) -> Schedule:
    found: Schedule = next(choice.schedule for most, choice in table if head_size <= most)
    return found
