# ruff: noqa
"""Mistakes with names, scopes and loop-carried variables."""

import numpy as np

import monotile.language as ml
from monotile.errors import *
from monotile.language import *

from .catalogue import mistake

del kernel  # so that one word is not imported

GLOBAL_TABLE = [1, 2, 3]


@mistake(UnknownName, "missing", "'missing' is not defined", "define it")
def unknown_name(y):
    y[arange(4), 0] = missing


@mistake(UnknownName, "gelu", "'gelu' is not defined", "there is no word 'gelu'|erf(x")
def a_word_that_does_not_exist(x, y):
    y[0, arange(4)] = gelu(x[0, arange(4)])


@mistake(UnknownName, "sigmod", "'sigmod' is not defined", "there is no word 'sigmod'|did you mean sigmoid?")
def a_misspelt_word(x, y):
    y[0, arange(4)] = sigmod(x[0, arange(4)])


@mistake(
    UnknownName, "softmax", "'softmax' is not defined", "there is no word 'softmax'|exp(x - max(x, axis=1)[:, None])"
)
def a_word_made_of_others(x, y):
    y[0, arange(4)] = softmax(x[0, arange(4)])


@mistake(UnknownName, "kernal_of_mine", "is not defined", "there is no word|define a function of that name")
def an_unknown_function(x, y):
    y[0, arange(4)] = kernal_of_mine(x[0, arange(4)])


@mistake(UnknownName, "kernel", "'kernel' is not defined", "from monotile.language import kernel")
def a_word_that_is_not_imported(x, y):
    y[0, 0] = kernel


@mistake(UnknownName, "GLOBAL_TABEL", "'GLOBAL_TABEL' is not defined", "did you mean GLOBAL_TABLE?")
def a_misspelt_name(y):
    y[0, 0] = GLOBAL_TABEL[0]


@mistake(UnknownAttribute, "ml.gelu", "the module monotile.language has no 'gelu'", "there is no word 'gelu'|erf")
def a_module_without_the_word(x, y):
    y[0, arange(4)] = ml.gelu(x[0, arange(4)])


@mistake(UnknownAttribute, "np.sigmod", "the module numpy has no 'sigmod'", "did you mean sigmoid?")
def a_library_without_the_word(x, y):
    y[0, arange(4)] = np.sigmod(x[0, arange(4)])


@mistake(NotCallable, "np.matmul(x[0, arange(4)], x[0, arange(4)])", "'matmul' cannot be called", "dot(a, b)")
def a_function_of_a_library_that_is_no_word(x, y):
    y[0, arange(4)] = np.matmul(x[0, arange(4)], x[0, arange(4)])


@mistake(UnknownName, "later", "'later' is not defined", "before this line")
def read_before_assignment(y):
    y[arange(4), 0] = later + 1.0
    later = 2.0


@mistake(NameOutOfScope, "inner", "'inner' is only defined inside the loop", "before it")
def name_made_in_a_loop(x, y):
    for j in range(x.shape[0]):
        inner = x[j, arange(4)]
    y[0, arange(4)] = inner


@mistake(NameOutOfScope, "j", "'j' is only defined inside the loop", "before it")
def loop_variable_after_the_loop(x, y):
    for j in range(x.shape[0]):
        pass
    y[j, arange(4)] = 0.0


@mistake(NameOutOfScope, "j", "'j' is only defined inside the loop", "before it")
def loop_variable_hides_an_older_name(x, y):
    j = 0
    for j in range(x.shape[0]):
        pass
    y[j, arange(4)] = 0.0


@mistake(NameOutOfScope, "half", "one branch of the if", "before it")
def name_made_in_one_branch(x, y, k: int):
    if k > 0:
        half = 0.5
    y[0, arange(4)] = half


@mistake(NameOutOfScope, "max", "'max' is only defined", "before it")
def lost_name_does_not_become_a_builtin(x, y, k: int):
    if k > 0:
        max = 0.5
    y[0, arange(4)] = max


@mistake(CarriedTypeChanged, "for j in range(4):", "'total' enters this loop as int32|float32[4]", "cast or reshape")
def carried_int_becomes_a_tile(x, y):
    total = 0
    for j in range(4):
        total = x[j, arange(4)]


@mistake(CarriedTypeChanged, "for j in range(4):", "'total' enters this loop as int32|float32[4]", "cast or reshape")
def carried_int_meets_floats(x, y):
    total = 0
    for j in range(4):
        total = total + x[j, arange(4)]


@mistake(CarriedTypeChanged, "for j in range(4):", "enters this loop as float32[4]|float32[4, 1]", "reshape")
def carried_shape_changes(y):
    acc = zeros(4)
    for j in range(4):
        acc = acc[:, None]


@mistake(
    CarriedTypeChanged,
    "for j in range(4):",
    "as (float32, float32) and leaves it as (the number 1.0, float32[4])",
    "cast",
)
def carried_tuple_changes(y):
    state = (0.0, 1.0)
    for j in range(4):
        state = (1.0, zeros(4))


@mistake(CarriedTypeChanged, "for j in range(4):", "as None", "cast")
def carried_none_becomes_a_tile(y):
    best = None
    for j in range(4):
        best = zeros(4)


@mistake(CarriedTypeChanged, "for j in range(4):", "is a loop variable inside", "another name")
def carried_name_is_an_inner_loop_variable(y):
    t = 1
    for j in range(4):
        t = t + 1
        for t in range(2):
            pass


@mistake(CarriedTypeChanged, "for j in range(4):", "as bool|the number 1.5", "cast")
def carried_bool_becomes_a_float(y, flag: bool):
    seen = flag
    for j in range(4):
        seen = 1.5


@mistake(CarriedTypeChanged, "if k > 0:", "'v' is float32[4] in one branch|None in the other", "both")
def branches_disagree_on_none(y, k: int):
    if k > 0:
        v = zeros(4)
    else:
        v = None


@mistake(CarriedTypeChanged, "if k > 0:", "'v' is float32[4]|float32[8]", "both")
def branches_disagree_on_shape(y, k: int):
    if k > 0:
        v = zeros(4)
    else:
        v = zeros(8)


@mistake(CarriedTypeChanged, "if k > 0:", "'v' is float32 in one branch|int32 in the other", "both")
def branches_disagree_on_dtype(y, k: int, s: float):
    v = k
    if k > 0:
        v = s


@mistake(CarriedTypeChanged, "if k > 0:", "a function", "both")
def branches_disagree_on_a_function(y, k: int):
    if k > 0:
        f = lambda v: v
    else:
        f = lambda v: v + 1


@mistake(CarriedTypeChanged, "if k > 0:", "(the int, the int)", "both")
def branches_disagree_on_a_tuple(y, k: int):
    v = (1, 2)
    if k > 0:
        v = (1, 2, 3)


@mistake(UnknownAttribute, "x.size", "the tensor 'x' has no 'size'", ".shape")
def unknown_attribute_of_a_tensor(x, y):
    y[0, 0] = x.size


@mistake(UnknownAttribute, "x[0, arange(4)].mean", "a tile float32[4] has no 'mean'", ".sum")
def unknown_attribute_of_a_tile(x, y):
    y[0, 0] = x[0, arange(4)].mean()


@mistake(UnknownAttribute, "(1, 2).count", "a tuple of 2 has no 'count'", "tensors have")
def unknown_attribute_of_a_tuple(y):
    y[0, 0] = (1, 2).count(1)


@mistake(BadIndex, "GLOBAL_TABLE[0]", "type list cannot be indexed", "tensors")
def global_list(y):
    y[0, 0] = GLOBAL_TABLE[0]
