"""Find a C++ compiler, and build a shared library of a shader and the runtime, once per shader and compiler."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ....runtime import cache as disk
from . import instrument, shader
from .report import NoCompiler, ShaderError

HERE = Path(__file__).parent
FILE = "shader.metal"
RUNTIME = ("runtime.cpp", "memory.cpp", "numbers.cpp")
METAL_HEADERS = [
    "metal_stdlib",
    "metal_simdgroup",
    "metal_simdgroup_matrix",
    "metal_math",
    "metal_compute",
    "metal_atomic",
    "metal_common",
    "metal_types",
    "metal_integer",
    "metal_relational",
    "metal_geometric",
    "metal_numeric",
    "metal_limits",
    "metal_type_traits",
    "metal_pack",
    "metal_matrix",
]
COMMON = [
    "-std=c++20",
    "-fPIC",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-sanitize=all",
    "-fno-stack-protector",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-w",
]
# Metal has no double: literals are float, and half and bfloat round after every operation.
SHADER = [
    "-O1",
    "-fno-unroll-loops",
    "-fno-vectorize",
    "-fno-slp-vectorize",
    "-gline-tables-only",
    "-nostdinc",
    "-nostdinc++",
    "-ftrivial-auto-var-init=pattern",
    "-fno-sanitize-trap=all",
    "-fsanitize=kernel-address,array-bounds,alignment,integer-divide-by-zero",
    "-mllvm",
    "-asan-instrumentation-with-call-threshold=0",
    "-mllvm",
    "-asan-stack=0",
    "-mllvm",
    "-asan-globals=0",
    "-mllvm",
    "-asan-opt=0",
    "-mllvm",
    "-asan-kernel-mem-intrinsic-prefix=1",
    "-Xclang",
    "-cl-single-precision-constant",
    "-Xclang",
    "-ffloat16-excess-precision=none",
    "-Xclang",
    "-fbfloat16-excess-precision=none",
]
DEFINES = ("-D__METAL__", "-D__METAL_VERSION__=310", "-D__HAVE_BFLOAT__", "-D__METAL_MACOS__")
DIRECTIVE = re.compile(r"^\s*#\s*(?!include|pragma)|\b_Pragma\b|__\w+__", re.M)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|^\s*#\s*(?:include|pragma)[^\n]*", re.S | re.M)
UNROLL = re.compile(r'_Pragma\s*\(\s*"[^"]*unroll[^"]*"\s*\)|#pragma\s+(?:clang\s+loop\s+)?unroll[^\n]*')


@dataclass(frozen=True)
class Compiler:
    """`command` compiles C++; `linker` turns objects into a shared library."""

    command: tuple[str, ...]
    linker: tuple[str, ...]
    name: str


@dataclass(frozen=True)
class BuiltKernel:
    library: bytes
    kernel: shader.ShaderKernel
    variables: tuple[str, ...]


def compiler() -> Compiler:
    """Return the compiler to use, or raise an error that says how to get one."""
    found = _find_compiler()
    if found is None:
        raise NoCompiler(
            "running Metal kernels on the CPU takes a C++ compiler of the clang family, and there is neither "
            "the package ziglang nor clang++ on the path: run `pip install 'monotile[metal]'`"
        )
    return found


def why_not() -> str | None:
    """Return why kernels cannot be run here, with the cure; None if they can."""
    try:
        compiler()
    except NoCompiler as error:
        return str(error)
    return None


@cache
def _find_compiler() -> Compiler | None:
    mac = sys.platform == "darwin"
    if importlib.util.find_spec("ziglang") is not None:
        zig = _zig()
        version = _run([*zig, "version"], "").strip()
        command = (*zig, "c++", "-mcpu=baseline")
        # Linking with `zig c++` would first build a C++ library, which takes minutes and is not needed.
        linker = (*command, "-dynamiclib") if mac else (*zig, "ld.lld", "-shared")
        return Compiler(command, linker, f"zig {version}")
    clang = shutil.which("clang++")
    if clang is None:
        return None
    version = _run([clang, "--version"], "").splitlines()[0]
    return Compiler(
        (clang,),
        (clang, "-dynamiclib" if mac else "-shared", "-undefined", "dynamic_lookup")[: 4 if mac else 2],
        version,
    )


def _zig() -> tuple[str, ...]:
    """Return the compiler's executable: `python -m ziglang` would start Python for each call, which takes as long."""
    found = importlib.util.find_spec("ziglang")
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        if (Path(folder) / "zig").is_file():
            return (str(Path(folder) / "zig"),)
    return sys.executable, "-m", "ziglang"


