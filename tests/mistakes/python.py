# ruff: noqa
# fmt: off
"""Python that the kernel language does not have."""

from monotile.errors import *
from monotile.language import *

from .catalogue import mistake


def spread(*args):
    return args


@mistake(UnsupportedPython, "while k > 0:", "'while'", "range")
def while_loop(y, k: int):
    while k > 0:
        k = k - 1


@mistake(UnsupportedPython, "try:", "'try'", "remove")
def try_statement(y):
    try:
        pass
    except ValueError:
        pass


@mistake(UnsupportedPython, "with y:", "'with'", "remove")
def with_statement(y):
    with y:
        pass


@mistake(UnsupportedPython, "[x[j, 0] for j in range(4)]", "list comprehension", "static_range")
def list_comprehension(x, y):
    y[0, 0] = [x[j, 0] for j in range(4)]


@mistake(UnsupportedPython, "{j: 1 for j in (1, 2)}", "dict comprehension", "static_range")
def dict_comprehension(y):
    t = {j: 1 for j in (1, 2)}


@mistake(UnsupportedPython, "{j for j in (1, 2)}", "set comprehension", "static_range")
def set_comprehension(y):
    t = {j for j in (1, 2)}


@mistake(UnsupportedPython, "(j for j in (1, 2))", "generator", "static_range")
def generator_expression(y):
    y[0, 0] = sum((j for j in (1, 2)))


@mistake(UnsupportedPython, 'f"{k}"', "f-string", "assert")
def f_string(y, k: int):
    t = f"{k}"


@mistake(UnsupportedPython, "{1: 2}", "a dict", "tuple")
def dict_literal(y):
    t = {1: 2}


@mistake(UnsupportedPython, "{1, 2}", "a set", "tuple")
def set_literal(y):
    t = {1, 2}


@mistake(UnsupportedPython, "yield x", "'yield'", "store")
def yield_expression(x, y):
    yield x


@mistake(UnsupportedPython, "class Inner:", "'class'", "named tuples")
def class_statement(y):
    class Inner:
        pass


@mistake(UnsupportedPython, "import math", "'import'", "top of the file")
def import_statement(y):
    import math


@mistake(UnsupportedPython, "from math import pi", "'import'", "top of the file")
def import_from(y):
    from math import pi


@mistake(UnsupportedPython, "spread(1, 2)", "spread() takes *args", "name every parameter")
def helper_with_star_args(y):
    y[0, 0] = spread(1, 2)


@mistake(UnsupportedPython, "*x[0, arange(4)]", "* before a tile", "tuple")
def star_of_a_tile(x, y):
    y[0, 0] = maximum(*x[0, arange(4)])


@mistake(UnsupportedPython, "x[0, arange(4)] ** 0.3", "'**'", "1 / sqrt(x)|exp2(y * log2(x))")
def power_that_is_not_whole(x, y):
    y[0, arange(4)] = x[0, arange(4)] ** 0.3


@mistake(UnsupportedPython, "3.0 ** x[0, arange(4)]", "3.0 ** float32[4]", "exp2(x * log2(c))")
def power_of_a_constant(x, y):
    y[0, arange(4)] = 3.0 ** x[0, arange(4)]


@mistake(UnsupportedPython, "2 ** arange(4)", "2 ** int32[4]", "1 << x")
def power_of_two_of_integers(y):
    t = 2 ** arange(4)


@mistake(UnsupportedPython, "full(**options)", "** in a call", "name every argument")
def double_star_call(y):
    options = (1, 2)
    y[0, 0] = full(**options)


@mistake(UnsupportedPython, "*rest", "'*' among the names", "name every item")
def star_assignment(y):
    a, *rest = (1, 2, 3)


@mistake(UnsupportedPython, "*a", "'*' in a tuple", "name every item")
def star_in_a_tuple(y):
    a = (1, 2)
    b = (*a, 3)


@mistake(UnsupportedPython, "n := 4", "':='", "own")
def walrus(y):
    y[0, arange(4)] = zeros((n := 4))


@mistake(UnsupportedPython, "x[arange(4), 0:4] @ x[arange(4), 0:4]", "'@'", "dot(a, b)")
def matmul_operator(x, y):
    t = x[arange(4), 0:4] @ x[arange(4), 0:4]


@mistake(UnsupportedPython, "x[0, arange(4)] ** 2.5", "'**'", "whole powers")
def power(x, y):
    y[0, arange(4)] = x[0, arange(4)] ** 2.5


@mistake(UnsupportedPython, "t **= 99", "'**'", "whole powers")
def power_in_place(x, y):
    t = x[0, arange(4)]
    t **= 99


@mistake(ConstantFailed, "k << 32", "every bit of int32", "0 to 31")
def shift(y, k: int):
    y[0, 0] = float(k << 32)


@mistake(UndefinedForDType, "y[0, 0] ^ 1.0", "'^' is not defined for float32", "cast")
def exclusive_or(y, k: int):
    y[0, 0] = y[0, 0] ^ 1.0


@mistake(UnsupportedPython, "del x", "'del'", "remove")
def delete(x, y):
    del x


@mistake(UnsupportedPython, "global counter", "'global'", "pass the value")
def global_statement(y):
    global counter


@mistake(UnsupportedPython, "raise ValueError()", "'raise'", "assert")
def raise_statement(y):
    raise ValueError()


