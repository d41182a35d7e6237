"""A call of the library, prepared once and repeated. Checks and choices are made from what the arrays look like, never
from their memory, and a call like an earlier one only allocates its results, reads addresses and launches.

A `CallBuilder` puts a call together: it reads the arrays' lengths and strides, allocates results and temporaries, and
lists launches. The `PreparedCall` made of it is cached under everything about the call but addresses, contents and
numbers that are passed to the kernels. It holds no array.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .. import backends
from ..backends.choices import Choice, Choices
from ..dtypes import DType, uint8
from ..errors import ArgumentAlignment, ArgumentKind, InternalError, MonotileError
from ..launch.kernel import Kernel
from ..launch.signature import capture_pattern, captured_arrays, check_threads, const_key, read_scalar
from ..launch.source_keys import GlobalReads
from ..runtime import arrays, tensors
from ..runtime.arrays import Library
from ..runtime.tensors import View
from .kept_maps import MapMaker, MapStore
from .launches import SCALE, PlannedLaunch, steps_of

Array = Any
Finish = Callable[[list[Array]], Any]  # post-processing of the list of results
MAX_PREPARED = 1024  # calls that are cached for one function
ALIGNMENT = 256  # bytes, of a temporary in the block they share
PLAIN = frozenset((type(None), bool, int, str))  # types of options that are their own cache key, with their type


class ArrayRef(NamedTuple):
    """An array of a call without its memory: which one it is, and its shape and strides."""

    place: tuple[str, int]  # "input", "result", "captured", "kept" or "temporary", and its index among them
    view: View

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape

    @property
    def dtype(self) -> DType:
        return self.view.dtype

    def broadcast(self, shape: tuple[int, ...]) -> ArrayRef:
        return ArrayRef(self.place, self.view.broadcast(shape))

    def reshaped(self, *shape: int) -> ArrayRef:
        """The same elements under another shape, which their strides are known to allow."""
        view = self.view.reshaped(shape)
        assert view is not None
        return ArrayRef(self.place, view)


class CallBuilder:
    """The arrays and launches of one call in the making. `backend` and `threads` are as the caller gave them."""

    def __init__(
        self, inputs: Mapping[str, View], captured: Sequence[Any], backend: str | None, threads: int | None
    ) -> None:
        self.inputs = {name: ArrayRef(("input", n), view) for n, (name, view) in enumerate(inputs.items())}
        self.captured, self.backend, self.threads = captured, backend, threads
        self.device = next(iter(inputs.values())).device
        self.choices: Choices = backends.get(backends.resolve(backend, self.device)).choices
        self.copies: set[int] = set()
        self.results: list[View] = []
        self.temporaries: list[View] = []
        self.kept_views: list[View] = []
        self.map_keys: list[Any] = []
        self.launches: list[PlannedLaunch] = []
        self.map_launches: list[PlannedLaunch] = []  # those that write kept arrays, from captured ones alone
        self.scale: float | None = None  # of a call that passes none
        self.scores: tuple[int, ...] = ()  # batch, query heads, queries and keys

    def input(self, name: str) -> ArrayRef:
        if name not in self.inputs:
            raise ArgumentKind(f"{name!r} must be an array, found NoneType; pass NumPy arrays or torch tensors")
        return self.inputs[name]

    def result(self, shape: tuple[int, ...], dtype: DType) -> ArrayRef:
        self.results.append(self._new(shape, dtype))
        return ArrayRef(("result", len(self.results) - 1), self.results[-1])

    def temporary(self, shape: tuple[int, ...], dtype: DType) -> ArrayRef:
        self.temporaries.append(self._new(shape, dtype))
        return ArrayRef(("temporary", len(self.temporaries) - 1), self.temporaries[-1])

    def kept(self, shape: tuple[int, ...], dtype: DType, key: Any) -> ArrayRef:
        """An array that outlives the call: it is made anew only when an array that it was made from has changed. `key`
        tells it from others of its shape that are made from the same arrays."""
        self.map_keys.append(key)
        self.kept_views.append(self._new(shape, dtype))
        return ArrayRef(("kept", len(self.kept_views) - 1), self.kept_views[-1])

    def _new(self, shape: tuple[int, ...], dtype: DType) -> View:
        return View(dtype, shape, tensors.dense(shape), self.device)

    def contiguous(self, array: ArrayRef) -> ArrayRef:
        """An input, copied at every call."""
        self.copies.add(array.place[1])
        view = array.view
        return ArrayRef(array.place, View(view.dtype, view.shape, tensors.dense(view.shape), view.device))

    def reshaped(self, array: ArrayRef, *shape: int) -> ArrayRef:
        """An input under another shape, copied if its strides do not allow it."""
        view = array.view.reshaped(shape)
        return ArrayRef(array.place, view) if view is not None else self.contiguous(array).reshaped(*shape)

    def threads_for(self, flops: int, bytes_: int) -> int | None:
        """The threads that the caller asked for, or as many as the work is worth."""
        if self.threads is None:
            return self.choices.threads(flops, bytes_)
        check_threads(self.threads)
        return self.threads

    def launch(self, kernel: Kernel, *args: Any, choice: Choice, threads: int | None, **consts: Any) -> None:
        """Add a launch of arrays, None for a tensor that is left out, and scalars, of which SCALE may be one."""
        consts = {**choice.blocks, **consts}
        captured = captured_arrays(consts.values())
        views = [a.view if isinstance(a, ArrayRef) else 1.0 if a is SCALE else a for a in args]
        plan = kernel.plan((*views, *captured), len(args), consts, self.backend, choice.schedule)
        index = {id(array): n for n, array in enumerate(self.captured)}
        places = [a.place if isinstance(a, ArrayRef) else ("", -1) for a in args]
        places += [("captured", index[id(array)]) for array in captured]
        scalars = [a if a is SCALE else read_scalar(n, a, d) for p, n, d in plan.scalars for a in (args[p],)]
        found = [places[n] for n in plan.array_positions]
        makes_kept = {kind for kind, _ in found} <= {"captured", "kept"}
        launches = self.map_launches if makes_kept else self.launches
        launches.append(PlannedLaunch(plan, found, scalars, threads))


class PreparedCall:
    """A call that was checked, without its arrays."""

    def __init__(self, lib: Library, builder: CallBuilder, finish: Finish) -> None:
        self.lib = lib
        self.finish, self.scale = finish, builder.scale
        self.names = [*builder.inputs, *[""] * len(builder.results), *["captured"] * len(builder.captured)]
        self.copies = frozenset(builder.copies)
        self.results = [(v.shape, lib.kind(v.dtype, v.device)) for v in builder.results]
        given = [o.view.dtype.bytes - 1 for o in builder.inputs.values()]
        others = [tensors.read("captured", a).dtype.bytes - 1 for a in builder.captured]
        self.aligned = (*given, *[0] * len(builder.results), *others)
        self.strictest = max(self.aligned)
        launches = [*builder.map_launches, *builder.launches]
        self.needs_arrays = any(planned.plan.program.needs_arrays for planned in launches)
        self.temporaries = [(v.shape, lib.kind(v.dtype, v.device)) for v in builder.temporaries]
        self.offsets: list[int] = []  # of each temporary in the one block that all of them share
        size = 0
        for view in builder.temporaries:
            self.offsets.append(size)
            size += -(-tensors.span(view)[1] // ALIGNMENT) * ALIGNMENT
        self.block = ((size,), lib.kind(uint8, builder.device)) if size else None
        counts = {"input": len(builder.inputs), "result": len(builder.results), "captured": len(builder.captured)}
        counts["kept"] = len(builder.kept_views)
        self.steps = steps_of(builder.launches, [*counts.items(), ("temporary", 0)])
        self.scores = builder.scores
        makers = steps_of(builder.map_launches, [("captured", len(builder.captured)), ("kept", 0)])
        reads = {n for planned in builder.map_launches for kind, n in planned.places if kind == "captured"}
        keys = tuple(builder.map_keys)
        self.maps = MapMaker(lib, builder.kept_views, makers, sorted(reads), keys) if makers else None
        self.reads = _foreign([read for planned in launches for read in planned.plan.globals_read])

    def holds(self) -> bool:
        """True if functions of the caller's that were compiled in still refer to the same things."""
        return all(names.get(name) is value for names, name, value in self.reads)

    def run(
        self, given: Sequence[Array], captured: Sequence[Array], scale: float | None, block_mask: MapStore | None
    ) -> Any:
        lib = self.lib
        if block_mask is not None:
            block_mask.check(self.scores)
        if self.copies:
            given = [lib.contiguous(a) if n in self.copies else a for n, a in enumerate(given)]
        results = [lib.empty(shape, kind) for shape, kind in self.results]
        addresses = lib.addresses([*given, *results])
        if captured:
            addresses += [tensors.address(a) for a in captured]
        bits = 0
        for address in addresses:
            bits |= address
        if bits & self.strictest:
            self._check_alignment(addresses)
        if scale is None:
            scale = self.scale
        kept: Sequence[Array] = ()
        if self.maps is not None:
            kept = self.maps.maps(captured, addresses[len(given) + len(results) :], block_mask)
            addresses += lib.addresses(kept)
        if self.needs_arrays:
            self._launch_arrays([*given, *results, *captured, *kept], addresses, scale)
            return self.finish(results)
        if self.block is not None:  # kept until everything is launched, on a GPU by torch until its stream is done
            block = lib.empty(*self.block)
            (base,) = lib.addresses((block,))
            addresses += [base + at for at in self.offsets]
        else:
            addresses += self.offsets  # temporaries without elements, if any
        for launch, bound, pick, takes_scale, scalars, threads in self.steps:
            launch(bound, (), pick(addresses), (scale, *scalars) if takes_scale else scalars, threads)
        return self.finish(results)

    def _check_alignment(self, addresses: Sequence[int]) -> None:
        for name, address, bits in zip(self.names, addresses, self.aligned, strict=True):
            if address & bits:
                raise ArgumentAlignment(f"{name!r} is not aligned to its elements; pass {name}.copy()")

    def _launch_arrays(self, every: list[Array], addresses: list[int], scale: float | None) -> None:
        """Launch programs that take arrays instead of addresses: each temporary is an array of its own."""
        temporaries = [self.lib.empty(shape, kind) for shape, kind in self.temporaries]
        every, addresses = every + temporaries, addresses + self.lib.addresses(temporaries)
        for launch, bound, pick, takes_scale, scalars, threads in self.steps:
            numbers = (scale, *scalars) if takes_scale else scalars
            launch(bound, pick(every), pick(addresses), numbers, threads)


