"""How much floating-point rounding of the map (1) can add to its sensitivity: a proven bound, public."""

from __future__ import annotations

import math

from ._typing import Sensitivity
from .errors import InvalidParameterError
from .modulation import ORTHONORMAL_TOLERANCE, Modulation

__all__ = ["DISTANCE_CLIP", "map_error_bound", "rounding_inflation"]

# Under a relation that does not clip, a device clips at this many times the neighbours' distance: rounding
# errors grow with the row, so some bound must exist. Clipping to a ball moves no two rows apart.
DISTANCE_CLIP = 2.0**20

# More noise than this would bias what the server subtracts; far above what sensible requests need.
_LARGEST_INFLATION = 1e-6

_U = 2.0**-53  # unit roundoff of a double


def map_error_bound(modulation: Modulation, num_features: int, clip_radius: float) -> float:
    """Bound on the distance between the computed and the exact noise-free map of one row.

    Parameters
    ----------
    modulation : Modulation
        The map; 1 − α as rounded to a double is part of its definition.
    num_features : int
        d.
    clip_radius : float
        R, to which rows are clipped before the map.

    Returns
    -------
    float
        e with ‖computed − exact‖ ≤ e, in units of the released row, for every row,
        every realised phase and every frame that passes the check.

    Notes
    -----
    First-order error analysis (Higham 2002, *Accuracy and stability of numerical
    algorithms*, sections 2.2 and 3.1) with u = 2⁻⁵³, all constants rounded up, and
    1 % for what is not first order: clipping loses (d+8)u·R, the contraction and the
    final sum u each, the inner product and its multiplication by ω (d+2)u·ωR, adding a
    phase 2πu, the cosine 8u (**assumed** within 4 units in the last place, which NumPy
    states for its cosine), its scaling 4u, and the product with Vᵀ m^{3/2}u·λ. Sums
    may be taken in any order, with or without fused multiply-add.
    """
    d, m, R = num_features, modulation.num_directions, clip_radius
    contraction, lam = modulation.contraction, modulation.effective_amplitude
    omega = modulation.frequency
    error = modulation.lipschitz("conditional") * (d + 8) * _U * R
    error += _U * (2.0 * contraction * R + lam)
    error += lam * _U * ((d + 2) * omega * R + 2.0 * math.pi + 12.0 + m * math.sqrt(m))
    underflow = 1e-300 * (d + m) * (1.0 + lam) * (1.0 + omega)
    return 1.01 * error + underflow


def rounding_inflation(
    modulation: Modulation,
    sensitivity: Sensitivity,
    *,
    num_features: int,
    separation: float,
    clip_radius: float,
) -> float:
    """Relative excess of the computed map's sensitivity over that of the exact one, L · separation.

    Parameters
    ----------
    modulation : Modulation
        The map.
    sensitivity : {"conditional", "marginal"}
        As in :meth:`Modulation.lipschitz`.
    num_features : int
        d.
    separation : float
        Distance between neighbours.
    clip_radius : float
        R, to which rows are clipped before the map.

    Returns
    -------
    float
        In (0, 1e-6]; noise must grow by this factor to be calibrated to the map as computed.

    Raises
    ------
    InvalidParameterError
        If it would be larger.

    Notes
    -----
    Three parts. (a) Both neighbours' maps are off by at most :func:`map_error_bound`.
    (b) A frame passes the check with ‖VᵀV − I‖ ≤ m(1e-9 + (d+2)u), so its cosine term is
    that much steeper. (c) With marginal sensitivity phases are multiples of 2π·2⁻⁵³:
    shifting one neighbour's grid onto the other's is a bijection that leaves at
    most 30u·λ between the cosine terms; given the coupled phases both releases are
    Gaussians that far apart, and forgetting the phases is post-processing.
    """
    d, m = num_features, modulation.num_directions
    exact = modulation.lipschitz(sensitivity) * separation
    excess = 2.0 * map_error_bound(modulation, d, clip_radius)
    if not modulation.is_plain:
        steeper = m * (ORTHONORMAL_TOLERANCE + (d + 2) * _U)
        excess += modulation.amplitude * modulation.frequency / math.sqrt(m) * steeper * separation
        excess += 30.0 * _U * modulation.amplitude
    inflation = excess / exact
    if not inflation <= _LARGEST_INFLATION:
        raise InvalidParameterError(
            f"rounding errors of this modulation would need {inflation:.1g} times more noise, above "
            f"{_LARGEST_INFLATION:g}; lower amplitude, frequency, num_directions or the number of features"
        )
    return inflation
