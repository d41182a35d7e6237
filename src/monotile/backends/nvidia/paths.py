"""Which of the two modules a kernel runs as: Gluon with producer and consumer warps, or plain Triton.

A schedule asks for Gluon with `consumers`. The kernel runs so if this Triton's Gluon is one the text was written for,
the GPU has Hopper's matrix instructions, and the kernel has a form that the producer warp can feed
(`gluon.pipeline.analyse`). Otherwise it runs as plain Triton with the rule's schedule, and the path says why. One
reason is known only at a launch: TMA cannot describe every stride and address. Such a call runs as plain Triton, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...ir import Kernel
from .device import HOPPER, Gpu
from .gluon import shared_memory, support
from .gluon.module import pipeline_of, render_gluon
from .gluon.pipeline import Pipeline
from .schedule import Schedule, choose, count
from .triton.descriptors import ALIGNMENT
from .triton.module import TritonSource, render_triton

AT_LAUNCH = (
    f"TMA needs addresses and strides that are multiples of {ALIGNMENT} bytes, a contiguous last dimension and no "
    "empty one; a call with other tensors runs as plain Triton with the rule's schedule"
)


@dataclass(frozen=True)
class LaunchPath:
    """The module that launches run, wherever descriptors can be made."""

    schedule: Schedule  # of this module: the rule's where another was asked for and cannot be had
    pipeline: Pipeline | None  # None for plain Triton
    why_plain: str = ""  # a sentence
    capability: int = 90  # of the GPU

    @property
    def name(self) -> str:
        return "triton" if self.pipeline is None else "gluon"

    def smaller(self) -> Iterator[LaunchPath]:
        """Yield this path, then ones with fewer stages, which need less shared memory."""
        for schedule in self.schedule.smaller():
            yield replace(self, schedule=schedule)

    def render(self, kernel: Kernel, *, wide: bool = False, emulate: bool = False) -> TritonSource:
        if self.pipeline is not None:
            return render_gluon(kernel, self.schedule, self.pipeline, wide=wide)
        return render_triton(kernel, self.schedule, wide=wide, emulate=emulate, capability=self.capability)


def select(kernel: Kernel, schedule: Schedule | None, target: Gpu = HOPPER, *, interpreted: bool = False) -> LaunchPath:
    """Return the path of a kernel after the passes. `interpreted`: Triton runs it in Python."""
    found = _select(kernel, schedule, target, interpreted=interpreted)
    return replace(found, capability=target.capability)


def _select(kernel: Kernel, schedule: Schedule | None, target: Gpu, *, interpreted: bool) -> LaunchPath:
    rule = choose(kernel, target.shared_bytes)
    if schedule is None or not schedule.consumers:
        why = "The schedule does not ask for producer and consumer warps (consumers=0)."
        return LaunchPath(schedule or rule, None, why)
    if interpreted:
        return LaunchPath(rule, None, "Triton's interpreter (TRITON_INTERPRET=1) does not run Gluon.")
    why = support.why_unsupported(target.architecture)
    if why:
        return LaunchPath(rule, None, why)
    found = pipeline_of(kernel)
    if isinstance(found, str):
        return LaunchPath(rule, None, found)
    if found.sharing % schedule.consumers:
        return LaunchPath(rule, None, "The blocks that a loop reads differ between the programs of one CTA.")
    for fitting in schedule.smaller():
        if shared_memory.needed(found, fitting) <= target.shared_bytes:
            return LaunchPath(fitting, found)
    needs = shared_memory.needed(found, replace(schedule, num_stages=1))
    return LaunchPath(rule, None, f"Its tiles need {needs} bytes of shared memory; a CTA has {target.shared_bytes}.")


def explain(kernel: Kernel, schedule: Schedule | None, target: Gpu = HOPPER) -> list[str]:
    """Say in a few lines which schedule and which path a launch gets, and why."""
    path, rule = select(kernel, schedule, target), choose(kernel, target.shared_bytes)
    architecture = target.architecture
    lines = [f"schedule: {rule.describe()}, by the rule" if schedule is None else f"schedule: {schedule.describe()}"]
    if path.pipeline is not None:
        consumers = count(path.schedule.consumers, "consumer")
        lines.append(f"path: Gluon for {architecture}, one producer warp and {consumers}")
        lines.append(f"at launch: {AT_LAUNCH}: {rule.describe()}")
        versions = " or ".join(support.VERSIONS)
        return lines if support.triton_version() else [*lines, f"assumed: Triton {versions}; none is installed here"]
    instead = f" with the rule's schedule: {rule.describe()}" if schedule is not None and schedule.consumers else ""
    lines += [f"path: plain Triton for {architecture}{instead}", f"why: {path.why_plain}"]
    if not instead:
        found = support.why_unsupported(architecture) or pipeline_of(kernel)
        able = "The kernel could run as Gluon." if not isinstance(found, str) else f"It would stay plain. {found}"
        lines.append(f"with consumers: {able}")
    if path.schedule.tensor_descriptors:
        lines.append("at launch: pointers take the place of descriptors where TMA cannot describe an operand")
    return lines
