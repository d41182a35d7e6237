"""Functions of a call (`score_mod`, `mask_mod`) as arguments of torch's operators, which take tensors, numbers and
words: each call's pair is an entry of a table, passed by its number.

In a compiled graph that number is a constant, so that its entry stays; elsewhere an entry lives as long as the graph
that may need it. A function that reads tensors of a compiled graph is no constant: it is passed as the function that
makes it, and the tensors as arguments of the operator."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..launch.captures import captures, frozen
from .block_mask import unwrapped
from .torch_calls import is_recorded, no_captured_gradient, refuse_captured_gradients

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


class Mods:
    """The functions of a call, each a function, a Maker or None."""

    def __init__(self, score_mod: Any, mask_mod: Any) -> None:
        self.score_mod, self.mask_mod = score_mod, mask_mod

    def with_arrays(self, arrays: Sequence[Tensor]) -> tuple[Mod | None, Mod | None]:
        """Both functions, made of the arrays that an operator was given for them."""
        rest = iter(arrays)
        score_mod, mask_mod = (
            mod.make(*itertools.islice(rest, mod.arrays)) if isinstance(mod, Maker) else mod
            for mod in (self.score_mod, self.mask_mod)
        )
        return score_mod, mask_mod


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
        plain = [None if isinstance(mod, ArrayMod) else mod for mod in (score_mod, mask_mod)]
        if torch.is_grad_enabled() and _reads_gradients_in_graph(*plain):
            raise no_captured_gradient()
        return _number_in_graph(*_constant_part(score_mod), *_constant_part(mask_mod)), NONE
    mods = Mods(frozen(score_mod), frozen(mask_mod))
    refuse_captured_gradients(_captured(mods.score_mod, mods.mask_mod))
    if is_recorded():
        return _number_in_graph(mods.score_mod, -1, mods.mask_mod, -1), NONE
    return _enter(mods), mods


def _captured(*mods: Any) -> list[Any]:
    """The arrays that the functions of a call read."""
    functions = [unwrapped(mod)[0] for mod in mods if mod is not None]
    return list(captures(functions).arrays.values())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _reads_gradients_in_graph(score_mod: Any, mask_mod: Any) -> bool:
    return any([getattr(array, "requires_grad", False) for array in _captured(score_mod, mask_mod)])


def _constant_part(mod: Any) -> tuple[Any, int]:
    return (mod.make, len(mod.arrays)) if isinstance(mod, ArrayMod) else (mod, -1)


def arrays_of(*mods: Any) -> list[Tensor]:
    """The tensors that an operator is given beside the number of two functions."""
    return [array for mod in mods if isinstance(mod, ArrayMod) for array in mod.arrays]


def mods_of(number: int) -> Mods:
    return _table[number]
