"""AMX without AMX: LLVM text whose tile instructions are calls of functions that do what the manual says.

The text that a processor with AMX runs is run here, word for word, but for the names of the intrinsics and one more
argument: the tile registers, which are memory of the kernel. Registers that were not configured as the compiler does it
trap. The sums are those of the manual: of the 32 steps of an instruction the even and the odd ones are added by FMAs,
both sums to each other, and that to the register; what is below 2^-126 is zero before and after each operation. Sums
of bytes are int32 and exact.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from monotile import ir
from monotile.backends.cpu import amx, jit
from monotile.backends.cpu import backend as cpu_backend
from monotile.backends.cpu.backend import HEADER, CpuBackend, CpuProgram
from monotile.backends.cpu.compiler import to_llvm
from monotile.backends.cpu.host import host
from monotile.backends.cpu.target import target, why_not

BYTE_NAMES = ("tdpbssd", "tdpbsud", "tdpbusd", "tdpbuud")
NAMES = ("ldtilecfg", "tilerelease", "tilezero", "tileloadd64", "tilestored64", "tdpbf16ps", *BYTE_NAMES)
SHARED = re.compile(r"( @part\d+)\(")  # functions that shared parts became: they get the registers too


def emulated(text: str, scratch_bytes: int = 0) -> str:
    """Replace the tile instructions of a module. Scratch is full of NaN when a program begins."""
    lines = []
    for line in text.split("\n"):
        name = next((n for n in NAMES if f"@llvm.x86.{n}(" in line), None)
        if name is not None and line.startswith("declare"):
            continue
        if name is not None:
            line = line.replace(f"@llvm.x86.{name}(", f"@emulated_{name}(ptr %registers, ").replace(", )", ")")
        line = SHARED.sub(r"\1(ptr %registers, ", line).replace(", )", ")")
        lines.append(line)
        if line == "entry:" and "@kernel(" in lines[-2]:
            lines.append("  %registers = alloca [8256 x i8], align 64")
            lines.append(f"  call void @llvm.memset.p0.i64(ptr %scratch, i8 255, i64 {scratch_bytes}, i1 false)")
    expected = ", ".join(f"i8 {byte}" for byte in amx.CONFIGURATION)
    functions = FUNCTIONS.replace("EXPECTED", expected) + "".join(map(_byte_products, BYTE_NAMES))
    lines += [line for line in functions.split("\n") if not _declared(line, lines)]
    return "\n".join(lines)


def _declared(line: str, lines: list[str]) -> bool:
    return line.startswith("declare") and line in lines


def _byte_products(name: str) -> str:
    """Return the function that adds products of bytes, signed (s) or not (u), four of each word."""
    left, right = (("ashr" if letter == "s" else "lshr") for letter in name[4:6])
    lines, total = [], "%sum"
    for n in range(4):
        for operand, shift in (("x", left), ("y", right)):
            lines.append(f"  %{operand}_{n}_up = shl <16 x i32> %{operand}, splat (i32 {24 - 8 * n})")
            lines.append(f"  %{operand}_{n} = {shift} <16 x i32> %{operand}_{n}_up, splat (i32 24)")
        lines.append(f"  %product_{n} = mul <16 x i32> %x_{n}, %y_{n}")
        lines.append(f"  %sum_{n} = add <16 x i32> {total}, %product_{n}")
        total = f"%sum_{n}"
    return BYTE_PRODUCTS.replace("NAME", name).replace("STEPS", "\n".join(lines))


class EmulatedBackend(CpuBackend):
    """The cpu backend for AMX on a processor that has all of it but the tiles."""

    def __init__(self) -> None:
        super().__init__("avx512-amx")
        self.name = EMULATED

    def why_not(self) -> str | None:
        here = target(host())
        able = here.name.startswith("avx512") and here.bfloat16_pairs
        return None if able else "this processor has no AVX512-BF16"

    def identity(self) -> str:
        return f"emulated {super().identity()}"

    def compile(self, kernel: ir.Kernel) -> Any:
        lowered = to_llvm(kernel, self.processor)
        text = emulated(lowered.text, lowered.scratch_bytes)
        header = HEADER.pack(lowered.scratch_bytes, lowered.longest_first)
        payload = header + jit.compile_code(text, host())
        return CpuProgram(kernel, payload)


REAL, EMULATED = "cpu:avx512-amx", "cpu:emulated-amx"
BACKEND = EMULATED if why_not("avx512-amx") else REAL


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let EMULATED name the backend."""
    plain, emulation = cpu_backend.for_unit, EmulatedBackend()
    monkeypatch.setattr(cpu_backend, "for_unit", lambda unit: emulation if unit == "emulated-amx" else plain(unit))


