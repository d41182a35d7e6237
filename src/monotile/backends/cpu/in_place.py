"""Tiles that dots read in place: from their tensor instead of a copy in scratch, where memory holds them alike."""

from __future__ import annotations

from collections.abc import Callable

from ...ir import Op
from .emit import Emitter, Index
from .evaluate import Evaluator
from .vectors import BYTES

# Of L1 on x86-64: pages of 4 KiB let a set follow from an address before it is translated. Rows of a float32 tile that
# far apart made prefill 1.13 to 1.29 times as long as a copy of the tile did (Zen 5, AVX-512 and AVX2, D 64 and 128).
CACHE_WAY_BYTES = 4096


def read_in_place(ev: Evaluator, load: Op, inside: str | None, copy: Callable[[], None], *, stepped: bool) -> None:
    """Read a tile from its tensor if memory holds it as scratch would, or else its copy; the kernel tests strides and
    bounds. Rows that dots step over one at a time may be any distance apart that does not put them in the same sets of
    the caches."""
    e, tile, buffer = ev.e, ev.tensors.tiles[load], ev.buffers[load.result]
    tests = [inside] if inside is not None else []
    differing = [(d.axis, d.stride) for d in tile.dims if d.axis and d.stride != buffer.strides[d.axis]]
    distances = {axis: s for axis, s in differing if stepped and axis is not buffer.lane}
    tests += [e.compare("eq", s, buffer.strides[axis]) for axis, s in differing if axis not in distances]
    tests += [_in_different_sets(e, e.mul(s, BYTES[tile.element])) for s in distances.values()]
    in_place = e.all(tests)
    if in_place is None:
        buffer.pointer = tile.base
    else:
        e.when(in_place, lambda: None, copy)
        buffer.pointer = e.op(f"select i1 {in_place}, ptr {tile.base}, ptr {buffer.name}")
        distances = {
            axis: e.op(f"select i1 {in_place}, i64 {s}, i64 {buffer.strides[axis]}") for axis, s in distances.items()
        }
    buffer.strides |= distances


def _in_different_sets(e: Emitter, distance: Index) -> str:
    """Return the condition that rows so many bytes apart do not share a set: at multiples of CACHE_WAY_BYTES, as in
    (B, N, H, D) where H x D is 1024 float32s, a set has room for one line of each of 8 or 12 rows."""
    return e.op(f"icmp ne i64 {e.op(f'and i64 {distance}, {CACHE_WAY_BYTES - 1}')}, 0")
