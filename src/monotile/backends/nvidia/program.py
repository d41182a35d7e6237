"""A compiled kernel: its variants, the variant that fits a call, and the launch on the current stream."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from ... import ir
from ...dtypes import DType, int64
from ...errors import ArgumentShape, DeviceLimit
from ...passes.grid import Grid
from ..base import Program, picker
from . import assembler, build, launcher, paths
from .device import HOPPER, Gpu, gpu, runtime
from .gluon import persistent
from .launcher import LoadedKernel
from .paths import LaunchPath
from .schedule import Schedule, choose
from .triton import descriptors
from .triton.descriptors import HostDescriptor
from .triton.memory import INT32_SPAN

MAX_PROGRAMS = 2**31 - 1
MAX_CACHED_DESCRIPTORS = 1024  # keys, values and queries of a few hundred layers


@dataclass(slots=True)
class BoundLaunch:
    """A launch but for addresses and scalars."""

    variant: Variant
    words: Sequence[int]
    lengths: list[Any]  # the lengths and strides that the function takes
    grid: int | None  # None when it depends on scalars
    tiles: tuple[int, ...] = ()  # the tiles of a persistent CTA
    compiled: dict[Any, LoadedKernel] = field(default_factory=dict)  # by device, alignment and widths of scalars
    without_descriptors: Callable[[], BoundLaunch] | None = None  # for addresses that descriptors cannot have
    descriptors: dict[tuple[int, int], Sequence[Any]] = field(default_factory=dict)  # encoded, by tensor and address
    device: int | None = None  # None for the current one


class Variant:
    """One rendering of a kernel, loaded."""

    def __init__(self, kernel: ir.Kernel, path: LaunchPath, architecture: str, *, wide: bool) -> None:
        self.path, self.schedule, self.wide = path, path.schedule, wide
        self.source = path.render(kernel, wide=wide, emulate=build.interpreting())
        self.architecture = architecture
        self.other_assembler = path.pipeline is None and assembler.needs_other(kernel, architecture)
        self.function: Any = build.load(self.source)
        arguments = self.source.arguments
        self.pointers = [a.index for a in arguments if a.kind == "pointer"]
        self.words = [a.index for a in arguments if a.kind in ("dim", "stride")]
        self.scalars = [a.index for a in arguments if a.kind == "scalar"]
        self.pick_pointers, self.pick_scalars = picker(self.pointers), picker(self.scalars)
        # Triton passes an int64 in 32 bits where that is enough, and compiles another kernel then.
        self.int64_scalars = [n for n in self.scalars if kernel.scalars[n][1] is int64]
        self.described = [d.index for d in self.source.described]
        self.persistent = any(a.kind == persistent.ARGUMENT for a in arguments)
        self.host_described = [d for d in self.source.described if d.block]  # whose descriptors the host makes


class NvidiaProgram(Program):
    """A kernel as Triton functions for one kind of GPU: one with 32-bit offsets within tiles, others when a call needs
    them. GPUs of another kind get a program of their own."""

    def __init__(self, kernel: ir.Kernel, schedule: Schedule | None, target: Gpu = HOPPER) -> None:
        self.kernel, self.asked, self.target = kernel, schedule, target
        self.path = paths.select(kernel, schedule, target, interpreted=build.interpreting())
        self.schedule = self.path.schedule
        self.variants: dict[tuple[bool, bool], Variant] = {}
        self.others: dict[tuple[str, int], NvidiaProgram] = {}

    @property
    def why_plain(self) -> str:
        """Why this is not a Gluon module; nothing where it is one."""
        return self.path.why_plain

    @property
    def default(self) -> Variant:
        descriptors = self.schedule.tensor_descriptors if self.path.pipeline is None else True
        return self.variant(wide=False, descriptors=descriptors)

    def variant(self, *, wide: bool, descriptors: bool) -> Variant:
        """Return the variant with descriptors as the path has it; without them, plain Triton. A Gluon module needs
        descriptors, so that its plain variant has the rule's schedule."""
        if (wide, descriptors) not in self.variants:
            path = self.path
            if path.pipeline is not None:
                plain = LaunchPath(choose(self.kernel, self.target.shared_bytes), None)
                path = path if descriptors else replace(plain, capability=self.target.capability)
            elif self.asked is None or not self.asked.consumers:
                path = replace(path, schedule=replace(path.schedule, tensor_descriptors=descriptors))
            self.variants[wide, descriptors] = Variant(self.kernel, path, self.target.architecture, wide=wide)
        return self.variants[wide, descriptors]

    def bind(self, words: Sequence[int], device: str = "cpu") -> BoundLaunch:
        """Choose a variant by lengths and strides."""
        if device.startswith("cuda"):
            found = gpu(device)
            kind = found.architecture, found.shared_bytes
            if kind != (self.target.architecture, self.target.shared_bytes):
                if kind not in self.others:
                    self.others[kind] = NvidiaProgram(self.kernel, self.asked, found)
                return self.others[kind].bind(words, device)
        tensors = self.default.source.described
        if not tensors or not descriptors.can_describe(tensors, words):
            return self._bind(words, device, descriptors=False)
        bound = self._bind(words, device, descriptors=True)
        bound.without_descriptors = cache(lambda: self._bind(words, device, descriptors=False))  # rarely needed
        return bound

    def _bind(self, words: Sequence[int], device: str, *, descriptors: bool) -> BoundLaunch:
        variant = self.variant(wide=False, descriptors=descriptors)
        if any(sum(abs(words[at]) * count for at, count in span) >= INT32_SPAN for span in variant.source.spans):
            variant = self.variant(wide=True, descriptors=descriptors)
        expression = variant.source.grid
        tiles = (1,) if variant.persistent else ()
        grid = None if expression.needs_scalars else _checked(expression.programs(words, ()))
        _, _, number = device.partition(":")
        index = int(number) if number else None
        if variant.persistent and grid:
            grids = {n: Grid(self.kernel, self.schedule.consumers * n) for n in persistent.CANDIDATES}
            count = runtime().multiprocessors(index)
            most = persistent.tiles_per_cta(lambda n: grids[n].programs(words, ()), count)
            grid, tiles = grids[most].programs(words, ()), (most,)
        return BoundLaunch(variant, words, [words[n] for n in variant.words], grid, tiles, device=index)

    def launch(
        self, bound: BoundLaunch, arrays: Sequence[Any], addresses: Sequence[int], scalars: Sequence[Any],
        threads: int | None,
    ) -> None:  # fmt: skip
        bits = 0
        for address in addresses:
            bits |= address
        aligned = bits % descriptors.ALIGNMENT == 0
        if not aligned and bound.without_descriptors is not None and _misaligned(bound, addresses):
            bound = bound.without_descriptors()
        variant, grid = bound.variant, bound.grid
        if grid is None:
            grid = _checked(variant.source.grid.programs(bound.words, scalars))
        if grid == 0:
            return
        numbers = (*bound.lengths, *variant.pick_scalars(scalars), *bound.tiles)
        if build.interpreting():
            _interpret(self.kernel, variant, grid, variant.pick_pointers(addresses), numbers)
            return
        gpu = runtime()
        device = gpu.current_device()
        if bound.device is not None and bound.device != device:
            with gpu.device(bound.device):
                self.launch(bound, arrays, addresses, scalars, threads)
            return
        if variant.described and not variant.host_described:
            gpu.set_allocator(_allocate)
        widths = tuple([_width(scalars[n]) for n in variant.int64_scalars]) if variant.int64_scalars else ()
        key = device, aligned or _alignments(variant.pick_pointers(addresses)), widths
        compiled = bound.compiled.get(key)
        if compiled is None:
            given = _typed_arguments(self.kernel, bound, addresses)
            bound.compiled[key] = compile_and_launch(self.kernel, variant, grid, given, numbers)
            return
        encoded: list[Any] = []
        for n, tensor in enumerate(variant.host_described):
            address = addresses[tensor.index]
            encoded += bound.descriptors.get((n, address)) or _encoded(bound, compiled, n, address)
        arguments = (*encoded, *variant.pick_pointers(addresses), *numbers)
        try:
            compiled.launch(grid, gpu.current_stream(device), arguments)
        except RuntimeError as error:
            raise build.launch_error(error, variant.source.name) from None


