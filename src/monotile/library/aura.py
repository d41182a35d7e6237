"""The rotation and the levels of the aura formats: both follow from the size of a row, and nothing is stored for them.

A row is rotated by random signs and a fast Hadamard transform, so that the coordinates of its unit vector are all
distributed alike, whatever they were. They are then quantised to the levels that are best for that distribution."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..dtypes import bfloat16, to_numpy
from ..errors import BadOption

Array = npt.NDArray[Any]
GRID = 1 << 15
ITERATIONS = 4000


@cache
def rotation(size: int) -> Array:
    """Return the orthogonal matrix R (size, size), float32: x R^T is the rotated row. Blocks are powers of two, the
    greatest first; each is a Hadamard matrix over the square root of its size, times a sign for each column."""
    found, at = np.zeros((size, size)), 0
    while at < size:
        block = 1 << ((size - at).bit_length() - 1)
        hadamard = np.ones((1, 1))
        while len(hadamard) < block:
            hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
        found[at : at + block, at : at + block] = hadamard / np.sqrt(block)
        at += block
    return (found * signs(size)).astype(np.float32)


def signs(size: int) -> Array:
    """Return the sign of each column: the lowest bit of its number, mixed by splitmix64."""
    z = (np.arange(1, size + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return 1.0 - 2.0 * ((z ^ (z >> np.uint64(31))) & np.uint64(1)).astype(np.float64)


@cache
def levels(size: int, bits: int) -> tuple[float, ...]:
    """Return the 2^bits Lloyd-Max levels of a coordinate of a random unit vector, rising. Its density is
    (1 - x^2)^((size - 3) / 2); below 3 numbers a row, that of 3 stands for it. Levels are rounded to 8 significant
    bits, so that they are the same numbers in every type that kernels multiply."""
    count, power = 2**bits, (max(size, 3) - 3) / 2
    reach = min(1.0, 12.0 / np.sqrt(max(size, 3)))
    edges = np.linspace(-reach, reach, GRID + 1)
    x = (edges[1:] + edges[:-1]) / 2
    density = np.power(np.maximum(1.0 - x * x, 0.0), power)
    mass, moment = (np.concatenate([[0.0], np.cumsum(density * f)]) for f in (1.0, x))
    spread = np.concatenate([[0.0], np.cumsum(np.cbrt(density))])  # the best spacing of many levels
    found = np.interp((np.arange(count) + 0.5) / count, spread / spread[-1], edges)
    for _ in range(ITERATIONS):
        bounds = np.concatenate([[-reach], (found[1:] + found[:-1]) / 2, [reach]])
        below, first = np.interp(bounds, edges, mass), np.interp(bounds, edges, moment)
        better = np.diff(first) / np.maximum(np.diff(below), 1e-300)
        moved, found = np.abs(better - found).max(), better
        if moved < 1e-9 * reach:
            break
    found = (found - found[::-1]) / 2  # the density is even
    return tuple(found.astype(to_numpy(bfloat16)).astype(np.float32).tolist())


def pack(codes: Array, bits: int) -> Array:
    """Pack codes (..., size) into little-endian words of 32 bits."""
    size = codes.shape[-1]
    flat = np.unpackbits(codes[..., None].astype(np.uint8), axis=-1, bitorder="little", count=bits)
    flat = flat.reshape(*codes.shape[:-1], size * bits)
    width = -(-size * bits // 32)
    padded = np.zeros((*codes.shape[:-1], width * 32), np.uint8)
    padded[..., : size * bits] = flat
    return np.packbits(padded, axis=-1, bitorder="little").view("<u4").astype(np.uint32)


def unpack(words: Array, size: int, bits: int) -> Array:
    """Return the codes of packed rows."""
    flat = np.unpackbits(np.ascontiguousarray(words.astype("<u4")).view(np.uint8), axis=-1, bitorder="little")
    parts = flat[..., : size * bits].reshape(*words.shape[:-1], size, bits)
    return np.packbits(parts, axis=-1, bitorder="little")[..., 0]


def no_norm() -> BadOption:
    """The error for a row whose norm cannot be stored."""
    return BadOption("x has a row whose norm is above the largest float32, which aura stores; scale x, or use int8")
