"""Coefficients that several backends need: minimax fits of our own, made float by rounding the lowest order first.

They begin with the constant term. The error stated with each is of the polynomial alone."""

from __future__ import annotations

# erf(x) / x - 1 in x^2, for x in [0, 1]: 0.03 * 2^-24 of erf(x).
ERF_NEAR = (
    0.12837916612625122,
    -0.3761262595653534,
    0.11283578723669052,
    -0.026853347197175026,
    0.005187162198126316,
    -0.0007997853099368513,
    7.806903158780187e-05,
)
# -log(erfc(x)) for x in [0.9, 4]: 0.03 * 2^-24 of erf(x).
ERFC_EXPONENT = (
    0.00016644726565573364,
    1.127797245979309,
    0.6369760632514954,
    0.10411372035741806,
    -0.0223152507096529,
    0.0030655055306851864,
    -0.0001982218964258209,
)
