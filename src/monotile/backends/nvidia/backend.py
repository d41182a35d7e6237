"""The nvidia backend: passes, Triton source, Triton's compiler, launch on the current stream."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

from ... import ir
from ...dtypes import DType, int64
from ...errors import ArgumentShape
from ...ir import verify
from ...passes import pipeline
from ...passes.grid import Grid
from ...passes.peel import peel_with_bounds
from ..base import Backend, Emitted, Program
from . import build, launcher, paths
from .choices import NvidiaChoices
from .gluon import module as gluon
from .gluon import persistent as laps
from .gluon.pipeline import Streams
from .schedule import Schedule, choose
from .triton import descriptors
from .triton.render import Rendered, render

OPTIONS = pipeline.PipelineOptions(peel_bounds=True)
MOST_PROGRAMS = 2**31 - 1
NARROW = 2**31
MOST_BRIEFS = 64


@dataclass(slots=True)
class Bound:
    """A launch but for addresses and scalars."""

    variant: Variant
    words: Sequence[int]
    tail: list[Any]  # lengths and strides
    programs: int | None  # None when it depends on scalars
    laps: int = 1  # how many a group of programs has
    compiled: dict[Any, Any] = field(default_factory=dict)  # by alignment of the addresses, scalar types and device
    otherwise: Bound | None = None  # without descriptors
    briefs: dict[tuple[int, int], Any] = field(default_factory=dict)  # descriptors made before, by tile and address
    device: int | None = None  # None for the current one


class Variant:
    """One rendering of a kernel, loaded."""

    def __init__(self, kernel: ir.Kernel, schedule: Schedule, streams: Streams | None, *, wide: bool) -> None:
        self.schedule = schedule
        self.rendered: Rendered = (
            gluon.render(kernel, schedule, streams, wide=wide)
            if streams is not None
            else render(kernel, schedule, wide=wide, emulate=build.interpreting())
        )
        self.function: Any = build.load(self.rendered)
        arguments = self.rendered.arguments
        self.pointers = [a.index for a in arguments if a.kind == "pointer"]
        self.words = [a.index for a in arguments if a.kind in ("dim", "stride")]
        self.scalars = [a.index for a in arguments if a.kind == "scalar"]
        # An int64 is passed by Triton in 32 bits where that is enough, and makes another kernel then.
        self.long = [n for n in self.scalars if kernel.scalars[n][1] is int64]
        self.described = [d.index for d in self.rendered.described]
        self.laps = any(a.kind == laps.ARGUMENT for a in arguments)
        self.tiles = [d for d in self.rendered.described if d.sides]  # whose descriptors the host makes


class NvidiaProgram(Program):
    """A kernel as Triton functions: one for tiles whose offsets fit 32 bits, and if ever needed others."""

    def __init__(self, kernel: ir.Kernel, schedule: Schedule) -> None:
        self.kernel, self.schedule = kernel, schedule
        self.path = paths.select(kernel, schedule, interpreted=build.interpreting())
        self.streams = self.path.pipeline
        self.variants: dict[tuple[bool, bool], Variant] = {}
        special = schedule.tensor_descriptors if self.streams is None else True
        self.usual = self.variant(wide=False, descriptors=special)

    @property
    def why_plain(self) -> str:
        """Why this is not a Gluon module; nothing where it is one."""
        return self.path.why_plain

    def variant(self, *, wide: bool, descriptors: bool) -> Variant:
        """With descriptors as the schedule says; without them the rule's schedule, if the given one needs them."""
        if (wide, descriptors) not in self.variants:
            schedule, streams = self.schedule, self.streams if descriptors else None
            if schedule.programs and streams is None:
                schedule = choose(self.kernel)
            elif not schedule.programs:
                schedule = replace(schedule, tensor_descriptors=descriptors)
            self.variants[wide, descriptors] = Variant(self.kernel, schedule, streams, wide=wide)
        return self.variants[wide, descriptors]

    def bind(self, words: Sequence[int], device: str = "cpu") -> Bound:
        """Chooses by lengths and strides; a bound with descriptors has another for addresses they cannot use."""
        rendered = self.usual.rendered
        if not rendered.described:
            return self._bind(words, device, descriptors=False)
        able = self.streams is None or _has_wgmma(device)
        if not able or not descriptors.apply(rendered.described, words):
            return self._bind(words, device, descriptors=False)
        bound = self._bind(words, device, descriptors=True)
        bound.otherwise = self._bind(words, device, descriptors=False)
        return bound

    def _bind(self, words: Sequence[int], device: str, *, descriptors: bool) -> Bound:
        variant = self.variant(wide=False, descriptors=descriptors)
        if any(sum(abs(words[at]) * count for at, count in reach) >= NARROW for reach in variant.rendered.reach):
            variant = self.variant(wide=True, descriptors=descriptors)
        grid = variant.rendered.grid
        programs = None if grid.needs_scalars else _count(grid.programs(words, ()))
        _, _, number = device.partition(":")
        at, many = int(number) if number else None, 1
        if variant.laps and programs:
            grids = {n: Grid(self.kernel, self.schedule.programs * n) for n in laps.TRIED}
            many = laps.enough(lambda n: grids[n].programs(words, ()), runtime().cores(at))
            programs = grids[many].programs(words, ())
        return Bound(variant, words, [words[n] for n in variant.words], programs, many, device=at)

    def launch(
        self, bound: Bound, arrays: Sequence[Any], addresses: Sequence[int], scalars: Sequence[Any], threads: int | None
    ) -> None:
        if bound.otherwise is not None:
            bits = 0
            for n in bound.variant.described:
                bits |= addresses[n]
            if bits % descriptors.ALIGNMENT:  # a power of two
                bound = bound.otherwise
        variant, programs = bound.variant, bound.programs
        if programs is None:
            programs = _count(variant.rendered.grid.programs(bound.words, scalars))
        if programs == 0:
            return
        pointers = [addresses[n] for n in variant.pointers]
        tiles = [addresses[tile.index] for tile in variant.tiles]
        tail = [*bound.tail, *[scalars[n] for n in variant.scalars], *([bound.laps] if variant.laps else ())]
        if build.interpreting():
            _interpret(self.kernel, variant, programs, pointers, tail)
        else:
            widths = tuple([_width(scalars[n]) for n in variant.long])
            _launch(self.kernel, bound, programs, tiles, pointers, tail, widths)