def build(
    source: str, kernel: str, constants: Mapping[int, bool | int | float], fast_math: bool = False
) -> BuiltKernel:
    """Return the shared library that runs a kernel, from the cache or built now."""
    chosen = compiler()
    parsed = _parsed(source, chosen)
    found = parsed.kernels.get(kernel)
    if found is None:
        known = ", ".join(sorted(parsed.kernels)) or "none"
        raise ShaderError(f"the shader has no kernel {kernel!r}; its kernels are: {known}")
    text = "\n".join(
        (
            '#include "metal_shim.h"',
            shader.constants_text(constants),
            f'# 1 "{FILE}"',
            parsed.text,
            shader.entry_text(found),
        )
    )
    flags = (*SHADER, "-ffast-math") if fast_math else SHADER
    key = disk.fingerprint(_runner_fingerprint(chosen), *flags, text)
    library = disk.load(key, "metal")
    if library is None:
        library = _compile(text, chosen, flags)
        disk.store(key, "metal", library)
    return BuiltKernel(library, found, parsed.variables)


def kernel_names(source: str) -> tuple[str, ...]:
    """Return the names of a shader's kernels."""
    return tuple(_parsed(source, compiler()).kernels)


@cache
def _parsed(source: str, chosen: Compiler) -> shader.ParsedShader:
    """Expand a shader's macros and parse it. Metal's own headers are left out; the shim takes their place later."""
    key = disk.fingerprint(_runner_fingerprint(chosen), "preprocessed", source)
    kept = None if DIRECTIVE.search(source) else _without_comments(source).encode()
    kept = kept or disk.load(key, "metal-text")
    if kept is None:
        with tempfile.TemporaryDirectory(prefix="monotile-") as name:
            folder = Path(name)
            for header in METAL_HEADERS:
                (folder / header).touch()
            (folder / FILE).write_text(UNROLL.sub("", source))
            command = [
                *chosen.command,
                "-E",
                "-x",
                "c++",
                "-std=c++20",
                "-nostdinc",
                "-nostdinc++",
                "-w",
                "-I.",
                *DEFINES,
            ]
            kept = _run([*command, FILE], name).encode()
        disk.store(key, "metal-text", kept)
    return shader.read(kept.decode())


def _without_comments(source: str) -> str:
    """Do what preprocessing does to a shader without macros; line numbers stay."""
    return COMMENT.sub(lambda match: " " + "\n" * match[0].count("\n"), source)


def _compile(text: str, chosen: Compiler, flags: Sequence[str]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="monotile-") as name:
        folder = Path(name)
        (folder / "kernel.cpp").write_text(text)
        command = [*chosen.command, *COMMON]
        _run([*command, *flags, *DEFINES, f"-I{HERE}", "-S", "-emit-llvm", "kernel.cpp", "-o", "kernel.ll"], name)
        llvm = (folder / "kernel.ll").read_text()
        (folder / "lines.ll").write_text(instrument.add_lines(llvm, FILE))
        _run([*chosen.command, "-fPIC", "-O0", "-w", "-fno-sanitize=all", "-c", "lines.ll", "-o", "kernel.o"], name)
        objects = ["kernel.o"]
        for part in RUNTIME:
            (folder / f"{part}.o").write_bytes(_runtime_object(part, chosen))
            objects.append(f"{part}.o")
        _run([*chosen.linker, *objects, "-o", "kernel.so"], name)
        return (folder / "kernel.so").read_bytes()


def _runtime_object(part: str, chosen: Compiler) -> bytes:
    key = disk.fingerprint(_runner_fingerprint(chosen), part)
    kept = disk.load(key, "metal-object")
    if kept is None:
        with tempfile.TemporaryDirectory(prefix="monotile-") as name:
            target = Path(name) / "part.o"
            _run([*chosen.command, *COMMON, "-O2", "-c", str(HERE / part), "-o", str(target)], name)
            kept = target.read_bytes()
        disk.store(key, "metal-object", kept)
    return kept


@cache
def _runner_fingerprint(chosen: Compiler) -> str:
    files = sorted(path for path in HERE.iterdir() if path.suffix in (".py", ".h", ".cpp"))
    return disk.fingerprint(chosen.name, platform.machine(), sys.platform, *(path.read_bytes() for path in files))


def _run(command: Sequence[str], folder: str) -> str:
    # Zig's own cache would keep every object and only grow; what is worth keeping is in monotile's cache.
    caches = {name: folder for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR") if folder}
    done = subprocess.run(command, cwd=folder or None, env={**os.environ, **caches}, capture_output=True, text=True)
    if done.returncode:
        shown = "\n".join(line for line in done.stderr.splitlines() if "-Wunused-command-line" not in line)
        raise ShaderError(f"the shader does not compile:\n{shown[:4000]}")
    return done.stdout
