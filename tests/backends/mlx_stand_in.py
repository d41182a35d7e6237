"""A stand-in for MLX on a Mac: arrays, and `mlx.core.fast.metal_kernel`, which checks a launch against MLX's docs.

It writes the signature as MLX does: inputs, then outputs, each in a buffer of its own; inputs of fewer than 8 elements
in the constant address space; the positions of a thread under the names of their attributes. Inputs are contiguous,
outputs are new. The source runs in the runner.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from arrays import Array
from monotile import metal

ATTRIBUTES = {
    "dispatch_threads_per_threadgroup": "uint3", "grid_size": "uint3", "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint", "thread_index_in_simdgroup": "uint", "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3", "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3", "threadgroups_per_grid": "uint3", "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint", "threads_per_threadgroup": "uint3",
}  # fmt: skip
TYPES = {
    "float32": "float", "float16": "float16_t", "bfloat16": "bfloat16_t", "int64": "int64_t", "int32": "int32_t",
    "int8": "int8_t", "uint8": "uint8_t", "bool": "bool",
}  # fmt: skip
PRELUDE = "#include <metal_stdlib>\nusing namespace metal;\ntypedef half float16_t;\ntypedef bfloat bfloat16_t;\n"


class DType:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"mlx.core.{self.name}"


DTYPES = {name: DType(name) for name in (*TYPES, "float64")}


class array:
    """Like MLX's: its memory is never written. An assignment replaces the array's contents by another array."""

    def __init__(self, values: Any, dtype: DType | None = None) -> None:
        self.values = np.array(values, None if dtype is None else numpy_kind(dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def size(self) -> int:
        return self.values.size

    @property
    def dtype(self) -> DType:
        return DTYPES[self.values.dtype.name]

    def reshape(self, *shape: Any) -> array:
        return array(self.values.reshape(*shape))

    def __getitem__(self, index: Any) -> array:
        return array(self.values[index])

    def __setitem__(self, index: Any, value: array) -> None:
        assert index is ... and value.shape == self.shape and value.dtype is self.dtype
        self.values = value.values


def numpy_kind(dtype: DType) -> Any:
    return ml_dtypes.bfloat16 if dtype.name == "bfloat16" else np.dtype(dtype.name)


class Kernels:
    """`metal_kernel` for arrays that `numpy` reads and `back` makes. It records what was launched."""

    def __init__(self, numpy: Callable[[Any], Array], back: Callable[[Array], Any]) -> None:
        self.numpy, self.back = numpy, back
        self.texts: dict[str, str] = {}
        self.input_sizes: list[int] = []

    def metal_kernel(
        self, name: str, input_names: list[str], output_names: list[str], source: str, header: str = "",
        ensure_row_contiguous: bool = True, atomic_outputs: bool = False, compile_options: Any = None,
    ) -> Callable[..., list[Any]]:  # fmt: skip
        assert output_names and ensure_row_contiguous and not atomic_outputs
        assert "[[kernel" not in source and all(n.isidentifier() for n in (name, *input_names, *output_names))
        assert self.texts.setdefault(name, header + source) == header + source, "MLX caches one source per name"
        for name_ in input_names:
            assert not re.search(rf"{name_}_(shape|strides|ndim)\b", source), "MLX would add an argument"

        def call(
            *, inputs: list[Any], output_shapes: list[Any], output_dtypes: list[Any], grid: tuple[int, int, int],
            threadgroup: tuple[int, int, int], init_value: float | None = None, **others: Any,
        ) -> list[Any]:  # fmt: skip
            assert others.keys() <= {"template", "verbose", "stream"}
            assert len(inputs) == len(input_names) and len(output_names) == len(output_shapes) == len(output_dtypes)
            given = [np.ascontiguousarray(self.numpy(a)) for a in inputs]
            kinds = [numpy_kind(DTYPES[str(d).removeprefix("mlx.core.")]) for d in output_dtypes]
            made = [metal.poisoned(tuple(s), kind) for s, kind in zip(output_shapes, kinds, strict=True)]
            if init_value is not None:
                for a in made:
                    a[...] = init_value
            text = header + signature(f"custom_kernel_{name}", input_names, given, output_names, made, source)
            self.input_sizes += [a.size for a in given]
            assert all(type(n) is int and 0 < n < 2**31 for n in (*grid, *threadgroup))
            assert all(total % side == 0 for total, side in zip(grid, threadgroup, strict=True)), (
                "a partial threadgroup"
            )
            groups = [total // side for total, side in zip(grid, threadgroup, strict=True)]
            buffers: dict[int | str, Any] = dict(enumerate([*given, *made]))
            metal.run(PRELUDE + text, f"custom_kernel_{name}", buffers, groups, threadgroup).check()
            return [self.back(a) for a in made]

        return call


def signature(
    name: str, input_names: list[str], inputs: list[Array], output_names: list[str], outputs: list[Array], source: str
) -> str:
    parameters = []
    for n, (parameter, value) in enumerate(zip(input_names, inputs, strict=True)):
        space = "constant" if value.size < 8 else "device"
        assert space == "device" or not re.search(rf"device[^;]*\b{parameter}\b", source), "constant memory as device"
        parameters.append(f"const {space} {TYPES[value.dtype.name]}* {parameter} [[buffer({n})]]")
    for n, (parameter, value) in enumerate(zip(output_names, outputs, strict=True), len(inputs)):
        parameters.append(f"device {TYPES[value.dtype.name]}* {parameter} [[buffer({n})]]")
    parameters += [f"{kind} {name} [[{name}]]" for name, kind in ATTRIBUTES.items() if name in source]
    return f"[[kernel]] void {name}(\n  " + ",\n  ".join(parameters) + f") {{\n{source}\n}}\n"


def mlx(available: bool = True) -> tuple[types.ModuleType, types.ModuleType, Kernels]:
    """Return `mlx` and `mlx.core`, to be put into sys.modules, and the kernels that they launch."""
    package, core = types.ModuleType("mlx"), types.ModuleType("mlx.core")
    kernels = Kernels(lambda a: a.values, array)
    parts = {
        "array": array, **DTYPES, "bool_": DTYPES["bool"],
        "zeros": lambda shape, dtype: array(np.zeros(shape, numpy_kind(dtype))),
        "pad": lambda a, widths: array(np.pad(a.values, widths)),
        "broadcast_to": lambda a, shape: array(np.broadcast_to(a.values, shape)),
        "stack": lambda arrays, axis: array(np.stack([a.values for a in arrays], axis)),
        "eval": lambda arrays: None, "fast": types.SimpleNamespace(metal_kernel=kernels.metal_kernel),
        "metal": types.SimpleNamespace(is_available=lambda: available),
    }  # fmt: skip
    vars(core).update(parts)
    vars(package)["core"] = core
    return package, core, kernels