def _count(programs: int) -> int:
    if programs > MOST_PROGRAMS:
        raise ArgumentShape(f"the grid has {programs} programs, of at most {MOST_PROGRAMS}; use larger blocks")
    return programs


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@cache
def _has_wgmma(device: str) -> bool:
    """Tell whether a GPU can run the Gluon modules. Other devices stand for GPUs that are not there."""
    if not device.startswith("cuda"):
        return True
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" == paths.GLUON_ARCHITECTURE


class Runtime(NamedTuple):
    """What a launch asks torch and Triton, looked up once."""

    current_device: Callable[[], int]
    current_stream: Callable[[int], int]
    device: Callable[[int], Any]  # a context in which that device is the current one
    set_allocator: Callable[[Any], None]
    cores: Callable[[int | None], int]  # multiprocessors of a device, or of the current one


@cache
def runtime() -> Runtime:
    import torch
    import triton
    from triton.runtime import driver

    stream = driver.active.get_current_stream
    return Runtime(torch.cuda.current_device, stream, torch.cuda.device, triton.set_allocator, cores)


@cache
def cores(device: int | str | None) -> int:
    """Multiprocessors of a GPU."""
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _launch(
    kernel: ir.Kernel, bound: Bound, programs: int, tiles: list[int], pointers: list[int], tail: list[Any],
    widths: tuple[int, ...],
) -> None:  # fmt: skip
    gpu = runtime()
    device = gpu.current_device()
    if bound.device is not None and bound.device != device:
        with gpu.device(bound.device):
            return _launch(kernel, bound, programs, tiles, pointers, tail, widths)
    variant = bound.variant
    if variant.described and not variant.tiles:
        gpu.set_allocator(_allocate)
    bits = 0
    for pointer in pointers:
        bits |= pointer
    aligned = bits & 15 == 0 or tuple([pointer & 15 == 0 for pointer in pointers])
    compiled = bound.compiled.get((device, aligned, widths))
    if compiled is None:
        dtypes = [kernel.tensors[n].dtype for n in variant.pointers]
        given: list[Any] = [Pointer(pointer, dtype) for pointer, dtype in zip(pointers, dtypes, strict=True)]
        for tile, address in zip(variant.tiles, tiles, strict=True):
            base = Pointer(address, descriptors.copied(kernel.tensors[tile.index].dtype))
            given.insert(len(given) - len(pointers), descriptors.whole(tile, bound.words, base))
        bound.compiled[device, aligned, widths] = first(variant, programs, given, tail)
        return None
    _, run, function, packed = compiled
    stream = gpu.current_stream(device)
    if not tiles:
        run(programs, 1, 1, stream, function, packed, None, None, None, *pointers, *tail)
        return None
    brief = [bound.briefs.get(each) or _brief(bound, *each) for each in enumerate(tiles)]
    run(programs, 1, 1, stream, function, packed, None, None, None, *brief, *pointers, *tail)
    return None


