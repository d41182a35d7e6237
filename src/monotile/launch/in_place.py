"""Calls whose outputs are also inputs: `rope(q, cos, sin, q)`. They have programs of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .. import backends
from ..errors import InternalError, MonotileError, OverlappingOutput
from .arguments import Arguments
from .captures import captures, with_constants

Pairs = tuple[tuple[int, int], ...]  # an output and the input that is the same array, by their positions


def plan(
    kernel: Any, before: Any, pairs: Pairs, args: Sequence[Any], consts: Mapping[str, Any],
    backend: str | None, schedule: Any,
) -> Any:  # fmt: skip
    """Plan a call of a kernel as the plan `before`, with inputs that are outputs, if no element is read after it is
    written."""

    def attempt() -> Any:
        from ..passes import in_place

        given = args[: len(kernel.parameters)]
        call = Arguments(kernel.signature, given, captures(consts.values()).beside(given), consts)
        built = in_place.prepared(kernel.build(call.specialisation()))
        for output, source in pairs:
            read, written = built.tensors[source], built.tensors[output]
            why = in_place.why_not(built, read, written)
            if why:
                found = f"the output {written.name!r} is also the input {read.name!r}, but {why}"
                raise OverlappingOutput(f"{found}; pass separate arrays")
            in_place.redirect(built, read, written)
        chosen = backends.for_device(backend, call.device)
        program = chosen.compile(built) if schedule is None else chosen.compile_as(built, schedule)
        return replace(before, program=program, bound=program.bind(call.words(), call.device))

    try:
        found = with_constants(tuple(consts.values()), attempt) if consts else attempt()
    except InternalError:
        raise
    except MonotileError as error:  # without the frames of the compiler
        raise error.with_traceback(None) from None
    before.in_place[pairs] = found
    return found
