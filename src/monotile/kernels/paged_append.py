"""Appending to a paged cache: each new token is stored where the page table says that its position lies."""

from monotile.language import Const, Tensor, int32, kernel, program_id, where


def place_of(token, b, page_table, lengths, pages):
    """The page of a new token of sequence b, and its position there. A position that the table does not have, and a
    page that is none, are outside the pages: nothing is stored there."""
    P, T, M = pages.shape[0], pages.shape[1], page_table.shape[1]
    place = lengths[b].astype(int32) + token
    index = where(place >= 0, place // T, M)
    return where(index < M, page_table[b, index], P), place % T


@kernel
def paged_append(
    k_pages: Tensor["P T Hkv D"], v_pages: Tensor["P T Hkv Dv"], page_table: Tensor["B M"], lengths: Tensor["B"],
    k_new: Tensor["B Hkv N D"], v_new: Tensor["B Hkv N Dv"], *, D: Const, Dv: Const,
):  # fmt: skip
    """Each program stores keys and values of one head of one token."""
    b, h, i = program_id(k_new.shape[0], k_new.shape[1], k_new.shape[2])
    page, place = place_of(i, b, page_table, lengths, k_pages)
    k_pages[page, place, h] = k_new[b, h, i]
    v_pages[page, place, h] = v_new[b, h, i]


@kernel
def paged_append_quantized(
    k_pages: Tensor["P T Hkv W"], k_scales: Tensor["P T Hkv G"], k_zeros: Tensor["P T Hkv G"],
    v_pages: Tensor["P T Hkv Wv"], v_scales: Tensor["P T Hkv Gv"], v_zeros: Tensor["P T Hkv Gv"],
    page_table: Tensor["B M"], lengths: Tensor["B"],
    k_new: Tensor["B Hkv N W"], new_k_scales: Tensor["B Hkv N G"], new_k_zeros: Tensor["B Hkv N G"],
    v_new: Tensor["B Hkv N Wv"], new_v_scales: Tensor["B Hkv N Gv"], new_v_zeros: Tensor["B Hkv N Gv"],
    *, W: Const, Wv: Const, G: Const = None, Gv: Const = None,
):  # fmt: skip
    """`paged_append` of codes, scales and zeros. All are stored by one launch, so that all are checked before it."""
    b, h, i = program_id(k_new.shape[0], k_new.shape[1], k_new.shape[2])
    page, place = place_of(i, b, page_table, lengths, k_pages)
    k_pages[page, place, h] = k_new[b, h, i]
    v_pages[page, place, h] = v_new[b, h, i]
    if k_scales is not None:
        k_scales[page, place, h] = new_k_scales[b, h, i]
    if k_zeros is not None:
        k_zeros[page, place, h] = new_k_zeros[b, h, i]
    if v_scales is not None:
        v_scales[page, place, h] = new_v_scales[b, h, i]
    if v_zeros is not None:
        v_zeros[page, place, h] = new_v_zeros[b, h, i]
