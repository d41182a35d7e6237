"""Runs Gluon modules in Python, for tests of what they compute on a machine without a GPU.

Producer and consumers are threads, tiles are torch tensors, and barriers block. Copies are done when they are issued
and dots when they are waited for, as late as a GPU may do them: a slot that is released too early shows as a wrong
result, a missing arrival as a deadlock. Layouts of registers are ignored. Shared memory is modelled by
gluon_shared_memory.py: what reads or writes tiles as a GPU must not is an error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from backends.gluon_shared_memory import Allocation, SharedTile, TileLayout, this_thread
from monotile import ir
from monotile.backends.nvidia.schedule import Schedule
from monotile.backends.nvidia.triton.descriptors import DescribedTensor, swizzle_bytes
from monotile.backends.nvidia.triton.module import TritonSource
from monotile.passes.grid import Grid

SECONDS = 30.0  # after which a wait is a deadlock
MINUS_INF = float("-inf")


class Barrier:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.pending = self.bytes = self.phase = 0  # the last: how many phases are complete

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, count: int = 1, bytes_: int = 0) -> None:
        with self.changed:
            self.pending -= count
            self.bytes += bytes_
            assert self.pending >= 0, "more arrivals than a phase has"
            if self.pending == 0 and self.bytes == 0:
                self.phase, self.pending = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, parity: Any) -> None:
        this_thread.seen[self] = self.complete(parity)

    def complete(self, parity: Any) -> int:
        """Block until a phase is complete; return how many are."""
        with self.changed:
            done = self.changed.wait_for(lambda: self.phase & 1 != int(parity), timeout=SECONDS)
            assert done, "deadlock"
            return self.phase


class Barriers(list[Barrier]):
    def index(self, n: Any) -> Barrier:  # type: ignore[override]
        return self[int(n)]


class Descriptor:
    def __init__(self, tensor: Any, described: DescribedTensor) -> None:
        self.tensor = tensor if tensor.dtype is not torch.bool else tensor.view(torch.uint8)
        self.block, self.dtype = list(described.block), self.tensor.dtype
        self.layout = TileLayout(swizzle_bytes(described), 8 * described.bytes, len(described.block))


class Pointer:
    """An address: a tensor's memory, and where in it."""

    def __init__(self, tensor: Any, at: Any = 0) -> None:
        self.tensor, self.at = tensor, at

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.tensor, self.at + offset)

    def places(self, mask: Any, shape: Sequence[int]) -> tuple[Any, Any, Any]:
        """Return the memory, the places of a tile's elements in it, and the mask, both with all sides."""
        tensor = self.tensor
        flat = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
        at, mask = (torch.as_tensor(x) for x in (self.at, True if mask is None else mask))
        shape = torch.broadcast_shapes(at.shape, mask.shape, shape)
        return flat, torch.broadcast_to(at, shape).long() + tensor.storage_offset(), torch.broadcast_to(mask, shape)


class Dot:
    """A dot that runs when it is waited for."""

    def __init__(self, left: Any, right: SharedTile, start: Any, use_acc: bool) -> None:
        self.left, self.right, self.start, self.use_acc = left, right, start, use_acc
        self.value: Any = None

    def run(self) -> None:
        left = self.left.read() if isinstance(self.left, SharedTile) else self.left
        start = self.start.value if isinstance(self.start, Dot) else self.start
        product = left.float() @ self.right.read().float()
        assert product.shape == start.shape
        self.value = product + start if self.use_acc else product


def start_dot(left: Any, right: SharedTile, start: Any, use_acc: bool = True, is_async: bool = False) -> Dot:
    found = Dot(left, right, start, use_acc)
    this_thread.dots.append(found)
    for tile in (left, right):
        if isinstance(tile, SharedTile):
            tile.check_fenced()
            tile.read()  # what is missing now may be there when the dot runs
            tile.begin_reading(found)
    return found


def wait_for_dots(pending: int, deps: Sequence[Dot]) -> Any:
    while len(this_thread.dots) > pending:
        done = this_thread.dots.pop(0)
        done.run()
        for tile in (done.left, done.right):
            if isinstance(tile, SharedTile):
                tile.end_reading(done)
    (dot,) = deps
    assert dot.value is not None, "a result is read before its dot is waited for"
    return dot.value


