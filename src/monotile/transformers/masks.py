"""Masks as Transformers describes them, a function of (batch, head, query, key) and a padding mask, as the options of
`monotile.attention`: which keys take part, causal, window, padding of order N, and a mask_mod for the rest.

A mask travels through a model as a tensor of shape (B, 1, Nq, Nk) that has no elements. The attention function reads
its description; a model that computes with it gets the dense mask that Transformers makes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import KernelError
from ..library.block_maps import depends_on
from .replaceable import check_config, models_of

MaskFunction = Callable[..., Any]


@dataclass(frozen=True)
class Visible:
    """Which keys queries see: of the first `keys` keys, with the last query at the last of them if it is causal."""

    keys: int
    causal: bool
    window: tuple[int | None, int | None] | None
    padding: Tensor | None  # (B, keys), False where a key is hidden
    mask_mod: MaskFunction | None

    @property
    def hides_nothing(self) -> bool:
        return not self.causal and self.window is None is self.padding is self.mask_mod


class LazyMask(torch.Tensor):  # type: ignore[misc]
    """A bool mask (B, 1, Nq, Nk) by its description; computing with it makes the dense mask."""

    visible: Visible
    make_dense: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, shape: Sequence[int], device: Any, visible: Visible, make_dense: Callable[[], Tensor]) -> LazyMask:
        made: LazyMask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        made.visible, made.make_dense = visible, make_dense
        return made

    def __init__(self, *args: Any) -> None:
        """Everything is done by __new__."""

    def __repr__(self, **options: Any) -> str:
        return f"LazyMask({tuple(self.shape)}, {self.visible})"

    def dense(self) -> Tensor:
        return self.make_dense().expand(self.shape)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = torch.utils._pytree.tree_map_only(LazyMask, LazyMask.dense, (args, kwargs or {}))
        return function(*args, **kwargs)


class MaskRequest(NamedTuple):
    """What Transformers asks a mask for."""

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: Any = 0  # a tensor with a static cache
    kv_offset: int = 0
    mask_function: MaskFunction | None = None
    attention_mask: Tensor | None = None  # (B, length), True for tokens that are not padding
    use_vmap: bool = False
    device: Any = "cpu"


def _sees_all(given: Mapping[str, Any]) -> bool:
    """True for one query at the last of the keys, none of which is padding: each step of decoding."""
    keys, first, padding = given["kv_length"], given.get("kv_offset", 0), given.get("attention_mask")
    last = given.get("q_offset", 0)
    if given["q_length"] != 1 or type(last) is not int or last + 1 != first + keys:
        return False
    return padding is None or (first == 0 and padding.shape[1] == keys and bool(padding.all()))


def _is_traced(*given: Any) -> bool:
    """True where Transformers' `is_tracing` is, which takes 15 us in a step of a model: of plain tensors and numbers
    there is less to ask."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return True
    if all([a is None or type(a) is int or type(a) is Tensor for a in given]):
        return torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())
    from transformers.utils.import_utils import is_tracing

    return any([is_tracing(a) for a in given])


def make_mask(
    *, allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool = False, **given: Any
) -> Tensor | None:
    """The mask of a forward pass, in place of Transformers' `sdpa_mask` and with its arguments. None stands for causal
    attention of as many keys as queries, where layers say that they are causal, or of one query to all keys, or for no
    mask in an encoder, where allowed."""
    theirs: Any = sys.modules["transformers.masking_utils"]  # an import statement takes 5 us in a step of a model
    config: Any = type(given.get("config"))
    if _is_traced(given.get("attention_mask"), given.get("q_offset")):
        skips = {"allow_is_causal_skip": allow_is_causal_skip and _layers_are_causal(config)}
        skips["allow_is_bidirectional_skip"] = allow_is_bidirectional_skip
        mask: Tensor | None = theirs.sdpa_mask(**skips, **given)
        return mask
    check_config(config)
    given.setdefault("mask_function", theirs.causal_mask_function)
    if allow_is_causal_skip and given["mask_function"] is theirs.causal_mask_function and _sees_all(given):
        return None
    request = MaskRequest(**{name: given[name] for name in MaskRequest._fields if name in given})
    visible = describe(request)
    rows, whole = request.q_length, request.kv_length == getattr(visible, "keys", None)
    if visible is not None and allow_is_causal_skip:
        plain = visible.window is None is visible.padding is visible.mask_mod
        if plain and visible.causal and rows == visible.keys and _layers_are_causal(config):
            return None
        if whole and rows == 1 and visible.hides_nothing:
            return None
    if visible is not None and allow_is_bidirectional_skip and whole and visible.hides_nothing:
        return None

    def make_dense() -> Tensor:
        found: Tensor = theirs.sdpa_mask(**request._asdict(), allow_is_causal_skip=False)
        return found

    if visible is None:
        return make_dense()
    shape = request.batch_size, 1, rows, request.kv_length
    return LazyMask(shape, request.device, visible, make_dense)


