"""Subscripts of tensors: `t[...]` becomes a load, store or gather; with a slice of run-time length, a view."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..dtypes import int32, int64, uint32
from ..errors import BadIndex, DTypeMismatch, ShapeMismatch, ShapeNotConstant
from ..ir import Tensor, Type, Value
from ..ir.affine import Linear, linear, to_scalar
from ..ir.builder import Builder, ValueOrNumber
from .objects import Span, TensorView

WHOLE = Span(None, None)


@dataclass
class DimIndex:
    """Index of one dimension: `start` alone, `extent` positions from `start`, or a tile of positions."""

    start: Value | None = None
    extent: int | None = None
    tile: Value | None = None
    along: int | None = None  # of a range written as a tile of rank 2: the dimension of that tile it varies along


def read(b: Builder, tensor: Tensor, subscript: Any) -> Value | TensorView:
    """Build a subscript that is read: a view if a slice in it has a run-time length, else a tile."""
    items = _expanded(b, tensor, subscript)
    if any([_has_runtime_length(tensor, n, item) for n, item in enumerate(items)]):
        return _view(b, tensor, items)
    return load(b, tensor, subscript)


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
    order = [d.along for d in dims if d.extent is not None]
    if any(d.tile is not None for d in dims) or order not in ([0, 1], [None] * len(order)):
        _scatter(b, tensor, dims, value)
        return
    shape = tuple(d.extent for d in dims if d.extent is not None)
    b.rank(len(shape))
    tile = _stored_tile(b, tensor, value, shape)
    access = _access(b, tensor, dims)
    b.emit("store", (tile, *access.starts, *access.spans), **access.attrs())


def _scatter(b: Builder, tensor: Tensor, dims: list[DimIndex], value: Any) -> None:
    """Emit a store to any positions; those outside the tensor are not written."""
    indices, shape = _indices(b, dims)
    tile = _stored_tile(b, tensor, value, shape)
    access = _access(b, tensor, [DimIndex(start=index) for index in indices])
    view = {"view": access.view} if access.view else {}
    b.emit("scatter", (tile, *access.starts, *access.spans), tensor=access.tensor, **view)


def _stored_tile(b: Builder, tensor: Tensor, value: Any, shape: tuple[int, ...]) -> Value:
    """Return what is stored: of the tensor's type, and broadcast to the slice it is assigned to."""
    tile = b.value(value, tensor.dtype)
    if tile.dtype.kind != tensor.dtype.kind:
        found = f"{tile.type} does not store into {tensor.name!r}, a tensor of {tensor.dtype}"
        raise b.fail(DTypeMismatch, found, f"cast it: .astype({tensor.name}.dtype)")
    tile = b.cast(tile, tensor.dtype)
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
    access = _access(b, tensor, dims)
    return b.emit("load", (*access.starts, *access.spans), Type(tensor.dtype, shape), **access.attrs()).result


def _indices(b: Builder, dims: list[DimIndex]) -> tuple[list[Value], tuple[int, ...]]:
    """Return an index for each dimension, which broadcast against each other, and the shape they broadcast to."""
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
    return indices, b.broadcast_shape(tuple(indices))


def _gather(b: Builder, tensor: Tensor, dims: list[DimIndex]) -> Value:
    """Emit a gather: every dimension gets an index for each element of the result."""
    indices, shape = _indices(b, dims)
    access = _access(b, tensor, [DimIndex(start=index) for index in indices])
    view = {"view": access.view} if access.view else {}
    operands = (*access.starts, *access.spans)
    return b.emit("gather", operands, Type(tensor.dtype, shape), tensor=access.tensor, **view).result


# ---- views -----------------------------------------------------------------------------------------------------------


@dataclass
class Access:
    """An access in the dimensions of a kernel's tensor: where it starts, and the view in which the starts count."""

    tensor: Tensor
    dims: list[DimIndex]
    view: tuple[int, ...]  # dimensions that are views
    spans: tuple[Value, ...]  # origin and length of each of them

    @property
    def starts(self) -> tuple[Value, ...]:
        return tuple(_start(d) for d in self.dims)

    def attrs(self) -> dict[str, Any]:
        """Return the attributes of a load or store."""
        view = {"view": self.view} if self.view else {}
        extents = tuple(d.extent for d in self.dims)
        return {"tensor": self.tensor, "extents": extents, "checked": (True,) * self.tensor.rank, **view}


def _access(b: Builder, tensor: Tensor, dims: list[DimIndex]) -> Access:
    if not isinstance(tensor, TensorView):
        return Access(tensor, dims, (), ())
    assert tensor.base is not None
    shown = iter(dims)
    full = [next(shown) if span.at is None else DimIndex(start=span.at) for span in tensor.spans]
    axes = tuple(axis for axis, span in enumerate(tensor.spans) if span.origin is not None)
    ends = (end for axis in axes for end in tensor.spans[axis][:2])
    return Access(tensor.base, full, axes, tuple(b.value(end) for end in ends if end is not None))


def length(b: Builder, tensor: Tensor, n: int) -> ValueOrNumber:
    """Return the length of a tensor or view along a dimension."""
    if not isinstance(tensor, TensorView):
        return b.dim(tensor, n)
    assert tensor.base is not None
    axis = _shown_axes(tensor)[n]
    found = tensor.spans[axis].length
    return b.dim(tensor.base, axis) if found is None else found