def copy(descriptor: Descriptor, origin: Sequence[Any], barrier: Barrier, target: SharedTile) -> None:
    """Copy a box; what lies outside the tensor is zero."""
    box, here, there = torch.zeros(descriptor.block, dtype=descriptor.dtype), [], []
    for start, side, length in zip(map(int, origin), descriptor.block, descriptor.tensor.shape, strict=True):
        low, high = max(start, 0), max(0, start, min(start + side, length))
        here.append(slice(low - start, high - start))
        there.append(slice(low, high))
    box[tuple(here)] = descriptor.tensor[tuple(there)]
    target.write(box, barrier)
    barrier.arrive(0, -box.numel() * box.element_size())


class CopyOut:
    """A copy of a tile to its tensor, which reads the tile when it is waited for."""

    def __init__(self, descriptor: Descriptor, origin: Sequence[Any], tile: SharedTile) -> None:
        self.descriptor, self.origin, self.tile = descriptor, [int(start) for start in origin], tile

    def run(self) -> None:
        """Copy the part of the box that lies inside the tensor."""
        here, there = [], []
        block, tensor = self.descriptor.block, self.descriptor.tensor
        for start, side, length in zip(self.origin, block, tensor.shape, strict=True):
            low, high = max(start, 0), max(0, start, min(start + side, length))
            here.append(slice(low - start, high - start))
            there.append(slice(low, high))
        tensor[tuple(there)] = self.tile.read().view(block)[tuple(here)]


def copy_out(descriptor: Descriptor, origin: Sequence[Any], tile: SharedTile) -> None:
    assert tile.layout == descriptor.layout, "a tile is copied that does not lie as its descriptor says"
    tile.check_fenced()
    found = CopyOut(descriptor, origin, tile)
    this_thread.copies.append(found)
    tile.begin_reading(found)


def wait_for_copies(pending: int) -> None:
    while len(this_thread.copies) > pending:
        done = this_thread.copies.pop(0)
        done.run()
        done.tile.end_reading(done)


def fence() -> None:
    this_thread.unfenced = []


def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Any:
    flat, at, mask = pointer.places(mask, ())
    return torch.where(mask, flat[torch.where(mask, at, 0)], torch.tensor(other, dtype=flat.dtype))


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    flat, at, mask = pointer.places(mask, value.shape)
    flat[at[mask]] = torch.broadcast_to(value, at.shape)[mask].to(flat.dtype)


def typed(value: Any) -> Any:
    return value if isinstance(value, torch.Tensor) else torch.tensor(value)


def allocate(dtype: Any, shape: Sequence[int], layout: Any) -> Any:
    if layout is Barrier:
        return Barriers(Barrier() for _ in range(shape[0]))
    return Allocation(dtype, shape, layout).tile


def specialize(parts: Sequence[tuple[Callable[..., None], Sequence[Any]]], warps: Any, registers: Any) -> None:
    """Run every part in a thread of its own; raise the first error."""
    errors: list[BaseException] = []

    def run(part: Callable[..., None], arguments: Sequence[Any]) -> None:
        this_thread.dots, this_thread.copies, this_thread.seen, this_thread.unfenced = [], [], {}, []
        try:
            part(*arguments)
            assert not this_thread.dots, "a dot is never waited for"
            assert not this_thread.copies, "a result may not have left shared memory"
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def nothing(*arguments: Any, **options: Any) -> None:
    return None


