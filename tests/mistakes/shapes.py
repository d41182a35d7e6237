# ruff: noqa
"""Mistakes with shapes, element types and subscripts."""

from monotile.errors import *
from monotile.language import *

from .catalogue import mistake

THOUSAND = (1.0,) * 1000


@mistake(ShapeMismatch, "dot(x[arange(8), 0:16], x[arange(8), 0:16])", "(8, 16) and (8, 16)", "b.T")
def dot_needs_a_transpose(x, y):
    y[arange(8), 0:8] = dot(x[arange(8), 0:16], x[arange(8), 0:16])


@mistake(ShapeMismatch, "dot(x[arange(8), 0:4], x[arange(8), 0:16])", "(8, 4) and (8, 16)", "(m, k) and (k, n)")
def dot_of_wrong_shapes(x, y):
    t = dot(x[arange(8), 0:4], x[arange(8), 0:16])


@mistake(ShapeMismatch, "dot(z[arange(8)], z[arange(8)])", "(8,) and (8,)", "(m, k)")
def dot_of_vectors(z, y):
    t = dot(z[arange(8)], z[arange(8)])


@mistake(ShapeMismatch, "zeros(4) + zeros(8)", "(4,) and (8,)", "equal")
def shapes_do_not_broadcast(y):
    t = zeros(4) + zeros(8)


@mistake(ShapeMismatch, "where(arange(4) < 2, zeros(8), 0.0)", "(4,) and (8,)", "equal")
def where_shapes(y):
    t = where(arange(4) < 2, zeros(8), 0.0)


@mistake(ShapeMismatch, "y[0, 0:4]", "a tile (8,) does not fit the slice (4,)", "equal")
def store_of_a_wrong_shape(y):
    y[0, 0:4] = zeros(8)


@mistake(ShapeMismatch, "y[0, 0]", "does not fit the slice ()", "equal")
def store_of_a_tile_at_one_place(y):
    y[0, 0] = zeros(4)


@mistake(ShapeMismatch, "z[arange(4)].T", ".T needs a tile of rank 2", "[:, None]")
def transpose_of_a_vector(z, y):
    t = z[arange(4)].T


@mistake(ShapeMismatch, "full(4, zeros(4))", "full takes one number", "broadcast")
def full_of_a_tile(y):
    t = full(4, zeros(4))


@mistake(ShapeNotConstant, "zeros(x.shape[0])", "only known at run time", "Const")
def tile_shape_not_constant(x, y):
    t = zeros(x.shape[0])


@mistake(ShapeNotConstant, "arange(k)", "only known at run time", "Const")
def arange_not_constant(y, k: int):
    t = arange(k)


@mistake(ShapeNotConstant, "range(0, 8, k)", "step of a loop", "Const")
def step_not_constant(y, k: int):
    for j in range(0, 8, k):
        pass


@mistake(ShapeNotConstant, "y[0:k, 0]", "length of this slice", "part = y[start : end]")
def store_to_a_slice_not_constant(x, y, k: int):
    y[0:k, 0] = 1.0


@mistake(BadOperand, "x[0:k, 0] + 1.0", "a view of the tensor 'x'", "x[rows]")
def view_in_arithmetic(x, y, k: int):
    t = x[0:k, 0] + 1.0


@mistake(BadIndex, "x[0:k, arange(4)]", "beside a slice of run-time length", "part = x[start : end]")
def view_with_a_tile_of_positions(x, y, k: int):
    t = x[0:k, arange(4)]


@mistake(BadIndex, "x[0:k:2, 0]", "step", "every element")
def view_with_a_step(x, y, k: int):
    t = x[0:k:2, 0]


@mistake(CarriedTypeChanged, "for j in range(0, 4):", "a view of the tensor 'x'", "another name")
def view_carried_through_a_loop(x, y, k: int):
    t = x[0:k, 0]
    for j in range(0, 4):
        t = x[j:k, 0]


