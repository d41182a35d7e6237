"""Compile LLVM IR text to machine code in this process."""

from __future__ import annotations

import contextlib
import itertools
import sys
from functools import cache
from typing import Any

from ...errors import InternalError
from . import image, llvm, loader
from .host import host
from .llvm import Host, lock

_library_numbers = itertools.count()


def optimise(text: str, processor: Host | None = None) -> str:
    """Run the LLVM passes and return the module as text. Here and below, the default processor is this machine's."""
    with lock:
        return str(_optimised(text, _target_machine(processor or host())))


def assembly(text: str, processor: Host | None = None) -> str:
    """Compile a module to assembly."""
    with lock:
        machine = _target_machine(processor or host())
        return str(machine.emit_assembly(_optimised(text, machine)))


def compile_object(text: str, processor: Host | None = None) -> bytes:
    """Compile a module to a relocatable object file."""
    with lock:
        machine = _target_machine(processor or host())
        return bytes(machine.emit_object(_optimised(text, machine)))


def compile_code(text: str, processor: Host | None = None) -> bytes:
    """Compile a module to the form that `machine_code.load` takes: an image, or an object file on other systems."""
    processor = processor or host()
    if "windows" in processor.triple:
        # LLVM's own name for ELF objects with the calling convention of Windows, which its JIT compilers use there.
        processor = processor._replace(triple=f"{processor.triple}-elf")
    data = compile_object(text, processor)
    if loader.takes_images():
        # An object that cannot be linked to an image is linked by LLVM in every process that loads it.
        with contextlib.suppress(image.Unlinkable):
            return image.link(data)
    return data


class Loaded:
    """Machine code in memory, with addresses that are valid as long as this object lives."""

    def __init__(self, data: bytes) -> None:
        self._name = f"object{next(_library_numbers)}"
        self._symbols: dict[str, Any] = {}  # LLVM unloads the code when any of these handles is freed
        binding = llvm.binding()
        builder = binding.JITLibraryBuilder().add_object_img(data).add_current_process()
        with lock:
            try:
                self._library = builder.link(_linker(), self._name)
            except RuntimeError as error:
                raise InternalError(f"LLVM cannot load an object file: {error}") from error

    def address(self, name: str) -> int:
        """Return the address of a function."""
        with lock:
            if name not in self._symbols:
                try:
                    self._symbols[name] = _linker().lookup(self._name, name)
                except RuntimeError as error:
                    raise InternalError(f"the compiled object has no usable {name!r}: {error}") from error
            return int(self._symbols[name][name])


def load_object(data: bytes) -> Loaded:
    """Link an object file into this process; it may call the process's own symbols, such as those of libc."""
    return Loaded(data)


@cache
def _target_machine(processor: Host) -> Any:
    # Position-independent code in the small model reaches its constants relative to the program counter, as operands
    # of the arithmetic; the JIT's default large model would load the address of each one first.
    binding = llvm.binding()
    if processor.triple.removesuffix("-elf") != host().triple:  # another architecture, whose text is asked for
        binding.initialize_all_targets()
        binding.initialize_all_asmprinters()
    return binding.Target.from_triple(processor.triple).create_target_machine(
        cpu=processor.cpu, features=processor.features, opt=2, reloc="pic", codemodel="small"
    )


@cache
def _linker() -> Any:
    # LLJIT loads an object in 1.1 ms from a cold process, MCJIT in 1.8 ms. JITLink keeps the sections of an object
    # together, which the small code model needs, and is the one linker that is sound on Apple's processors.
    return llvm.binding().create_lljit_compiler(
        _target_machine(host()), use_jit_link=sys.platform != "win32", suppress_errors=True
    )


def _optimised(text: str, machine: Any) -> Any:
    """Parse and verify a module and run a few passes.

    The emitter writes vector code whose loops are blocked already and computes nothing twice. LLVM turns its variables
    into registers and folds its arithmetic: the O2 pipeline takes four times as long and gives the same speed.
    """
    binding = llvm.binding()
    try:
        module = binding.parse_assembly(text)
        module.verify()
    except RuntimeError as error:
        raise InternalError(f"LLVM rejects the generated code: {error}") from error
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    passes = binding.create_new_module_pass_manager()
    passes.add_sroa_pass()
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    passes.run(module, binding.create_pass_builder(machine, binding.create_pipeline_tuning_options()))
    return module
