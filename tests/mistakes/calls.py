# ruff: noqa
# fmt: off
"""Mistakes in calls: of words, of helpers, of objects that cannot be called; and operands of a wrong kind."""

import builtins
import math

import numpy as np

from monotile.errors import *
from monotile.language import *
from monotile.language import kernel as kernel_word

from .catalogue import mistake


@mistake(WrongCall, "max(x[:4, arange(4)], axis=1, keepdims=True)", "keepdims", "leave it out|[:, None]")
def keepdims(x, y):
    y[:4, arange(4)] = max(x[:4, arange(4)], axis=1, keepdims=True)


@mistake(WrongCall, "x[:4, arange(4)].sum(dim=1)", "dim", "axis= for dim=")
def dim_for_axis(x, y):
    y[arange(4), 0] = x[:4, arange(4)].sum(dim=1)


@mistake(WrongCall, "round(x[0, arange(4)], 2)", "round to digits", "/ 100.0")
def round_to_digits(x, y):
    y[0, arange(4)] = round(x[0, arange(4)], 2)

TABLE = np.arange(4)
namespace = {}
exec("def from_nowhere(x): return x", namespace)
from_nowhere = namespace["from_nowhere"]
exec("from_nowhere_lambda = lambda x: x", namespace)


class Hostile:
    """An object whose every operation raises."""

    def __bool__(self):
        raise RuntimeError("no truth")

    def __eq__(self, other):
        raise RuntimeError("no comparison")

    __hash__ = None

    def __repr__(self):
        raise RuntimeError("no text")

    def __call__(self):
        raise RuntimeError("no call")


hostile = Hostile()


@kernel_word
def other_kernel(x):
    pass


def add(a, b=1.0, *, c=0.0):
    return a + b + c


def forever(v):
    return forever(v + 1)


def ping(v):
    return pong(v)


def pong(v):
    return ping(v)


def helper_with_a_mistake(v):
    return v + nothing


@mistake(WrongCall, "arange()", "arange: missing a required argument: 'n'", "arange(n)")
def word_without_arguments(y):
    t = arange()


@mistake(WrongCall, "arange(1, 2)", "arange: too many positional arguments", "arange(n)")
def word_with_too_many_arguments(y):
    t = arange(1, 2)


@mistake(WrongCall, "zeros(4, kind=1)", "zeros: got an unexpected keyword argument 'kind'", "zeros(shape, dtype")
def word_with_an_unknown_keyword(y):
    t = zeros(4, kind=1)


@mistake(WrongCall, "zeros(4, np.float64)", "element type", "monotile.language")
def numpy_dtype(y):
    t = zeros(4, np.float64)


@mistake(WrongCall, "zeros(4).astype(float)", "element type", "float32")
def astype_of_a_python_type(y):
    t = zeros(4).astype(float)


@mistake(WrongCall, "zeros(4).astype()", ".astype: missing a required argument", ".astype(dtype)")
def astype_without_a_type(y):
    t = zeros(4).astype()


@mistake(WrongCall, "zeros(4).sum(1, 2)", ".sum: too many", ".sum(axis")
def sum_of_two_axes(y):
    t = zeros(4).sum(1, 2)


@mistake(WrongCall, "program_id()", "size of the grid", "cdiv")
def program_id_without_a_grid(y):
    i = program_id()


@mistake(WrongCall, "program_id(2.5)", "whole number|2.5", "int")
def program_id_of_a_float(y):
    i = program_id(2.5)


@mistake(WrongCall, "range()", "1 to 3 arguments, found 0", "low, high, step")
def range_without_bounds(y):
    for j in range():
        pass


@mistake(WrongCall, "range(zeros(4))", "whole number|a tile float32[4]", "int")
def range_of_a_tile(y):
    for j in range(zeros(4)):
        pass


@mistake(WrongCall, "sum(3)", "needs a tile, found the int", "t[rows]")
def sum_of_a_number(y):
    t = sum(3)


