"""Generated modules as files, Triton's compiler for GPUs that need not be there, and its errors as monotile's."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from ...dtypes import DType
from ...errors import DeviceLimit, LaunchFailed, OutOfDeviceMemory, UnknownArchitecture, UnknownBackend
from ...ir import Kernel
from ...runtime import cache as store
from . import assembler, triton_key
from .device import shared_bytes
from .paths import LaunchPath
from .schedule import Schedule
from .triton import descriptors
from .triton.module import TritonSource

POINTERS = {
    "float32": "*fp32",
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "int64": "*i64",
    "int32": "*i32",
    "uint32": "*u32",
    "float8_e4m3fn": "*u8",
    "float8_e5m2": "*u8",
    "int8": "*i8",
    "uint8": "*u8",
    "bool": "*i1",
}
FITTING = "use smaller blocks, or a schedule with fewer stages"
SCALARS = {"float32": "fp32", "int64": "i64", "int32": "i32", "bool": "i32"}


def write(source: TritonSource) -> Path:
    """Write a module to the cache directory: Triton reads a function's source from where it was imported."""
    folder = store.directory() / "nvidia"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{source.name}.py"
    with contextlib.suppress(OSError):
        if path.read_text() == source.text:
            store.mark_used(str(path), path.stat())
            return path
    handle, temporary = tempfile.mkstemp(prefix=".new-", dir=folder)
    with open(handle, "w") as file:
        file.write(source.text)
    os.replace(temporary, path)
    return path


def load(source: TritonSource) -> Any:
    """Import a module and return its function."""
    triton_key.remember()
    path = write(source)
    spec = importlib.util.spec_from_file_location(source.name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, source.name)
    if hasattr(function, "cache_key") == interpreting():  # only functions that will be compiled have one
        raise UnknownBackend("TRITON_INTERPRET was changed after triton was imported; set it before Python starts")
    return function


@cache
def interpreting() -> bool:
    """Return True if Triton runs kernels in Python: TRITON_INTERPRET=1 was set when it was imported."""
    import triton
    import triton.language as tl

    return not isinstance(tl.max, triton.runtime.jit.JITFunction)


def capability(architecture: str) -> int:
    """Read an architecture's name: 90 of "sm_90"."""
    number = architecture.removeprefix("sm_")
    if number == architecture or not number.isdecimal():
        raise UnknownArchitecture(f"{architecture!r} is not an NVIDIA architecture; write it like sm_90")
    return int(number)


def compile_ahead(kernel: Kernel, source: TritonSource, schedule: Schedule, capability: int = 90) -> Any:
    """Compile for an NVIDIA GPU of this compute capability, which need not be there. Pointers and strides are taken to
    be multiples of 16, as those of ordinary tensors are."""
    import triton
    from triton.backends import compiler

    if interpreting():
        raise DeviceLimit("Triton's interpreter does not compile; unset TRITON_INTERPRET")
    function = load(source)
    signature = _descriptor_types(kernel, source) | {a.name: _type(kernel, a.kind, a.index) for a in source.arguments}
    names = list(signature)
    even = [names.index(a.name) for a in source.arguments if a.kind in ("pointer", "stride")]
    attributes: Any = {(n,): [["tt.divisibility", 16]] for n in even}
    if hasattr(compiler, "AttrsDescriptor"):  # Triton 3.2
        attributes = compiler.AttrsDescriptor.from_hints(dict.fromkeys(even, 16))
    kind: Any = triton.compiler.ASTSource
    other = assembler.needs_other(kernel, f"sm_{capability}")
    if any(tensor.block for tensor in source.described):
        other = False
        kind = importlib.import_module("triton.experimental.gluon._runtime").GluonASTSource
    try:
        with assembler.chosen(other=other) as more:
            made = triton.compile(
                kind(function, signature, {}, attributes),
                target=compiler.GPUTarget("cuda", capability, 32),
                options=schedule.options | more,
            )
    except Exception as error:
        raise translated(error, source.name) or error from None
    most = shared_bytes(capability)
    if made.metadata.shared > most:  # a launch would refuse it; nothing before does
        needs = f"{source.name} needs {made.metadata.shared} bytes of shared memory, sm_{capability} has {most}"
        raise DeviceLimit(f"{needs}; {FITTING}")
    return made