@mistake(ShapeNotConstant, "x[0]", "dimension 1 of 'x'", "Const")
def whole_row_of_run_time_length(x, y):
    t = x[0]


@mistake(ShapeNotConstant, "x.shape[k]", "indexed by a run-time value", "constant position")
def tuple_index_not_constant(x, y, k: int):
    t = x.shape[k]


@mistake(ShapeNotConstant, "x.shape[k:]", "indexed by a run-time value", "constant position")
def tuple_slice_not_constant(x, y, k: int):
    t = x.shape[k:]


@mistake(ShapeNotConstant, "x[arange(4), 0:4].sum(axis=k)", "constant axis", "axis=0")
def axis_not_constant(x, y, k: int):
    t = x[arange(4), 0:4].sum(axis=k)


@mistake(ShapeNotConstant, "x[arange(4), 0:4].max()", "constant axis", "axis=0")
def axis_missing(x, y):
    t = x[arange(4), 0:4].max()


@mistake(ShapeNotConstant, "static_range(k)", "constant bounds", "range")
def static_range_of_a_run_time_bound(y, k: int):
    for j in static_range(k):
        pass


@mistake(BadSide, "zeros(0)", "from 1 to|found 0", "1 up")
def zero_side(y):
    t = zeros(0)


@mistake(BadSide, "arange(-4)", "found -4", "1 up")
def negative_side(y):
    t = arange(-4)


@mistake(BadSide, "zeros((4, 2.0))", "found float", "int")
def side_is_a_float(y):
    t = zeros((4, 2.0))


@mistake(BadSide, "zeros(((1, 2), 3))", "found tuple", "int")
def side_is_a_tuple(y):
    t = zeros(((1, 2), 3))


@mistake(BadSide, "arange(True)", "found bool", "int")
def side_is_a_bool(y):
    t = arange(True)


@mistake(BadSide, "arange(10**30)", "found 1000", "1 up")
def enormous_side(y):
    t = arange(10**30)


@mistake(BadSide, "x[4:4, 0]", "found 0", "1 up")
def empty_slice(x, y):
    t = x[4:4, 0]


@mistake(BadAxis, "x[arange(4), 0:4].sum(axis=2)", "axis 2 does not exist", "counted from 0")
def axis_too_large(x, y):
    t = x[arange(4), 0:4].sum(axis=2)


@mistake(BadStep, "range(8, 0, -1)", "found -1", "count upwards")
def negative_step(y):
    for j in range(8, 0, -1):
        pass


@mistake(BadStep, "blocks(x.shape[0], 0)", "found 0", "count upwards")
def zero_step(x, y):
    for j in blocks(x.shape[0], 0):
        pass


@mistake(BadStep, "range(0, 8, 0.5)", "found 0.5", "count upwards")
def fractional_step(y):
    for j in range(0, 8, 0.5):
        pass


@mistake(BadStep, "static_range(10**9)", "iterations", "range")
def endless_static_range(y):
    for j in static_range(10**9):
        pass


@mistake(BadStep, "static_range(0, 4, 0)", "zero", "low, high, step")
def static_range_of_step_zero(y):
    for j in static_range(0, 4, 0):
        pass


@mistake(RankTooHigh, "zeros((2, 2, 2))", "rank 3", "one slice")
def rank_three(y):
    t = zeros((2, 2, 2))


@mistake(RankTooHigh, "zeros((2, 2))[:, :, None]", "rank 3", "one slice")
def rank_three_by_none(y):
    t = zeros((2, 2))[:, :, None]


@mistake(RankTooHigh, "c[arange(2), 0:2, 0:2]", "rank 3", "single position")
def rank_three_load(c, y):
    t = c[arange(2), 0:2, 0:2]


@mistake(DTypeMismatch, "x[0, arange(4)] + (arange(4) < 2)", "float32[4] and bool[4]|'+'", "astype")
def float_and_bool(x, y):
    t = x[0, arange(4)] + (arange(4) < 2)


