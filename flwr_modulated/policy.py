"""What a device has decided about its own privacy, before any server asks."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from os import PathLike

import numpy as np
from numpy.typing import ArrayLike

from ._typing import Accounting, FloatArray, OnExhausted, Sensitivity
from ._validate import check_choice, check_int, check_matrix, check_real, check_vector
from .errors import InvalidDataError, InvalidParameterError, RequestRefusedError
from .mechanism import Mechanism
from .modulation import Modulation, check_directions
from .noise import NoiseSource
from .privacy import Guarantee, calibrate_noise_multiplier

__all__ = ["Columns", "Limits", "Policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that a server may ask for.

    Within these limits nothing a server asks changes the guarantee: the noise follows
    the request. They keep a careless or hostile server from wasting the budget on
    releases that carry no information.

    Parameters
    ----------
    max_alpha : float, default 0.9
        Largest contraction α, below 1.
    max_amplitude, max_frequency : float, default 10.0
        Largest cosine amplitude λ and frequency ω.
    max_directions : int, default 32
        Largest number of directions m.

    Raises
    ------
    InvalidParameterError
        If a limit is outside its range.
    """

    max_alpha: float = 0.9
    max_amplitude: float = 10.0
    max_frequency: float = 10.0
    max_directions: int = 32

    def __post_init__(self) -> None:
        check_real("max_alpha", self.max_alpha, low=0, high=1, high_open=True)
        check_real("max_amplitude", self.max_amplitude, low=0)
        check_real("max_frequency", self.max_frequency, low=0)
        check_int("max_directions", self.max_directions, low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Public constants that turn raw columns into standardised ones.

    Parameters
    ----------
    centre, scale : sequence of float
        One number a feature; a feature becomes ``(x - centre) / scale``. Constants of the
        study, chosen without looking at the device's data.
    label_centre : float, default 0.0
        In label units.
    label_scale : float, default 1.0
        > 0, in label units.

    Raises
    ------
    InvalidParameterError
        If the lengths differ, or a number is not finite, or a scale not positive.
    """

    centre: tuple[float, ...]
    scale: tuple[float, ...]
    label_centre: float = 0.0
    label_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("centre", "scale"):
            value = getattr(self, name)
            if isinstance(value, str) or not hasattr(value, "__iter__"):
                raise InvalidParameterError(f"{name} must be a list of numbers, one a feature")
            object.__setattr__(self, name, tuple(value))
        for position, number in enumerate(self.centre):
            check_real(f"centre[{position}]", number)
        for position, number in enumerate(self.scale):
            check_real(f"scale[{position}]", number, low=0, low_open=True)
        if not self.centre or len(self.centre) != len(self.scale):
            raise InvalidParameterError(
                "centre and scale must have one number a feature each, "
                f"got {len(self.centre)} and {len(self.scale)}"
            )
        check_real("label_centre", self.label_centre)
        check_real("label_scale", self.label_scale, low=0, low_open=True)

    def standardise(self, features: ArrayLike, labels: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """Standardise features (n, d) and labels (n,).

        Raises
        ------
        InvalidDataError
            If the shapes do not fit or a value is not finite; never shows a value.
        """
        rows = check_matrix("features", features, num_columns=len(self.centre))
        targets = check_vector("labels", labels, length=rows.shape[0])
        with np.errstate(over="ignore"):  # the checks say it better
            rows = (rows - np.array(self.centre)) / np.array(self.scale)
            targets = (targets - self.label_centre) / self.label_scale
        for name, values in (("features", rows), ("labels", targets)):
            if not np.isfinite(values).all():
                raise InvalidDataError(
                    f"standardised {name} must be finite; check the centre and scale of the columns"
                )
        return rows, targets


@dataclass(frozen=True, slots=True)
class Policy:
    """A device's own budget, and what a server may ask of it.

    Parameters
    ----------
    guarantee : Guarantee
        Holds for all releases of the device together.
    num_releases : int, default 1
        The most releases that the device ever makes of a row; the noise of each is
        calibrated so that all of them together keep the guarantee.
    sensitivity : {"conditional", "marginal"}, default "conditional"
        See :class:`~flwr_modulated.mechanism.Mechanism`.
    accounting : {"exact", "zcdp", "classical"}, default "exact"
        See :class:`~flwr_modulated.mechanism.Mechanism`.
    release_labels : bool, default True
        Whether labels may leave the device as they are. They do under ``Distance`` and
        ``Replace``, so False needs ``ReplaceRecord``.
    on_exhausted : {"refuse", "repeat"}, default "refuse"
        What a ledger does with a new request once the budget is spent: refuse it, or
        answer with the last release that was made with the same map, if there is one.
    columns : Columns, optional
        Public centre and scale of each column; None means the data come standardised.
    limits : Limits, optional
        The most that a server may ask for.

    Raises
    ------
    InvalidParameterError
        If a parameter is outside its range.

    Notes
    -----
    **Any sequence of requests is safe.** A server chooses α, λ, ω, m and the directions
    of each request as it likes, also after it has seen earlier answers. Release t
    adds noise σ_t = √T·multiplier·Δ_t, proportional to that request's own sensitivity
    Δ_t, so it is μ-GDP with μ² = (Δ_t/σ_t)² = `cost`, the same number whatever was asked.
    Adaptively chosen μ_t-GDP releases compose to √(Σμ_t²)-GDP (Dong, Roth and Su 2019,
    arXiv:1905.02383, Theorem 3.2 and Corollary 3.3), and T of them reach `budget`, which
    is the guarantee. Should the owner change the policy between releases, a ledger
    stops before Σμ_t² passes the present budget; that is a valid stopping rule even if
    the changes depend on earlier releases (Smith and Thakurta 2022, arXiv:2210.17520).

    Examples
    --------
    >>> from flwr_modulated import Distance, Guarantee, Policy
    >>> policy = Policy(Guarantee(2.0, 1e-5, Distance(1.0)), num_releases=10)
    >>> round(policy.budget / policy.cost, 9)
    10.0
    """

    guarantee: Guarantee
    num_releases: int = 1
    sensitivity: Sensitivity = "conditional"
    accounting: Accounting = "exact"
    release_labels: bool = field(default=True, kw_only=True)
    on_exhausted: OnExhausted = field(default="refuse", kw_only=True)
    columns: Columns | None = field(default=None, kw_only=True)
    limits: Limits = field(default_factory=Limits, kw_only=True)

    def __post_init__(self) -> None:
        _mechanism.__wrapped__(self, Modulation())  # not through the cache: settings may be of any type yet
        check_choice("on_exhausted", self.on_exhausted, OnExhausted)
        for name, kind in (("release_labels", bool), ("columns", Columns | None), ("limits", Limits)):
            if not isinstance(getattr(self, name), kind):
                raise InvalidParameterError(
                    f"{name} must not be of type {type(getattr(self, name)).__name__}; see Policy"
                )
        if not self.release_labels and not self.guarantee.relation.hides_labels:
            raise InvalidParameterError(
                f"release_labels must be True with the relation {self.guarantee.relation}: labels leave "
                "the device as they are; to keep them private use replace_record"
            )

    def mechanism(self, modulation: Modulation) -> Mechanism:
        """The mechanism for a modulation that a server asks for, with this device's own noise."""
        return _mechanism(self, modulation)

    @property
    def budget(self) -> float:
        """Squared parameter μ² of Gaussian differential privacy that the guarantee allows in all."""
        return 1.0 / self._multiplier**2

    @property
    def cost(self) -> float:
        """Squared parameter μ² of each release, budget / num_releases, whatever is asked."""
        return self.budget / self.num_releases

    @property
    def _multiplier(self) -> float:
        return calibrate_noise_multiplier(
            float(self.guarantee.epsilon), float(self.guarantee.delta), accounting=self.accounting
        )

    def check(
        self, modulation: Modulation, directions: ArrayLike, *, num_rows: int, num_columns: int
    ) -> FloatArray:
        """Decide on a request, before anything is spent or computed from data.

        Parameters
        ----------
        modulation : Modulation
            What the server asks for.
        directions : array_like of shape (d, m)
            What the server sent.
        num_rows : int
            Rows that this device would release.
        num_columns : int
            Width d of what it would release (features, or features and label).

        Returns
        -------
        ndarray of shape (d, m)
            The directions, checked.

        Raises
        ------
        RequestRefusedError
            If the request is outside the limits, the directions are not orthonormal
            within 1e-9, or more rows than the guarantee covers would leave. The
            reason states what was asked and allowed, and holds no data.
        """
        if not isinstance(modulation, Modulation):
            raise RequestRefusedError(f"modulation must be a Modulation, got {type(modulation).__name__}")
        for name, asked, allowed in (
            ("alpha", modulation.alpha, self.limits.max_alpha),
            ("amplitude", modulation.amplitude, self.limits.max_amplitude),
            ("frequency", modulation.frequency, self.limits.max_frequency),
            ("num_directions", modulation.num_directions, self.limits.max_directions),
        ):
            if not asked <= allowed:
                raise RequestRefusedError(f"{name} must be at most {allowed:g} on this device, got {asked:g}")
        guarantee = self.guarantee
        if guarantee.unit == "client" and num_rows > guarantee.rows_per_client:
            raise RequestRefusedError(
                f"this device's guarantee covers at most {guarantee.rows_per_client} row(s); "
                "its owner must raise rows_per_client or hold fewer"
            )
        try:
            return check_directions(
                directions, num_features=num_columns, num_directions=modulation.num_directions
            )
        except InvalidParameterError as error:
            reason = str(error)
        raise RequestRefusedError(reason)

    def describe(self, noise_source: NoiseSource | None = None) -> str:
        """What this policy hides and what it does not, in words for a non-expert."""
        text = self.mechanism(Modulation()).describe(noise_source)
        if self.sensitivity == "marginal":
            text += " Where a server asks for modulation, it relies on the phases staying secret."
        return text

    @classmethod
    def from_toml(cls, path: str | PathLike[str]) -> Policy:
        """Read a policy from a TOML file.

        Parameters
        ----------
        path : path-like
            The file.

        Returns
        -------
        Policy

        Raises
        ------
        OSError
            If the file cannot be read.
        InvalidParameterError
            If it is not TOML, a key is unknown or missing, or a value out of range.

        Notes
        -----
        A complete file; every line with a comment may be left out::

            num_releases = 1               # the default, as for all below
            accounting = "exact"           # or "zcdp", "classical"
            sensitivity = "conditional"    # or "marginal"
            on_exhausted = "refuse"        # or "repeat"
            release_labels = true          # must be said, except under "replace_record"

            [guarantee]
            epsilon = 2.0
            delta = 1e-5
            relation = "replace"           # or "distance", "replace_record"; must be said
            radius = 3.0
            # label_scale = 1.0            # "replace_record" only
            unit = "row"                   # or "client"
            rows_per_client = 1            # unit "client" only

            [columns]                      # without it, data must come standardised
            centre = [40.0, 3.5]
            scale = [12.0, 1.5]
            label_centre = 0.0             # default
            label_scale = 1.0              # default

            [limits]                       # what a server may ask for
            max_alpha = 0.9
            max_amplitude = 10.0
            max_frequency = 10.0
            max_directions = 32
        """
        from ._policy_file import read_policy  # it needs this module

        return read_policy(path)


@lru_cache(maxsize=256)
def _mechanism(policy: Policy, modulation: Modulation) -> Mechanism:
    # Kept: in a simulation thousands of clients share a policy.
    return Mechanism(
        modulation,
        policy.guarantee,
        num_releases=policy.num_releases,
        sensitivity=policy.sensitivity,
        accounting=policy.accounting,
    )
