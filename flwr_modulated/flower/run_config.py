"""The run configuration of the reference app, checked; `docs/app.md` says what each key means."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

from .._validate import check_choice, check_int, check_real
from ..errors import InvalidParameterError
from ..estimators import Auto, Estimator, GradientDescent, Ridge
from ..modulation import Modulation
from ..policy import Policy
from ..privacy import Distance, Guarantee, Relation, Replace, ReplaceRecord
from ..run_status import DEFAULT_OUTPUT

__all__ = ["RunConfig", "split_names"]

EstimatorName: TypeAlias = Literal["auto", "ridge", "iterative"]
RelationName: TypeAlias = Literal["distance", "replace", "replace_record"]

# Setting these in the other kind of run would do nothing, and somebody would believe that it did.
_SIMULATED_ONLY = ("task", "epsilon", "delta", "relation", "radius", "record_label_scale", "seed")
_DEVICES_ONLY = ("study", "policy")

# A study's name is part of a file name, and devices keep their release under it.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What ``flwr run -c`` may set; keys have dashes where these names have underscores.

    Attributes
    ----------
    simulated : bool
        Whether nodes simulate devices. If not, each node is a device with data, policy
        and ledger of its own.
    task : str
        Simulated only: one of the five tasks, ``"synthetic"``, or a CSV or Parquet file.
    epsilon, delta, relation, radius, record_label_scale : float, float, str, float, float
        Simulated only: the guarantee of the simulated devices.
    seed : int
        Simulated only: of the split into training and test rows. Noise has no seed.
    study : str
        Name of the study; devices keep their release under it.
    policy : str
        The study's policy file, the same that devices are given. It sets no noise: a
        device's own file does.
    features, label : str
        Names of the columns, separated by commas.
    estimator, penalty, step : str, float, float
        ``"auto"``, ``"ridge"`` with its penalty, or ``"iterative"`` with its step.
    intercept : bool
        Whether the report has an intercept.
    alpha, amplitude, frequency, num_directions : float, float, float, int
        The public map that devices are asked to use.
    num_server_rounds : int
        Rounds; in one-shot mode later ones ask those not heard from.
    fraction_train, min_available_nodes, min_replies : float, int, int
        Fraction of nodes asked in a round, how many to wait for, how many must answer.
    wait_timeout, round_timeout, late_timeout : float
        Seconds to wait for `min_available_nodes`, for the replies of a round, and in later rounds
        for nodes not heard from.
    output : str
        Directory of the results, on the machine of the SuperLink.

    Raises
    ------
    InvalidParameterError
        If a value is of the wrong type or outside its range, or two do not fit together.
    """

    simulated: bool = True
    task: str = "fair"
    epsilon: float = 8.0
    delta: float = 1e-5
    relation: str = "distance"
    radius: float = 1.0
    record_label_scale: float = 1.0
    seed: int = 0
    study: str = ""
    policy: str = ""
    features: str = ""
    label: str = ""
    estimator: str = "auto"
    penalty: float = 0.5
    step: float = 0.8
    intercept: bool = True
    alpha: float = 0.0
    amplitude: float = 0.0
    frequency: float = 0.0
    num_directions: int = 0
    num_server_rounds: int = 1
    fraction_train: float = 1.0
    min_available_nodes: int = 2
    min_replies: int = 2
    wait_timeout: float = 600.0
    round_timeout: float = 600.0
    late_timeout: float = 0.0
    output: str = DEFAULT_OUTPUT

    def __post_init__(self) -> None:
        for item in fields(self):
            value, kind = getattr(self, item.name), type(item.default)
            if kind is float and isinstance(value, int) and not isinstance(value, bool):
                object.__setattr__(self, item.name, float(value))  # -c epsilon=2 arrives as a whole number
            elif type(value) is not kind:
                raise InvalidParameterError(
                    f"{_key(item.name)} must be of type {kind.__name__} in the run config, "
                    f"got {type(value).__name__}"
                )
        check_choice("estimator", self.estimator, EstimatorName)
        check_choice("relation", self.relation, RelationName)
        check_int("seed", self.seed, low=0)
        check_int("num-server-rounds", self.num_server_rounds, low=1)
        check_real("round-timeout", self.round_timeout, low=0, low_open=True)
        if self.study and not _NAME.fullmatch(self.study):
            raise InvalidParameterError(
                "study must be 1 to 64 letters, digits, dots, dashes or underscores: it names a file"
            )
        if not self.output:
            raise InvalidParameterError("output must name a directory")
        self._check_kind()

    def _check_kind(self) -> None:
        defaults = {item.name: item.default for item in fields(self)}
        foreign = [
            _key(name)
            for name in (_DEVICES_ONLY if self.simulated else _SIMULATED_ONLY)
            if getattr(self, name) != defaults[name]
        ]
        if foreign and self.simulated:
            raise InvalidParameterError(
                f"{', '.join(foreign)} must be left out of a simulated run; for devices with data of their "
                "own set simulated=false"
            )
        if foreign:
            raise InvalidParameterError(
                f"{', '.join(foreign)} must be left out with simulated=false: each device's guarantee "
                "and data are its own"
            )
        missing = [
            name for name in ("study", "policy", "features", "label") if not getattr(self, name).strip()
        ]
        if missing and not self.simulated:
            raise InvalidParameterError(
                f"with simulated=false, the run config must also set {', '.join(missing)}"
            )

    @classmethod
    def read(cls, run_config: Mapping[str, Any]) -> RunConfig:
        """Read what Flower hands to an app.

        Raises
        ------
        InvalidParameterError
            If a key is unknown or a value cannot be used.
        """
        names = {_key(item.name): item.name for item in fields(cls)}
        unknown = sorted(set(run_config) - set(names))
        if unknown:
            raise InvalidParameterError(
                f"the run config has unknown key(s) {', '.join(unknown)}; known: {', '.join(names)}"
            )
        return cls(**{names[key]: value for key, value in run_config.items()})

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features, in the order of the study; empty: all columns."""
        return split_names(self.features)

    @property
    def iterative(self) -> bool:
        """Whether every round asks for a fresh release."""
        return self.estimator == "iterative"

    @property
    def modulation(self) -> Modulation:
        """The public map."""
        return Modulation(self.alpha, self.amplitude, self.frequency, self.num_directions)

    @property
    def output_path(self) -> Path:
        """Absolute directory of the results."""
        return Path(self.output).expanduser().absolute()

    def make_estimator(self) -> Estimator:
        """The estimator."""
        if self.iterative:
            return GradientDescent(self.step)
        return Ridge(self.penalty) if self.estimator == "ridge" else Auto()

    def read_policy(self) -> Policy:
        """The policy of simulated devices, or the study's, from its file.

        Raises
        ------
        InvalidParameterError
            If the file cannot be read.
        """
        if self.simulated:
            num_releases = self.num_server_rounds if self.iterative else 1
            guarantee = Guarantee(self.epsilon, self.delta, self._relation)
            return Policy(guarantee, num_releases=num_releases)
        path = Path(self.policy).expanduser().absolute()
        try:
            return Policy.from_toml(path)
        except OSError as error:
            raise InvalidParameterError(
                f"policy must be a readable file on the machine of the SuperLink, got {path} "
                f"({type(error).__name__}); give an absolute path"
            ) from None

    @property
    def _relation(self) -> Relation:
        if self.relation == "replace_record":
            return ReplaceRecord(self.radius, self.record_label_scale)
        return Replace(self.radius) if self.relation == "replace" else Distance(self.radius)


def split_names(text: str) -> tuple[str, ...]:
    """Names from a list separated by commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _key(name: str) -> str:
    return name.replace("_", "-")
