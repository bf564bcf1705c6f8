"""Root of a decreasing function; importing scipy.optimize takes longer than what needs it here."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["bracketed_root"]


def bracketed_root(function: Callable[[float], float], low: float, high: float, *, tolerance: float) -> float:
    """Root of a continuous decreasing function between two points around it.

    Parameters
    ----------
    function : callable
        Finite, at least 0 at `low` and at most 0 at `high`.
    low, high : float
        The bracket.
    tolerance : float
        Largest error of the root.

    Returns
    -------
    float
        Regula falsi with the Illinois modification, and a bisection wherever two steps did not
        halve the bracket (Dowell and Jarratt 1971).
    """
    at_low, at_high = function(low), function(high)
    width, side = high - low, 0
    while high - low > tolerance:
        share = at_low / (at_low - at_high) if at_low > at_high else 0.5
        if side and high - low > 0.5 * width:
            share = 0.5
        middle = low + share * (high - low)
        # Keeps half a tolerance from the ends, so that the last step closes the bracket.
        middle = min(max(middle, low + 0.5 * tolerance), high - 0.5 * tolerance)
        width = high - low
        value = function(middle)
        if value > 0:
            low, at_low = middle, value
            at_high = 0.5 * at_high if side > 0 else at_high
            side = 1
        else:
            high, at_high = middle, value
            at_low = 0.5 * at_low if side < 0 else at_low
            side = -1
    return 0.5 * (low + high)
