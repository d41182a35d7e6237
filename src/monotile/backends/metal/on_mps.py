"""Launch Metal source on torch tensors on "mps", through `torch.mps.compile_shader`. Not yet run on Apple hardware.

A compiled function takes the arguments of buffers 0, 1, ... in order: tensors, and lists of integers (bound as int64)
or of floats (bound as float32). Sizes count threads, not threadgroups.
"""

from __future__ import annotations

import importlib.util
import sys

from ...errors import DeviceLimit, UnknownBackend
from ...ir import Kernel
from .bindings import LaunchArguments, Launcher
from .source import MetalSource


def why_not() -> str | None:
    if "torch" not in sys.modules and importlib.util.find_spec("torch") is None:
        return "torch is not installed: pip install torch"
    import torch

    if not torch.backends.mps.is_available():
        return "torch sees no Apple GPU, which takes macOS on Apple silicon; move tensors with .cpu()"
    if not hasattr(torch.mps, "compile_shader"):
        return f"torch {torch.__version__} has no torch.mps.compile_shader: pip install 'torch>=2.7'"
    return None


class OnMps(Launcher):
    def __init__(self, kernel: Kernel, rendered: MetalSource) -> None:
        super().__init__(kernel, rendered)
        reason = why_not()
        if reason is not None:
            raise UnknownBackend(f"backend 'metal' cannot use tensors on 'mps': {reason}")
        torch = sys.modules["torch"]
        try:
            self.function = getattr(torch.mps.compile_shader(rendered.source), rendered.name)
        except (RuntimeError, SyntaxError) as error:
            raise DeviceLimit(f"Metal's compiler refuses {rendered.name}: {error}") from None
        most = getattr(self.function, "max_threads_per_threadgroup", rendered.threads)
        if most < rendered.threads:
            found = f"{rendered.name} needs threadgroups of {rendered.threads} threads, and this GPU has registers for"
            raise DeviceLimit(f"{found} {most}; use smaller blocks")

    def run(self, launch: LaunchArguments) -> None:
        group = self.rendered.threads
        numbers = [list(values) for _, values in launch.numbers]
        self.function(*launch.arrays, *numbers, threads=(launch.programs * group, 1, 1), group_size=(group, 1, 1))
