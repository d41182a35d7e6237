"""AMX instructions: tile registers of 16 rows x 64 bytes, and products of two of them that are added to a third.

A tile of sums is 16 rows x 16 lanes of float32. One instruction adds the products of 32 steps: A has the 32 bfloat16 of
each row side by side, B has 16 words of two steps for each lane. With bytes it is 64 steps, words of four, and int32
sums. All eight registers have the full size; tiles at an edge are padded in scratch. Of bfloat16, inputs and results
below 2^-126 count as zero.
"""

from __future__ import annotations

from dataclasses import dataclass

from .emit import Emitter, Index

ROWS = 16  # of a tile
LANES = 16  # float32 of a row
BYTES = 64  # of a row
REGISTERS = 8


@dataclass(frozen=True)
class Product:
    """An instruction that multiplies tiles: `group` neighbours along the contraction share a word of 32 bits."""

    intrinsic: str
    element: str
    group: int
    sums: str  # their type

    @property
    def steps(self) -> int:
        """Return the positions of the contraction that one instruction takes."""
        return self.group * ROWS

    @property
    def tile(self) -> int:
        """Return the elements of a tile."""
        return self.steps * ROWS


BFLOAT16 = Product("llvm.x86.tdpbf16ps", "i16", 2, "float")
# Of bytes, by the types of the operands with the rows (A) and with the lanes (B).
BYTE_PRODUCTS = {
    (a, b): Product(f"llvm.x86.tdpb{'su'[a == 'uint8']}{'su'[b == 'uint8']}d", "i8", 4, "i32")
    for a in ("int8", "uint8")
    for b in ("int8", "uint8")
}

# The operand of LDTILECFG: palette 1, then bytes per row and rows of each register.
CONFIGURATION = bytes([1, *[0] * 15, *(REGISTERS * [BYTES, 0]), *[0] * 16, *(REGISTERS * [ROWS]), *[0] * 8])


def constants() -> str:
    """Return the module's constant that `configure` loads."""
    data = "".join(f"\\{byte:02X}" for byte in CONFIGURATION)
    return f'@tile_configuration = private constant [64 x i8] c"{data}", align 64\n'


def configure(e: Emitter) -> None:
    """Give every register its size. A program does it once: it takes no longer than a few products."""
    e.call("void", "llvm.x86.ldtilecfg", ("ptr", "@tile_configuration"))


def release(e: Emitter) -> None:
    """Return the registers to their initial state, which the system need not save when it switches threads."""
    e.call("void", "llvm.x86.tilerelease")


def zero(e: Emitter, register: int) -> None:
    e.call("void", "llvm.x86.tilezero", ("i8", str(register)))


def load(e: Emitter, register: int, pointer: str, stride_bytes: Index) -> None:
    """Load 16 rows of 64 bytes."""
    e.call("void", "llvm.x86.tileloadd64", ("i8", str(register)), ("ptr", pointer), ("i64", str(stride_bytes)))


def store(e: Emitter, register: int, pointer: str, stride_bytes: Index) -> None:
    e.call("void", "llvm.x86.tilestored64", ("i8", str(register)), ("ptr", pointer), ("i64", str(stride_bytes)))


def add_products(e: Emitter, product: Product, sums: int, a: int, b: int) -> None:
    e.call("void", product.intrinsic, *(("i8", str(register)) for register in (sums, a, b)))
