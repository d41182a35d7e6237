"""A call of the library, prepared once and repeated: checks and choices are made from what the arrays look like, never
from their memory, and a call like an earlier one only allocates its results, reads addresses and launches.

A `Draft` is where an op puts a call together: it reads the arrays' lengths and strides, asks for results and
temporaries, and lists launches. What comes of it, a `Prepared`, is kept under everything about the call but addresses,
contents and numbers that are passed to the kernels. It holds no array.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from ..dtypes import DType, uint8
from ..errors import ArgumentAlignment, ArgumentKind, InternalError, MonotileError
from ..launch.kernel import Kernel, Plan
from ..launch.signature import capture_pattern, captured_arrays, const_key, read_scalar
from ..launch.source_keys import GlobalReads
from ..runtime import arrays, tensors
from ..runtime.arrays import Library
from ..runtime.tensors import View

Array = Any
MAX_PREPARED = 1024  # of one op
ALIGNMENT = 256  # of a temporary in the block they share
PLAIN = frozenset((type(None), bool, int, str))  # options that are their own key, together with their type


class Operand(NamedTuple):
    """An array of a call: whose memory it is, and how it is looked at."""

    place: tuple[str, int]  # "input", "result", "captured" or "temporary", and which of them
    view: View

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape

    @property
    def dtype(self) -> DType:
        return self.view.dtype

    def broadcast(self, shape: tuple[int, ...]) -> Operand:
        return Operand(self.place, self.view.broadcast(shape))

    def reshaped(self, *shape: int) -> Operand:
        """Another shape of memory that is known to allow it."""
        view = self.view.reshaped(shape)
        assert view is not None
        return Operand(self.place, view)


class Scale:
    """Stands for the number that each call brings along."""


SCALE = Scale()


class Step(NamedTuple):
    """A launch of a prepared call."""

    launch: Callable[..., None]
    bound: Any
    pick: Callable[[Sequence[Any]], Sequence[Any]]  # its arrays' addresses among those of the call
    scaled: bool  # the first scalar is the call's number
    scalars: tuple[Any, ...]
    threads: int | None


class Draft:
    """A call in the making."""

    def __init__(self, lib: Library, names: Sequence[str], given: Sequence[Any], captured: Sequence[Any]) -> None:
        self.lib, self.captured = lib, captured
        self.inputs: dict[str, Operand] = {}
        for name, array in zip(names, given, strict=True):
            if array is not None:
                self.inputs[name] = Operand(("input", len(self.inputs)), tensors.read(name, array))
        self.device = next(iter(self.inputs.values())).view.device
        self.copies: set[int] = set()
        self.results: list[View] = []
        self.temporaries: list[View] = []
        self.launches: list[tuple[Plan, list[tuple[str, int]], list[Any], int | None]] = []
        self.scale: float | None = None  # where the call brings no number

    def input(self, name: str) -> Operand:
        if name not in self.inputs:
            raise ArgumentKind(f"{name!r} must be an array, found NoneType; pass NumPy arrays or torch tensors")
        return self.inputs[name]

    def result(self, shape: tuple[int, ...], dtype: DType) -> Operand:
        self.results.append(self._new(shape, dtype))
        return Operand(("result", len(self.results) - 1), self.results[-1])

    def temporary(self, shape: tuple[int, ...], dtype: DType) -> Operand:
        self.temporaries.append(self._new(shape, dtype))
        return Operand(("temporary", len(self.temporaries) - 1), self.temporaries[-1])

    def _new(self, shape: tuple[int, ...], dtype: DType) -> View:
        return View(dtype, shape, tensors.dense(shape), self.device)

    def contiguous(self, operand: Operand) -> Operand:
        """An input, copied at every call."""
        self.copies.add(operand.place[1])
        view = operand.view
        return Operand(operand.place, View(view.dtype, view.shape, tensors.dense(view.shape), view.device))

    def reshaped(self, operand: Operand, *shape: int) -> Operand:
        """An input under another shape, copied if there is no other way."""
        view = operand.view.reshaped(shape)
        return Operand(operand.place, view) if view is not None else self.contiguous(operand).reshaped(*shape)

    def launch(
        self, kernel: Kernel, *args: Any, backend: str | None, threads: int | None, schedule: Any = None, **consts: Any
    ) -> None:
        """One more launch: operands, None for a tensor that is left out, and scalars, of which SCALE may be one."""
        captured = captured_arrays(consts.values())
        seen = [a.view if isinstance(a, Operand) else 1.0 if a is SCALE else a for a in args]
        plan = kernel.plan((*seen, *captured), len(args), consts, backend, schedule)
        at = {id(array): n for n, array in enumerate(self.captured)}
        places = [a.place if isinstance(a, Operand) else ("", -1) for a in args]
        places += [("captured", at[id(array)]) for array in captured]
        scalars = [a if a is SCALE else read_scalar(n, a, d) for p, n, d in plan.scalars for a in (args[p],)]
        self.launches.append((plan, [places[n] for n in plan.array_positions], scalars, threads))


class Prepared:
    """A call that was checked, without its arrays."""

    def __init__(self, draft: Draft, finish: Callable[[list[Array]], Any]) -> None:
        lib = self.lib = draft.lib
        self.finish, self.scale = finish, draft.scale
        self.names = [*draft.inputs, *[""] * len(draft.results), *["captured"] * len(draft.captured)]
        self.copies = frozenset(draft.copies)
        self.results = [(v.shape, lib.kind(v.dtype, v.device)) for v in draft.results]
        given = [o.view.dtype.bytes - 1 for o in draft.inputs.values()]
        others = [tensors.read("captured", a).dtype.bytes - 1 for a in draft.captured]
        self.aligned = (*given, *[0] * len(draft.results), *others)
        self.strictest = max(self.aligned)
        self.needs_arrays = any(plan.program.needs_arrays for plan, *_ in draft.launches)
        self.temporaries = [(v.shape, lib.kind(v.dtype, v.device)) for v in draft.temporaries]
        self.carved: list[int] = []  # where each temporary begins in the one block that all of them share
        size = 0
        for view in draft.temporaries:
            self.carved.append(size)
            size += -(-tensors.span(view)[1] // ALIGNMENT) * ALIGNMENT
        self.block = ((size,), lib.kind(uint8, draft.device)) if size else None
        first = {"input": 0, "result": len(draft.inputs)}
        first["captured"] = first["result"] + len(draft.results)
        first["temporary"] = first["captured"] + len(draft.captured)
        self.steps = []
        for plan, places, scalars, threads in draft.launches:
            scaled = bool(scalars) and scalars[0] is SCALE
            picked = _picker([first[kind] + n for kind, n in places])
            rest = tuple(scalars[1:] if scaled else scalars)
            self.steps.append(Step(plan.program.launch, plan.bound, picked, scaled, rest, threads))
        self.reads = _foreign([read for plan, *_ in draft.launches for read in plan.globals_read])

    def holds(self) -> bool:
        """Whether functions of the caller's that were compiled in still refer to the same things."""
        return all(names.get(name) is value for names, name, value in self.reads)

    def run(self, given: Sequence[Array], captured: Sequence[Array], scale: float | None) -> Any:
        lib = self.lib
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
        if self.needs_arrays:
            self._launch_arrays([*given, *results, *captured], addresses, scale)
            return self.finish(results)
        if self.block is not None:  # it lives until everything is launched, on a GPU until its stream is done with it
            block = lib.empty(*self.block)
            (base,) = lib.addresses((block,))
            addresses += [base + at for at in self.carved]
        else:
            addresses += self.carved  # empty ones, if any
        for launch, bound, pick, scaled, scalars, threads in self.steps:
            launch(bound, (), pick(addresses), (scale, *scalars) if scaled else scalars, threads)
        return self.finish(results)

    def _check_alignment(self, addresses: Sequence[int]) -> None:
        for name, address, bits in zip(self.names, addresses, self.aligned, strict=True):
            if address & bits:
                raise ArgumentAlignment(f"{name!r} is not aligned to its elements; pass {name}.copy()")

    def _launch_arrays(self, every: list[Array], addresses: list[int], scale: float | None) -> None:
        """The same for programs that take arrays instead of addresses: each temporary is an array of its own."""
        temporaries = [self.lib.empty(shape, kind) for shape, kind in self.temporaries]
        every, addresses = every + temporaries, addresses + self.lib.addresses(temporaries)
        for launch, bound, pick, scaled, scalars, threads in self.steps:
            numbers = (scale, *scalars) if scaled else scalars
            launch(bound, pick(every), pick(addresses), numbers, threads)


