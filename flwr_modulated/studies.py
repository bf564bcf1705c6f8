"""What a study owner asks and what a plan answers: plain values, nothing is computed here."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from scipy.special import ndtri

from ._typing import Accounting, Sensitivity
from ._validate import check_choice, check_int, check_real
from .assumptions import Population
from .errors import InvalidParameterError
from .mechanism import Mechanism
from .modulation import Modulation
from .privacy import Distance, Guarantee, Relation, Replace, ReplaceRecord

__all__ = ["Exposure", "Forecast", "Plan", "Study", "Target", "TargetKind", "choose_target", "parse_relation"]

TargetKind: TypeAlias = Literal["standard_error", "r2_loss", "power"]

# Two-sided tests at 5 %.
CRITICAL_VALUE = float(ndtri(0.975))


@dataclass(frozen=True, slots=True)
class Target:
    """What a study wants to reach.

    Parameters
    ----------
    kind : {"standard_error", "r2_loss", "power"}
        Standard error of a typical coefficient; R² lost against the best linear rule; or the
        chance that a two-sided 5 % test finds a coefficient of size `effect`.
    value : float
        In coefficient units; in (0, 1); or in (0.05, 1).
    effect : float, optional
        Size of the coefficient to be found, in coefficient units; with ``"power"`` only.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.
    """

    kind: TargetKind
    value: float
    effect: float | None = None

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, TargetKind)
        if self.kind == "standard_error":
            check_real("target_se", self.value, low=0, low_open=True)
        else:
            low = 0.0 if self.kind == "r2_loss" else 0.05
            check_real(f"target {self.kind}", self.value, low=low, high=1, low_open=True, high_open=True)
        if (self.kind == "power") != (self.effect is not None):
            raise InvalidParameterError(
                "effect must be given with power, and only then: it is the coefficient to be found"
            )
        if self.effect is not None:
            check_real("effect", self.effect, low=0, low_open=True)

    @property
    def standard_error(self) -> float | None:
        """The standard error that the target comes down to; None for an R² loss."""
        if self.kind == "standard_error":
            return self.value
        if self.effect is not None:
            return self.effect / (CRITICAL_VALUE + float(ndtri(self.value)))
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A study as its owner describes it. Give two of `epsilon`, `num_clients` and `target`.

    Parameters
    ----------
    num_features : int
        d ≥ 1, standardised.
    relation : Distance, Replace or ReplaceRecord
        Which two inputs must be hard to tell apart.
    delta : float
        δ in (0, 1).
    epsilon : float, optional
        ε > 0 for all releases of a device together.
    num_clients : int, optional
        Devices that are asked, one row each.
    target : Target, optional
        What must be reached.
    r2 : float, default 0.5
        Share of the label's variance that the features explain, in (0, 1).
    correlation : float, default 0.0
        Correlation of every pair of features, in [0, 1).
    dropout : float, default 0.0
        Share of asked devices that never answer, in [0, 1).
    modulation : Modulation, default plain
        The client map.
    num_releases : int, default 1
        Releases of every device; all together keep ε.
    sensitivity, accounting
        As in :class:`~flwr_modulated.mechanism.Mechanism`.

    Raises
    ------
    InvalidParameterError
        If a value is out of range, or not exactly two of the three are given.
    """

    num_features: int
    relation: Relation
    delta: float
    epsilon: float | None = None
    num_clients: int | None = None
    target: Target | None = None
    r2: float = 0.5
    correlation: float = 0.0
    dropout: float = 0.0
    modulation: Modulation = field(default_factory=Modulation)
    num_releases: int = 1
    sensitivity: Sensitivity = "conditional"
    accounting: Accounting = "exact"

    def __post_init__(self) -> None:
        check_real("dropout", self.dropout, low=0, high=1, high_open=True)
        given = [self.epsilon is not None, self.num_clients is not None, self.target is not None]
        if sum(given) != 2:
            raise InvalidParameterError(
                "exactly two of epsilon, num_clients and a target (standard error, R² loss or power) must be "
                "given: the plan answers for the third"
            )
        Population.standardised(self.num_features, r2=self.r2, correlation=self.correlation)
        if self.num_clients is not None:
            check_int("num_clients", self.num_clients, low=1)
            self._check_replies()
        columns = self.num_features + self.relation.hides_labels
        if self.modulation.num_directions > columns:
            raise InvalidParameterError(
                f"num_directions must be at most the {columns} released columns, "
                f"got {self.modulation.num_directions}"
            )
        self.mechanism(1.0 if self.epsilon is None else self.epsilon)

    def _check_replies(self) -> None:
        least = math.ceil((2 * self.num_features + 4) / (1 - self.dropout))
        check_int(
            "num_clients",
            self.num_clients,
            low=least,
            hint="with fewer devices there is nothing to forecast",
        )

    @property
    def population(self) -> Population:
        """The rows as assumed, before clipping."""
        return Population.standardised(self.num_features, r2=self.r2, correlation=self.correlation)

    @property
    def label_scale(self) -> float | None:
        """s_y where the label travels in the record, else None."""
        return self.relation.label_scale if isinstance(self.relation, ReplaceRecord) else None

    def mechanism(self, epsilon: float, *, num_releases: int | None = None) -> Mechanism:
        """What a device would run at ε = `epsilon`."""
        return Mechanism(
            self.modulation,
            Guarantee(epsilon, self.delta, self.relation),
            num_releases=self.num_releases if num_releases is None else num_releases,
            sensitivity=self.sensitivity,
            accounting=self.accounting,
        )