# Registers 0 to 7 are 1024 bytes each; their configuration follows, all zeros before it is loaded.
FUNCTIONS = """
define internal void @emulated_ldtilecfg(ptr %registers, ptr %configuration) nounwind noinline {
  %there = getelementptr i8, ptr %registers, i64 8192
  %new = load <64 x i8>, ptr %configuration, align 1
  call void @llvm.memset.p0.i64(ptr %registers, i8 0, i64 8192, i1 false)
  store <64 x i8> %new, ptr %there, align 64
  ret void
}
define internal void @emulated_tilerelease(ptr %registers) nounwind noinline {
  call void @llvm.memset.p0.i64(ptr %registers, i8 255, i64 8256, i1 false)
  ret void
}
define internal ptr @emulated_register(ptr %registers, i8 %number) nounwind {
  %there = getelementptr i8, ptr %registers, i64 8192
  %found = load <64 x i8>, ptr %there, align 64
  %same = icmp eq <64 x i8> %found, <EXPECTED>
  %bits = bitcast <64 x i1> %same to i64
  %configured = icmp eq i64 %bits, -1
  %exists = icmp ult i8 %number, 8
  %fine = and i1 %configured, %exists
  br i1 %fine, label %yes, label %no
no:
  call void @llvm.trap()
  unreachable
yes:
  %wide = zext i8 %number to i64
  %offset = mul i64 %wide, 1024
  %register = getelementptr i8, ptr %registers, i64 %offset
  ret ptr %register
}
define internal void @emulated_tilezero(ptr %registers, i8 %number) nounwind noinline {
  %register = call ptr @emulated_register(ptr %registers, i8 %number)
  call void @llvm.memset.p0.i64(ptr %register, i8 0, i64 1024, i1 false)
  ret void
}
define internal void @emulated_rows(ptr %to, i64 %to_stride, ptr %from, i64 %from_stride) nounwind noinline {
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop ]
  %a = mul i64 %i, %from_stride
  %b = mul i64 %i, %to_stride
  %source = getelementptr i8, ptr %from, i64 %a
  %target = getelementptr i8, ptr %to, i64 %b
  %row = load <16 x i32>, ptr %source, align 1
  store <16 x i32> %row, ptr %target, align 1
  %next = add i64 %i, 1
  %more = icmp ult i64 %next, 16
  br i1 %more, label %loop, label %end
end:
  ret void
}
define internal void @emulated_tileloadd64(ptr %registers, i8 %number, ptr %from, i64 %stride) nounwind noinline {
  %register = call ptr @emulated_register(ptr %registers, i8 %number)
  call void @emulated_rows(ptr %register, i64 64, ptr %from, i64 %stride)
  ret void
}
define internal void @emulated_tilestored64(ptr %registers, i8 %number, ptr %to, i64 %stride) nounwind noinline {
  %register = call ptr @emulated_register(ptr %registers, i8 %number)
  call void @emulated_rows(ptr %to, i64 %stride, ptr %register, i64 64)
  ret void
}
define internal <16 x float> @emulated_flush(<16 x float> %x) nounwind alwaysinline {
  %size = call <16 x float> @llvm.fabs.v16f32(<16 x float> %x)
  %least = bitcast <16 x i32> splat (i32 8388608) to <16 x float>
  %small = fcmp olt <16 x float> %size, %least
  %flushed = select <16 x i1> %small, <16 x float> zeroinitializer, <16 x float> %x
  ret <16 x float> %flushed
}
define internal <16 x float> @emulated_fma(<16 x i32> %a, <16 x i32> %b, <16 x float> %sum) nounwind alwaysinline {
  %x = bitcast <16 x i32> %a to <16 x float>
  %y = bitcast <16 x i32> %b to <16 x float>
  %fx = call <16 x float> @emulated_flush(<16 x float> %x)
  %fy = call <16 x float> @emulated_flush(<16 x float> %y)
  %new = call <16 x float> @llvm.fma.v16f32(<16 x float> %fx, <16 x float> %fy, <16 x float> %sum)
  %flushed = call <16 x float> @emulated_flush(<16 x float> %new)
  ret <16 x float> %flushed
}
define internal void @emulated_tdpbf16ps(ptr %registers, i8 %sums, i8 %left, i8 %right) nounwind noinline {
entry:
  %c = call ptr @emulated_register(ptr %registers, i8 %sums)
  %a = call ptr @emulated_register(ptr %registers, i8 %left)
  %b = call ptr @emulated_register(ptr %registers, i8 %right)
  br label %rows
rows:
  %m = phi i64 [ 0, %entry ], [ %m_next, %row_end ]
  %a_row = getelementptr <16 x i32>, ptr %a, i64 %m
  %c_row = getelementptr <16 x float>, ptr %c, i64 %m
  br label %steps
steps:
  %k = phi i64 [ 0, %rows ], [ %k_next, %steps ]
  %even = phi <16 x float> [ zeroinitializer, %rows ], [ %even_next, %steps ]
  %odd = phi <16 x float> [ zeroinitializer, %rows ], [ %odd_next, %steps ]
  %word_at = getelementptr i32, ptr %a_row, i64 %k
  %word = load i32, ptr %word_at, align 4
  %one = insertelement <16 x i32> poison, i32 %word, i64 0
  %x = shufflevector <16 x i32> %one, <16 x i32> poison, <16 x i32> zeroinitializer
  %y_at = getelementptr <16 x i32>, ptr %b, i64 %k
  %y = load <16 x i32>, ptr %y_at, align 64
  %x_even = shl <16 x i32> %x, splat (i32 16)
  %y_even = shl <16 x i32> %y, splat (i32 16)
  %x_odd = and <16 x i32> %x, splat (i32 -65536)
  %y_odd = and <16 x i32> %y, splat (i32 -65536)
  %even_next = call <16 x float> @emulated_fma(<16 x i32> %x_even, <16 x i32> %y_even, <16 x float> %even)
  %odd_next = call <16 x float> @emulated_fma(<16 x i32> %x_odd, <16 x i32> %y_odd, <16 x float> %odd)
  %k_next = add i64 %k, 1
  %more_steps = icmp ult i64 %k_next, 16
  br i1 %more_steps, label %steps, label %row_end
row_end:
  %both = fadd <16 x float> %even_next, %odd_next
  %products = call <16 x float> @emulated_flush(<16 x float> %both)
  %old = load <16 x float>, ptr %c_row, align 64
  %daz = call <16 x float> @emulated_flush(<16 x float> %old)
  %total = fadd <16 x float> %daz, %products
  %new = call <16 x float> @emulated_flush(<16 x float> %total)
  store <16 x float> %new, ptr %c_row, align 64
  %m_next = add i64 %m, 1
  %more_rows = icmp ult i64 %m_next, 16
  br i1 %more_rows, label %rows, label %end
end:
  ret void
}
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
declare void @llvm.trap()
declare <16 x float> @llvm.fabs.v16f32(<16 x float>)
"""
BYTE_PRODUCTS = """
define internal void @emulated_NAME(ptr %registers, i8 %sums, i8 %left, i8 %right) nounwind noinline {
entry:
  %c = call ptr @emulated_register(ptr %registers, i8 %sums)
  %a = call ptr @emulated_register(ptr %registers, i8 %left)
  %b = call ptr @emulated_register(ptr %registers, i8 %right)
  br label %rows
rows:
  %m = phi i64 [ 0, %entry ], [ %m_next, %row_end ]
  %a_row = getelementptr <16 x i32>, ptr %a, i64 %m
  %c_row = getelementptr <16 x i32>, ptr %c, i64 %m
  %old = load <16 x i32>, ptr %c_row, align 64
  br label %steps
steps:
  %k = phi i64 [ 0, %rows ], [ %k_next, %steps ]
  %sum = phi <16 x i32> [ %old, %rows ], [ %sum_3, %steps ]
  %word_at = getelementptr i32, ptr %a_row, i64 %k
  %word = load i32, ptr %word_at, align 4
  %one = insertelement <16 x i32> poison, i32 %word, i64 0
  %x = shufflevector <16 x i32> %one, <16 x i32> poison, <16 x i32> zeroinitializer
  %y_at = getelementptr <16 x i32>, ptr %b, i64 %k
  %y = load <16 x i32>, ptr %y_at, align 64
STEPS
  %k_next = add i64 %k, 1
  %more_steps = icmp ult i64 %k_next, 16
  br i1 %more_steps, label %steps, label %row_end
row_end:
  store <16 x i32> %sum_3, ptr %c_row, align 64
  %m_next = add i64 %m, 1
  %more_rows = icmp ult i64 %m_next, 16
  br i1 %more_rows, label %rows, label %end
end:
  ret void
}
"""
