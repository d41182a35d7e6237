"""A decorated kernel: look up or compile the program for a call, and launch it.

Three tables keep a call short. `_plans` is keyed by everything about the call but addresses and contents: a hit goes
straight to the backend. `_templates` is keyed by what the compiled code depends on (element types, constants, known
strides, never lengths), as read from the arguments without checking them: a hit is a new plan of a checked program.
`_programs` is keyed by the same as the full check reads it.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .. import backends
from ..backends.base import Backend
from ..errors import (
    ArgumentAlignment,
    BadOption,
    BadSignature,
    InternalError,
    KernelError,
    MonotileError,
    OverlappingOutput,
    ReadOnlyOutput,
)
from ..ir import Kernel as KernelIR
from ..ir.builder import GlobalRead
from ..runtime import arrays, tensors
from ..runtime.tensors import numpy_address
from . import in_place, source_keys
from .arguments import Arguments, Specialisation
from .captures import NOTHING, Captures, captures, const_key, note_rebound, with_constants
from .gradients import refuse_gradients
from .in_place import Pairs
from .layouts import ArgumentLayout, LayoutReader
from .plans import Plan, PlanTemplate, user_globals
from .signature import read_scalar, read_signature, read_threads
from .source_keys import CompiledKernel, GlobalReads

MAX_PLANS = 4096


class Kernel:
    """A kernel of the tile language. Call it with arrays and scalars in order and constants by name."""

    def __init__(self, function: Callable[..., None]) -> None:
        if not isinstance(function, types.FunctionType):
            found = f"@kernel needs a plain function, found {type(function).__name__}"
            raise BadSignature(found, "put @kernel directly above a def")
        self.function = function
        self.name = function.__name__
        self.__doc__, self.__name__, self.__wrapped__ = function.__doc__, function.__name__, function
        self.__module__, self.__qualname__ = function.__module__, function.__qualname__
        try:
            self.signature = read_signature(function)
        except BadSignature as error:
            raise error.with_traceback(None) from None
        self.parameters, self.const_names = self.signature.parameters, self.signature.const_names
        self.defaults = self.signature.defaults
        self._plans: dict[Any, Plan] = {}
        self._programs: dict[Any, CompiledKernel] = {}
        self._templates: dict[Any, PlanTemplate] = {}
        self._layouts = LayoutReader(self.signature)
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"<monotile kernel {self.name}>"

    def __call__(
        self, *args: Any, backend: str | None = None, threads: int | None = None, schedule: Any = None, **consts: Any
    ) -> None:
        if threads is not None:
            threads = read_threads(threads)
        try:
            if consts:
                values = tuple(consts.values())
                plan, args = with_constants(values, lambda: self._planned(args, consts, backend, schedule))
            else:
                plan, args = self._planned(args, consts, backend, schedule)
        except InternalError:
            raise
        except MonotileError as error:  # without the frames of the compiler
            raise error.with_traceback(None) from None
        given = args if plan.all_arrays else [args[n] for n in plan.array_positions]
        if "torch" in sys.modules:
            refuse_gradients(self.name, given)
        addresses = [numpy_address(a) if type(a) is np.ndarray else tensors.address(a) for a in given]
        pairs = self._check_memory(plan, given, addresses)
        if pairs:
            plan = plan.in_place.get(pairs) or in_place.plan(self, plan, pairs, args, consts, backend, schedule)
        scalars = [] if plan.all_arrays else [read_scalar(name, args[n], dtype) for n, name, dtype in plan.scalars]
        try:
            plan.program.launch(plan.bound, given, addresses, scalars, threads)
        except KernelError as error:  # a race that the interpreter found
            raise error.with_traceback(None) from None

    def _planned(
        self, given: tuple[Any, ...], consts: Mapping[str, Any], backend: str | None, schedule: Any
    ) -> tuple[Plan, tuple[Any, ...]]:
        """Return the plan of a call, and its arguments with the arrays and numbers that its constants capture."""
        captured, args = NOTHING, given
        if consts:
            captured = captures(consts.values()).beside(given)
            args = (*given, *captured.arrays.values(), *captured.numbers.values())
        shapes = [(a.shape, a.strides, a.dtype) if type(a) is np.ndarray else tensors.signature(a) for a in args]
        key: Any = (backend, schedule, *shapes)
        if consts:
            key += tuple([(n, v if type(v) is int else const_key(v)) for n, v in consts.items()])
            key += captured.pattern
        try:
            plan = self._plans.get(key)
        except TypeError:  # something unhashable: the full check will say what
            plan = None
        if plan is not None:
            for names, name, value in plan.globals_read:
                if names.get(name) is not value:  # rebound since: compile again
                    self._plans.clear()
                    if note_rebound(plan.globals_read):
                        return self._planned(given, consts, backend, schedule)
                    plan = None
                    break
        if plan is None:
            if any([arrays.is_foreign(a, backend) for a in given]):
                given = arrays.host_views([p.name for p in self.parameters], given, backend)
                return self._planned(given, consts, backend, schedule)
            plan = self.plan(given, captured, consts, backend, schedule)
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan, args

    def _check_memory(self, plan: Plan, arrays: Sequence[Any], addresses: Sequence[int]) -> Pairs:
        """Check what may differ between calls with one plan: alignment, writability, and outputs that share memory with
        another argument. Byte ranges are compared first; interleaved views are compared exactly. Return the pairs of
        an output and an input that are one array."""
        for n, address in enumerate(addresses):
            if address & plan.alignment_masks[n]:
                name = self._array_name(plan, n)
                raise ArgumentAlignment(f"{name!r} is not aligned to its elements; pass {name}.copy()")
        spans = plan.spans
        pairs: Pairs = ()
        for i in plan.outputs:
            if not tensors.is_writable(arrays[i]):
                name = self._array_name(plan, i)
                raise ReadOnlyOutput(f"{name!r} is written by {self.name} but is read-only; pass a writable array")
            low, high = spans[i]
            low, high = low + addresses[i], high + addresses[i]
            for j, address in enumerate(addresses):
                begin, end = spans[j]
                if low < end + address and begin + address < high and i != j and tensors.share(arrays[i], arrays[j]):
                    if not tensors.same_view(arrays[i], arrays[j]) or j in plan.outputs:
                        names = self._array_name(plan, i), self._array_name(plan, j)
                        found = f"the output {names[0]!r} shares memory with {names[1]!r}"
                        raise OverlappingOutput(f"{found}; pass separate arrays, or the same one")
                    pairs += ((i, j),)
        return pairs

    def _array_name(self, plan: Plan, n: int) -> str:
        return self.signature.parameter(plan.array_positions[n]).name

    # ---- a first call with given shapes ------------------------------------------------------------------------------

    def plan(
        self,
        given: Sequence[Any],
        captured: Captures,
        consts: Mapping[str, Any],
        backend: str | None,
        schedule: Any = None,
    ) -> Plan:
        """Check a call and find or compile its program. `captured` are arrays and numbers of functions among the
        constants; a `View` may stand for an array."""
        key: Any = None
        layouts: dict[int, ArgumentLayout] = {}
        if not captured.pattern:
            key, layouts = self._layouts.read(given, consts, backend, schedule)
        plan = self._plan_of_template(key, layouts)
        if plan is not None:
            return plan
        call = Arguments(self.signature, given, captured, consts)
        chosen = backends.for_device(backend, call.device)
        if schedule is not None and not isinstance(schedule, chosen.schedules or ()):
            takes = f"takes a {chosen.schedules.__name__}" if chosen.schedules else "takes no schedule"
            raise BadOption(f"backend {chosen.name!r} {takes}, found {type(schedule).__name__}; leave it out")
        compiled = self._find_or_compile(call, chosen, schedule)
        call.check_outputs(compiled.kernel)
        views = call.views.values()
        typed = zip(call.scalar_positions, compiled.kernel.scalars, strict=True)
        template = PlanTemplate(
            compiled,
            call.device,
            array_positions=tuple(call.views),
            scalars=tuple((position, name, dtype) for position, (name, dtype) in typed),
            alignment_masks=tuple(v.dtype.bytes - 1 for v in views),
            outputs=tuple(sorted(compiled.kernel.written)),
            all_arrays=len(call.views) == len(call.args),
            user_globals=user_globals(compiled.globals_read),
            shared_lengths=self._layouts.shared_lengths(layouts),
        )
        if key is not None and tuple(layouts) == template.array_positions:
            if len(self._templates) >= MAX_PLANS:
                self._templates.clear()
            self._templates[key] = template
        return template.plan(call.words(), [tensors.span(v) for v in views])

    def _plan_of_template(self, key: Any, layouts: Mapping[int, ArgumentLayout]) -> Plan | None:
        """Return the plan of a call whose layouts a checked call had; None where the full check is needed."""
        try:
            template = self._templates.get(key)
        except TypeError:  # something unhashable: the full check will say what
            return None
        return None if template is None else template.plan_of(layouts)

    def _find_or_compile(self, call: Arguments, backend: Backend, schedule: Any) -> CompiledKernel:
        """Return this process's program for the call, else the one on disk, else compile it."""
        spec = call.specialisation()
        consts_key = tuple([(n, const_key(v)) for n, v in spec.consts.items()])
        key = backend.name, schedule, spec.tensors, spec.scalars, consts_key, call.captured.pattern
        with self._lock:
            found = self._programs.get(key)
            if found is not None and all(names.get(name) is value for names, name, value in found.globals_read):
                return found

            def compile_call() -> CompiledKernel:
                globals_read: list[GlobalRead] = []
                kernel = self.build(spec, globals_read)
                call.check_outputs(kernel)
                program = backend.compile(kernel) if schedule is None else backend.compile_as(kernel, schedule)
                return CompiledKernel(kernel, program, _distinct(globals_read))

            found = source_keys.recall(backend, schedule, self.function, spec, compile_call)
            # The constants of the IR may be functions that hold on to arrays.
            outline = source_keys.Outline(found.kernel.name, spec, found.kernel.written)
            self._programs[key] = found = found._replace(kernel=outline)
        return found

    def ir(self, *args: Any, **consts: Any) -> KernelIR:
        """Return the IR this call would compile, as the front end makes it."""
        return with_constants(tuple(consts.values()), lambda: self.ir_with_arguments(*args, **consts))

    def ir_with_arguments(self, *args: Any, **consts: Any) -> KernelIR:
        """Return the IR of a call, with captured numbers as arguments; raise an error where they must be constants."""
        call = Arguments(self.signature, args, captures(consts.values()).beside(args), consts)
        return self.build(call.specialisation())

    def build(self, spec: Specialisation, globals_read: list[GlobalRead] | None = None) -> KernelIR:
        """Run the front end."""
        from ..frontend.build import build
        from ..ir import verify

        kernel = build(
            self.function, spec.tensors, spec.scalars, spec.consts, spec.captured, spec.numbers, globals_read
        )
        verify.check(kernel, "frontend")
        return kernel


def _distinct(globals_read: list[GlobalRead]) -> GlobalReads:
    return tuple({(id(names), name): (names, name, value) for names, name, value in globals_read}.values())
