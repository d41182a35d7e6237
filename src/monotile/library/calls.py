"""A call of the library, prepared once and repeated. Checks and choices are made from what the arrays look like, never
from their memory, and a call like an earlier one only allocates its results, reads addresses and launches.

A `CallBuilder` puts a call together: it reads the arrays' lengths and strides, allocates results and temporaries, and
lists launches. The `PreparedCall` made of it is cached under everything about the call but addresses, contents and
numbers that are passed to the kernels. It holds no array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .. import backends
from ..backends.choices import Choice, Choices
from ..dtypes import DType, uint8
from ..errors import ArgumentKind, InternalError, MonotileError
from ..frontend.functions import PLAIN, is_function
from ..launch.captures import NOTHING, Captures, captures, const_key, note_rebound, with_constants
from ..launch.kernel import Kernel
from ..launch.signature import read_scalar, read_threads
from ..runtime import arrays, tensors
from ..runtime.arrays import Library
from ..runtime.tensors import Layouts, View
from .growth import Families, GrowingCall, Growth, family_key
from .kept_maps import MapMaker, MapStore
from .launches import SCALE, PlannedLaunch, steps_of
from .torch_calls import refuse_captured_gradients

Array = Any
Finish = Callable[[list[Array]], Any]  # post-processing of the list of results
MAX_PREPARED = 1024  # calls that are cached for one function
ALIGNMENT = 256  # bytes, of a temporary in the block they share


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

    def permuted(self, *axes: int) -> ArrayRef:
        """The same elements with dimensions in another order."""
        return ArrayRef(self.place, self.view.permuted(axes))

    def reshaped(self, *shape: int) -> ArrayRef:
        """The same elements under another shape, which their strides are known to allow."""
        view = self.view.reshaped(shape)
        assert view is not None
        return ArrayRef(self.place, view)


class CallBuilder:
    """The arrays and launches of one call in the making. `backend` and `threads` are as the caller gave them."""

    def __init__(
        self, inputs: Mapping[str, View | None], captured: Captures, backend: str | None, threads: int | None
    ) -> None:
        self.inputs = {name: ArrayRef(("input", n), view) for n, (name, view) in enumerate(inputs.items()) if view}
        self.given = len(inputs)  # with those that are left out
        self.captured, self.backend, self.threads = captured, backend, threads
        self.device = next(iter(self.inputs.values())).view.device
        self.choices: Choices = backends.get(backends.resolve(backend, self.device)).choices
        self.copies: dict[int, tuple[int, ...]] = {}  # inputs by position, and the shape they are broadcast to
        self.broadcast: dict[int, tuple[int, ...]] = {}  # the same, where leading dimensions then count as one
        self.results: list[View] = []
        self.temporaries: list[View] = []
        self.kept_views: list[View] = []
        self.kept_keys: list[Any] = []
        self.launches: list[PlannedLaunch] = []
        self.map_launches: list[PlannedLaunch] = []  # those that write kept arrays, from captured ones alone
        self.scale: float | None = None  # of a call that passes none
        self.scores: tuple[int, ...] = ()  # batch, query heads, queries and keys
        self.growth: Growth | None = None  # of a call that may be repeated with more keys

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
        self.kept_keys.append(key)
        self.kept_views.append(self._new(shape, dtype))
        return ArrayRef(("kept", len(self.kept_views) - 1), self.kept_views[-1])

    def _new(self, shape: tuple[int, ...], dtype: DType) -> View:
        return View(dtype, shape, tensors.dense(shape), self.device)

    def contiguous(self, array: ArrayRef, shape: tuple[int, ...] | None = None) -> ArrayRef:
        """An input, copied at every call, where it is broadcast to another shape."""
        shape = array.shape if shape is None else shape
        self.copies[array.place[1]] = self.broadcast.get(array.place[1], shape)
        return ArrayRef(array.place, View(array.dtype, shape, tensors.dense(shape), self.device))

    def reshaped(self, array: ArrayRef, *shape: int) -> ArrayRef:
        """An input under another shape, copied if its strides do not allow it."""
        view = array.view.reshaped(shape)
        return ArrayRef(array.place, view) if view is not None else self.contiguous(array).reshaped(*shape)

    def threads_for(self, flops: int, bytes_: int) -> int | None:
        """The threads that the caller asked for, or as many as the work is worth."""
        if self.threads is None:
            return self.choices.threads(flops, bytes_)
        return read_threads(self.threads)

    def launch(self, kernel: Kernel, *args: Any, choice: Choice, threads: int | None, **consts: Any) -> None:
        """Add a launch of arrays, None for a tensor that is left out, and scalars, of which SCALE may be one."""
        consts = {**choice.blocks, **consts}
        views = [a.view if type(a) is ArrayRef else 1.0 if a is SCALE else a for a in args]
        captured = captures(consts.values()).beside(views)
        plan = kernel.plan(views, captured, consts, self.backend, choice.schedule)
        index = {place: n for n, place in enumerate(self.captured.arrays)}
        places = [a.place if type(a) is ArrayRef else ("", -1) for a in args]
        places += [("captured", index[place]) for place in captured.arrays]
        own = [(args[position], name, dtype) for position, name, dtype in plan.scalars if position < len(args)]
        scalars = [a if a is SCALE else read_scalar(name, a, dtype) for a, name, dtype in own]
        number_index = {place: n for n, place in enumerate(self.captured.numbers)}
        numbers = [number_index[place] for place in captured.numbers]
        found = [places[n] for n in plan.array_positions]
        makes_kept = {kind for kind, _ in found} <= {"captured", "kept"}
        launches = self.map_launches if makes_kept else self.launches
        read: list[Any] = [views[n] for n in plan.array_positions if n < len(views)]
        launches.append(PlannedLaunch(plan, found, read, scalars, numbers, threads))


class Captured(NamedTuple):
    """What the functions of a call bring: the arrays and numbers they refer to, the arrays' addresses, and the block
    mask of one."""

    found: Captures
    arrays: Sequence[Array]
    numbers: Sequence[int | float]
    addresses: list[int]
    block_mask: MapStore | None


class PreparedCall:
    """A call that was checked, without its arrays. A launch picks its addresses from those of the call: of the arrays
    as given, the results, captured arrays, kept arrays, temporaries."""

    def __init__(self, lib: Library, builder: CallBuilder, finish: Finish) -> None:
        self.lib, self.finish = lib, finish
        self.copies = sorted(builder.copies.items())
        self.results = [lib.template(view) for view in builder.results]
        launches = [*builder.map_launches, *builder.launches]
        self.needs_arrays = any(planned.plan.program.needs_arrays for planned in launches)
        self.temporaries = [lib.template(view) for view in builder.temporaries] if self.needs_arrays else []
        self.offsets: list[int] = []  # of each temporary in the one block that all of them share
        size = 0
        for view in builder.temporaries:
            self.offsets.append(size)
            size += -(-tensors.span(view)[1] // ALIGNMENT) * ALIGNMENT
        self.block = lib.template(View(uint8, (size,), (1,), builder.device)) if size else None
        counts = {"input": builder.given, "result": len(builder.results), "captured": len(builder.captured.arrays)}
        counts |= {"kept": len(builder.kept_views), "temporary": len(builder.temporaries)}
        self.steps = steps_of(builder.launches, list(counts.items()), builder.scale)
        self.maps, self.scores = _map_maker(lib, builder), builder.scores
        self.reads = tuple([read for planned in launches for read in planned.plan.user_globals])

    def holds(self) -> bool:
        """True if functions of the caller's that were compiled in still refer to the same things."""
        return not self.reads or all(names.get(name) is value for names, name, value in self.reads)

    def run(self, given: Sequence[Array], addresses: list[int], captured: Captured | None, scale: float | None) -> Any:
        """Launch on the arrays that a call gives. `addresses` are theirs, and become those of all arrays."""
        lib = self.lib
        if self.copies:
            given = self._copied(given, addresses)
        results = []
        for template in self.results:
            array, address = lib.allocate(template)
            results.append(array)
            addresses.append(address)
        others: Sequence[Array] = ()
        numbers: Sequence[int | float] = ()
        if captured is not None:
            others, numbers = self._captured(captured, addresses), captured.numbers
        if self.needs_arrays:
            self._launch_arrays([*given, *results, *others], addresses, scale, numbers)
            return self.finish(results)
        if self.block is not None:  # kept until everything is launched, on a GPU by torch until its stream is done
            _block, base = lib.allocate(self.block)
            addresses += [base + at for at in self.offsets]
        else:
            addresses += self.offsets  # temporaries without elements, if any
        for step in self.steps:
            scalars = step.scalars_of(scale, numbers)
            step.launch(step.bound, (), step.pick(addresses), scalars, step.threads)
        return self.finish(results)

    def _copied(self, given: Sequence[Array], addresses: list[int]) -> Sequence[Array]:
        """Return the arrays with contiguous copies where kernels need them, whose addresses replace the others."""
        given = list(given)
        for n, shape in self.copies:
            given[n] = self.lib.contiguous(given[n], shape)
            addresses[n] = tensors.address(given[n])
        return given

    def _captured(self, captured: Captured, addresses: list[int]) -> Sequence[Array]:
        """Return captured and kept arrays, whose addresses are appended."""
        _, found, numbers, places, block_mask = captured
        if block_mask is not None:
            block_mask.check(self.scores)
        addresses += places
        if self.maps is None:
            return found
        kept, kept_addresses = self.maps.maps(found, places, numbers, block_mask)
        addresses += kept_addresses
        return [*found, *kept]

    def _launch_arrays(
        self, every: list[Array], addresses: list[int], scale: float | None, numbers: Sequence[int | float]
    ) -> None:
        """Launch programs that take arrays instead of addresses: each temporary is an array of its own."""
        for template in self.temporaries:
            array, address = self.lib.allocate(template)
            every.append(array)
            addresses.append(address)
        for step in self.steps:
            scalars = step.scalars_of(scale, numbers)
            step.launch(step.bound, step.pick(every), step.pick(addresses), scalars, step.threads)


