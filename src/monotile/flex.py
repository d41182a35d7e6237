"""FlexAttention by monotile's kernels: torch's names and signatures, forward and backward.

from monotile.flex import create_block_mask, flex_attention

o = flex_attention(q, k, v, score_mod=alibi, block_mask=create_block_mask(causal, None, None, 1024, 1024))
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from .errors import BadOption, HeadsDoNotDivide
from .frontend.functions import is_function
from .library.block_maps import depends_on
from .library.block_mask import BlockMask, block_mask
from .library.entry import attention
from .library.readable import check_kinds, check_readable
from .library.torch_calls import with_clear_errors

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

__all__ = ["and_masks", "create_block_mask", "flex_attention", "or_masks"]
Mod = Callable[..., Any]

_of_torch: weakref.WeakKeyDictionary[Any, BlockMask | None] = weakref.WeakKeyDictionary()


# fmt: off
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Mod | None = ..., block_mask: Any = ...,
    scale: float | None = ..., enable_gqa: bool = ..., return_lse: Literal[False] = ..., kernel_options: Any = ...,
    *, return_aux: None = ...,
) -> Tensor: ...
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Mod | None = ..., block_mask: Any = ...,
    scale: float | None = ..., enable_gqa: bool = ..., *, return_lse: Literal[True], kernel_options: Any = ...,
    return_aux: None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Mod | None = ..., block_mask: Any = ...,
    scale: float | None = ..., enable_gqa: bool = ..., return_lse: Literal[False] = ..., kernel_options: Any = ...,
    *, return_aux: AuxRequest,
) -> tuple[Tensor, AuxOutput]: ...
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Mod | None = ..., block_mask: Any = ...,
    scale: float | None = ..., enable_gqa: bool = ..., return_lse: bool = ..., kernel_options: Any = ...,
    *, return_aux: AuxRequest | None = ...,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]: ...
# fmt: on
@with_clear_errors
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Mod | None = None, block_mask: Any = None,
    scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False, kernel_options: Any = None,
    *, return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:  # fmt: skip
    """`torch.nn.attention.flex_attention.flex_attention`. `block_mask` is what `create_block_mask` gives, here or in
    torch. `kernel_options` tune torch's kernels and are not read."""
    if not type(query) is type(key) is type(value) is Tensor:
        check_kinds(query=query, key=key, value=value)
    if return_lse and return_aux is not None:
        raise BadOption("return_lse and return_aux are given together; use return_aux=AuxRequest(lse=True)")
    if return_aux is not None and return_aux.max_scores:
        raise BadOption("return_aux asks for max_scores, which monotile does not give; ask for lse alone")
    if not enable_gqa and query.shape[-3] != key.shape[-3]:
        found = f"query has {query.shape[-3]} heads and key {key.shape[-3]}"
        raise HeadsDoNotDivide(f"{found}; pass enable_gqa=True where heads of query share heads of key and value")
    blocks = None if block_mask is None else _blocks(block_mask)
    if query.shape[0] != key.shape[0] == 1:
        key, value = (t.expand(query.shape[0], -1, -1, -1) for t in (key, value))
    with_lse = return_lse or (return_aux is not None and return_aux.lse)
    mod = None if score_mod is None else checked_mod("score_mod", score_mod)
    found = attention(query, key, value, scale=scale, score_mod=mod, mask_mod=blocks, return_lse=with_lse)
    if return_aux is None:
        return found
    o, lse = found if with_lse else (found, None)
    from torch.nn.attention.flex_attention import AuxOutput

    return o, AuxOutput(lse=lse)


def create_block_mask(
    mask_mod: Mod, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128, _compile: bool = False, **others: Any,
) -> BlockMask:  # fmt: skip
    """A monotile block mask of torch's arguments. B and H of 1 or None stand for all batches and heads. Blocks are of
    the sizes that calls need, and lie on the device of the arrays that the function reads: device, BLOCK_SIZE and the
    options that tune torch's kernels are not read."""
    mask_mod = checked_mod("mask_mod", mask_mod)
    batch, head = depends_on(mask_mod)
    B = None if B in (None, 1) and not batch else B
    H = None if H in (None, 1) and not head else H
    return block_mask(mask_mod, B, H, Q_LEN, KV_LEN)