def _picker(at: list[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    if len(at) > 1:
        return itemgetter(*at)
    return lambda items: [items[n] for n in at]


def _foreign(reads: Sequence[tuple[dict[str, Any], str, Any]]) -> GlobalReads:
    """What the caller's functions read. The library's own names stay what they are."""
    package = __name__.partition(".")[0] + "."
    return tuple(read for read in reads if not str(read[0].get("__name__")).startswith(package))


# ---- ops -------------------------------------------------------------------------------------------------------------


class Op:
    """A function of the library. `plan` drafts a call from its inputs and options, and says how results are given."""

    def __init__(self, names: Sequence[str], plan: Callable[..., Callable[[list[Array]], Any]]) -> None:
        self.names, self.plan = names, plan
        self.table: dict[Any, Prepared] = {}

    def __call__(self, given: Sequence[Array | None], options: tuple[Any, ...], scale: float | None = None) -> Any:
        """`given` are arrays in the order of `names`, None where one is left out; `scale` is a number for kernels."""
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
            prepared = self.table.get(key)
        except TypeError:  # something unhashable: the full check will say what
            key, prepared = None, None
        if prepared is None or (prepared.reads and not prepared.holds()):
            return self._first(key, given, captured, options, scale)
        present = [a for a in given if a is not None]
        return prepared.run(present, captured, scale)

    def _first(self, key: Any, given: Sequence[Any], captured: Sequence[Any], options: Any, scale: float | None) -> Any:
        lib = arrays.library(self.names[0], given[0])
        adopted = [None if a is None else lib.adopt(n, a) for n, a in zip(self.names, given, strict=True)]
        if any(a is not b for a, b in zip(adopted, given, strict=True)):
            result = self(adopted, options, scale)
            kind = type(result)
            if not isinstance(result, tuple):
                return lib.give_back(result)
            found = [lib.give_back(array) for array in result]
            return kind(*found) if hasattr(kind, "_fields") else tuple(found)
        try:
            draft = Draft(lib, self.names, given, captured)
            prepared = Prepared(draft, self.plan(draft, *options))
        except InternalError:
            raise
        except MonotileError as error:  # without the frames of the compiler
            raise error.with_traceback(None) from None
        if key is not None:
            if len(self.table) >= MAX_PREPARED:
                self.table.clear()
            self.table[key] = prepared
        return prepared.run([a for a in given if a is not None], captured, scale)


def _option_key(option: Any) -> Any:
    return const_key(tuple(option)) if type(option) is list else const_key(option)