def _map_maker(lib: Library, builder: CallBuilder) -> MapMaker | None:
    if not builder.map_launches:
        return None
    counts = [("captured", len(builder.captured.arrays)), ("kept", len(builder.kept_views))]
    steps = steps_of(builder.map_launches, counts, None)
    reads = {n for planned in builder.map_launches for kind, n in planned.places if kind == "captured"}
    return MapMaker(lib, builder.kept_views, steps, sorted(reads), tuple(builder.kept_keys))


# ---- functions of the library ----------------------------------------------------------------------------------------


class LibraryFunction:
    """A function of the library with its cache of prepared calls. `plan` checks a call, adds its launches to a builder
    and returns the post-processing of the results. `Options` is a named tuple that ends in `backend` and `threads`.
    `families` are calls by all but their number of keys."""

    def __init__(self, names: Sequence[str], Options: Any, plan: Callable[[CallBuilder, Any], Finish]) -> None:
        self.names, self.Options, self.plan = names, Options, plan
        self.calls: dict[Any, PreparedCall] = {}
        self.families = Families(MAX_PREPARED)

    def call(
        self, given: Sequence[Array | None], layouts: Layouts, options: tuple[Any, ...], scale: float | None = None,
        block_mask: MapStore | None = None,
    ) -> Any:  # fmt: skip
        """`given` are arrays in the order of `names`, None where one is left out, and `layouts` theirs. Options that
        are equal must mean the same, so those that may be 1, 1.0 or True are checked before. `scale` is a number for
        kernels, and `block_mask` has the maps of the mask_mod among the options."""
        signatures, addresses = layouts
        key: Any = (*signatures, *options, type(options[-1]))
        try:
            prepared = self.calls.get(key)
        except TypeError:  # something unhashable: the full check will say what
            key, prepared = None, None
        if prepared is not None:
            return prepared.run(given, addresses, None, scale)
        functions = tuple([option for option in options if type(option) not in PLAIN and is_function(option)])
        if functions:
            call = given, layouts, options, scale, block_mask
            return with_constants(functions, lambda: self._with_functions(functions, *call))
        grown = self.families.grown(signatures, options) if key is not None else []
        for alike, prepared in grown:
            self._keep((*alike, *options, type(options[-1])), prepared)
        if grown:
            return grown[0][1].run(given, addresses, None, scale)
        return self._first(key, given, addresses, None, options, scale)

    def _keep(self, key: Any, prepared: PreparedCall) -> None:
        if len(self.calls) >= MAX_PREPARED:
            self.calls.clear()
        self.calls[key] = prepared

    def _with_functions(
        self, functions: tuple[Any, ...], given: Sequence[Any], layouts: Layouts, options: tuple[Any, ...],
        scale: float | None, block_mask: MapStore | None,
    ) -> Any:  # fmt: skip
        """Find a call by what its functions compile to and capture."""
        signatures, addresses = layouts
        found = captures(functions).beside(given[:1])
        given_arrays = list(found.arrays.values())
        if given_arrays:
            refuse_captured_gradients(given_arrays)
        others, places = tensors.layouts(given_arrays) if given_arrays else ([], [])
        captured = Captured(found, given_arrays, tuple(found.numbers.values()), places, block_mask)
        keys = [o if type(o) in PLAIN or not is_function(o) else const_key(o) for o in options]
        key: Any = (*signatures, *keys, type(options[-1]), *others, *found.pattern)
        try:
            prepared = self.calls.get(key)
        except TypeError:
            key, prepared = None, None
        if prepared is not None and not prepared.holds():
            if note_rebound(prepared.reads):
                return self._with_functions(functions, given, layouts, options, scale, block_mask)
            prepared = None
        if prepared is None:
            return self._first(key, given, addresses, captured, options, scale)
        return prepared.run(given, addresses, captured, scale)

    def _first(
        self, key: Any, given: Sequence[Any], addresses: list[int], captured: Captured | None, options: tuple[Any, ...],
        scale: float | None,
    ) -> Any:  # fmt: skip
        named = self.Options(*options)
        lib = arrays.library(self.names[0], given[0], named.backend)
        arrays.check_one_library(zip(self.names, given, strict=False))
        adopted = [None if a is None else lib.adopt(n, a) for n, a in zip(self.names, given, strict=False)]
        if any(a is not b for a, b in zip(adopted, given, strict=True)):
            results = self.call(adopted, tensors.layouts(adopted), options, scale, captured and captured.block_mask)
            return arrays.given_back(lib, results, [*given, *(captured.arrays if captured is not None else ())])
        try:
            views = {n: None if a is None else tensors.read(n, a) for n, a in zip(self.names, given, strict=False)}
            prepared, family = self._prepare(lib, views, captured, options)
        except InternalError:
            raise
        except MonotileError as error:  # without the frames of the compiler
            raise error.with_traceback(None) from None
        if key is not None:
            self._keep(key, prepared)
            self.families.add_signatures(key[: len(given) + 1], options, family)
        return prepared.run(given, addresses, captured, scale)

    def _prepare(
        self, lib: Library, views: dict[str, View | None], captured: Captured | None, options: tuple[Any, ...]
    ) -> tuple[PreparedCall, GrowingCall | None]:
        """Plan a call, or make it of one with another number of keys. Return it, and from what others can be made."""
        key = family_key(lib, views, options) if captured is None and "k" in views else None
        grown, family = self.families.grown_views(key, views)
        if grown is not None:
            return grown, family
        named = self.Options(*options)
        builder = CallBuilder(views, captured.found if captured else NOTHING, named.backend, named.threads)
        prepared = PreparedCall(lib, builder, self.plan(builder, named))
        if builder.growth is not None and key is not None:
            return prepared, self.families.add(key, GrowingCall(prepared, builder))
        return prepared, None
