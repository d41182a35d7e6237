"""Functions of a call (`score_mod`, `mask_mod`) as arguments of torch's operators, which take tensors, numbers and
words: each call's pair is an entry of a table, passed by its number.

In a compiled graph that number is a constant, so that its entry stays; elsewhere an entry lives as long as the graph
that may need it. A function that reads tensors of a compiled graph is no constant: it is passed as the function that
makes it, and the tensors as arguments of the operator."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CapturedChanged, NoGradient
from ..launch.captures import frozen
from .block_mask import unwrapped
from .snapshots import Snapshot
from .torch_calls import CAPTURED_GRADIENT, is_recorded, refuse_captured_gradients

Mod = Callable[..., Any]


class ArrayMod(NamedTuple):
    """A mod of a compiled graph: `make(*arrays)` is the function."""

    make: Callable[..., Mod]
    arrays: tuple[Tensor, ...]


class Maker(NamedTuple):
    """An ArrayMod without its arrays: it takes the next `arrays` of those that an operator is given."""

    make: Callable[..., Mod]
    arrays: int


def mod_of_arrays(make: Callable[..., Mod], *arrays: Tensor) -> Any:
    """The mod that `make` gives for some arrays; in a compiled graph they become arguments of the operator. `make` is a
    function of a module, the same in every call."""
    return ArrayMod(make, arrays) if torch.compiler.is_compiling() else make(*arrays)


UNCHANGED = contextlib.nullcontext()


class Mods:
    """The functions of a call, each a function, a Maker or None, with a snapshot of what they read: that of the call,
    in a compiled graph that of its last run."""

    def __init__(self, score_mod: Any, mask_mod: Any) -> None:
        self.score_mod, self.mask_mod = score_mod, mask_mod
        self.snapshot: Snapshot | None = None
        self.recorded = False  # by make_fx or torch.jit.trace, with the snapshot of then
        self.changes: dict[str, Tensor] = {}  # by device; the version of each counts changes between runs of a graph

    def read_now(self) -> Snapshot:
        given = self.score_mod, unwrapped(self.mask_mod)[0]
        return Snapshot([mod for mod in given if mod is not None and not isinstance(mod, Maker)])

    def with_arrays(self, arrays: Sequence[Tensor]) -> tuple[Mod | None, Mod | None]:
        """Both functions, made of the arrays that an operator was given for them."""
        rest = iter(arrays)
        score_mod, mask_mod = (
            mod.make(*itertools.islice(rest, mod.arrays)) if isinstance(mod, Maker) else mod
            for mod in (self.score_mod, self.mask_mod)
        )
        return score_mod, mask_mod

    def note_run(self, read: Sequence[Tensor]) -> None:
        """Take a snapshot for the gradients of a compiled graph that runs now. If something has changed since the last
        run, torch shall refuse the gradients of earlier ones: they have saved the version of a tensor."""
        if not read:
            return
        made_of = sum(mod.arrays for mod in (self.score_mod, self.mask_mod) if isinstance(mod, Maker))
        if len(read) == made_of:
            return
        if self.snapshot is None:
            self.snapshot = self.read_now()
        elif not self.snapshot.is_current():
            self.snapshot = self.read_now()
            for tensor in self.changes.values():
                torch.autograd.graph.increment_version(tensor)
        refuse_captured_gradients(self.snapshot.arrays, computed=True)

    def as_called(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the functions read what they read in the call whose gradients are computed. A recorded
        graph does not tell its runs apart: it has gradients as long as nothing has changed."""
        if self.recorded and self.snapshot and not self.snapshot.is_current():
            raise CapturedChanged(
                "something that score_mod or mask_mod reads has changed since make_fx or torch.jit.trace recorded the "
                "call; record it again before its gradients are computed"
            )
        return self.snapshot.restored() if self.snapshot else UNCHANGED


NONE = Mods(None, None)
_table: weakref.WeakValueDictionary[int, Mods] = weakref.WeakValueDictionary({0: NONE})
_kept: dict[tuple[Any, Any], tuple[int, Mods]] = {}  # those that compiled graphs refer to
_numbers = itertools.count(1)


def _enter(mods: Mods) -> int:
    number = next(_numbers)
    _table[number] = mods
    return number


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _number_in_graph(score_mod: Any, score_arrays: int, mask_mod: Any, mask_arrays: int) -> int:
    """The number of two functions as a constant of a compiled graph. Those with arrays (-1: without) are makers."""
    given = (score_mod, score_arrays), (mask_mod, mask_arrays)
    key = *(_identity(mod) for mod, _ in given), score_arrays, mask_arrays
    if key not in _kept:
        mods = Mods(*(mod if count < 0 else Maker(mod, count) for mod, count in given))
        _kept[key] = _enter(mods), mods
    return _kept[key][0]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _reads_gradients(number: int) -> bool:
    """True if functions of a compiled graph read a tensor that requires grad."""
    return any([getattr(array, "requires_grad", False) for array in _table[number].read_now().arrays])


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _may_change(number: int) -> bool:
    """True if functions of a compiled graph read something."""
    return bool(_table[number].read_now())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _changes_on(number: int, device: str) -> Tensor:
    """A tensor without elements, whose version counts changes of what functions of a compiled graph read."""
    return _table[number].changes.setdefault(device, torch.empty(0, device=device))


def _identity(mod: Any) -> Any:
    """What tells a function from others: its code, where nothing else belongs to it, so that a lambda made anew in
    every trace takes no further entry."""
    if type(mod) is FunctionType and not mod.__closure__ and not mod.__defaults__ and not mod.__kwdefaults__:
        return mod.__code__, id(mod.__globals__)
    return mod


def number_of(score_mod: Any, mask_mod: Any) -> tuple[int, Mods]:
    """The number by which an operator is given two functions, and its entry, to be held until the operator has it."""
    if score_mod is None and mask_mod is None:
        return 0, NONE
    if torch.compiler.is_compiling():
        number = _number_in_graph(*_constant_part(score_mod), *_constant_part(mask_mod))
        if torch.is_grad_enabled() and _reads_gradients(number):
            raise NoGradient(CAPTURED_GRADIENT)
        return number, NONE
    mods = Mods(frozen(score_mod), frozen(mask_mod))
    mods.snapshot = mods.read_now()
    refuse_captured_gradients(mods.snapshot.arrays)
    if is_recorded():
        number = _number_in_graph(mods.score_mod, -1, mods.mask_mod, -1)
        _table[number].snapshot, _table[number].recorded = mods.snapshot, True
        return number, NONE
    return _enter(mods), mods


def _constant_part(mod: Any) -> tuple[Any, int]:
    return (mod.make, len(mod.arrays)) if isinstance(mod, ArrayMod) else (mod, -1)


def arrays_of(*mods: Any) -> list[Tensor]:
    """The tensors that an operator is given beside the number of two functions."""
    return [array for mod in mods if isinstance(mod, ArrayMod) for array in mod.arrays]


def watched(number: int, *given: Tensor | None) -> list[Tensor]:
    """The tensor of `_changes_on`, where an operator of a compiled graph has gradients and functions that read
    something; else nothing. torch saves its version in the forward pass and compares it in the backward pass. An
    exported program has none."""
    if not number or not torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
        return []
    if not torch.is_grad_enabled():
        return []
    if not any([t is not None and t.requires_grad for t in given]) or not _may_change(number):
        return []
    device = given[0].device  # type: ignore[union-attr]
    return [_changes_on(number, str(device))]


def mods_of(number: int) -> Mods:
    return _table[number]
