# ruff: noqa
"""Parameter lists that cannot be a kernel's. Each case: a function that defines it, what is found, caret and cure."""

from monotile.language import *


def defaulted():
    @kernel
    def k(x, y=1.0):
        pass


def starred():
    @kernel
    def k(x, *rest):
        pass


def double_starred():
    @kernel
    def k(x, **rest):
        pass


def reserved():
    @kernel
    def k(x, threads: int):
        pass


def unknown_annotation():
    @kernel
    def k(x, n: str):
        pass


def unhashable_annotation():
    @kernel
    def k(x, n: [1, 2]):
        pass


def bare_tensor():
    @kernel
    def k(x: Tensor):
        pass


def undefined_annotation():
    @kernel
    def k(x: "Nothing"):
        pass


def half_scalar():
    @kernel
    def k(x, s: float16):
        pass


def bad_const_default():
    @kernel
    def k(x, *, B: Const = [1]):
        pass


def nan_default():
    @kernel
    def k(x, *, B: Const = float("nan")):
        pass


def not_a_function():
    kernel(3)


def a_class():
    @kernel
    class K:
        pass


def asynchronous():
    @kernel
    async def k(x):
        pass


def commas():
    Tensor["M, K"]


def no_dimensions():
    Tensor[""]


def tensor_of_a_number():
    Tensor[3]


CASES = [
    (defaulted, "'y' has a default", "y", "Const"),
    (starred, "*rest", "rest", "tensors"),
    (double_starred, "*rest", "rest", "tensors"),
    (reserved, "'threads' is a keyword of every call", "threads: int", "tensors"),
    (unknown_annotation, "annotation of 'n' is str", "n: str", "float, int"),
    (unhashable_annotation, "annotation of 'n' is list", "n: [1, 2]", "float, int"),
    (bare_tensor, "annotation of 'x' is Tensor", "x: Tensor", "Tensor['M K']"),
    (undefined_annotation, "'Nothing' is not defined", 'def k(x: "Nothing"):', "import"),
    (half_scalar, "annotation of 's' is DType", "s: float16", "float, int"),
    (bad_const_default, "default cannot be compiled", "B: Const", "Const"),
    (nan_default, "NaN", "B: Const", "Const"),
    (not_a_function, "found int", None, "def"),
    (a_class, "found type", None, "def"),
    (asynchronous, "async", None, "plain def"),
    (commas, "Tensor['M, K'] is not a shape", None, "spaces"),
    (no_dimensions, "Tensor[''] is not a shape", None, "name every dimension"),
    (tensor_of_a_number, "Tensor[3] is not a shape", None, "name every dimension"),
]
