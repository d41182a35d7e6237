"""The passes that every backend runs, in order. A pass is a function that changes a kernel in place; the verifier runs
at the end. A backend selects passes with `PipelineOptions` and may add its own.

| pass         | what it does                                                                                      |
|--------------|---------------------------------------------------------------------------------------------------|
| fold         | fold constants, identities, decided comparisons and branches, bounds that cannot be exceeded      |
| cse          | merge equal pure ops                                                                              |
| motion       | hoist loop invariants                                                                             |
| dce          | remove ops that nothing reads                                                                     |
| spread       | where asked for: load slices whose elements a tile repeats, in place of gathers                   |
| skip         | restrict loops under `blocks(..., visible)` to blocks that may be visible                         |
| unmark       | drop the `visible` marks                                                                          |
| peel         | split a loop where its position predicates become constant: masked, unmasked, masked iterations   |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import UnsupportedPython
from ..ir import Kernel, copy, show, verify, walk
from .cse import cse, dce
from .fold import fold
from .motion import motion
from .peel import peel, peel_all_bounds, peel_with_bounds, skip, unmark

Pass = Callable[[Kernel], None]
CLEAN: tuple[Pass, ...] = (fold, cse, motion, dce)


@dataclass(frozen=True)
class PipelineOptions:
    """Passes a backend selects."""

    peel_bounds: bool = True  # also peel iterations whose loads and stores cross the edge of a tensor
    peel_all_bounds: bool = False  # also for bounds checks that the loop does not change
    keep_marks: bool = False  # keep `visible`: the backend skips hidden rows of a block itself
    early: tuple[Pass, ...] = ()  # passes that the backend selects to run before loops are split
    after_peel: tuple[Pass, ...] = ()  # passes of the backend that run on peeled loops
    last: tuple[Pass, ...] = ()  # passes of the backend that run at the end


def passes(options: PipelineOptions) -> tuple[Pass, ...]:
    """Return the passes in the order they run."""
    chosen = peel_all_bounds if options.peel_all_bounds else peel_with_bounds if options.peel_bounds else peel
    marks = () if options.keep_marks else (unmark,)
    after_peel = (*options.after_peel, *CLEAN) if options.after_peel else ()
    return (*CLEAN, *options.early, skip, *marks, *CLEAN, chosen, *CLEAN, *after_peel, *options.last)


def after_each(kernel: Kernel, options: PipelineOptions) -> str:
    """Return the kernel as text, as the front end made it and after every pass."""
    texts = [f"# frontend\n{show(kernel)}"]
    run(copy(kernel), options, lambda name, k: texts.append(f"# {name}\n{show(k)}"))
    return "\n".join(texts)


def run(kernel: Kernel, options: PipelineOptions, watch: Callable[[str, Kernel], None] | None = None) -> None:
    """Run every pass. `watch` is called after each with the pass's name and the kernel, which is verified then; without
    it the kernel is verified once, at the end: the verifier takes as long as the passes."""
    for op in walk(kernel.body):
        if op.kind == "print":
            cure = 'call the kernel with backend="interpreter", or take the print out'
            raise UnsupportedPython("print works in the interpreter only", cure, op.loc)
    for each in passes(options):
        each(kernel)
        if watch is not None:
            verify.check(kernel, each.__name__)
            watch(each.__name__, kernel)
    if watch is None:
        verify.check(kernel, "the passes")