@mistake(DTypeMismatch, "k * (k < 2)", "int32 and bool", "astype")
def int_and_bool_scalars(y, k: int):
    t = k * (k < 2)


@mistake(DTypeMismatch, "(arange(4) < 2) * 0.5", "0.5 does not promote with bool", "cast")
def float_literal_with_bools(y):
    t = (arange(4) < 2) * 0.5


@mistake(DTypeMismatch, "arange(4) + True", "True does not promote", "int(x)")
def bool_literal_with_ints(y):
    t = arange(4) + True


@mistake(DTypeMismatch, "y[0, arange(4)]", "int32[4] does not store into 'y'", ".astype(y.dtype)")
def store_of_ints_into_floats(y):
    y[0, arange(4)] = arange(4)


@mistake(DTypeMismatch, "idx[arange(4)]", "0.5 does not promote with int32", "astype")
def store_of_a_float_into_ints(idx, y):
    idx[arange(4)] = 0.5


@mistake(DTypeMismatch, "idx[arange(4)]", "bool[4] does not store into 'idx'", "astype")
def store_of_bools_into_ints(idx, y):
    idx[arange(4)] = arange(4) < 2


@mistake(DTypeMismatch, "where(arange(4) < 2, 1, True)", "int32 and bool", "cast")
def where_of_int_and_bool(y):
    t = where(arange(4) < 2, 1, True)


@mistake(DTypeMismatch, "range(wide)", "int64", "astype(int32)")
def loop_over_int64(y, wide: int64):
    for j in range(wide):
        pass


@mistake(UndefinedForDType, "(arange(4) < 2) / (arange(4) < 1)", "'/' is not defined for bool", "cast the bool")
def division_of_bools(y):
    t = (arange(4) < 2) / (arange(4) < 1)


@mistake(UndefinedForDType, "x[0, arange(4)] // 2", "'//' is not defined for float32", "floor(x / y)")
def floor_division_of_floats(x, y):
    t = x[0, arange(4)] // 2


@mistake(UndefinedForDType, "exp(arange(4))", "exp", "astype(float32)")
def exp_of_ints(y):
    t = exp(arange(4))


@mistake(UndefinedForDType, "~zeros(4)", "'~' is not defined for float32", "compare first")
def invert_of_ints(y):
    t = ~zeros(4)


@mistake(UndefinedForDType, "-(arange(4) < 2)", "'-' is not defined for bool", "astype(int32)")
def minus_of_bools(y):
    t = -(arange(4) < 2)


@mistake(UndefinedForDType, "zeros(4) & zeros(4)", "'&' is not defined for float32", "compare first")
def bitand_of_ints(y):
    t = zeros(4) & zeros(4)


@mistake(UndefinedForDType, "where(arange(4), 1, 2)", "bool condition|int32[4]", "compare")
def where_of_ints(y):
    t = where(arange(4), 1, 2)


@mistake(UndefinedForDType, "(arange(4) < 2).sum()", "sum is not defined for bool", "astype(int32)")
def sum_of_bools(y):
    t = (arange(4) < 2).sum()


@mistake(
    UndefinedForDType, "dot(zeros((4, 4), int32), zeros((4, 4)))", "dot of int32 and float32 is not defined", "cast"
)
def dot_of_ints(y):
    t = dot(zeros((4, 4), int32), zeros((4, 4)))


@mistake(NumberDoesNotFit, "arange(4) + 3000000000", "3000000000 does not fit int32", "int64")
def large_number(y):
    t = arange(4) + 3000000000


@mistake(NumberDoesNotFit, "x[0, arange(4)] * 10**400", "more than 40 digits does not fit float32", "smaller")
def enormous_number(x, y):
    t = x[0, arange(4)] * 10**400


@mistake(NumberDoesNotFit, "x[0, arange(4)] * 1e300", "1e+300 does not fit float32", "inf")
def float_beyond_float32(x, y):
    t = x[0, arange(4)] * 1e300


