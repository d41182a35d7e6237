"""Subscripts of tensors: `t[...]` becomes a load, store or gather."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..dtypes import int64, uint32
from ..errors import BadIndex, DTypeMismatch, ShapeMismatch, ShapeNotConstant
from ..ir import Tensor, Type, Value
from ..ir.affine import Linear, linear, to_scalar
from ..ir.builder import Builder


@dataclass
class DimIndex:
    """Index of one dimension: `start` alone, `extent` positions from `start`, or a tile of positions."""

    start: Value | None = None
    extent: int | None = None
    tile: Value | None = None
    along: int | None = None  # of a range written as a tile of rank 2: the dimension of that tile it varies along


def load(b: Builder, tensor: Tensor, subscript: Any) -> Value:
    dims = _parse_subscript(b, tensor, subscript)
    if any(d.tile is not None for d in dims):
        return _gather(b, tensor, dims)
    value, order = _load_slice(b, tensor, dims), [d.along for d in dims if d.extent is not None]
    if order == [1, 0]:
        return b.trans(value)
    if len(order) == 1 and order[0] is not None:
        return b.expand(value, 1 - order[0])
    return value


def store(b: Builder, tensor: Tensor, subscript: Any, value: Any) -> None:
    dims = _parse_subscript(b, tensor, subscript)
    if any(d.tile is not None or d.along is not None for d in dims):
        cure = "write t[rows, cols] = x with rows = start + arange(n)"
        raise b.fail(BadIndex, "a store goes to runs of positions, not to scattered ones", cure)
    shape = tuple(d.extent for d in dims if d.extent is not None)
    b.rank(len(shape))
    tile = b.value(value, tensor.dtype)
    if tile.dtype.kind != tensor.dtype.kind:
        found = f"{tile.type} does not store into {tensor.name!r}, a tensor of {tensor.dtype}"
        raise b.fail(DTypeMismatch, found, f"cast it: .astype({tensor.name}.dtype)")
    tile = b.cast(tile, tensor.dtype)
    tile = _broadcast_to_load_slice(b, tile, shape)
    operands = (tile, *(_start(d) for d in dims))
    b.emit("store", operands, tensor=tensor, extents=tuple(d.extent for d in dims), checked=(True,) * tensor.rank)


def _broadcast_to_load_slice(b: Builder, tile: Value, shape: tuple[int, ...]) -> Value:
    """Broadcast a stored tile to the slice it is assigned to."""
    if tile.shape == shape:
        return tile
    fits = len(tile.shape) <= len(shape) and all(
        s in (1, t) for s, t in zip(tile.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise b.fail(ShapeMismatch, f"a tile {tile.shape} does not fit the slice {shape}", "make the shapes equal")
    return b.broadcast(tile, shape)


def _start(dim: DimIndex) -> Value:
    assert dim.start is not None
    return dim.start


def _load_slice(b: Builder, tensor: Tensor, dims: list[DimIndex]) -> Value:
    shape = tuple(d.extent for d in dims if d.extent is not None)
    b.rank(len(shape))
    extents = tuple(d.extent for d in dims)
    operands = tuple(_start(d) for d in dims)
    type_ = Type(tensor.dtype, shape)
    return b.emit("load", operands, type_, tensor=tensor, extents=extents, checked=(True,) * tensor.rank).result


def _gather(b: Builder, tensor: Tensor, dims: list[DimIndex]) -> Value:
    """Emit a gather: every dimension gets an index for each element of the result."""
    spread = [d for d in dims if d.extent is not None or d.tile is not None]
    orthogonal = all(d.tile is None or len(d.tile.shape) == 1 for d in spread) and all(d.along is None for d in spread)
    rank = len(spread) if orthogonal else 2
    b.rank(rank)
    indices = []
    for dim in dims:
        if dim.tile is None and dim.extent is None:
            indices.append(_start(dim))
            continue
        index = dim.tile if dim.tile is not None else b.binary("add", _start(dim), b.arange(dim.extent or 1))
        if len(index.shape) == 1 and rank == 2:
            index = b.expand(index, 0 if dim is spread[1] else 1)
        indices.append(index)
    shape = b.broadcast_shape(tuple(indices))
    return b.emit("gather", tuple(indices), Type(tensor.dtype, shape), tensor=tensor).result


def _parse_subscript(b: Builder, tensor: Tensor, subscript: Any) -> list[DimIndex]:
    items = list(subscript) if isinstance(subscript, tuple) else [subscript]
    dots = [n for n, item in enumerate(items) if item is Ellipsis]
    if dots:
        at = dots[0]
        items[at : at + 1] = [slice(None)] * (tensor.rank - len(items) + 1)
    if len(items) > tensor.rank:
        found = f"{tensor.name!r} has {tensor.rank} dimensions, indexed with {len(items)}"
        raise b.fail(BadIndex, found, "drop the extra subscripts")
    items += [slice(None)] * (tensor.rank - len(items))
    flat = any(isinstance(i, Value) and len(i.shape) == 1 for i in items)
    deep = any(isinstance(i, Value) and len(i.shape) == 2 for i in items)
    if deep and (flat or any(isinstance(i, slice) for i in items)):
        cure = "index with x[rows, cols] or with x[rows[:, None], cols[None, :]], not with a mixture"
        raise b.fail(BadIndex, "tiles of rank 2 and other runs in one subscript", cure)
    dims = [_dim_index(b, tensor, n, item) for n, item in enumerate(items)]
    along = [d.along for d in dims if d.along is not None]
    if len(set(along)) != len(along) or (along and any(d.tile is not None for d in dims)):
        dims = [d if d.along is None else DimIndex(tile=items[n]) for n, d in enumerate(dims)]
    return dims


def _dim_index(b: Builder, tensor: Tensor, n: int, item: Any) -> DimIndex:
    if isinstance(item, slice):
        return _slice_index(b, tensor, n, item)
    value = _integer_index(b, tensor, item)
    if not value.shape:
        return DimIndex(start=value)
    form = linear(value)
    if form is not None and value.shape == (1,) and not form.iotas:  # a tile of one position
        return DimIndex(start=to_scalar(b, form, value.dtype), extent=1)
    if form is not None and list(form.iotas.values()) == [1]:
        ((along, _),) = form.iotas.items()
        if all(side == 1 for dim, side in enumerate(value.shape) if dim != along):
            start = to_scalar(b, Linear(form.const, form.terms), value.dtype)
            return DimIndex(start=start, extent=value.shape[along], along=along if len(value.shape) == 2 else None)
    return DimIndex(tile=value)


def _integer_index(b: Builder, tensor: Tensor, item: Any) -> Value:
    """Check a subscript or the end of a slice: an integer, and not negative, since nothing counts from the end."""
    if item is None:
        cure = f"load first, then add the dimension: {tensor.name}[rows][:, None]"
        raise b.fail(BadIndex, f"None in a subscript of the tensor {tensor.name!r}", cure)
    if isinstance(item, bool) or not isinstance(item, int | Value):
        found = f"a subscript of {tensor.name!r} is of type {type(item).__name__}"
        raise b.fail(BadIndex, found, "use a position, a slice, or a tile such as start + arange(n)")
    if isinstance(item, int) and item < 0:
        cure = f"count from the end with {tensor.name}.shape"
        raise b.fail(BadIndex, f"a negative position in a subscript of {tensor.name!r}", cure)
    value = b.value(item)
    if not value.dtype.is_int:
        cure = "use whole numbers: .astype(int32)" if value.dtype.is_float else "choose with where(condition, a, b)"
        raise b.fail(BadIndex, f"a subscript of {tensor.name!r} has type {value.type}", cure)
    return b.cast(value, int64) if value.dtype is uint32 else value  # positions are signed


def _slice_index(b: Builder, tensor: Tensor, n: int, item: slice) -> DimIndex:
    length = tensor.dims[n]
    if item.step is not None:
        cure = "take every element, or give a tile of positions"
        raise b.fail(BadIndex, "slices with a step are not supported", cure)
    start = _integer_index(b, tensor, 0 if item.start is None else item.start)
    stop = None if item.stop is None else _integer_index(b, tensor, item.stop)
    if start.shape or (stop is not None and stop.shape):
        raise b.fail(BadIndex, "a slice begins and ends at single positions", f"write {tensor.name}[rows]")
    low = linear(start)
    if stop is None:
        if not isinstance(length, int) or low is None or not low.is_const:
            found = f"dimension {n} of {tensor.name!r} has a length known only at run time"
            cure = "name the dimension after a Const, or write start + arange(n) in place of the slice"
            raise b.fail(ShapeNotConstant, found, cure)
        return DimIndex(start=start, extent=b.side(length - low.const))
    high = linear(stop)
    extent = high - low if low is not None and high is not None else None
    if extent is None or not extent.is_const:
        cure = "write start : start + n with n constant, or start + arange(n)"
        raise b.fail(ShapeNotConstant, f"the length of this slice of {tensor.name!r} is not constant", cure)
    return DimIndex(start=start, extent=b.side(extent.const))
