"""Appending to a paged cache: each new token is stored where the page table says that its position lies."""

from monotile.language import Const, Tensor, int32, kernel, program_id, where


@kernel
def paged_append(
    k_pages: Tensor["P T Hkv D"], v_pages: Tensor["P T Hkv Dv"], page_table: Tensor["B M"], lengths: Tensor["B"],
    k_new: Tensor["B Hkv N D"], v_new: Tensor["B Hkv N Dv"], *, D: Const, Dv: Const = None,
):  # fmt: skip
    """Each program stores keys and values of one head of one token; keys alone if there are no values. A position that
    the table does not have, and a page that is none, are outside the pages: nothing is stored there."""
    b, h, i = program_id(k_new.shape[0], k_new.shape[1], k_new.shape[2])
    P, T, M = k_pages.shape[0], k_pages.shape[1], page_table.shape[1]
    place = lengths[b].astype(int32) + i
    index = where(place >= 0, place // T, M)
    page = where(index < M, page_table[b, index], P)
    k_pages[page, place % T, h] = k_new[b, h, i]
    if v_pages is not None:
        v_pages[page, place % T, h] = v_new[b, h, i]