@mistake(NumberDoesNotFit, "zeros(4, uint8) + 256", "256 does not fit uint8", "wider")
def number_beyond_a_narrow_type(y):
    t = zeros(4, uint8) + 256


@mistake(NumberDoesNotFit, "full(4, -1, uint8)", "-1 does not fit uint8", "wider")
def negative_number_in_uint8(y):
    t = full(4, -1, uint8)


@mistake(BadIndex, "x[0, 0, 0]", "2 dimensions, indexed with 3", "drop")
def too_many_subscripts(x, y):
    t = x[0, 0, 0]


@mistake(BadIndex, "x[0.5, 0]", "of type float", "position")
def float_subscript(x, y):
    t = x[0.5, 0]


@mistake(BadIndex, "x[s, 0]", "has type float32", "astype(int32)")
def float_scalar_subscript(x, y, s: float):
    t = x[s, 0]


@mistake(BadIndex, "x[arange(4) < 2, 0]", "has type bool[4]", "where")
def boolean_mask_subscript(x, y):
    t = x[arange(4) < 2, 0]


@mistake(BadIndex, "x[-1, 0]", "negative position", "x.shape")
def negative_subscript(x, y):
    t = x[-1, 0]


@mistake(BadIndex, "x[arange(4), None]", "None in a subscript", "load first")
def none_subscript(x, y):
    t = x[arange(4), None]


@mistake(BadIndex, "x[0, 0:8:2]", "step", "every element")
def slice_with_a_step(x, y):
    t = x[0, 0:8:2]


@mistake(BadIndex, "x[arange(4) : arange(4) + 4, 0]", "single positions", "x[rows]")
def slice_between_tiles(x, y):
    t = x[arange(4) : arange(4) + 4, 0]


@mistake(BadIndex, 'x["a":, 0]', "of type str", "position")
def slice_of_strings(x, y):
    t = x["a":, 0]


@mistake(BadIndex, "x[arange(4)[:, None], arange(4)]", "rank 2", "mixture")
def mixed_subscripts(x, y):
    t = x[arange(4)[:, None], arange(4)]


@mistake(BadIndex, "x[x]", "of type Tensor", "position")
def tensor_subscript(x, y):
    t = x[x]


@mistake(BadIndex, "zeros(4)[0]", "this subscript of a tile", "index the tensor")
def subscript_of_a_tile(y):
    t = zeros(4)[0]


@mistake(BadIndex, "y[y[arange(4), 0], 0]", "float32", "whole numbers")
def scattered_store(idx, y):
    y[y[arange(4), 0], 0] = 1.0


@mistake(BadIndex, "x.shape[2]", "a tuple of 2 has no item 2", "0 to 1")
def shape_position(x, y):
    t = x.shape[2]


@mistake(BadIndex, "x.shape[None]", "a tuple of 2 has no item None", "0 to 1")
def shape_at_none(x, y):
    t = x.shape[None]


@mistake(BadIndex, '"abc"[0]', "'abc' cannot be indexed", "tensors")
def subscript_of_a_string(y):
    t = "abc"[0]


@mistake(BadIndex, "arange[4]", "a function cannot be indexed", "tensors")
def subscript_of_a_word(y):
    t = arange[4]


@mistake(ShapeNotConstant, "THOUSAND[arange(4)]", "a tuple of 1000", "256")
def table_too_long(x, y):
    y[0, arange(4)] = THOUSAND[arange(4)]


@mistake(DTypeMismatch, "a << a.astype(int64)", "wider than the int32", ".astype(int32)")
def shift_by_a_wider_count(x, y):
    a = arange(4)
    y[0, a] = a << a.astype(int64)


@mistake(DTypeMismatch, "a + a.astype(uint32)", "do not promote", "int64")
def signed_and_unsigned(x, y):
    a = arange(4)
    y[0, a] = a + a.astype(uint32)