WORDS: dict[str, Any] = {
    "full": lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype),
    "arange": lambda low, high, layout=None: torch.arange(low, high, dtype=torch.int32),
    "where": lambda seen, a, b: torch.where(typed(seen), typed(a), typed(b)),
    "maximum": lambda a, b: torch.fmax(typed(a), typed(b)),
    "minimum": lambda a, b: torch.fmin(typed(a), typed(b)),
    "max": lambda x, axis: torch.amax(x, axis), "min": lambda x, axis: torch.amin(x, axis), "sum": torch.sum,
    "reduce": lambda x, axis, fold: {"bool_or": torch.amax, "bool_and": torch.amin}[fold.__name__](x, axis),
    "abs": torch.abs, "exp2": torch.exp2, "log2": torch.log2, "fma": lambda a, b, c: a * b + c,
    "div_rn": lambda a, b: typed(a) / b, "cast": lambda x, dtype: typed(x).to(dtype),
    "convert_layout": lambda x, layout: x, "set_auto_layout": lambda x, layout: x,
    "load": load, "store": store, "static_range": range, "allocate_shared_memory": allocate,
    "warp_specialize": specialize, "constexpr": None, "barrier": nothing, "thread_barrier": nothing,
    "NVMMADistributedLayout": nothing, "NVMMASharedLayout": TileLayout, "SliceLayout": nothing,
    "DotOperandLayout": nothing, "BlockedLayout": nothing,
    "int1": torch.bool, "int8": torch.int8, "uint8": torch.uint8, "int32": torch.int32, "int64": torch.int64,
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
}  # fmt: skip

HELPERS: dict[str, Any] = {  # functions of inline assembly, by how their names begin
    "scaled_difference_": lambda x, y, by: (x - y[:, None]) * by,
    "mask_by_bytes": lambda scores, seen: torch.where(seen != 0, scores, MINUS_INF),
    "mask_by_numbers": lambda scores, mask: torch.where(mask != MINUS_INF, scores, MINUS_INF),
}


def module(source: TritonSource, program: list[int]) -> Callable[..., None]:
    """Return the module's function; `program` holds the number of the CTA that it runs as."""
    language = SimpleNamespace(**WORDS, program_id=lambda axis: torch.tensor(program[0], dtype=torch.int32))
    barriers = SimpleNamespace(
        init=lambda barrier, count: barrier.init(count),
        wait=lambda barrier, parity: barrier.wait(parity),
        by_chance=lambda barrier, parity: barrier.complete(parity),  # a copy that was not waited for, and is done
        arrive=lambda barrier, count: barrier.arrive(count),
        expect=lambda barrier, bytes_: barrier.arrive(1, bytes_),
        MBarrierLayout=lambda: Barrier,
    )
    names: dict[str, Any] = {
        "nothing": nothing,
        "gl": language,
        "gluon": SimpleNamespace(jit=lambda function=None, **options: function or (lambda inner: inner)),
        "tma": SimpleNamespace(
            async_copy_global_to_shared=copy, async_copy_shared_to_global=copy_out, store_wait=wait_for_copies
        ),
        "mbarrier": barriers,
        "warpgroup_mma": start_dot,
        "warpgroup_mma_wait": wait_for_dots,
        "fence_async_shared": fence,
    }
    exec(compile(source.text[source.text.index("@gluon.jit") :], source.name, "exec"), names)
    for name in names:
        names[name] = next((f for start, f in HELPERS.items() if name.startswith(start)), names[name])
    found: Callable[..., None] = names[source.name]
    return found


def run(
    kernel: ir.Kernel, schedule: Schedule, source: TritonSource, tensors: dict[str, Any], scalars: dict[str, Any]
) -> None:
    """Run all CTAs, one after the other; persistent ones with five tiles for each consumer: slots are used again."""
    words: list[int] = []
    for tensor in kernel.tensors:
        words += [0, *tensors[tensor.name].shape, *tensors[tensor.name].stride()]
    given = [tensors[tensor.name] for tensor in kernel.tensors]
    numbers = [torch.tensor(scalars[name]) for name, _ in kernel.scalars]
    tiles = 5 if schedule.persistent else 1
    arguments: list[Any] = [Descriptor(given[d.index], d) for d in source.described]
    for argument in source.arguments:
        if argument.kind == "pointer":
            arguments.append(Pointer(given[argument.index]))
        elif argument.kind == "scalar":
            number = numbers[argument.index]
            arguments.append(number if number.is_floating_point() else number.int())
        else:
            value = words[argument.index] if argument.kind in ("dim", "stride") else tiles
            arguments.append(torch.tensor(value, dtype=torch.int32))
    program = [0]
    function = module(source, program)
    order = [scalars[name] for name, _ in kernel.scalars]
    for program[0] in range(Grid(kernel, schedule.consumers * tiles).programs(words, order)):
        function(*arguments)
