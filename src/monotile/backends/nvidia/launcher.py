"""Launch a compiled kernel with little time on the host.

Triton's launcher allocates scratch memory that hardly any kernel needs, and encodes every tensor descriptor again at
every launch, for several microseconds. The kernel arguments that a descriptor becomes depend on a tensor's address and
lengths alone, so here they are encoded once and kept. That reaches under Triton's launcher, whose inside is not
promised: it is done for the version it was written for, where everything is as expected there; otherwise Triton's own
is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, NamedTuple

VERSION = "3.6."
HOOKS = None, None, None  # metadata of the launch, and what is called before and after it


class LoadedKernel(NamedTuple):
    """A compiled kernel, loaded."""

    launch: Callable[[int, int, Sequence[Any]], None]  # of a number of CTAs, on a stream, with arguments
    encode: Callable[[int, Any], Sequence[Any]]  # the arguments that become of a descriptor, by its number


def load(kernel: Any, descriptors: int) -> LoadedKernel:
    """Return the launcher of a kernel that Triton compiled, with `descriptors` tensor descriptors as its first
    arguments."""
    run, function, packed = kernel.run, kernel.function, kernel.packed_metadata
    inside = _inside(run, descriptors)
    if inside is None:

        def launch(grid: int, stream: int, arguments: Sequence[Any]) -> None:
            run(grid, 1, 1, stream, function, packed, *HOOKS, *arguments)

        return LoadedKernel(launch, lambda n, descriptor: (descriptor,))
    under, encodings = inside
    fixed = function, run.launch_cooperative_grid, run.launch_pdl, None, None, packed, *HOOKS  # no scratch memory

    def launch_directly(grid: int, stream: int, arguments: Sequence[Any]) -> None:
        under(grid, 1, 1, stream, *fixed, *arguments)

    return LoadedKernel(launch_directly, lambda n, descriptor: _encode(descriptor, encodings[n]))


def _inside(run: Any, descriptors: int) -> tuple[Callable[..., None], list[Any]] | None:
    """Return the compiled launch function under Triton's, and how each descriptor is encoded."""
    if not metadata.version("triton").startswith(VERSION) or run.global_scratch_size or run.profile_scratch_size:
        return None
    if not descriptors:
        return run.launch, []
    code, cells = getattr(run.launch, "__code__", None), getattr(run.launch, "__closure__", None) or ()
    found = {name: cell.cell_contents for name, cell in zip(getattr(code, "co_freevars", ()), cells, strict=True)}
    encodings = found.get("tensordesc_meta") or []
    descriptors_first = found.get("tensordesc_indices") == set(range(descriptors)) and len(encodings) == descriptors
    if not descriptors_first or None in encodings or "launcher" not in found:
        return None
    return found["launcher"], encodings


def _encode(descriptor: Any, encoding: Any) -> Sequence[Any]:
    from triton.backends.nvidia.driver import make_tensordesc_arg

    encoded: Sequence[Any] = make_tensordesc_arg(descriptor, encoding)
    return encoded
