"""Rows times one matrix: the rotation of queries and outputs on a cache whose keys or values are rotated."""

from monotile.language import Const, Tensor, arange, cdiv, dot, float32, kernel, program_id


@kernel
def rotate(
    x: Tensor["B H N D"], matrix: Tensor["D D"], y: Tensor["B H N D"], *, D: Const, BR: Const, SPAN: Const = None,
):  # fmt: skip
    """Each program computes SPAN columns of BR rows, or all columns, in float32; y has any type."""
    span = D if SPAN is None else SPAN
    b, h, n, c = program_id(x.shape[0], x.shape[1], cdiv(x.shape[2], BR), cdiv(D, span))
    rows, columns = n * BR + arange(BR), c * span + arange(span)
    y[b, h, rows, columns] = dot(x[b, h, rows].astype(float32), matrix[arange(D), columns])
