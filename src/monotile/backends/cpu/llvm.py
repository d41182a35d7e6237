"""llvmlite, loaded on first use: it takes 40 ms, which `import monotile` must not cost."""

from __future__ import annotations

import os
import threading
from functools import cache
from typing import Any, NamedTuple

# llvmlite locks single calls, not the sequences of calls made here.
lock = threading.RLock()

if hasattr(os, "register_at_fork"):
    # A child must not inherit LLVM in the middle of another thread's work.
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


class Host(NamedTuple):
    """A processor that code is compiled for, and the LLVM that compiles it; part of every key in the disk cache."""

    triple: str
    cpu: str
    features: str
    llvm: str
    llvmlite: str


@cache
def binding() -> Any:
    """Import and initialise llvmlite's binding."""
    import llvmlite.binding as llvm

    with lock:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
    return llvm


def detect_host() -> Host:
    """Ask LLVM for the processor this process runs on."""
    import llvmlite

    llvm = binding()
    with lock:
        return Host(
            triple=llvm.get_process_triple(),
            cpu=llvm.get_host_cpu_name(),
            features=llvm.get_host_cpu_features().flatten(),
            llvm=".".join(str(number) for number in llvm.llvm_version_info),
            llvmlite=llvmlite.__version__,
        )
