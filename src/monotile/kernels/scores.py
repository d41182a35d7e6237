"""Scores: how a product of a query and a key becomes a score. Order: scale, score_mod, softcap, additive mask.

Scores are held unscaled where that is possible: a score times `score_scale(rule)` is the score in natural units. The
softmax scales differences of scores only, so that large scores keep their digits."""

from typing import Any, NamedTuple

from monotile.language import elementwise, exp2, float32, fma, maximum, minimum, reciprocal, tanh, value_and_grad

from .softmax import LOG2E, NATURAL_SCALE
from .visibility import is_additive

MIN_SCALE = 1e-30  # stands for a scale of 0: a score scale is positive
MAX_FACTOR = 3e38  # stands for factors that overflow: infinity times a product of 0 would be NaN
MAX_APPROXIMATE_SOFTCAP = 64.0  # up to here approximate scores are off by less than 2^-16


class Options(NamedTuple):
    """Compile-time options of attention; None leaves one out."""

    causal: str | None = None  # "lower_right" or "upper_left"
    left: int | None = None  # keys before a query's own position that it sees
    right: int | None = None  # keys after it
    softcap: float | None = None
    score_mod: Any = None
    mask_mod: Any = None
    negative: bool = False  # the scale is negative: products change their sign, and its size is positive


class Rule(NamedTuple):
    """How products become scores in one kernel."""

    options: Options
    scale: Any
    additive: bool  # an additive mask joins the scores, which are natural then
    approximate: bool = False  # scores may be off by 2^-16: only weights of 16 bits are made of them


def score(rule, products, at, mask):
    """Scores of a tile, to be multiplied by `score_scale(rule)`, less `softcap_offset(rule)`."""
    options, size = rule.options, _size(rule.scale)
    S = -products if options.negative else products
    if options.score_mod is not None:
        mod = elementwise(options.score_mod)
        S = mod(S * size, at.b, at.h, at.i, at.keys[None, :]) * NATURAL_SCALE  # ints become floats
        size = NATURAL_SCALE
    if _approximates_softcap(rule):  # c * tanh(x / c) = c - 2 c / (1 + e^(2 x / c)), without the first c
        S = reciprocal(-1.0 - exp2(S * minimum(size * (2.0 * LOG2E / options.softcap), MAX_FACTOR)))
    elif options.softcap is not None:
        S = tanh(S * minimum(size * (1.0 / options.softcap), MAX_FACTOR))
    if not rule.additive:
        return S
    return fma(S, _scale_before_mask(rule), mask.astype(float32)) if is_additive(mask) else S * _scale_before_mask(rule)


def score_scale(rule):
    """The factor from held scores to natural units; 1 where an additive mask has been added to them."""
    return NATURAL_SCALE if rule.additive else _scale_before_mask(rule)


def softcap_offset(rule):
    """The constant that all approximate scores lack: the first term of the approximate softcap."""
    return rule.options.softcap if _approximates_softcap(rule) else 0.0


def derivative(rule, products, at):
    """The derivative of a natural score with respect to the scaled product it is made of."""
    options, size = rule.options, _size(rule.scale)
    S = -products if options.negative else products
    slope = NATURAL_SCALE
    if options.score_mod is not None:
        S, slope = value_and_grad(options.score_mod)(S * size, at.b, at.h, at.i, at.keys[None, :])
        S, size = S * NATURAL_SCALE, NATURAL_SCALE
    if options.softcap is not None:
        capped = tanh(S * minimum(size * (1.0 / options.softcap), MAX_FACTOR))
        slope = slope * (1.0 - capped * capped)
    return slope


def _scale_before_mask(rule):
    """The factor before an additive mask is added."""
    options = rule.options
    if options.softcap is not None:
        return 2.0 * options.softcap if _approximates_softcap(rule) else options.softcap
    return NATURAL_SCALE if options.score_mod is not None else _size(rule.scale)


def _size(scale):
    return maximum(abs(scale), MIN_SCALE)


def _approximates_softcap(rule):
    """The approximation is off by up to softcap * 2^-22, however small the score is."""
    softcap = rule.options.softcap
    return rule.approximate and softcap is not None and softcap <= MAX_APPROXIMATE_SOFTCAP