@mistake(WrongCall, "dot(x, y)", "dot needs two tiles, found the tensor 'x'", "load")
def dot_of_tensors(x, y):
    t = dot(x, y)


@mistake(WrongCall, "add()", "add() is missing a", "add(a, b, c)")
def helper_without_arguments(y):
    t = add()


@mistake(WrongCall, "add(1, 2, 3)", "add() does not take 3 positional", "add(a, b, c)")
def helper_with_too_many_arguments(y):
    t = add(1, 2, 3)


@mistake(WrongCall, "add(1, a=2)", "does not take the argument 'a'", "add(a, b, c)")
def helper_with_an_argument_twice(y):
    t = add(1, a=2)


@mistake(WrongCall, "add(1, d=2)", "does not take the argument 'd'", "add(a, b, c)")
def helper_with_an_unknown_argument(y):
    t = add(1, d=2)


@mistake(WrongCall, "(lambda v: v)()", "lambda() is missing v", "lambda(v)")
def lambda_without_arguments(y):
    t = (lambda v: v)()


@mistake(WrongCall, "blocks(8, 4, lambda p: p)", "visible gave a tile int32[4]", "bool tile")
def visible_gives_numbers(y):
    for j in blocks(8, 4, lambda p: p):
        pass


@mistake(WrongCall, "builtins.max(1)", "max of 1 number", "max(a, b)")
def max_of_one_number(y):
    t = builtins.max(1)


@mistake(NotCallable, "blocks(8, 4, 3)", "the int cannot be called", "words")
def visible_is_a_number(y):
    for j in blocks(8, 4, 3):
        pass


@mistake(NotCallable, "math(1)", "the module math cannot be called", "words")
def module_call(y):
    t = math(1)


@mistake(NotCallable, "float32(1)", "float32 cannot be called", "words")
def dtype_call(y):
    t = float32(1)


@mistake(NotCallable, "x(0)", "the tensor 'x' cannot be called", "[...]")
def tensor_call(x, y):
    t = x(0)


@mistake(NotCallable, "zeros(4)(0)", "a tile float32[4] cannot be called", "[...]")
def tile_call(y):
    t = zeros(4)(0)


@mistake(NotCallable, "missing()", "None cannot be called", "words")
def none_call(y):
    missing = None
    t = missing()


@mistake(NotCallable, "math.exp(x[0, 0])", "'exp' cannot be called with run-time values", "monotile.language.exp")
def exp_of_the_math_module(x, y):
    t = math.exp(x[0, 0])


@mistake(NotCallable, "np.mean(x[0, arange(4)])", "'mean' cannot be called", "sum(x, axis=1) / x.shape[1]")
def numpy_function(x, y):
    t = np.mean(x[0, arange(4)])


@mistake(RaceBetweenPrograms, "y[0, 0]", "program 0 and program 1 both write y[0, 0]", "every element to one program")
def race(x, y):
    i = program_id(x.shape[0])
    y[0, 0] = x[i, 0]


@mistake(BadOperand, "print(x)", "print shows tiles and numbers", "load a tile first: print(x[rows])")
def print_call(x, y):
    print(x)


@mistake(NotCallable, "len(x)", "'len' cannot be called", "words")
def len_of_a_tensor(x, y):
    t = len(x)


@mistake(NotCallable, "other_kernel(x)", "kernel 'other_kernel' cannot be called", "plain function")
def kernel_call(x, y):
    other_kernel(x)


@mistake(BadOperand, "x + 1.0", "the tensor 'x' where", "x[rows]")
def tensor_arithmetic(x, y):
    t = x + 1.0


@mistake(BadOperand, "x + y", "the tensor 'x' where", "x[rows]")
def arithmetic_on_tensors(x, y):
    t = x + y


@mistake(BadOperand, "x == y", "the tensor 'x' where", "x[rows]")
def comparison_of_tensors(x, y):
    t = x == y


@mistake(BadOperand, "-x", "the tensor 'x' where", "x[rows]")
def minus_tensor(x, y):
    t = -x