def _foreign(reads: Sequence[tuple[dict[str, Any], str, Any]]) -> GlobalReads:
    """The globals that the caller's functions read; the library's own never change."""
    package = __name__.partition(".")[0] + "."
    return tuple(read for read in reads if not str(read[0].get("__name__")).startswith(package))


# ---- functions of the library ----------------------------------------------------------------------------------------


class LibraryFunction:
    """A function of the library with its cache of prepared calls. `plan` checks a call, adds its launches to a builder
    and returns the post-processing of the results. Options are a named tuple that ends in `backend` and `threads`."""

    def __init__(self, names: Sequence[str], plan: Callable[[CallBuilder, Any], Finish]) -> None:
        self.names, self.plan = names, plan
        self.calls: dict[Any, PreparedCall] = {}

    def __call__(
        self, given: Sequence[Array | None], options: tuple[Any, ...], scale: float | None = None,
        block_mask: MapStore | None = None,
    ) -> Any:  # fmt: skip
        """`given` are arrays in the order of `names`, None where one is left out; `scale` is a number for kernels;
        `block_mask` has the maps of the mask_mod among the options."""
        kinds = tuple(map(type, options))
        shapes = tensors.signatures(given)
        captured: Sequence[Array] = ()
        if PLAIN.issuperset(kinds):
            key: Any = (kinds, options, *shapes)
        else:
            if types.FunctionType in kinds:
                captured = captured_arrays(options)
            key = (
                kinds,
                *map(_option_key, options),
                *shapes,
                *map(tensors.signature, captured),
                *capture_pattern(options),
            )
        try:
            prepared = self.calls.get(key)
        except TypeError:  # something unhashable: the full check will say what
            key, prepared = None, None
        if prepared is None or (prepared.reads and not prepared.holds()):
            return self._first(key, given, captured, options, scale, block_mask)
        present = [a for a in given if a is not None]
        return prepared.run(present, captured, scale, block_mask)

    def _first(
        self, key: Any, given: Sequence[Any], captured: Sequence[Any], options: Any, scale: float | None,
        block_mask: MapStore | None,
    ) -> Any:  # fmt: skip
        lib = arrays.library(self.names[0], given[0])
        adopted = [None if a is None else lib.adopt(n, a) for n, a in zip(self.names, given, strict=True)]
        if any(a is not b for a, b in zip(adopted, given, strict=True)):
            return _given_back(lib, self(adopted, options, scale, block_mask))
        present = {n: a for n, a in zip(self.names, given, strict=True) if a is not None}
        try:
            views = {name: tensors.read(name, array) for name, array in present.items()}
            builder = CallBuilder(views, captured, options.backend, options.threads)
            prepared = PreparedCall(lib, builder, self.plan(builder, options))
        except InternalError:
            raise
        except MonotileError as error:  # without the frames of the compiler
            raise error.with_traceback(None) from None
        if key is not None:
            if len(self.calls) >= MAX_PREPARED:
                self.calls.clear()
            self.calls[key] = prepared
        return prepared.run(list(present.values()), captured, scale, block_mask)


def _given_back(lib: Library, result: Any) -> Any:
    """Results as arrays of the caller's library."""
    if not isinstance(result, tuple):
        return lib.give_back(result)
    found = [lib.give_back(array) for array in result]
    return type(result)(*found) if hasattr(result, "_fields") else tuple(found)


def _option_key(option: Any) -> Any:
    return const_key(tuple(option)) if type(option) is list else const_key(option)