@cache
def _layers_are_causal(config: type) -> bool:
    """True if the layers of a model surely have a true `is_causal` where they are causal: `sdpa` needs it, and in
    models that do not take `sdpa` layers of decoders may say the contrary."""
    models = models_of(config)
    return bool(models) and all(model._supports_sdpa for model in models)


# ---- from functions to options ---------------------------------------------------------------------------------------


class Parts(NamedTuple):
    """A conjunction of mask functions, taken apart."""

    causal: bool
    left: list[int]
    right: list[int]
    others: list[MaskFunction]


@cache
def codes() -> dict[str, Any]:
    """The code of each function that Transformers' masks are made of."""
    from transformers import masking_utils as made

    ids = torch.zeros(1, 1, dtype=torch.int64)
    return {
        "and": made.and_masks().__code__,
        "or": made.or_masks().__code__,
        "causal": made.causal_mask_function.__code__,
        "bidirectional": made.bidirectional_mask_function.__code__,
        "window": made.sliding_window_overlay(1).__code__,
        "both_sides": made.sliding_window_bidirectional_overlay(1).__code__,
        "padding": made.padding_mask_function(ids).__code__,
    }


def describe(request: MaskRequest) -> Visible | None:
    """The options of attention for a mask, None if a function in it cannot be compiled."""
    assert request.mask_function is not None
    parts = Parts(False, [], [], [])
    parts = _take_apart(request.mask_function, parts)
    first, keys = int(request.q_offset), request.kv_length
    end = first + request.q_length - request.kv_offset  # one past the last query's own key
    causal, others = parts.causal, list(parts.others)
    left, right = (min(sides, default=None) for sides in (parts.left, parts.right))
    if causal and 0 < end <= keys:
        keys = end
    elif end != keys and (causal or left is not None or right is not None):
        others = [request.mask_function]  # the last query is not at the last key, which attention's options assume
        causal, left, right = False, None, None
    if left is not None and left >= end - 1:
        left = None
    padding = _padding(request, keys)
    mask_mod = None
    if others:
        mask_mod = _shifted(_conjunction(others), first, request.kv_offset, request.device)
        try:
            depends_on(mask_mod)
        except KernelError:
            return None
    window = None if left is None is right else (left, right)
    if causal and request.q_length == 1:
        causal = False  # the last query sees all keys
    return Visible(keys, causal, window, padding, mask_mod)


def _take_apart(function: MaskFunction, parts: Parts) -> Parts:
    known, code = codes(), getattr(function, "__code__", None)
    if code is known["and"]:
        for part in _captured(function)["mask_functions"]:
            parts = _take_apart(part, parts)
        return parts
    if code is known["causal"]:
        return parts._replace(causal=True)
    if code is known["window"]:
        parts.left.append(_captured(function)["sliding_window"] - 1)
    elif code is known["both_sides"]:
        parts.left.append(_captured(function)["sliding_window"])
        parts.right.append(_captured(function)["sliding_window"])
    elif code is not known["bidirectional"]:
        parts.others.append(function)
    return parts


def _captured(function: Any) -> dict[str, Any]:
    return dict(zip(function.__code__.co_freevars, [c.cell_contents for c in function.__closure__ or ()], strict=True))


def _padding(request: MaskRequest, keys: int) -> Tensor | None:
    """The keys that padding leaves, None if there is none of it."""
    mask = request.attention_mask
    if mask is None:
        return None
    mask = mask[:, request.kv_offset : request.kv_offset + keys]
    if mask.shape[1] < keys:
        mask = torch.nn.functional.pad(mask, (0, keys - mask.shape[1]))
    return None if bool(mask.all()) else mask


def _conjunction(functions: Sequence[MaskFunction]) -> MaskFunction:
    """One function of several, without what Transformers' own does for devices."""
    rebuilt = tuple(_rebuilt(function) for function in functions)
    if len(rebuilt) == 1:
        return rebuilt[0]

    def conjunction(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = rebuilt[0](b, h, i, j)
        for other in rebuilt[1:]:
            seen = seen & other(b, h, i, j)
        return seen

    return conjunction


def _disjunction(functions: Sequence[MaskFunction]) -> MaskFunction:
    rebuilt = tuple(_rebuilt(function) for function in functions)

    def disjunction(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = rebuilt[0](b, h, i, j)
        for other in rebuilt[1:]:
            seen = seen | other(b, h, i, j)
        return seen

    return disjunction


def _rebuilt(function: MaskFunction) -> MaskFunction:
    known, code = codes(), getattr(function, "__code__", None)
    if code is known["and"]:
        return _conjunction(_captured(function)["mask_functions"])
    if code is known["or"]:
        return _disjunction(_captured(function)["mask_functions"])
    return function


def _shifted(function: MaskFunction, rows: int, columns: int, device: Any) -> MaskFunction:
    """A mask function at the positions of a cache. Offsets change with every token: as arrays, they are not compiled
    in."""
    if rows == columns == 0:
        return function
    row, column = (torch.tensor([n], dtype=torch.int32, device=device) for n in (rows, columns))

    def shifted(b: Any, h: Any, i: Any, j: Any) -> Any:
        return function(b, h, i + row[0], j + column[0])

    return shifted
