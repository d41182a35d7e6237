"""`monotile inspect KERNEL --stage run`: the values of one program in the interpreter, on random arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import dtypes
from ..launch.arguments import Arguments
from ..launch.captures import NOTHING, compile_in
from ..runtime.tensors import View
from . import catalogue
from .inspection import arguments
from .request import BadRequest, Request


def text(place: str, request: Request, at: str) -> str:
    """The values of a program, line by line. Floats are normal, integers from 0 to 7, the same ones in every run."""
    from ..backends.trace import Trace

    if place in catalogue.FUNCTIONS:
        raise BadRequest(f"{place} is a function of several launches; give a kernel: path/to/file.py:NAME")
    name, _, number = at.partition("=")
    if name != "program" or not (number.isascii() and number.isdecimal()):
        raise BadRequest(f"--at {at} is not a program; write --at program=3")
    kernel = catalogue.find_kernel(place)
    request, _ = catalogue.completed(kernel, request, "interpreter", None)
    views, consts = arguments(kernel, request)
    compile_in(tuple(consts.values()))
    call = Arguments(kernel.signature, views, NOTHING, consts)
    form = kernel.build(call.specialisation())
    rng = np.random.default_rng(0)
    arrays = [_filled(rng, view) for view in call.views.values()]
    scalars = [call.args[n] for n in call.scalar_positions]
    try:
        return Trace(form, arrays, scalars).run(int(number))
    except IndexError as error:
        most = int(str(error)) - 1
        raise BadRequest(
            f"{kernel.name} has no program {number} here; write --at program=N, from 0 to {most}"
        ) from None


def split_at(words: Sequence[str]) -> tuple[list[str], str]:
    """Take `--at program=3` out of a command line; program 0 by default."""
    rest, at = [], "program=0"
    following = iter(words)
    for word in following:
        if word == "--at" or word.startswith("--at="):
            at = word[5:] or next(following, "")
        else:
            rest.append(word)
    return rest, at


def _filled(rng: np.random.Generator, view: View) -> Any:
    if view.dtype.is_float:
        return rng.standard_normal(view.shape).astype(np.float32).astype(dtypes.to_numpy(view.dtype))
    return rng.integers(0, 2 if view.dtype is dtypes.bool_ else 8, view.shape).astype(dtypes.to_numpy(view.dtype))
