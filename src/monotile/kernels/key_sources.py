"""Sources of keys: where the keys and values of a sequence come from. Attention asks a source for tiles and knows
nothing else of it; which source it is, is known at compile time."""

from typing import Any, NamedTuple


class Source(NamedTuple):
    """Keys and values of one sequence."""

    k: Any  # (batch, heads, positions, D): a tensor or a view
    v: Any
    count: Any  # keys of the sequence
    b: Any  # its batch


def dense(k, v):
    """Batches of tensors; without `v`, values are the first columns of the keys. The batch is known later."""
    return Source(k, v if v is not None else k, k.shape[2], None)


def ragged(k, v, offsets, s):
    """Sequence s of those that lie one after the other in batch 0."""
    start, end = offsets[s], offsets[s + 1]
    keys = k[:, :, start:end]
    return Source(keys, v[:, :, start:end] if v is not None else keys, keys.shape[2], 0)


def keys_at(source, head, positions):
    """The keys at some positions, (positions, D)."""
    return source.k[source.b, head, positions]


def values_at(source, head, positions, columns):
    """The values at some positions, (positions, columns)."""
    return source.v[source.b, head, positions, columns]