@mistake(BadOperand, "zeros(4) + None", "None where", "is None")
def none_in_arithmetic(y):
    t = zeros(4) + None


@mistake(BadOperand, "None + 1", "None where", "is None")
def none_in_constant_arithmetic(y):
    t = None + 1


@mistake(BadOperand, "zeros(4) == None", "None where", "is None")
def comparison_with_none(y):
    t = zeros(4) == None


@mistake(BadOperand, "~None", "None where", "is None")
def invert_none(y):
    t = ~None


@mistake(BadOperand, "where(x, 1.0, 2.0)", "the tensor 'x' where", "x[rows]")
def tensor_condition(x, y):
    t = where(x, 1.0, 2.0)


@mistake(BadOperand, "where(True, x, 2.0)", "the tensor 'x' where", "x[rows]")
def tensor_in_where(x, y):
    t = where(True, x, 2.0)


@mistake(BadOperand, "exp(x)", "the tensor 'x' where", "x[rows]")
def exp_of_a_tensor(x, y):
    t = exp(x)


@mistake(BadOperand, "zeros(4) + (x, y)", "a tuple of 2 where", "tiles or numbers")
def tuple_of_tensors_in_arithmetic(x, y):
    t = zeros(4) + (x, y)


@mistake(BadOperand, 'zeros(4) * "a"', "'a' where", "tiles or numbers")
def string_in_arithmetic(y):
    t = zeros(4) * "a"


@mistake(BadOperand, "zeros(4) + float32", "float32 where", "tiles or numbers")
def dtype_in_arithmetic(y):
    t = zeros(4) + float32


@mistake(BadOperand, "zeros(4) + 1j", "type complex where", "tiles or numbers")
def complex_number(y):
    t = zeros(4) + 1j


@mistake(BadOperand, "zeros(4) + TABLE", "type ndarray where", "tiles or numbers")
def captured_array(y):
    t = zeros(4) + TABLE


@mistake(BadOperand, "zeros(4) + zeros(4).sum", ".sum without its call", "tiles or numbers")
def method_without_a_call(y):
    t = zeros(4) + zeros(4).sum


@mistake(BadOperand, "range(4) + 1", "a run-time range where", "tiles or numbers")
def range_in_arithmetic(y):
    t = range(4) + 1


@mistake(BadOperand, "(1.0, 2.0) if k > 0 else (3.0, 4.0)", "a tuple of 2 where", "tiles or numbers")
def tuples_chosen_at_run_time(y, k: int):
    a, b = (1.0, 2.0) if k > 0 else (3.0, 4.0)


@mistake(BadOperand, "zeros(4) + (lambda v: v)", "a function where", "tiles or numbers")
def function_in_arithmetic(y):
    t = zeros(4) + (lambda v: v)


@mistake(ConstantFailed, "1 // 0", "zero", "constants")
def constant_division_by_zero(y):
    t = 1 // 0


@mistake(ConstantFailed, "k // 0", "divides by zero", "constants")
def run_time_division_by_a_constant_zero(y, k: int):
    t = k // 0


@mistake(ConstantFailed, "cdiv(4, 0)", "cdiv divides by 0", "1 up")
def cdiv_by_zero(y):
    t = cdiv(4, 0)


@mistake(ConstantFailed, "10**10**10", "too large", "smaller")
def endless_power(y):
    t = 10**10**10


@mistake(ConstantFailed, "1 << 10**9", "too large", "smaller")
def endless_shift(y):
    t = 1 << 10**9


@mistake(ConstantFailed, "(1,) * 10**9", "too large", "smaller")
def endless_tuple(y):
    t = (1,) * 10**9


@mistake(ConstantFailed, "log(0)", "fails at compile time", "constants")
def constant_logarithm_of_zero(y):
    t = log(0)


@mistake(ConstantFailed, "exp(10**6)", "fails at compile time", "constants")
def constant_overflow(y):
    t = exp(10**6)


@mistake(ConstantFailed, "int(inf)", "infinity", "constants")
def int_of_infinity(y):
    t = int(inf)