@mistake(UnsupportedPython, "break", "'break'", "under an if")
def break_statement(y):
    for j in range(4):
        break


@mistake(UnsupportedPython, "continue", "'continue'", "under an if")
def continue_statement(y):
    for j in static_range(4):
        continue


@mistake(UnsupportedPython, "for j in range(4):", "for ... else", "after the loop")
def for_else(y):
    for j in range(4):
        pass
    else:
        pass


@mistake(UnsupportedPython, "match k:", "'match'", "if and elif")
def match_statement(y, k: int):
    match k:
        case 1:
            pass


@mistake(UnsupportedPython, "async def inner():", "'async def'", "plain def")
def async_helper(y):
    async def inner():
        pass


@mistake(UnsupportedPython, "staticmethod", "decorator", "top of the file")
def decorated_helper(y):
    @staticmethod
    def inner():
        pass


@mistake(UnsupportedPython, "t: float32 = 1.0", "annotation", ".astype")
def annotated_assignment(y):
    t: float32 = 1.0


@mistake(UnsupportedPython, "(i, j)", "one loop variable", "unpack")
def two_loop_variables(y):
    for (i, j) in range(4):
        pass


@mistake(UnsupportedPython, "k in (1, 2)", "'in' on run-time values", "==")
def in_of_a_run_time_value(y, k: int):
    if k in (1, 2):
        pass


@mistake(UnsupportedPython, "1 in (k, 2)", "'in' on run-time values", "==")
def in_a_tuple_with_a_run_time_value(y, k: int):
    if 1 in (k, 2):
        pass


@mistake(UnsupportedPython, "k > 0", "assert on a run-time value", "Const")
def assert_on_a_run_time_value(y, k: int):
    assert k > 0


@mistake(AssertionFailed, "B % 3 == 0", "B is 4", "Const")
def failing_assert(y, *, B: Const):
    assert B % 3 == 0, f"B is {B}"


@mistake(AssertionFailed, "B > 100", "does not hold", "Const")
def failing_assert_without_text(y, *, B: Const):
    assert B > 100


@mistake(TruthOfTile, "arange(4) > 2", "a tile bool[4] is neither", "where")
def truth_of_a_tile(y):
    if arange(4) > 2:
        pass


@mistake(TruthOfTile, "x", "the tensor 'x' is neither", "where")
def truth_of_a_tensor(x, y):
    if x:
        pass


@mistake(TruthOfTile, "arange(4) > 2", "a tile bool[4]", "&")
def and_of_tiles(y, k: int):
    t = k > 0 and arange(4) > 2


@mistake(TruthOfTile, "arange(4)", "a tile int32[4]", "where")
def not_of_a_tile(y):
    t = not arange(4)


@mistake(TruthOfTile, "arange(4) > 2", "a tile bool[4]", "where")
def conditional_expression_on_a_tile(y):
    t = 1.0 if arange(4) > 2 else 2.0


@mistake(ReturnedValue, "return x[0, 0]", "a kernel returns nothing", "store")
def returns_a_value(x, y):
    return x[0, 0]


@mistake(EarlyReturn, "return", "return inside an if on a run-time value", "at the end")
def return_in_a_run_time_branch(y, k: int):
    if k > 0:
        return


@mistake(EarlyReturn, "return 1", "return inside a run-time loop", "at the end")
def return_in_a_run_time_loop(y):
    def helper():
        for j in range(4):
            return 1

    y[0, 0] = helper()


@mistake(NotIterable, "x", "for cannot run over the tensor 'x'", "range")
def loop_over_a_tensor(x, y):
    for row in x:
        pass


@mistake(NotIterable, "8", "for cannot run over", "range")
def loop_over_a_number(y):
    for row in 8:
        pass


@mistake(UnpackMismatch, "a, b", "2 name(s) for a tuple of 3", "as many names")
def too_many_values(y):
    a, b = (1, 2, 3)


@mistake(UnpackMismatch, "a, b", "2 name(s) for a tile float32[4]", "as many names")
def unpacking_a_tile(x, y):
    a, b = x[0, arange(4)]


@mistake(UnpackMismatch, "i, j", "2 name(s) for a scalar int32", "as many names")
def unpacking_one_program_id(y):
    i, j = program_id(4)


@mistake(NotAssignable, "t[0]", "not a tile", "where()")
def store_into_a_tile(y):
    t = zeros(4)
    t[0] = 1.0


@mistake(NotAssignable, "k[0]", "not a scalar int32", "where()")
def store_into_a_scalar(y, k: int):
    k[0] = 1


@mistake(NotAssignable, "x.shape[0]", "not a tuple", "where()")
def store_into_a_shape(x, y):
    x.shape[0] = 1


@mistake(NotAssignable, "x.dtype", "cannot be assigned", "name")
def assignment_to_an_attribute(x, y):
    x.dtype = float32


@mistake(NotAssignable, "y[0, arange(4)]", "the tensor 'x' cannot be stored", "tile")
def store_of_a_tensor(x, y):
    y[0, arange(4)] = x


@mistake(NotAssignable, "y[0, 0]", "None cannot be stored", "tile")
def store_of_none(y):
    y[0, 0] = None


@mistake(NotAssignable, "y[0, 0]", "a tuple of 2 cannot be stored", "tile")
def store_of_a_tuple(y):
    y[0, 0] = 1, 2
