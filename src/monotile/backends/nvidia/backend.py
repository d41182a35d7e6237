"""The nvidia backend: passes, then a Triton or Gluon module (paths.py), which Triton compiles and launches."""

from __future__ import annotations

import functools
import importlib.util
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ... import ir
from ...ir import verify
from ...passes import pipeline
from ...passes.peel import peel_with_bounds
from ...passes.spread import spread_repeated
from ...runtime import cache
from ..base import Backend, Emitted, Program
from . import build, paths
from .choices import NvidiaChoices
from .columns import split_columns
from .device import HOPPER, described
from .gluon import support
from .orientation import orient_dots
from .program import NvidiaProgram
from .schedule import Schedule
from .sides import split_sides
from .triton.text import names_module

LOWERED = "nvidia_ir"  # kind of a file in the disk cache
LEAST_TRITON = (3, 2)
OPTIONS = pipeline.PipelineOptions(
    peel_bounds=True, early=(spread_repeated,), last=(orient_dots, split_sides, split_columns)
)


class NvidiaBackend(Backend):
    name = "nvidia"
    choices = NvidiaChoices()
    schedules = Schedule

    def why_not(self) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "it needs triton: pip install triton (Linux)"
        version = support.triton_version()
        if version and tuple(map(int, version.split(".")[:2])) < LEAST_TRITON:
            least = ".".join(map(str, LEAST_TRITON))
            return f"Triton {version} is too old, it needs {least}: pip install 'triton>={least}'"
        if build.interpreting():
            return None
        if importlib.util.find_spec("torch") is None:
            return "it needs torch: pip install torch"
        import torch

        if torch.cuda.is_available():
            return None
        cure = "use backend='cpu', or start Python with TRITON_INTERPRET=1 for Triton's interpreter"
        return f"torch sees no NVIDIA GPU{_driver_error(torch)}; {cure}"

    def accepts(self, device: str) -> bool:
        if build.interpreting():
            return device == "cpu"
        return device.startswith("cuda")

    def identity(self) -> str:
        return f"{cache.compiler_fingerprint()} nvidia"

    def key(self, kernel: ir.Kernel, schedule: Any = None) -> str:
        return cache.fingerprint(self.identity(), repr(schedule), ir.show(kernel))

    def cached(self, key: str, kernel: ir.Kernel, schedule: Any = None) -> Program | None:
        payload = cache.load(key, LOWERED)
        return None if payload is None else NvidiaProgram(pickle.loads(payload), schedule)

    def compile(self, kernel: ir.Kernel) -> Program:
        return self.compile_as(kernel, None)

    def compile_as(self, kernel: ir.Kernel, schedule: Any) -> Program:
        """Run the passes, and keep the IR on disk: Triton keeps what becomes of it."""
        lowered = self.lower(kernel, peel=schedule is None or schedule.peel)
        # Constants are in the IR. Functions among them cannot be stored, and may hold on to arrays.
        lowered = replace(lowered, consts={name: value for name, value in kernel.consts.items() if names_module(value)})
        cache.store_compiled(self.key(kernel, schedule), LOWERED, pickle.dumps(lowered))
        return NvidiaProgram(lowered, schedule)

    def lower(
        self, kernel: ir.Kernel, *, peel: bool = True, watch: Callable[[str, ir.Kernel], None] | None = None
    ) -> ir.Kernel:
        """Run the passes on a copy; `watch` sees the kernel after each."""
        kernel = ir.copy(kernel)
        for each in pipeline.passes(OPTIONS):
            if peel or each is not peel_with_bounds:
                each(kernel)
                verify.check(kernel, each.__name__)
                if watch is not None:
                    watch(each.__name__, kernel)
        return kernel

    def _after_each_pass(self, kernel: ir.Kernel, *, peel: bool) -> str:
        texts = [f"# frontend\n{ir.show(kernel)}"]
        self.lower(kernel, peel=peel, watch=lambda name, k: texts.append(f"# {name}\n{ir.show(k)}"))
        return "\n".join(texts)

    def _select(self, kernel: ir.Kernel, schedule: Any, device: str | None) -> tuple[ir.Kernel, paths.LaunchPath]:
        lowered = self.lower(kernel, peel=schedule is None or schedule.peel)
        return lowered, paths.select(lowered, schedule, described(device) if device else HOPPER)

    def stages(
        self, kernel: ir.Kernel, schedule: Any = None, device: str | None = None
    ) -> dict[str, Callable[[], str]]:
        @functools.cache
        def selected() -> tuple[ir.Kernel, paths.LaunchPath]:
            return self._select(kernel, schedule, device)

        def text() -> str:
            lowered, path = selected()
            return path.render(lowered).text

        def ptx() -> str:
            capability = build.capability(device or HOPPER.architecture)
            return str(build.compile_fitting(*selected(), capability)[0].asm["ptx"])

        module = selected()[1].name if schedule is not None else "triton"
        return {
            "ir": lambda: ir.show(kernel),
            "passes": lambda: self._after_each_pass(kernel, peel=schedule is None or schedule.peel),
            module: text,
            "ptx": ptx,
        }

    def explain(self, kernel: ir.Kernel, schedule: Any = None, device: str | None = None) -> list[str]:
        lowered = self.lower(kernel, peel=schedule is None or schedule.peel)
        return paths.explain(lowered, schedule, described(device) if device else HOPPER)

    def emit(self, kernel: ir.Kernel, schedule: Any = None, device: str | None = None) -> Emitted:
        from .emission import emitted

        return emitted(*self._select(kernel, schedule, device))


def _driver_error(torch: Any) -> str:
    """What torch or the driver says, where it fails."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f" ({str(error).splitlines()[0]})"
    return ""


BACKEND = NvidiaBackend()
