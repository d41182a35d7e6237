"""`attention_backward`: the gradients of attention. Checks and views here, all arithmetic in kernels/."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ..backends.choices import BackwardBlocks, BackwardChoice, Choice
from ..dtypes import DType, bool_, float32
from ..errors import ArgumentRank, ArgumentShape, BadOption, MixedDTypes
from ..kernels.backward import backward_keys, backward_queries, row_deltas, sees_some_key
from ..kernels.option_gradients import mask_gradient, sink_gradient
from ..kernels.scores import Options
from ..runtime import tensors
from . import torch_calls
from .block_maps import add_block_map
from .block_mask import BlockMask, unwrapped
from .calls import ArrayRef, CallBuilder, Finish, LibraryFunction
from .inputs import (
    AttentionInputs,
    on_one_diagonal,
    read_inputs,
    read_options,
    read_scoring,
    unit_last,
)
from .launches import SCALE
from .leading import summed_to
from .ragged_spans import add_spans

Array = Any
Window = tuple[int | None, int | None] | None


class Gradients(NamedTuple):
    """Gradients of attention's arguments; None where there is no such argument or it was not asked for."""

    dq: Array
    dk: Array
    dv: Array
    dsinks: Array | None
    dmask: Array | None


class BackwardOptions(NamedTuple):
    """The options of a call, as given; ragged sequences have no mask."""

    causal: Any
    window: Any
    softcap: Any
    score_mod: Any
    mask_mod: Any
    negative: bool  # the scale is negative
    mask_grad: Any
    backend: str | None
    threads: int | None


class RowGradients(NamedTuple):
    """What a call gives for each query row: checked, with a batch dimension."""

    do: ArrayRef
    o: ArrayRef
    lse: ArrayRef
    dlse: ArrayRef | None


def attention_backward(
    do: Array, q: Array, k: Array, v: Array, o: Array, lse: Array, *, dlse: Array | None = None,
    mask_grad: bool = False, causal: bool | str = False, scale: float | None = None, mask: Array | None = None,
    window: Window = None, softcap: float | None = None, sinks: Array | None = None,
    score_mod: Callable[..., Any] | None = None, mask_mod: Callable[..., Any] | BlockMask | None = None,
    deterministic: bool = True, backend: str | None = None, threads: int | None = None,
) -> Gradients:  # fmt: skip
    """Return the gradients of `attention` with these arguments, where it returned `o` and `lse`.

    torch tensors that require grad need no call of it: `attention` is differentiable there. The gradients themselves
    have none: call it under `torch.no_grad()`, or in the backward of a `torch.autograd.Function`.

    Args:
        do: gradient of the output (..., Hq, Nq, Dv).
        q: queries (..., Hq, Nq, D).
        k: keys (..., Hkv, Nk, D).
        v: values (..., Hkv, Nk, Dv).
        o: output of the forward call.
        lse: its logsumexp (..., Hq, Nq), from `return_lse=True`.
        dlse: gradient of the logsumexp; 0 if left out.
        mask_grad: also return the gradient of an additive mask.
        deterministic: True for the same bits in every run. False allows sums in any order on a GPU; so far none is.
        causal, scale, mask, window, softcap, sinks, score_mod, mask_mod, backend, threads: as in `attention`.

    Returns:
        `Gradients` dq, dk, dv, dsinks and dmask; the last two are None where they were not asked for.

    Example:
        >>> q = np.ones((1, 2, 5, 64), np.float32)
        >>> o, lse = monotile.attention(q, q, q, return_lse=True)
        >>> monotile.attention_backward(np.ones_like(o), q, q, q, o, lse).dq.shape
        (1, 2, 5, 64)
    """
    check_bools(mask_grad=mask_grad, deterministic=deterministic)
    scale, window, softcap, negative = read_scoring(causal, scale, window, softcap)
    blocks = None
    if mask_mod is not None:
        mask_mod, blocks = unwrapped(mask_mod)
    arrays = q, k, v, do, o, lse, dlse, mask, sinks
    if torch_calls.is_tensor(q):
        torch_calls.refuse_gradients("attention_backward", *arrays)
    options = causal, window, softcap, score_mod, mask_mod, negative, mask_grad, backend, threads
    found: Gradients = ATTENTION_BACKWARD.call(arrays, tensors.layouts(arrays), options, scale, blocks)
    return found


