"""The passes, in order. Every rewrite is a function from a kernel to nothing that changes it in place; the verifier
runs
after each. Backends choose with `Options`; what they learn afterwards (axes, nests, storage) are analyses they call.

| pass         | what it does                                                                                      |
|--------------|---------------------------------------------------------------------------------------------------|
| fold         | constants, identities, decided comparisons and branches, bounds that cannot be exceeded           |
| cse          | equal pure ops become one                                                                         |
| motion       | what a loop does not change moves before it                                                       |
| dce          | ops nothing reads are removed                                                                     |
| skip         | loops under `blocks(..., visible)` run only over blocks that may be visible                       |
| peel         | a loop is cut where its position tests become known: masked blocks, clean blocks, masked blocks   |
| unmark       | what `visible` said of blocks is dropped                                                          |
| quantify     | whether any row passes tests of positions becomes a test of positions                             |
| narrow       | what a mask hides from every row is not loaded                                                    |
| sink         | the maximum of scaled numbers is the maximum, scaled                                              |
| detach       | a fold of positions and loads gets its own copy of them                                           |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .. import verify
from ..ir import Kernel, copy, show
from .cse import cse, dce
from .detach import detach
from .fold import fold
from .motion import motion
from .narrow import narrow
from .peel import peel, peel_all_bounds, peel_with_bounds, skip, unmark
from .quantify import quantify
from .sink import sink

Pass = Callable[[Kernel], None]
CLEAN: tuple[Pass, ...] = (fold, cse, motion, dce)


@dataclass(frozen=True)
class Options:
    """What a backend asks for."""

    peel_bounds: bool = True  # also cut loops where loads and stores reach the edge of a tensor
    peel_all_bounds: bool = False  # also for bounds that a loop does not change
    keep_marks: bool = False  # the backend leaves out hidden parts of blocks itself
    detach: bool = False
    quantify: bool = False
    narrow: bool = False  # what a mask hides from every row is not loaded


def passes(options: Options) -> tuple[Pass, ...]:
    chosen = peel_all_bounds if options.peel_all_bounds else peel_with_bounds if options.peel_bounds else peel
    marks = () if options.keep_marks else (unmark,)
    known: tuple[Pass, ...] = (*((quantify,) if options.quantify else ()), *((narrow,) if options.narrow else ()))
    known = (*known, *CLEAN) if known else ()
    last = (detach,) if options.detach else ()
    return (*CLEAN, skip, *marks, *CLEAN, chosen, *CLEAN, *known, sink, *CLEAN, *last)


def after_each(kernel: Kernel, options: Options) -> str:
    """The kernel as text, as the front end made it and after every pass."""
    texts = [f"# frontend\n{show(kernel)}"]
    run(copy(kernel), options, lambda name, k: texts.append(f"# {name}\n{show(k)}"))
    return "\n".join(texts)


def run(kernel: Kernel, options: Options, watch: Callable[[str, Kernel], None] | None = None) -> None:
    """Runs every pass; `watch` sees the kernel after each."""
    for each in passes(options):
        each(kernel)
        verify.check(kernel, each.__name__)
        if watch is not None:
            watch(each.__name__, kernel)
