"""Launch Metal source on MLX arrays, through `mlx.core.fast.metal_kernel`. Not yet run on Apple hardware.

MLX writes the function's signature itself, inputs before outputs, and takes only the body. Inputs arrive contiguous;
those of fewer than 8 elements would come in the constant address space, and are padded. Outputs are new arrays, filled
with zeros.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from ...errors import ArgumentKind, ArgumentShape, DeviceLimit, UnknownBackend
from ...ir import Kernel, Tensor, walk
from ...runtime import cache
from .bindings import LaunchArguments, Launcher, number_buffers
from .dialect import TYPES
from .names import tensor_names
from .source import MetalSource

MOST_THREADS = 2**31 - 1  # of a launch
CONSTANT_BELOW = 8  # elements: shorter inputs are passed in the constant address space
POSITIONS = """  const uint gid = threadgroup_position_in_grid.x;
  const uint sg_u = simdgroup_index_in_threadgroup, lane_u = thread_index_in_simdgroup;
"""


def why_not() -> str | None:
    if "mlx.core" not in sys.modules and importlib.util.find_spec("mlx") is None:
        return "mlx is not installed: pip install mlx"
    import mlx.core as mx

    if not mx.metal.is_available():
        return "MLX has no Metal here, which takes macOS on Apple silicon; pass numpy.array(x)"
    if not hasattr(mx.fast, "metal_kernel"):
        return "this mlx has no mlx.core.fast.metal_kernel: pip install --upgrade mlx"
    return None


class OnMlx(Launcher):
    def __init__(self, kernel: Kernel, rendered: MetalSource) -> None:
        super().__init__(kernel, rendered)
        reason = why_not()
        if reason is not None:
            raise UnknownBackend(f"backend 'metal' cannot use MLX arrays: {reason}")
        read = {op.attrs["tensor"].index for op in walk(kernel.body) if op.kind in ("load", "gather")}
        for tensor in kernel.tensors:
            if tensor.index in read & kernel.written:
                found = f"{kernel.name} reads {tensor.name!r}, which it also writes, and MLX gives outputs new memory"
                raise ArgumentKind(f"{found}; write to another array")
        self.outputs = [tensor for tensor in kernel.tensors if tensor.index in kernel.written]
        self.inputs = [tensor for tensor in kernel.tensors if tensor.index not in kernel.written]
        self.function = self._function() if self.outputs else None
        self.compiled = False

    def _function(self) -> Any:
        """Build the function. MLX caches libraries by name, so the name carries a fingerprint of the source."""
        rendered, groups = self.rendered, number_buffers(self.kernel, self.rendered)
        names = [_parameter(t.index) for t in self.inputs] + [_parameter(group.index) for group in groups]
        lines = [self._pointer(t, "const ") for t in self.inputs] + [self._pointer(t, "") for t in self.outputs]
        for group in groups:
            kind = f"const device {TYPES[group.dtype.name]} *"
            lines.append(f"  {kind}{group.name} = reinterpret_cast<{kind}>({_parameter(group.index)});")
        made = sys.modules["mlx.core"].fast.metal_kernel(
            name=f"{rendered.name}_{cache.fingerprint(rendered.source)[:10]}",
            input_names=names,
            output_names=[_parameter(t.index) for t in self.outputs],
            source=POSITIONS + "\n".join([*lines, rendered.body]),
            header=rendered.head + "\n",
        )
        return made

    def _pointer(self, tensor: Tensor, constness: str) -> str:
        """Define the name and type that the body uses for a parameter."""
        kind, name = f"{constness}device {TYPES[tensor.dtype.name]} *", tensor_names(self.kernel)[tensor.index]
        return f"  {kind}{name}_p = reinterpret_cast<{kind}>({_parameter(tensor.index)});"

    def run(self, launch: LaunchArguments) -> None:
        if self.function is None:
            return
        mx, group = sys.modules["mlx.core"], self.rendered.threads
        if launch.programs * group > MOST_THREADS:
            most = MOST_THREADS // group
            raise ArgumentShape(f"the grid has {launch.programs} programs; MLX takes {most}: use larger blocks")
        inputs = [_padded(mx, launch.arrays[t.index]) for t in self.inputs]
        for kind, values in launch.numbers:
            padding = [0] * (CONSTANT_BELOW - len(values))
            inputs.append(mx.array([*values, *padding], dtype=getattr(mx, kind.dtype.name)))
        targets = [launch.arrays[t.index] for t in self.outputs]
        made = self.function(
            inputs=inputs,
            output_shapes=[target.shape if target.size else (1,) for target in targets],
            output_dtypes=[target.dtype for target in targets],
            grid=(launch.programs * group, 1, 1),
            threadgroup=(group, 1, 1),
            init_value=0,
        )
        self._compile(mx, made)
        for target, array in zip(targets, made, strict=True):
            if target.size:
                target[...] = array

    def _compile(self, mx: Any, made: list[Any]) -> None:
        """Evaluate the first launch at once: MLX compiles only then, and checks the threads that its pipeline takes,
        for which the signature that it writes asks nothing."""
        if self.compiled:
            return
        try:
            mx.eval(made)
        except (RuntimeError, ValueError) as error:
            raise DeviceLimit(f"MLX cannot run {self.rendered.name}: {error}; use smaller blocks") from None
        self.compiled = True


def _parameter(index: int) -> str:
    return f"buffer_{index}"


def _padded(mx: Any, array: Any) -> Any:
    missing = CONSTANT_BELOW - array.size
    return mx.pad(array.reshape(-1), (0, missing)) if missing > 0 else array
