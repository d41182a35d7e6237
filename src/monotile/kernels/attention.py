"""Attention: o = softmax(q k^T * scale) v with every option, for any number of rows over any number of keys.

A program owns a block of rows of a row group and the keys of one split. Prefill is many rows and no split, decode few
rows and many splits; everything between is the same kernel."""

from monotile.language import Const, Tensor, arange, blocks, float32, kernel

from . import codecs, key_sources, programs, scores, sequences, softmax
from .narrowing import part_to_read
from .visibility import (
    FULL,
    block_case,
    by_block_case,
    by_position,
    is_additive,
    place_of,
    visible,
    visible_keys,
)

NOT_QUANTIZED = (None,) * 6  # the fields of quantised keys and values, in a call with plain ones
DENSE = (None,) * 11 + NOT_QUANTIZED  # and the tensors of ragged and paged keys, in a call with dense ones


@kernel
def attention(
    q: Tensor["B H R D"], k: Tensor["B Hkv Nk D"], v: Tensor["B Hkv Nk Dv"], mask: Tensor["B Hq Nq Nk"],
    block_map: Tensor["B H MR MK"], sinks: Tensor["Hq"], o: Tensor["B H R Dv"], lse: Tensor["B H R"],
    split_o: Tensor["B H R S Dv"], split_m: Tensor["B H R S"], split_l: Tensor["B H R S"], q_offsets: Tensor["E"],
    k_offsets: Tensor["E"], spans: Tensor["SF U"], k_pages: Tensor["P Hkv T D"], v_pages: Tensor["P Hkv T Dv"],
    page_table: Tensor["BT M"], lengths: Tensor["BT"], plan: Tensor["F SE"], slot_o: Tensor["SG SR W Dv"],
    slot_m: Tensor["SG SR W"], slot_l: Tensor["SG SR W"], k_codes: Tensor["B Hkv Nk KW"],
    k_scales: Tensor["B Hkv Nk KG"], k_zeros: Tensor["B Hkv Nk KG"], v_codes: Tensor["B Hkv Nk VW"],
    v_scales: Tensor["B Hkv Nk VG"], v_zeros: Tensor["B Hkv Nk VG"],
    scale: float, queries: int, first_block: int, blocks_per_split: int,
    *, options: Const, D: Const, Dv: Const, BR: Const, BK: Const, packed: Const = False, covered: Const = False,
    glance: Const = 0, by_mod: Const = None, T: Const = 0, together: Const = 1, k_codec: Const = None,
    v_codec: Const = None, KW: Const = None, VW: Const = None, KG: Const = None, VG: Const = None,
):  # fmt: skip
    """Each program owns BR rows of one of H groups (packed: `queries` rows of each query head) and writes the output.
    Or a softmax state: with `split_o` that of `blocks_per_split` blocks of BK keys from `first_block` on, with `glance`
    of those the map shows; with `plan` of a slot of balanced splits. Without `v`, values are the first Dv columns of k.
    `covered`: the map has COVERED blocks; `by_mod`: without a map, mask_mod tells what is visible first."""
    k, v = k if k_codec is None else k_codes, v if v_codec is None else v_codes
    of = key_sources.CodeScales(k_scales, k_zeros, v_scales, v_zeros)
    keys = programs.KeyTensors(k, v, k_pages, v_pages, page_table, lengths, k_offsets, T, spans, together, of)
    q, o, lse, source, own, s, low, high = sequences.part_of_program(
        q, keys, o, lse, split_o, slot_o, plan, q_offsets, queries, first_block, blocks_per_split, BR, BK, packed
    )
    b, rows, Nk = source.b, own.rows, source.count
    slot_m, slot_l, slot_o = sequences.slot_rows(plan, own, BR, slot_m, slot_l, slot_o)
    g = own.group if packed else own.group // (q.shape[1] // source.k.shape[1])  # the KV head
    Q = q[b, own.group, rows] if q_offsets is None or not packed else scattered_rows(q, b, own)
    exact = Q.dtype == float32 or lse is not None or split_o is not None or plan is not None
    rule = scores.Rule(options, scale, is_additive(mask), approximate=not exact)
    score_scale, hides = scores.score_scale(rule), mask is not None or options.mask_mod is not None

    def at(cols):
        return place_of(own, cols, Nk, packed)

    def step(state, cols, case):
        M = mask_tile(mask, own, cols, packed) if mask is not None and case != FULL else None
        S = scores.score(rule, codecs.products(k_codec, Q, source, g, j, cols), at(cols), M)
        seen = visible(options, at(cols), M, case)
        keys = visible_keys(options, at(cols), M, seen, case, hides)
        read = codecs.values(v_codec, Q.dtype, source, g, j, cols, Dv)
        return softmax.step(state, S, read[0], seen, keys, score_scale, factor=read[1])

    low, high = part_to_read(options, block_map, own, at, s, split_o, Nk, low, high, BK, glance, by_mod)
    state = softmax.empty(BR, Dv)
    for j in blocks(high, BK, lambda cols: by_position(options, at(cols)), start=low):
        case = block_case(options, block_map, own, at, j, BK, by_mod)
        state = by_block_case(step, state, j + arange(BK), case, hides, covered)
    state = softmax.in_natural_units(state, score_scale)
    if plan is not None:
        g, rows = own.group, arange(BR)
        slot_m[g, rows, s], slot_l[g, rows, s], slot_o[g, rows, s] = state
    elif split_o is not None:
        split_m[b, own.group, rows, s], split_l[b, own.group, rows, s], split_o[b, own.group, rows, s] = state
    else:
        if sinks is not None:
            state = softmax.sink(state, sinks[own.head] - scores.softcap_offset(rule))
        o[b, own.group, rows], L = softmax.finish(state)
        if lse is not None:
            lse[b, own.group, rows] = L


def scattered_rows(q, b, own):
    """The packed rows of a sequence between others, which do not lie evenly."""
    return q[b, own.head[:, None], own.queries[:, None], arange(q.shape[3])[None, :]]


def mask_tile(mask, own, cols, packed):
    """The mask of some keys. Packed rows past the last one would have that of the next group's heads: a bool mask hides
    all keys from them."""
    if packed:
        tile = mask[own.b, own.head[:, None], own.queries[:, None], cols[None, :]]
        return tile if is_additive(mask) else tile & (own.rows < own.count)[:, None]
    return mask[own.b, own.head, own.rows, cols]
