# ruff: noqa
# fmt: off
"""Derivatives of functions that have none."""

from monotile.errors import *
from monotile.language import *

from .catalogue import mistake


def centred(s):
    return s - s.sum(axis=1)[:, None]


@mistake(NotDifferentiable, "s.sum(axis=1)", "'sum' depends on the argument of grad|not elementwise", "outside")
def derivative_of_a_sum(x, y):
    y[0:8, 0:16] = grad(centred)(x[0:8, 0:16])


@mistake(NotElementwise, "s.sum(axis=1)", "'sum' mixes elements of a tile", "reduce in a kernel")
def a_sum_in_a_function_of_elements(x, y):
    y[0:8, 0:16] = elementwise(centred)(x[0:8, 0:16])


@mistake(NotElementwise, "s.T", "'.T' mixes elements of a tile", "position")
def a_transpose_in_a_function_of_elements(x, y):
    y[0:8, 0:8] = elementwise(lambda s: s + s.T)(x[0:8, 0:8])


@mistake(UndefinedForDType, "(s > 0.0) + (s < 1.0)", "'+' is not defined for bool", "cast the bool")
def a_sum_of_bools_in_a_function_of_elements(x, y):
    y[0:8, 0:16] = elementwise(lambda s: s * ((s > 0.0) + (s < 1.0)))(x[0:8, 0:16])


@mistake(NotDifferentiable, "max(s, axis=0)", "'max' depends on", "outside")
def derivative_of_a_maximum_along_an_axis(x, y):
    y[0:8, 0:16] = grad(lambda s: s - max(s, axis=0))(x[0:8, 0:16])


@mistake(NotDifferentiable, "dot(s, s)", "'dot' depends on", "outside")
def derivative_of_a_product_of_matrices(x, y):
    y[0:8, 0:8] = grad(lambda s: dot(s, s))(x[0:8, 0:8])


@mistake(NotDifferentiable, "s.T", "a transpose depends on", "shape")
def derivative_of_a_transpose(x, y):
    y[0:8, 0:8] = grad(lambda s: s + s.T)(x[0:8, 0:8])


@mistake(NotDifferentiable, "s[:, None]", "[:, None] depends on", "shape")
def derivative_of_columns(z, y):
    y[0:8, 0:8] = grad(lambda s: s[:, None] * s[None, :])(z[0:8])


@mistake(NotDifferentiable, "for n in range(k):", "a run-time loop depends on", "static_range")
def derivative_of_a_run_time_loop(x, y, k: int):
    def power(s):
        t = s
        for n in range(k):
            t = t * s
        return t

    y[0:8, 0:16] = grad(power)(x[0:8, 0:16])


@mistake(NotDifferentiable, "y[0, 0:16]", "a store depends on", "after the call")
def derivative_of_a_store(x, y):
    def stored(s):
        y[0, 0:16] = s
        return s

    y[1, 0:16] = grad(stored)(x[0, 0:16])


@mistake(NotDifferentiable, "value_and_grad(exp)(arange(4))", "found a tile int32[4]", "astype")
def derivative_by_an_integer(y):
    value, slope = value_and_grad(exp)(arange(4))


@mistake(NotDifferentiable, "grad(lambda s: (s, s))(x[0, 0:16])", "found a tuple of 2", "one result")
def derivative_of_two_results(x, y):
    y[0, 0:16] = grad(lambda s: (s, s))(x[0, 0:16])


@mistake(WrongCall, "grad(x[0, 0:16])", "needs a function, found a tile", "grad(f)(x)")
def derivative_of_a_tile(x, y):
    y[0, 0:16] = grad(x[0, 0:16])


@mistake(WrongCall, "grad(exp)()", "missing a required argument", "grad(function)(x")
def derivative_without_an_argument(y):
    y[0, 0] = grad(exp)()


@mistake(NotAssignable, "y[0, 0]", "a function cannot be stored", "tile")
def derivative_without_its_call(y):
    y[0, 0] = grad(exp)