def _brief(bound: Bound, n: int, address: int) -> Any:
    """A descriptor, kept for the next launch with the same tensor."""
    if len(bound.briefs) >= MOST_BRIEFS:
        bound.briefs.clear()
    found = bound.briefs[n, address] = descriptors.Brief(address, bound.variant.tiles[n], bound.words)
    return found


def _allocate(size: int, alignment: int, stream: int | None) -> Any:
    """Memory for the descriptors that programs make."""
    import torch

    return torch.empty(size, device="cuda", dtype=torch.int8)


def _width(number: Any) -> int:
    """In how many bits Triton passes a whole number."""
    return 32 if -(2**31) <= number < 2**31 else 64


class Pointer:
    """As much of a tensor as Triton looks at: its address, and what lies there."""

    def __init__(self, address: int, dtype: DType) -> None:
        import torch

        self.address, self.dtype = address, getattr(torch, dtype.name)

    def data_ptr(self) -> int:
        return self.address


def first(variant: Variant, programs: int, given: list[Any], tail: list[Any]) -> Any:
    """Compiles for these arguments, launches, and keeps what a later launch needs."""
    schedule = variant.schedule
    try:
        kernel = variant.function[(programs,)](*given, *tail, **schedule.options)
    except Exception as error:
        raise build.translated(error, variant.rendered.name) or error from None
    run = launcher.quick(kernel.run) if variant.tiles else kernel.run
    return kernel, run, kernel.function, kernel.packed_metadata


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


def _interpret(kernel: ir.Kernel, variant: Variant, programs: int, pointers: list[int], tail: list[Any]) -> None:
    """Arrays in this machine's memory. Only their addresses matter: the strides are arguments."""
    dtypes = [kernel.tensors[n].dtype for n in variant.pointers]
    given = [HostPointer(pointer, dtype) for pointer, dtype in zip(pointers, dtypes, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of NaN and overflow
        variant.function[(programs,)](*given, *tail)


class NvidiaBackend(Backend):
    name = "nvidia"
    choices = NvidiaChoices()
    schedules = Schedule

    def why_not(self) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "it needs triton: pip install triton (Linux)"
        if build.interpreting():
            return None
        if importlib.util.find_spec("torch") is None:
            return "it needs torch: pip install torch"
        import torch

        if not torch.cuda.is_available():
            cure = "use backend='cpu', or start Python with TRITON_INTERPRET=1 for Triton's interpreter"
            return f"torch sees no NVIDIA GPU; {cure}"
        return None

    def accepts(self, device: str) -> bool:
        if build.interpreting():
            return device == "cpu"
        return device.startswith("cuda")

    def compile(self, kernel: ir.Kernel) -> Program:
        lowered = self.lower(kernel)
        return NvidiaProgram(lowered, choose(lowered))

    def compile_as(self, kernel: ir.Kernel, schedule: Any) -> Program:
        return NvidiaProgram(self.lower(kernel, peel=schedule.peel), schedule)

    def lower(self, kernel: ir.Kernel, *, peel: bool = True) -> ir.Kernel:
        kernel = ir.copy(kernel)
        if peel:
            pipeline.run(kernel, OPTIONS)
            return kernel
        for each in pipeline.passes(OPTIONS):
            if each is not peel_with_bounds:
                each(kernel)
                verify.check(kernel, each.__name__)
        return kernel

    def stages(
        self, kernel: ir.Kernel, schedule: Any = None, device: str | None = None
    ) -> dict[str, Callable[[], str]]:
        @cache
        def lowered() -> ir.Kernel:
            return self.lower(kernel, peel=schedule is None or schedule.peel)

        @cache
        def path() -> paths.Path:
            return paths.select(lowered(), schedule, device or paths.GLUON_ARCHITECTURE)

        def ptx() -> str:
            rendered, capability = path().render(lowered()), build.capability(device or paths.GLUON_ARCHITECTURE)
            return str(build.ahead(lowered(), rendered, path().schedule, capability).asm["ptx"])

        return {
            "ir": lambda: ir.show(kernel),
            "passes": lambda: pipeline.after_each(kernel, OPTIONS),
            path().name if schedule is not None else "triton": lambda: path().render(lowered()).source,
            "ptx": ptx,
        }

    def explain(self, kernel: ir.Kernel, schedule: Any = None, device: str | None = None) -> list[str]:
        lowered = self.lower(kernel, peel=schedule is None or schedule.peel)
        return paths.explain(lowered, schedule, device or paths.GLUON_ARCHITECTURE)

    def emit(self, kernel: ir.Kernel, schedule: Any = None, device: str | None = None) -> Emitted:
        from .emission import emitted

        lowered = self.lower(kernel, peel=schedule is None or schedule.peel)
        return emitted(lowered, paths.select(lowered, schedule, device or paths.GLUON_ARCHITECTURE))


BACKEND = NvidiaBackend()