def _misaligned(bound: BoundLaunch, addresses: Sequence[int]) -> bool:
    """Return True if a descriptor cannot have one of the addresses."""
    return any(addresses[n] % descriptors.ALIGNMENT for n in bound.variant.described)


def _checked(programs: int) -> int:
    if programs > MAX_PROGRAMS:
        raise ArgumentShape(f"the grid has {programs} programs, of at most {MAX_PROGRAMS}; use larger blocks")
    return programs


# ---- on a GPU --------------------------------------------------------------------------------------------------------


def _alignments(pointers: Sequence[int]) -> tuple[bool, ...]:
    """Return which pointers Triton takes to be aligned: it compiles another kernel for others."""
    return tuple([pointer % descriptors.ALIGNMENT == 0 for pointer in pointers])


def _typed_arguments(kernel: ir.Kernel, bound: BoundLaunch, addresses: Sequence[int]) -> list[Any]:
    """Return descriptors and pointers as Triton's compiler wants them."""
    found: list[Any] = []
    for tensor in bound.variant.host_described:
        base = Pointer(addresses[tensor.index], descriptors.copied_dtype(kernel.tensors[tensor.index].dtype))
        found.append(descriptors.tensor_descriptor(tensor, bound.words, base))
    return found + [
        Pointer(addresses[n], descriptors.pointer_dtype(kernel.tensors[n].dtype)) for n in bound.variant.pointers
    ]