@dataclass(frozen=True, slots=True)
class Forecast:
    """How well one method is expected to do.

    Attributes
    ----------
    method : str
        What is done, in words.
    hides : str
        The relation that its ε is about.
    r2 : float
        Expected R² on new rows; may be negative.
    r2_loss : float
        How much that is below the best linear rule of the assumed rows.
    """

    method: str
    hides: str
    r2: float
    r2_loss: float


@dataclass(frozen=True, slots=True)
class Exposure:
    """What the best attackers make of everything one device releases.

    Attributes
    ----------
    unbiased_error : float
        Root mean square error per feature of the best unbiased guess of the row, in standard
        deviations of a feature.
    prior_error : float
        The same for a guess that also uses the public label and what is known of the population.
    blind_error : float
        The same without any release: what the label and the population tell anyway.
    best_guess : float
        Chance of naming the right one of two neighbours that are equally likely; 0.5 is a coin.
    """

    unbiased_error: float
    prior_error: float
    blind_error: float
    best_guess: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer.

    Attributes
    ----------
    study : Study
        As asked.
    guarantee : Guarantee
        What devices are promised; ε is solved for if it was left open.
    num_clients, num_replies : int
        Devices to ask, and rows expected to arrive; solved for if left open.
    noise_std : float
        σ of each release, in standard deviations of a feature.
    standard_error : float or None
        Of a typical coefficient of the unregularised estimator, in standard deviations of the
        label per standard deviation of the feature; None where noise leaves nothing to estimate
        (a noise ratio above 1).
    noise_ratio : float
        τ over the smallest eigenvalue of Σ; standard errors from data hold below about 0.3.
    power : float or None
        Chance of finding the target's effect; None where no effect was given, or no standard
        error exists.
    detection : float
        Chance that the score test at 5 % finds that the features matter at all.
    forecasts : tuple of Forecast
        The recommended method first.
    exposure : Exposure
        What attackers learn.
    advice : tuple of str
        Sentences.
    """

    study: Study
    guarantee: Guarantee
    num_clients: int
    num_replies: int
    noise_std: float
    standard_error: float | None
    noise_ratio: float
    power: float | None
    detection: float
    forecasts: tuple[Forecast, ...]
    exposure: Exposure
    advice: tuple[str, ...]


def choose_target(
    *,
    standard_error: float | None = None,
    r2_loss: float | None = None,
    power: float | None = None,
    effect: float | None = None,
) -> Target | None:
    """The target among its alternatives; None where none is given.

    Parameters
    ----------
    standard_error, r2_loss, power, effect : float, optional
        As in :class:`Target`; at most one of the first three.

    Returns
    -------
    Target or None

    Raises
    ------
    InvalidParameterError
        If more than one is given, or an effect without power.
    """
    values: dict[TargetKind, float | None] = {
        "standard_error": standard_error,
        "r2_loss": r2_loss,
        "power": power,
    }
    wanted = [Target(kind, value, effect) for kind, value in values.items() if value is not None]
    if len(wanted) > 1 or (not wanted and effect is not None):
        raise InvalidParameterError(
            "at most one target must be given: a standard error, an R² loss, or power together with effect"
        )
    return wanted[0] if wanted else None


def parse_relation(text: str) -> Relation:
    """A relation from ``distance:1``, ``replace:3``, ``replace_record:3,2`` or its printed form.

    Parameters
    ----------
    text : str
        Name and radius; for ``replace_record`` optionally the label scale. The form that
        relations print, such as ``replace_record(3, label_scale=2)``, is read too.

    Returns
    -------
    Distance, Replace or ReplaceRecord

    Raises
    ------
    InvalidParameterError
        If the text is of another form or a number is out of range.

    Examples
    --------
    >>> parse_relation("replace_record:3,2")
    ReplaceRecord(radius=3.0, label_scale=2.0)
    """
    kinds: dict[str, type[Distance] | type[Replace] | type[ReplaceRecord]] = {
        "distance": Distance,
        "replace": Replace,
        "replace_record": ReplaceRecord,
    }
    form = re.fullmatch(
        r"(\w+)(?::|\()([^,()]+)(?:,\s*(?:label_scale=)?([^,()]+))?\)?", text.replace(" ", "")
    )
    if form is None or form[1] not in kinds or (form[3] is not None and form[1] != "replace_record"):
        raise InvalidParameterError(
            "relation must be distance:RADIUS, replace:RADIUS or replace_record:RADIUS[,LABEL_SCALE], "
            f"got {text!r}"
        )
    try:
        numbers = [float(part) for part in form.groups()[1:] if part is not None]
    except ValueError:
        raise InvalidParameterError(f"relation must have numbers after its name, got {text!r}") from None
    return kinds[form[1]](*numbers)
