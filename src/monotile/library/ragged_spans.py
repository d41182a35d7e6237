"""The table of spans of a ragged call (kernels/spans.py), where its programs are to look their sequences up."""

from __future__ import annotations

from ..backends.choices import Choice
from ..dtypes import int32
from ..kernels.spans import FIELDS, count_of_spans, sequence_spans
from .calls import ArrayRef, CallBuilder

TOGETHER = "together"  # the constant with the programs of a span


def add_spans(
    builder: CallBuilder, choice: Choice, block: str, positions: tuple[int, int], offsets: tuple[ArrayRef, ArrayRef]
) -> ArrayRef | None:
    """Add the table of spans of one side, queries or keys, if the choice says how many programs share a span. `block`
    names the choice's block along that side; of `positions` and `offsets` the first is that of this side."""
    together, size = choice.blocks.get(TOGETHER), choice.blocks[block]
    if not together or not size:
        return None
    own, other = positions
    spans = builder.temporary((FIELDS, count_of_spans(own, offsets[0].shape[0] - 1, together * size)), int32)
    args = spans, *offsets, own, other
    builder.launch(sequence_spans, *args, choice=Choice({}), threads=1, size=together * size)
    return spans