@mistake(ConstantFailed, "~1.5", "fails at compile time", "constants")
def invert_of_a_float(y):
    t = ~1.5


@mistake(ConstantFailed, 'B < "a"', "not supported", "constants")
def comparison_of_unlike_constants(y, *, B: Const):
    t = B < "a"


@mistake(ConstantFailed, "(1, 2) + 3", "concatenate", "constants")
def tuple_plus_number(y):
    t = (1, 2) + 3


@mistake(ConstantFailed, "math.sqrt(-1)", "fails at compile time", "constants")
def python_call_that_fails(y):
    t = math.sqrt(-1)


@mistake(ConstantFailed, "hostile", "no truth", "constants")
def object_without_truth(y):
    if hostile:
        pass


@mistake(ConstantFailed, "hostile == 1", "no comparison", "constants")
def object_without_comparison(y):
    t = hostile == 1


@mistake(UnsupportedPython, 'raise RuntimeError("no call")', "'raise'", "assert")
def object_that_fails_when_called(y):
    t = hostile()


@mistake(BadOperand, "hostile + zeros(4)", "type Hostile where", "tiles or numbers")
def object_in_arithmetic(y):
    t = hostile + zeros(4)


@mistake(ConstantFailed, "TABLE == TABLE", "truth value", "constants")
def comparison_of_arrays(y):
    t = TABLE == TABLE


@mistake(TooDeep, "forever(v + 1)", "nested more than", "recursion")
def recursion(y):
    t = forever(1)


@mistake(TooDeep, "ping(v)", "nested more than", "recursion")
def mutual_recursion(y):
    t = ping(1)


@mistake(NoSource, "from_nowhere(1)", "source of 'from_nowhere'", "file")
def helper_without_source(y):
    t = from_nowhere(1)


@mistake(UnknownName, "nothing", "'nothing' is not defined", "define")
def mistake_in_a_helper(y):
    t = helper_with_a_mistake(1)


@mistake(BadGrid, "program_id(8)", "twice", "once")
def two_grids(y):
    i = program_id(4)
    j = program_id(8)


@mistake(BadGrid, "program_id(4)", "inside a run-time loop", "at the top")
def grid_in_a_loop(y):
    for j in range(4):
        i = program_id(4)


@mistake(BadGrid, "program_id(-1)", "a grid of -1", "0 up")
def negative_grid(y):
    i = program_id(-1)


@mistake(BadGrid, "program_id(idx[0])", "what a tensor holds", "lengths")
def grid_from_memory(idx, y):
    i = program_id(idx[0])


@mistake(BadOperand, "ünïcödé + x", "the tensor 'x'", "x[rows]")
def unicode_before_the_caret(x, y):
    größe = 1; ünïcödé = "日本語"; t = größe, ünïcödé + x


@mistake(BadOperand, "x +", "the tensor 'x'", "x[rows]")
def expression_on_several_lines(x, y):
    t = (
        x +
        1.0
    )


@mistake(UnknownName, "nothing", "'nothing'", "define")
def lambda_on_several_lines(y):
    f = (lambda v:
         v + nothing)
    t = f(1)


@mistake(UnknownName, "nothing", "'nothing'", "define")
def tabs(y):
	if True:
		t = 1 +	nothing


@mistake(UnknownName, "nothing", "'nothing'", "define")
def very_long_line(y):
    t = 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + nothing + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1


def bad_default(v=1.0 + 2.0):
    return v + later_defined


@mistake(UnknownName, "later_defined", "'later_defined'", "define")
def helper_with_a_default(y):
    t = bad_default()


@mistake(BadOperand, "v + 1.0", "None where", "is None")
def default_of_a_nested_function(y):
    def inner(v=None):
        return v + 1.0

    t = inner()


@mistake(BadOperand, "a + b", "the tensor 'x'", "x[rows]")
def two_lambdas_on_one_line(x, y):
    f, g = (lambda a, b: a - b), (lambda a, b: a + b)
    t = g(x, 1)