def _shown_axes(tensor: Tensor) -> list[int]:
    """Return the dimensions of the kernel's tensor that a view of it has, too."""
    if not isinstance(tensor, TensorView):
        return list(range(tensor.rank))
    return [axis for axis, span in enumerate(tensor.spans) if span.at is None]


def _has_runtime_length(tensor: Tensor, n: int, item: Any) -> bool:
    if not isinstance(item, slice) or item.step is not None or item.start is item.stop is None:
        return False
    ends = (0 if item.start is None else item.start), (tensor.dims[n] if item.stop is None else item.stop)
    if not all(isinstance(e, int | str) or (isinstance(e, Value) and e.dtype.is_int and not e.shape) for e in ends):
        return False  # which is an error
    low, high = (Linear(e) if isinstance(e, int) else linear(e) if isinstance(e, Value) else None for e in ends)
    return low is None or high is None or not (high - low).is_const


def _view(b: Builder, tensor: Tensor, items: list[Any]) -> TensorView:
    """Build a view of a tensor or of a view. Its ends are clamped: it cannot reach outside what it is a view of."""
    base = tensor.base if isinstance(tensor, TensorView) and tensor.base is not None else tensor
    spans = list(tensor.spans) if isinstance(tensor, TensorView) else [WHOLE] * tensor.rank
    dims: list[str | int] = []
    for n, (axis, item) in enumerate(zip(_shown_axes(tensor), items, strict=True)):
        if isinstance(item, slice):
            if item.start is not None or item.stop is not None or item.step is not None:
                spans[axis] = _slice_span(b, tensor, n, item, spans[axis])
            shown = spans[axis].length
            dims.append(tensor.dims[n] if shown is None else shown if isinstance(shown, int) else f"{tensor.name}:{n}")
            continue
        at = _integer_index(b, tensor, item)
        if at.shape:
            found = f"a tile of positions beside a slice of run-time length, in a subscript of {tensor.name!r}"
            raise b.fail(BadIndex, found, f"make the view first, then load: part = {tensor.name}[start : end]")
        spans[axis] = spans[axis]._replace(at=at)
    return TensorView(base.name, base.index, base.dtype, tuple(dims), base=base, spans=tuple(spans))


def _slice_span(b: Builder, tensor: Tensor, n: int, item: slice, outer: Span) -> Span:
    """Return what a slice shows of a dimension that shows `outer`."""
    if item.step is not None:
        raise b.fail(
            BadIndex, "slices with a step are not supported", "take every element, or give a tile of positions"
        )
    most = length(b, tensor, n)
    for end in (item.start, item.stop):
        if end is not None and _integer_index(b, tensor, end).shape:
            raise b.fail(BadIndex, "a slice begins and ends at single positions", f"write {tensor.name}[rows]")
    first = 0 if item.start is None else _clamped(b, item.start, most)
    end = most if item.stop is None else _clamped(b, item.stop, most)
    count = _extremum(b, "max", _sum(b, "sub", end, first), 0) if first != 0 else end
    origin = first if outer.origin is None else _sum(b, "add", outer.origin, first)
    for value, hint in ((origin, "origin"), (count, "length")):
        if isinstance(value, Value) and not value.hint:
            value.hint = f"{tensor.name}_{hint}"
    return Span(origin, count)


def _clamped(b: Builder, end: ValueOrNumber, most: ValueOrNumber) -> ValueOrNumber:
    """Clamp the end of a slice between 0 and a length."""
    if end == 0:
        return 0
    found = _extremum(b, "min", _extremum(b, "max", end, 0), most)
    return b.cast(found, int32) if isinstance(found, Value) else found


def _extremum(b: Builder, kind: str, x: ValueOrNumber, y: ValueOrNumber) -> ValueOrNumber:
    if isinstance(x, Value) or isinstance(y, Value):
        return b.binary(kind, x, y)
    return max(x, y) if kind == "max" else min(x, y)


def _sum(b: Builder, kind: str, x: ValueOrNumber, y: ValueOrNumber) -> ValueOrNumber:
    if isinstance(x, Value) or isinstance(y, Value):
        return b.binary(kind, x, y)
    return x + y if kind == "add" else x - y


# ---- subscripts ------------------------------------------------------------------------------------------------------


def _expanded(b: Builder, tensor: Tensor, subscript: Any) -> list[Any]:
    """Return one item of a subscript per dimension."""
    items = list(subscript) if isinstance(subscript, tuple) else [subscript]
    dots = [n for n, item in enumerate(items) if item is Ellipsis]
    if dots:
        at = dots[0]
        items[at : at + 1] = [slice(None)] * (tensor.rank - len(items) + 1)
    if len(items) > tensor.rank:
        found = f"{tensor.name!r} has {tensor.rank} dimensions, indexed with {len(items)}"
        raise b.fail(BadIndex, found, "drop the extra subscripts")
    return items + [slice(None)] * (tensor.rank - len(items))


def _parse_subscript(b: Builder, tensor: Tensor, subscript: Any) -> list[DimIndex]:
    items = _expanded(b, tensor, subscript)
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
        cure = f"store into a view: part = {tensor.name}[start : end], then part[rows] = x"
        raise b.fail(ShapeNotConstant, f"the length of this slice of {tensor.name!r} is not constant", cure)
    return DimIndex(start=start, extent=b.side(extent.const))