def and_masks(*mask_mods: Mod) -> Mod:
    """A mask_mod that shows what all of several show."""
    functions = tuple(checked_mod("mask_mod", mod) for mod in mask_mods)

    def and_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        seen = q_idx.new_ones((), dtype=torch.bool)
        for function in functions:
            seen = seen & function(b, h, q_idx, kv_idx)
        return seen

    return and_mask


def or_masks(*mask_mods: Mod) -> Mod:
    """A mask_mod that shows what any of several shows."""
    functions = tuple(checked_mod("mask_mod", mod) for mod in mask_mods)

    def or_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        seen = q_idx.new_zeros((), dtype=torch.bool)
        for function in functions:
            seen = seen | function(b, h, q_idx, kv_idx)
        return seen

    return or_mask


def checked_mod(name: str, function: Any) -> Mod:
    if not is_function(function):
        raise BadOption(f"{name} is a Python function, found {type(function).__name__}")
    found: Mod = function
    return found


# ---- block masks of torch --------------------------------------------------------------------------------------------


def _blocks(given: Any) -> BlockMask | None:
    """A block mask of monotile's for one of either library."""
    if isinstance(given, BlockMask):
        return given
    if not hasattr(given, "kv_num_blocks"):
        raise BadOption(f"block_mask is what create_block_mask gives, found {type(given).__name__}")
    if given not in _of_torch:
        _of_torch[given] = _from_torch(given)
    return _of_torch[given]


def _from_torch(given: Any) -> BlockMask | None:
    """A block mask with torch's meaning: blocks that are listed as full are visible, those listed as partial where the
    function says so, and others hidden, whatever the function says of them."""
    from torch.nn.attention.flex_attention import _LARGE_SPARSE_BLOCK_SIZE, _sliced_mask_mod_error, noop_mask

    rows, columns = given.BLOCK_SIZE
    if rows == columns == _LARGE_SPARSE_BLOCK_SIZE:
        return None
    if given.mask_mod is _sliced_mask_mod_error:
        raise BadOption("the BlockMask was sliced, and has no mask_mod; make one for these queries and keys")
    names = "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"
    check_readable(**{f"block_mask.{name}": getattr(given, name) for name in names})
    Nq, Nk = given.seq_lengths
    partial = _listed(given.kv_num_blocks, given.kv_indices)
    full = None if given.full_kv_num_blocks is None else _listed(given.full_kv_num_blocks, given.full_kv_indices)
    visible = partial if full is None else partial + 2 * full
    mask_mod: Any = None if given.mask_mod in (None, noop_mask) else checked_mod("mask_mod", given.mask_mod)
    by_batch, by_head = visible.shape[0] > 1, visible.shape[1] > 1

    def listed(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        case = visible[b if by_batch else 0, h if by_head else 0, q_idx // rows, kv_idx // columns]
        return case > 0

    def listed_and_seen(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        case = visible[b if by_batch else 0, h if by_head else 0, q_idx // rows, kv_idx // columns]
        return (case > 1) | ((case > 0) & mask_mod(b, h, q_idx, kv_idx))

    return create_block_mask(
        listed if mask_mod is None else listed_and_seen, visible.shape[0], visible.shape[1], Nq, Nk
    )


def _listed(numbers: Tensor, indices: Tensor) -> Tensor:
    """Return 1 for each block (batch, head, row, column) in the first `numbers` columns of its list, else 0."""
    valid = torch.arange(indices.shape[-1], device=indices.device) < numbers[..., None]
    found = torch.zeros(indices.shape, dtype=torch.int32, device=indices.device)
    return found.scatter_add(-1, indices.long(), valid.int()).clamp(max=1)
