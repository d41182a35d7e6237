"""Plans: checked launches, of which a repeated call needs no more than addresses and scalars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..backends.base import Program
from ..dtypes import DType
from .in_place import Pairs
from .layouts import ArgumentLayout, Positions, lengths_agree
from .source_keys import CompiledKernel, GlobalReads

PACKAGE = __name__.partition(".")[0]


@dataclass(slots=True)
class Plan:
    """A checked launch: of the next call with the same key, only addresses, scalars and writability are checked."""

    program: Program
    bound: Any  # what the program's `bind` made of lengths and strides
    array_positions: tuple[int, ...]  # of the arrays among the arguments
    scalars: tuple[tuple[int, str, DType], ...]  # position, name and type of each scalar
    spans: tuple[tuple[int, int], ...]  # bytes each array covers, relative to its address
    alignment_masks: tuple[int, ...]  # address bits that must be zero
    outputs: tuple[int, ...]  # arrays that are written, as positions in `array_positions`
    all_arrays: bool  # no scalars among the arguments
    globals_read: GlobalReads  # globals with the values that were compiled in
    user_globals: GlobalReads  # those of them outside of this package
    in_place: dict[Pairs, Plan] = field(default_factory=dict)  # the same launch with inputs that are outputs


class PlanTemplate(NamedTuple):
    """What the plans of one program have in common."""

    compiled: CompiledKernel
    device: str
    array_positions: tuple[int, ...]
    scalars: tuple[tuple[int, str, DType], ...]
    alignment_masks: tuple[int, ...]
    outputs: tuple[int, ...]
    all_arrays: bool
    user_globals: GlobalReads
    shared_lengths: tuple[Positions, ...]

    def plan(self, words: list[int], spans: Sequence[tuple[int, int]]) -> Plan:
        """Return the plan for tensors of these lengths and strides, and a zero for each scalar."""
        program = self.compiled.program
        bound = program.bind(words, self.device)
        return Plan(
            program, bound, self.array_positions, self.scalars, tuple(spans), self.alignment_masks, self.outputs,
            self.all_arrays, self.compiled.globals_read, self.user_globals,
        )  # fmt: skip

    def plan_of(self, layouts: Mapping[int, ArgumentLayout]) -> Plan | None:
        """Return the plan of a call with these layouts, by position; None where only the full check can tell."""
        if not lengths_agree(self.shared_lengths, layouts):
            return None
        for names, name, value in self.user_globals:
            if names.get(name) is not value:
                return None
        found = list(layouts.values())
        if any([found[n].overlaps_itself for n in self.outputs]):
            return None
        words: list[int] = []
        for layout in found:
            words += layout.words
        return self.plan(words + [0] * len(self.scalars), [layout.span for layout in found])


def user_globals(reads: GlobalReads) -> GlobalReads:
    """Return the globals outside of this package, whose own never change."""
    return tuple(read for read in reads if not str(read[0].get("__name__")).startswith(PACKAGE + "."))
