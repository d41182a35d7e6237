"""Emit LLVM text and an object file for programs that do not use monotile.

Both have two functions: NAME(words, program, scratch) runs one program, NAME_programs(words) counts them.
"""

from __future__ import annotations

from ...ir import Kernel
from .. import manifest
from ..base import Emitted
from . import jit
from .compiler import to_llvm
from .llvm import Host

PAGE = 4096  # scratch begins on a page boundary, and one page behind it may be read


def emitted(kernel: Kernel, processor: Host) -> Emitted:
    lowered = to_llvm(kernel, processor)
    name, count = kernel.name, f"{kernel.name}_programs"
    text = lowered.text.replace("@kernel(", f"@{name}(").replace("@programs(", f"@{count}(")
    symbols = manifest.Symbols(kernel)
    entry = {
        "name": name,
        "file": f"{name}.ll",
        "object": f"{name}.o",
        "constants": manifest.constants(kernel),
        "tensors": [manifest.tensor_entry(kernel, tensor, symbols) for tensor in kernel.tensors],
        "functions": {name: "void(ptr words, int64 program, ptr scratch)", count: "int64(ptr words)"},
        "words": _words(kernel),
        "grid": [manifest.programs(kernel, symbols), "1", "1"],
        "scratch_bytes": lowered.scratch_bytes + PAGE,
        "scratch_alignment": PAGE,
        "machine": {name: getattr(processor, name) for name in ("triple", "cpu", "features", "llvm")},
    }
    return Emitted({f"{name}.ll": text.encode(), f"{name}.o": jit.compile_object(text, processor)}, entry)


def _words(kernel: Kernel) -> list[manifest.Entry]:
    """Describe the 64-bit words of a launch; a float32 is in the lower half of its word."""
    words = [manifest.word("address", tensor) for tensor in kernel.tensors]
    words += [manifest.scalar(name) | {"dtype": dtype.name} for name, dtype in kernel.scalars]
    for tensor in kernel.tensors:
        words += [manifest.word("length", tensor, axis) for axis in range(tensor.rank)]
        words += [manifest.word("stride", tensor, axis) for axis in range(tensor.rank)]
    return words