def _encoded(bound: BoundLaunch, compiled: LoadedKernel, n: int, address: int) -> Sequence[Any]:
    """Encode a descriptor and keep it for the next launch with the same tensor."""
    if len(bound.descriptors) >= MAX_CACHED_DESCRIPTORS:
        bound.descriptors.clear()
    descriptor = HostDescriptor(address, bound.variant.host_described[n], bound.words)
    found = bound.descriptors[n, address] = compiled.encode(n, descriptor)
    return found


def _allocate(size: int, alignment: int, stream: int | None) -> Any:
    """Allocate memory for the descriptors that programs make."""
    import torch

    return torch.empty(size, device="cuda", dtype=torch.int8)


def _width(number: Any) -> int:
    """Return the bits in which Triton passes a whole number."""
    return 32 if -(2**31) <= number < 2**31 else 64


class Pointer:
    """As much of a tensor as Triton looks at: its address, and its element type."""

    def __init__(self, address: int, dtype: DType) -> None:
        import torch

        self.address, self.dtype = address, getattr(torch, dtype.name)

    def data_ptr(self) -> int:
        return self.address


def compile_and_launch(
    kernel: ir.Kernel, variant: Variant, grid: int, arguments: list[Any], rest: Sequence[Any]
) -> LoadedKernel:
    """Compile for these arguments, launch, and return the launcher for later ones. A plain module that exceeds shared
    memory, which Triton finds before it launches, is compiled again with fewer stages: results do not depend on
    them."""
    paths_left = list(variant.path.smaller())[1:]
    while True:
        try:
            return _compile_and_launch(variant, grid, arguments, rest)
        except DeviceLimit:
            if not paths_left:
                raise
            variant = Variant(kernel, paths_left.pop(0), variant.architecture, wide=variant.wide)


def _compile_and_launch(variant: Variant, grid: int, arguments: list[Any], rest: Sequence[Any]) -> LoadedKernel:
    try:
        with assembler.chosen(other=variant.other_assembler) as more:
            kernel = variant.function[(grid,)](*arguments, *rest, **variant.schedule.options, **more)
    except Exception as error:
        raise build.translated(error, variant.source.name) or error from None
    return launcher.load(kernel, len(variant.host_described))


# ---- in Triton's interpreter -----------------------------------------------------------------------------------------


class HostPointer(Pointer):
    """As much of a tensor as Triton's interpreter asks for: it copies tensors to this machine's memory and back, and
    here they are already there."""

    def __init__(self, address: int, dtype: DType) -> None:
        self.address, self.dtype = address, dtype.name  # which needs no torch

    def _itself(self, *args: Any, **words: Any) -> HostPointer:
        return self

    untyped_storage = cpu = new_empty = set_ = copy_ = _itself

    def _nothing(self) -> int:
        return 0

    storage_offset = size = stride = _nothing


def _interpret(kernel: ir.Kernel, variant: Variant, grid: int, pointers: Sequence[int], rest: Sequence[Any]) -> None:
    """Run on arrays in this machine's memory. Only their addresses matter: the strides are arguments."""
    dtypes = [descriptors.pointer_dtype(kernel.tensors[n].dtype) for n in variant.pointers]
    arguments = [HostPointer(pointer, dtype) for pointer, dtype in zip(pointers, dtypes, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of NaN and overflow
        variant.function[(grid,)](*arguments, *rest)
