"""What the compiler needs to know of the processor: how wide a vector is and how big a register block may be."""

from __future__ import annotations

from dataclasses import dataclass

from .host import Host


@dataclass(frozen=True)
class Target:
    """`lanes` float32s in a vector; a dot holds `rows` x `vectors` accumulators in registers."""

    name: str
    lanes: int
    rows: int
    vectors: int
    registers: int  # that hold a vector
    bfloat16_pairs: bool = False  # an instruction that adds two products of bfloat16 to a float32

    @property
    def scales(self) -> bool:
        """Whether one instruction takes a number apart and one scales by a power of two, for whole vectors."""
        return self.name == "avx512"

    @property
    def accumulators(self) -> int:
        return self.rows * self.vectors

    @property
    def panel(self) -> int:
        """Lanes a register block covers."""
        return self.lanes * self.vectors

    def vectors_for(self, rows: int) -> int:
        """How wide a register block of so many rows may be at most: accumulators, a row of vectors and a broadcast."""
        return max(1, (self.registers - 1) // (rows + 1))


def target(host: Host) -> Target:
    """Accumulators, one row of lane vectors and a broadcast must fit the registers."""
    features = host.features.split(",")
    if "+avx512f" in features and "+avx512vl" in features and "+avx512bw" in features:
        return Target("avx512", lanes=16, rows=8, vectors=2, registers=32, bfloat16_pairs="+avx512bf16" in features)
    if "+avx2" in features and "+fma" in features:
        return Target("avx2", lanes=8, rows=4, vectors=2, registers=16)
    if host.triple.startswith(("aarch64", "arm64")):
        return Target("neon", lanes=4, rows=4, vectors=4, registers=32)
    return Target("baseline", lanes=4, rows=2, vectors=2, registers=16)
