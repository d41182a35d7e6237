"""Reading masks: bool or floating, with sides of 1 where they broadcast."""

from __future__ import annotations

from ..dtypes import FLOATS, bool_
from ..errors import ArgumentRank, MaskShape, MixedDTypes
from .calls import ArrayRef, CallBuilder
from .leading import Lead, mask_as_one_batch


def broadcast_mask_to(builder: CallBuilder, mask: ArrayRef, scores: tuple[int, ...], lead: Lead) -> ArrayRef:
    """A mask that fits these scores, whose batch stands for the leading dimensions, as rank 4, sides as given."""
    _check_mask_dtype(mask)
    shape, whole = mask.shape, (*(lead or (1,)), *scores[1:])
    if len(shape) > len(whole) or any(s not in (1, t) for s, t in zip(shape[::-1], whole[::-1], strict=False)):
        raise MaskShape(
            f"the mask {shape} does not broadcast to the scores {whole} (batch, query heads, queries, keys)"
        )
    if len(shape) > 4 or (len(shape) == 4 and len(lead) > 1):
        mask = mask_as_one_batch(builder, mask, lead)
    return mask.reshaped(*(1,) * (4 - len(mask.shape)), *mask.shape)


def read_mask(mask: ArrayRef) -> tuple[ArrayRef, tuple[int, ...]]:
    """A mask of rank 2 to 4 as rank 4, and its leading sides."""
    _check_mask_dtype(mask)
    if not 2 <= len(mask.shape) <= 4:
        raise ArgumentRank(f"a mask has 2 to 4 dimensions, the last two queries and keys; found shape {mask.shape}")
    return mask.reshaped(*(1,) * (4 - len(mask.shape)), *mask.shape), mask.shape[:-2]


def _check_mask_dtype(mask: ArrayRef) -> None:
    if mask.dtype is not bool_ and mask.dtype not in FLOATS:
        raise MixedDTypes(f"a mask is bool (True = attend) or floating (added to the scores), found {mask.dtype}")