def compile_fitting(kernel: Kernel, path: LaunchPath, capability: int = 90) -> tuple[Any, LaunchPath]:
    """Compile a path's module ahead of time; what exceeds the GPU's shared memory, with fewer stages. Return what was
    compiled and its path."""
    *first, last = path.smaller()
    for smaller in first:
        with contextlib.suppress(DeviceLimit):
            return compile_ahead(kernel, smaller.render(kernel), smaller.schedule, capability), smaller
    return compile_ahead(kernel, last.render(kernel), last.schedule, capability), last


def resources(made: Any) -> dict[str, int]:
    """REG, the registers of a thread, and STACK, the bytes it spills: by the tool that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return {name: int(count) for name, count in re.findall(r"(REG|STACK):(\d+)", done.stdout)}


def _descriptor_types(kernel: Kernel, source: TritonSource) -> dict[str, str]:
    """Return the types of descriptors that the host makes, as Triton writes them."""
    found = {}
    for described in source.described:
        if described.block:
            tensor = kernel.tensors[described.index]
            kind = POINTERS[descriptors.copied_dtype(tensor.dtype).name].removeprefix("*")
            layout = descriptors.shared_layout(described)
            found[described.parameter] = f"tensordesc<{kind}{list(described.block)},{layout!r}>"
    return found


def _type(kernel: Kernel, kind: str, index: int) -> str:
    if kind == "pointer":
        return POINTERS[kernel.tensors[index].dtype.name]
    dtype: DType | None = kernel.scalars[index][1] if kind == "scalar" else None
    return SCALARS[dtype.name] if dtype is not None else "i32"


def _line(said: str, *words: str) -> str:
    """Return the line of a message that has one of the words; Triton adds the command and the whole text."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or [said]
    return next((line for word in words for line in lines if word in line), lines[0])


def launch_error(error: Exception, name: str) -> Exception:
    """Return the driver's error at a launch as one of monotile's."""
    said = _line(str(error), "CUDA", "out of memory")
    if "out of memory" in said.lower():
        return OutOfDeviceMemory(f"no GPU memory is left to launch {name}; free arrays, or pass smaller ones: {said}")
    lost = any(word in said.lower() for word in ("illegal", "misaligned", "unspecified", "ecc", "assert"))
    cure = "CUDA takes no more launches in this process: start a new one" if lost else "nothing was launched"
    return LaunchFailed(f"the driver refuses to launch {name}, or a launch before it failed; {cure}. It says: {said}")


def translated(error: Exception, name: str) -> Exception | None:
    """Return Triton's error as one of monotile's; None when it is something else."""
    kind, said = type(error).__name__, str(error)
    if kind == "OutOfResources":
        return DeviceLimit(f"{name} does not fit the GPU: {said.rstrip('.')}; {FITTING}")
    if kind == "PTXASError" or "ptxas" in said.lower():
        if "is not defined for option 'gpu-name'" in said or "Unsupported gpu architecture" in said:
            cure = "install a newer triton, or use backend='cpu'"
            return UnknownArchitecture(
                f"this Triton's ptxas does not know the GPU; {cure}. It says: {_line(said, 'gpu')}"
            )
        for lack in ("Register allocation failed", "uses too much"):
            if lack in said:
                return DeviceLimit(f"{name} does not fit the GPU: {_line(said, lack).rstrip('.')}; {FITTING}")
        return DeviceLimit(f"ptxas refuses {name}: {_line(said, 'error   :', 'fatal   :')}")
    if kind == "OutOfMemoryError" or "[CUDA]" in said or "CUDA error" in said:
        return launch_error(error, name)
    if "PassManager::run failed" in said:
        cure = "try a newer triton, or a schedule without warp_specialize"
        return DeviceLimit(f"Triton's compiler fails on {name}; {cure}. {said}")
    return None
