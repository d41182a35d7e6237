"""Compile LLVM IR text to machine code in this process. Only this module calls llvmlite."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from functools import cache
from typing import Any

from ...errors import InternalError
from . import image, loader
from .host import Host, host

# llvmlite locks single calls, not the sequences of calls made here.
_lock = threading.RLock()
_library_numbers = itertools.count()

if hasattr(os, "register_at_fork"):
    # A child must not inherit LLVM in the middle of another thread's work.
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def detect_host() -> Host:
    """Ask LLVM for the processor this process runs on."""
    import llvmlite

    llvm = _llvm()
    with _lock:
        return Host(
            triple=llvm.get_process_triple(),
            cpu=llvm.get_host_cpu_name(),
            features=llvm.get_host_cpu_features().flatten(),
            llvm=".".join(str(number) for number in llvm.llvm_version_info),
            llvmlite=llvmlite.__version__,
        )


def optimise(text: str, processor: Host | None = None) -> str:
    """Run the LLVM passes and return the module as text. Here and below, the default processor is this machine's."""
    with _lock:
        return str(_optimised(text, _target_machine(processor or host())))


def assembly(text: str, processor: Host | None = None) -> str:
    """Compile a module to assembly."""
    with _lock:
        machine = _target_machine(processor or host())
        return str(machine.emit_assembly(_optimised(text, machine)))


def compile_object(text: str, processor: Host | None = None) -> bytes:
    """Compile a module to a relocatable object file."""
    with _lock:
        machine = _target_machine(processor or host())
        return bytes(machine.emit_object(_optimised(text, machine)))


def compile_code(text: str, processor: Host | None = None) -> bytes:
    """Compile a module to what `loader.load` takes: an image, or the object file where this process takes no images."""
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
        llvm = _llvm()
        builder = llvm.JITLibraryBuilder().add_object_img(data).add_current_process()
        with _lock:
            try:
                self._library = builder.link(_linker(), self._name)
            except RuntimeError as error:
                raise InternalError(f"LLVM cannot load an object file: {error}") from error

    def address(self, name: str) -> int:
        """Return the address of a function."""
        with _lock:
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
def _llvm() -> Any:
    """Import llvmlite on first use: it takes 40 ms, which `import monotile` must not cost."""
    import llvmlite.binding as llvm

    with _lock:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
    return llvm


@cache
def _target_machine(processor: Host) -> Any:
    # Position-independent code in the small model reaches its constants relative to the program counter, as operands
    # of the arithmetic; the JIT's default large model would load the address of each one first.
    llvm = _llvm()
    if processor.triple != host().triple:  # another architecture, whose text is asked for
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
    return llvm.Target.from_triple(processor.triple).create_target_machine(
        cpu=processor.cpu, features=processor.features, opt=2, reloc="pic", codemodel="small"
    )


@cache
def _linker() -> Any:
    # LLJIT loads an object in 1.1 ms from a cold process, MCJIT in 1.8 ms. JITLink keeps the sections of an object
    # together, which the small code model needs, and is the one linker that is sound on Apple's processors.
    return _llvm().create_lljit_compiler(_target_machine(host()), use_jit_link=True, suppress_errors=True)


def _optimised(text: str, machine: Any) -> Any:
    """Parse and verify a module and run a few passes.

    The emitter writes vector code whose loops are blocked already. LLVM turns its variables into registers and folds
    its arithmetic: the O2 pipeline takes four times as long and gives the same speed.
    """
    llvm = _llvm()
    try:
        module = llvm.parse_assembly(text)
        module.verify()
    except RuntimeError as error:
        raise InternalError(f"LLVM rejects the generated code: {error}") from error
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    passes = llvm.create_new_module_pass_manager()
    passes.add_sroa_pass()
    passes.add_new_gvn_pass()
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    return module