def _plan(builder: CallBuilder, given: BackwardOptions) -> Finish:
    options = read_options(given)
    inputs = read_inputs(builder)
    options = on_one_diagonal(options, inputs)
    rows = _read_rows(builder, inputs)
    _check_mask_grad(given.mask_grad, inputs, builder)
    dq, dk, dv = (inputs.result(builder, array.shape, inputs.dtype) for array in (inputs.q, inputs.k, inputs.v))
    threads = builder.threads_for(5 * inputs.flops // 2, 2 * inputs.bytes)
    choice = builder.choices.attention_backward(inputs.problem(options))
    call = BackwardCall(builder, inputs, options, rows, threads)
    call.add_gradients(dq, dk, dv, choice)
    if given.mask_grad:
        call.add_mask(choice.keys)
    with_sinks, with_mask = inputs.sinks is not None, given.mask_grad
    shapes = [builder.input(name).shape for name in "qkv"]

    def finish(results: list[Array]) -> Gradients:
        rest = results[3:]
        dq, dk, dv = (summed_to(array, shape) for array, shape in zip(results[:3], shapes, strict=True))
        return Gradients(dq, dk, dv, rest[0] if with_sinks else None, rest[-1] if with_mask else None)

    return finish


class BackwardCall:
    """The launches of one call."""

    def __init__(
        self, builder: CallBuilder, inputs: AttentionInputs, options: Options, rows: RowGradients, threads: int | None,
        offsets: tuple[ArrayRef | None, ArrayRef | None] = (None, None), *, by_mod: str | None = None,
    ) -> None:  # fmt: skip
        self.builder, self.inputs, self.options = builder, inputs, options
        self.rows, self.threads, self.offsets, self.by_mod = rows, threads, offsets, by_mod
        self.mask = inputs.broadcast_mask()
        self.delta = builder.temporary(inputs.out_shape[:3], float32)
        self.maps: dict[tuple[int, int], tuple[ArrayRef | None, bool]] = {}

    def add_gradients(self, dq: ArrayRef, dk: ArrayRef, dv: ArrayRef, choice: BackwardChoice) -> None:
        """Add the gradients of q, k, v and sinks."""
        self.add_deltas()
        if choice.rows is not None and 0 not in dq.shape:
            self.add_queries(dq, choice.rows)
        if 0 not in dk.shape[:3] or (choice.rows is None and 0 not in dq.shape):
            self.add_keys(dk, dv, dq if choice.rows is None else None, choice)
        if self.inputs.sinks is not None:
            self.add_sinks(self.inputs.sinks)

    def add_deltas(self) -> None:
        if 0 not in self.inputs.out_shape:
            args = self.rows.do, self.rows.o, self.rows.dlse, self.delta
            self.builder.launch(row_deltas, *args, choice=Choice({}), threads=self.threads)

    def add_queries(self, dq: ArrayRef, blocks: BackwardBlocks) -> None:
        block_map, covered = self._block_map(blocks)
        args = *self._scores(block_map), self._spans(blocks, "BR"), dq, SCALE
        consts = {"options": self.options, "covered": covered, "by_mod": self.by_mod}
        self.builder.launch(backward_queries, *args, choice=blocks, threads=self.threads, **consts)

    def add_keys(self, dk: ArrayRef, dv: ArrayRef, dq: ArrayRef | None, choice: BackwardChoice) -> None:
        """Add the gradients of keys and values, and with them those of the queries, which are summed in float32."""
        blocks = choice.keys
        block_map, covered = self._block_map(blocks)
        summed_apart = dq is not None and dq.dtype is not float32
        workspace = self.builder.temporary(self.inputs.q.shape, float32) if summed_apart else None
        consts = {"options": self.options, "covered": covered, "all_sighted": self._all_sighted()}
        consts["by_mod"] = self.by_mod
        for part in ((dk, None), (None, dv)) if choice.apart else ((dk, dv),):
            args = *self._scores(block_map), self._spans(blocks, "BK"), *part, dq, workspace, SCALE
            self.builder.launch(backward_keys, *args, choice=blocks, threads=self.threads, **consts)

    def _all_sighted(self) -> bool:
        """True if every query sees some key: nothing but position hides keys, and neither the first nor the last query
        is out of reach of all."""
        if self.mask is not None or self.options.mask_mod is not None or self.offsets != (None, None):
            return False
        Nq, Nk = self.inputs.q.shape[2], self.inputs.k.shape[2]
        return all(sees_some_key(self.options, i, Nq, Nk) for i in (0, Nq - 1))

    def add_sinks(self, sinks: ArrayRef) -> None:
        dsinks = self.builder.result(sinks.shape, sinks.dtype)
        if 0 not in dsinks.shape:
            args = sinks, self.rows.lse, self.delta, dsinks
            self.builder.launch(sink_gradient, *args, choice=Choice({}), threads=self.threads)

    def add_mask(self, blocks: BackwardBlocks) -> None:
        assert self.inputs.mask is not None and self.mask is not None
        given, sides = self.builder.input("mask"), self.inputs.mask.shape
        dmask = self.builder.result(given.shape, given.dtype)
        if 0 in dmask.shape:
            return
        summed = tuple(side != whole for side, whole in zip(sides, self.mask.shape, strict=True))
        do, q, k, v, mask, _, lse, delta, *_ = self._scores(None)
        args = do, q, k, v, mask, lse, delta, dmask.reshaped(*sides), SCALE
        consts = {"options": self.options, "summed": summed}
        self.builder.launch(mask_gradient, *args, choice=blocks, threads=self.threads, **consts)

    def _scores(self, block_map: ArrayRef | None) -> tuple[ArrayRef | None, ...]:
        """The arrays that a tile of scores and its gradient are computed from."""
        inputs, rows = self.inputs, self.rows
        return rows.do, inputs.q, inputs.k, inputs.v, self.mask, block_map, rows.lse, self.delta, *self.offsets

    def _spans(self, blocks: BackwardBlocks, side: str) -> ArrayRef | None:
        """The table of spans of queries (`side` "BR") or keys ("BK") of ragged sequences, where there is to be one."""
        of_queries, of_keys = self.offsets
        if of_queries is None or of_keys is None:
            return None
        queries, keys = self.inputs.q.shape[2], self.inputs.k.shape[2]
        if side == "BR":
            return add_spans(self.builder, blocks, side, (queries, keys), (of_queries, of_keys))
        return add_spans(self.builder, blocks, side, (keys, queries), (of_keys, of_queries))

    def _block_map(self, blocks: BackwardBlocks) -> tuple[ArrayRef | None, bool]:
        """The block map for these blocks, which kernels with the same blocks share."""
        if self.offsets[0] is not None:
            return None, False  # blocks of a sequence are not those of a map
        key = blocks.row_block, blocks.key_block
        if key not in self.maps:
            self.maps[key] = add_block_map(self.builder, self.inputs, self.options, blocks, self.threads)
        return self.maps[key]


# ---- checks ----------------------------------------------------------------------------------------------------------


def _read_rows(builder: CallBuilder, inputs: AttentionInputs) -> RowGradients:
    lead = inputs.lead or ()
    out = *lead, *inputs.out_shape[1:]
    check_rows(builder, out, out[:-1], inputs.dtype)

    def batched(name: str) -> ArrayRef:
        array = builder.input(name)
        return builder.reshaped(array, inputs.out_shape[0], *array.shape[len(lead) :])

    do, o = (unit_last(builder, batched(name)) for name in ("do", "o"))
    return RowGradients(do, o, batched("lse"), batched("dlse") if "dlse" in builder.inputs else None)


def check_bools(**given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, bool):
            raise BadOption(f"{name} is True or False, found {value!r}")


def check_rows(builder: CallBuilder, out: tuple[int, ...], sums: tuple[int, ...], dtype: DType) -> None:
    """Check do, o, lse and dlse against the shapes of the output and of its logsumexp."""
    for name in ("do", "o"):
        _check(builder.input(name), name, out, "the output")
        if builder.input(name).dtype is not dtype:
            found = f"{name!r} is {builder.input(name).dtype}"
            raise MixedDTypes(f"{found}; the output and its gradient have q's element type, {dtype}: cast it")
    for name in ("lse", "dlse"):
        if name in builder.inputs or name == "lse":
            _check(builder.input(name), name, sums, "the logsumexp")
            if builder.input(name).dtype is not float32:
                found = f"{name!r} is {builder.input(name).dtype}"
                raise MixedDTypes(f"{found}; the logsumexp is float32, as attention(return_lse=True) gives it")


def _check(array: ArrayRef, name: str, shape: tuple[int, ...], what: str) -> None:
    if len(array.shape) != len(shape):
        raise ArgumentRank(f"{name!r} has shape {array.shape}; {what} of these q, k and v has shape {shape}")
    if array.shape != shape:
        raise ArgumentShape(f"{name!r} has shape {array.shape}; {what} of these q, k and v has shape {shape}")


def _check_mask_grad(mask_grad: Any, inputs: AttentionInputs, builder: CallBuilder) -> None:
    if mask_grad and inputs.mask is None:
        raise BadOption("mask_grad asks for the gradient of a mask, but there is none; pass mask, or leave it out")
    if mask_grad and inputs.mask is not None and inputs.mask.dtype is bool_:
        raise BadOption("a bool mask has no gradient; pass a floating mask, or leave mask_grad out")
    if mask_grad and math.prod(builder.input("mask").shape) != math.prod(inputs.mask.shape if inputs.mask else ()):
        raise BadOption(
            f"the mask {builder.input('mask').shape} is broadcast along some of its leading dimensions, where its "
            "gradient is not summed; pass it with all of them, and sum its gradient"
        )


_NAMES = ("q", "k", "v", "do", "o", "lse", "dlse", "mask", "sinks")
ATTENTION_BACKWARD = LibraryFunction(_NAMES, BackwardOptions, _plan)
