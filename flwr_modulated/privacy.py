"""Neighbouring relations, guarantees, and how much Gaussian noise a guarantee needs.

Everything here is analysis: nothing is sampled. Calibration rounds towards privacy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from scipy.special import log_ndtr

from ._roots import bracketed_root
from ._typing import Accounting, FloatArray, Unit
from ._validate import check_choice, check_int, check_real
from .errors import InvalidParameterError
from .noise import NoiseSource

__all__ = [
    "Distance",
    "Guarantee",
    "Relation",
    "Replace",
    "ReplaceRecord",
    "calibrate_noise_multiplier",
    "gaussian_delta",
    "gaussian_epsilon",
    "zcdp_rho",
]

# Relative slack added to a computed root: far above the error of the root finder and of
# log_ndtr, far below anything that costs utility.
_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class Distance:
    """Neighbours are rows at Euclidean distance at most `radius`, with the same label.

    The paper's relation (``radius=1`` on standardised features). It is metric privacy:
    values within `radius` of each other are hidden from one another; a pair at distance
    ``s`` costs ``(s / radius)²`` times the zCDP of the guarantee. A standardised row has
    norm about ``√d``, so this is weaker than hiding the row.

    Parameters
    ----------
    radius : float
        r > 0, in units of the standardised features.
    """

    radius: float

    def __post_init__(self) -> None:
        check_real("radius", self.radius, low=0, low_open=True)

    @property
    def separation(self) -> float:
        """Largest distance between neighbours before the map, r."""
        return self.radius

    @property
    def clip_radius(self) -> float | None:
        """Rows are not clipped under this relation."""
        return None

    @property
    def hides_labels(self) -> bool:
        """Labels are public under this relation."""
        return False

    def join(self, features: FloatArray, labels: FloatArray) -> FloatArray:
        """What is released of rows (n, d) and labels (n,): the rows."""
        return features

    def __str__(self) -> str:
        return f"distance({self.radius:g})"


@dataclass(frozen=True, slots=True)
class Replace:
    """Neighbours are any two rows in the ball of `radius`, with the same label.

    Local differential privacy of the features: clients clip their row to the ball.

    Parameters
    ----------
    radius : float
        R > 0, in units of the standardised features.
    """

    radius: float

    def __post_init__(self) -> None:
        check_real("radius", self.radius, low=0, low_open=True)

    @property
    def separation(self) -> float:
        """Largest distance between neighbours before the map, 2R."""
        return 2.0 * self.radius

    @property
    def clip_radius(self) -> float | None:
        """Norm R to which clients clip."""
        return self.radius

    @property
    def hides_labels(self) -> bool:
        """Labels are public under this relation."""
        return False

    def join(self, features: FloatArray, labels: FloatArray) -> FloatArray:
        """What is released of rows (n, d) and labels (n,): the rows."""
        return features

    def __str__(self) -> str:
        return f"replace({self.radius:g})"


@dataclass(frozen=True, slots=True)
class ReplaceRecord:
    """Neighbours are any two records (x, y / label_scale) in the ball of `radius`.

    Local differential privacy of features *and* label: the map acts on the joint
    vector in d + 1 dimensions and no label travels beside it.

    Parameters
    ----------
    radius : float
        R > 0, in units of the standardised record.
    label_scale : float, default 1.0
        s_y > 0, in label units; the label enters the joint vector as ``y / s_y``.
    """

    radius: float
    label_scale: float = 1.0

    def __post_init__(self) -> None:
        check_real("radius", self.radius, low=0, low_open=True)
        check_real("label_scale", self.label_scale, low=0, low_open=True)

    @property
    def separation(self) -> float:
        """Largest distance between neighbours before the map, 2R."""
        return 2.0 * self.radius

    @property
    def clip_radius(self) -> float | None:
        """Norm R to which clients clip the joint vector."""
        return self.radius

    @property
    def hides_labels(self) -> bool:
        """The label is part of the private record."""
        return True

    def join(self, features: FloatArray, labels: FloatArray) -> FloatArray:
        """What is released of rows (n, d) and labels (n,): joint records (n, d + 1)."""
        with np.errstate(over="ignore"):  # whoever releases them checks that they are finite
            return np.column_stack([features, labels / self.label_scale])

    def __str__(self) -> str:
        return f"replace_record({self.radius:g}, label_scale={self.label_scale:g})"


Relation: TypeAlias = Distance | Replace | ReplaceRecord


@dataclass(frozen=True, slots=True)
class Guarantee:
    """(ε, δ)-differential privacy with its relation and unit, for all releases together.

    Parameters
    ----------
    epsilon : float
        ε > 0.
    delta : float
        δ in (0, 1).
    relation : Distance, Replace or ReplaceRecord
        Which two inputs must be hard to tell apart.
    unit : {"row", "client"}, default "row"
        Whether the relation changes one row, or all rows of one client at once.
    rows_per_client : int, default 1
        With ``unit="client"``: the most rows that one client may hold.

    Raises
    ------
    InvalidParameterError
        If a parameter is outside its range.

    Examples
    --------
    >>> print(Guarantee(2.0, 1e-5, Distance(1.0)))
    (ε=2, δ=1e-05)-DP, relation distance(1), unit row, labels public
    """

    epsilon: float
    delta: float
    relation: Relation
    unit: Unit = "row"
    rows_per_client: int = 1

    def __post_init__(self) -> None:
        check_real("epsilon", self.epsilon, low=0, low_open=True)
        check_real(
            "delta",
            self.delta,
            low=0,
            high=1,
            low_open=True,
            high_open=True,
            hint="choose it well below 1 / (number of clients)",
        )
        if not isinstance(self.relation, Relation):
            raise InvalidParameterError(
                "relation must be Distance(radius), Replace(radius) or ReplaceRecord(radius, label_scale), "
                f"got {type(self.relation).__name__}"
            )
        check_choice("unit", self.unit, Unit)
        check_int("rows_per_client", self.rows_per_client, low=1)
        if self.unit == "row" and self.rows_per_client != 1:
            raise InvalidParameterError(
                "rows_per_client must be 1 with unit='row'; use unit='client' to protect several rows at once"
            )

    def __str__(self) -> str:
        labels = "labels private" if self.relation.hides_labels else "labels public"
        rows = f" of up to {self.rows_per_client} rows" if self.unit == "client" else ""
        return (
            f"(ε={self.epsilon:g}, δ={self.delta:g})-DP, relation {self.relation}, "
            f"unit {self.unit}{rows}, {labels}"
        )

    def describe(
        self,
        *,
        num_releases: int = 1,
        accounting: Accounting = "exact",
        noise_source: NoiseSource | None = None,
    ) -> str:
        """One paragraph for a non-expert: what is hidden, from whom, how well, and what is not.

        Parameters
        ----------
        num_releases : int, default 1
            T, the number of releases that share this guarantee.
        accounting : {"exact", "zcdp", "classical"}, default "exact"
            How the noise is calibrated.
        noise_source : NoiseSource, optional
            Adds which noise is used and for which arithmetic the guarantee holds.

        Returns
        -------
        str

        Raises
        ------
        InvalidParameterError
            If an argument is out of range.
        """
        from ._words import describe_guarantee  # it needs this module

        return describe_guarantee(self, num_releases, accounting, noise_source)

    def convert(self, relation: Relation, *, accounting: Accounting = "exact") -> Guarantee:
        """What this guarantee implies under another relation, at the same δ and unit.

        Parameters
        ----------
        relation : Distance, Replace or ReplaceRecord
            The relation to state the guarantee under, in the same units.
        accounting : {"exact", "zcdp", "classical"}, default "exact"
            How the noise behind this guarantee was calibrated.

        Returns
        -------
        Guarantee
            The smallest ε, by exact accounting, rounded up.

        Raises
        ------
        InvalidParameterError
            If the guarantee says nothing about `relation`: labels that travel in the
            clear cannot become hidden, nor joint records change their label scale.

        Notes
        -----
        Holds for the Gaussian mechanisms of this package, not for any mechanism with
        this (ε, δ). All releases together are μ-GDP with μ = 1/(noise multiplier), and μ is
        proportional to the distance of the two rows before the map (Dong, Roth and Su 2019,
        arXiv:1905.02383, Theorem 2.7). Rows clipped to R are never farther apart than 2R.

        Examples
        --------
        >>> paper = Guarantee(2.0, 1e-5, Distance(1.0))
        >>> print(paper.convert(Replace(3.0)))
        (ε=16.7425, δ=1e-05)-DP, relation replace(3), unit row, labels public
        """
        if not isinstance(relation, Relation):
            raise InvalidParameterError(
                f"relation must be Distance, Replace or ReplaceRecord, got {type(relation).__name__}"
            )
        mine = self.relation
        if isinstance(relation, ReplaceRecord):
            if not isinstance(mine, ReplaceRecord):
                raise InvalidParameterError(
                    f"relation must leave labels public, got {relation}: under {mine} labels "
                    "travel in the clear, and no ε hides them"
                )
            if relation.label_scale != mine.label_scale:
                raise InvalidParameterError(
                    f"label_scale must be {mine.label_scale:g} as in {mine}, got {relation.label_scale:g}"
                )
        separation = relation.separation
        if mine.clip_radius is not None:
            separation = min(separation, 2.0 * mine.clip_radius)
        multiplier = calibrate_noise_multiplier(self.epsilon, self.delta, accounting=accounting)
        epsilon = gaussian_epsilon(self.delta, multiplier * mine.separation / separation)
        return replace(self, relation=relation, epsilon=max(epsilon, _SLACK))


def gaussian_delta(epsilon: float, noise_multiplier: float) -> float:
    """Exact δ(ε) of one Gaussian release between its worst neighbours.

    Parameters
    ----------
    epsilon : float
        ε ≥ 0.
    noise_multiplier : float
        Noise standard deviation over L2 sensitivity, σ/Δ > 0; for T releases of
        the same row, σ/(√T Δ).

    Returns
    -------
    float
        The smallest δ for which the release is (ε, δ)-DP, rounded up.

    References
    ----------
    Balle and Wang (2018), *Improving the Gaussian mechanism for differential
    privacy*, arXiv:1805.06530, Theorem 8.

    Examples
    --------
    >>> round(gaussian_delta(1.0, 1.0), 6)
    0.126937
    """
    check_real("epsilon", epsilon, low=0)
    check_real("noise_multiplier", noise_multiplier, low=0, low_open=True)
    return math.exp(_gaussian_log_delta(epsilon, noise_multiplier))


def gaussian_epsilon(delta: float, noise_multiplier: float) -> float:
    """Exact ε(δ) of one Gaussian release between its worst neighbours.

    Parameters
    ----------
    delta : float
        δ in (0, 1).
    noise_multiplier : float
        σ/Δ > 0; for T releases of the same row, σ/(√T Δ).

    Returns
    -------
    float
        The smallest ε ≥ 0 for which the release is (ε, δ)-DP, rounded up.

    References
    ----------
    Balle and Wang (2018), arXiv:1805.06530, Theorem 8.

    Examples
    --------
    >>> round(gaussian_epsilon(1e-5, 1.0), 4)
    4.3772
    """
    check_real("delta", delta, low=0, high=1, low_open=True, high_open=True)
    check_real("noise_multiplier", noise_multiplier, low=0, low_open=True)
    from scipy.optimize import brentq

    target = math.log(delta)

    def excess(epsilon: float) -> float:
        return max(_gaussian_log_delta(epsilon, noise_multiplier) - target, -1e3)

    if excess(0.0) <= 0:
        return 0.0
    rho = 0.5 / noise_multiplier**2
    high = rho + 2.0 * math.sqrt(-rho * target)  # Bun and Steinke 2016, Proposition 1.3: never too small
    epsilon = float(brentq(excess, 0.0, high * (1.0 + _SLACK)))
    while excess(epsilon) > 0:
        epsilon *= 1.0 + _SLACK
    return epsilon


def _gaussian_log_delta(epsilon: float, noise_multiplier: float) -> float:
    # Logarithms throughout: e^ε overflows and both tails underflow long before δ does.
    half = 0.5 / noise_multiplier
    shift = epsilon * noise_multiplier
    upper = float(log_ndtr(half - shift))
    tail = float(log_ndtr(-half - shift))
    if upper == -math.inf:
        return -math.inf
    # For tiny ε the two terms nearly cancel: widen their gap by what rounding may have taken from it.
    rounding = 8.0 * np.finfo(np.float64).eps * (1.0 + epsilon + abs(upper) + abs(tail))
    gap = max(upper - (epsilon + tail), 0.0) + rounding
    return min(upper + math.log(-math.expm1(-gap)) + rounding, 0.0)


def zcdp_rho(epsilon: float, delta: float) -> float:
    """Zero-concentrated budget ρ that the standard conversion turns into (ε, δ).

    Solves ε = ρ + 2√(ρ ln(1/δ)) (Bun and Steinke 2016, Proposition 1.3).

    Parameters
    ----------
    epsilon : float
        ε > 0.
    delta : float
        δ in (0, 1).

    Returns
    -------
    float
        ρ > 0.

    Raises
    ------
    InvalidParameterError
        If an argument is out of range.
    """
    check_real("epsilon", epsilon, low=0, low_open=True)
    check_real("delta", delta, low=0, high=1, low_open=True, high_open=True)
    log_inverse = -math.log(delta)
    # ε / (√(a+ε) + √a) equals √(a+ε) − √a without its cancellation.
    return (epsilon / (math.sqrt(log_inverse + epsilon) + math.sqrt(log_inverse))) ** 2


def calibrate_noise_multiplier(
    epsilon: float,
    delta: float,
    *,
    num_compositions: int = 1,
    accounting: Accounting = "exact",
    allow_invalid_classical: bool = False,
) -> float:
    """Noise multiplier σ/Δ of each of T Gaussian releases that share (ε, δ).

    Parameters
    ----------
    epsilon, delta : float
        The total budget.
    num_compositions : int, default 1
        T, the number of releases of the same unit; T Gaussian releases of one unit
        are one release with σ/√T.
    accounting : {"exact", "zcdp", "classical"}, default "exact"
        ``"exact"`` solves the Gaussian mechanism's own δ(ε); ``"zcdp"`` uses
        ε = ρ + 2√(ρ ln(1/δ)); ``"classical"`` uses √(2 ln(1.25/δ))/ε, a theorem
        for ε ≤ 1 only.
    allow_invalid_classical : bool, default False
        Compute the classical formula outside ε ≤ 1, where it does **not** give the
        stated guarantee. For comparison with software that does so.

    Returns
    -------
    float
        σ/Δ, rounded up.

    Raises
    ------
    InvalidParameterError
        If an argument is out of range, or classical accounting is asked for ε > 1
        without the override.

    Notes
    -----
    1. The δ of the returned multiplier is at most `delta` (exact and zCDP, any ε;
       classical for ε ≤ 1).
    2. No amplification by sampling is claimed: the server knows who took part.

    Examples
    --------
    >>> exact = calibrate_noise_multiplier(1.0, 1e-5)
    >>> zcdp = calibrate_noise_multiplier(1.0, 1e-5, accounting="zcdp")
    >>> round(exact, 4), round(zcdp, 4)
    (3.7306, 4.9006)
    """
    check_real("epsilon", epsilon, low=0, low_open=True)
    check_real("delta", delta, low=0, high=1, low_open=True, high_open=True)
    check_int("num_compositions", num_compositions, low=1)
    check_choice("accounting", accounting, Accounting)
    if accounting == "exact":
        multiplier = _exact_multiplier(epsilon, delta)
    elif accounting == "zcdp":
        multiplier = math.sqrt(0.5 / zcdp_rho(epsilon, delta))
    else:
        if epsilon > 1 and not allow_invalid_classical:
            raise InvalidParameterError(
                f"epsilon must be in (0, 1] with accounting='classical', got {epsilon:g}: the formula "
                "√(2 ln(1.25/δ))/ε is a theorem for ε ≤ 1 only and adds too little noise for larger ε; "
                "use accounting='exact'"
            )
        multiplier = math.sqrt(2.0 * math.log(1.25 / delta)) / epsilon
    return multiplier * math.sqrt(num_compositions) * (1.0 + _SLACK)


@lru_cache(maxsize=4096)
def _exact_multiplier(epsilon: float, delta: float) -> float:
    # dp_accounting.get_sigma_gaussian gives the same root (a test compares the two), but importing
    # it takes longer than everything the planner does.
    target = math.log(delta)

    def excess(log_multiplier: float) -> float:
        # Bounded, since a root finder cannot interpolate from minus infinity.
        return max(_gaussian_log_delta(epsilon, math.exp(log_multiplier)) - target, -1e3)

    low = high = 0.0
    while excess(high) > 0:
        high += 1.0
    while excess(low) <= 0:
        low -= 1.0
    multiplier = math.exp(bracketed_root(excess, low, high, tolerance=1e-12))
    # The root itself may lie on either side of the target.
    while _gaussian_log_delta(epsilon, multiplier) > target:
        multiplier *= 1.0 + _SLACK
    return multiplier


def clip_rows(rows: FloatArray, radius: float | None) -> FloatArray:
    """Scale rows longer than `radius` onto the sphere; shorter rows stay as they are.

    Parameters
    ----------
    rows : ndarray of shape (n, d)
        Private rows.
    radius : float or None
        Norm bound R; None clips nothing.

    Returns
    -------
    ndarray of shape (n, d)
        Rows with norm at most R (to rounding).
    """
    if radius is None:
        return rows
    # Dividing by the largest entry first keeps the squares of huge rows finite.
    largest = np.maximum(np.abs(rows).max(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    scaled = rows / largest
    shrunk = radius / np.maximum(np.linalg.norm(scaled, axis=1, keepdims=True), 1.0)
    return np.where(largest > shrunk, scaled * shrunk, rows)
