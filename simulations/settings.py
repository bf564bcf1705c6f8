"""Hydra's DictConfig in, frozen values out: the only file that knows DictConfig.

The schema makes an unknown key or a value of a wrong type an error that names it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from flwr_modulated import (
    Distance,
    Guarantee,
    InvalidParameterError,
    ModulatedError,
    Modulation,
    Policy,
    Replace,
    ReplaceRecord,
)
from flwr_modulated.datasets import TASKS
from flwr_modulated.privacy import Relation

from .hosting import Engine

CONF_DIR = str(Path(__file__).resolve().parent.parent / "conf")

MODULATED = ("auto", "iterative", "ridge")
# FedAvg whose nodes host many one-row clients; "tuned" takes its settings from a search.
LOCAL_DP = ("local_dp_fedavg", "local_dp_fedavg_tuned")
# Flower's own differential privacy, one node a client.
FLOWER_CENTRAL = (
    "flower_central_server",
    "flower_central_client",
    "flower_adaptive_server",
    "flower_adaptive_client",
)
FLOWER_DP = ("flower_local_dp", *FLOWER_CENTRAL)
NOT_PRIVATE = "ols"
METHODS = (*MODULATED, *LOCAL_DP, *FLOWER_DP, NOT_PRIVATE)
SYNTHETIC = "synthetic"
RELATIONS = ("distance", "replace", "replace_record")


@dataclass
class Selected:
    """The paper's selected hyperparameters of a task (its Table 2)."""

    step: float = MISSING
    penalty: float = MISSING
    clip: float = MISSING
    fedavg_step: float = MISSING


@dataclass
class TaskConfig:
    """Group ``task``."""

    name: str = MISSING
    selected: Selected = field(default_factory=Selected)
    # Of the synthetic task; the others have as many as the data.
    num_clients: int = 0
    num_features: int = 0


@dataclass
class MethodConfig:
    """Group ``method``: what all methods share."""

    name: str = MISSING
    num_rounds: int = 1


@dataclass
class ModulatedConfig(MethodConfig):
    """Methods that release modulated rows."""

    alpha: float = 0.0
    amplitude: float = 0.0
    frequency: float = 0.0
    num_directions: int = 0
    sensitivity: str = "conditional"


@dataclass
class AutoConfig(ModulatedConfig):
    """Nothing to tune. One release per client, or several that share the budget, pooled or not."""

    name: str = "auto"
    pool: bool = False


@dataclass
class RidgeConfig(ModulatedConfig):
    """One release per client, a fixed ridge penalty."""

    name: str = "ridge"
    penalty: float = MISSING


@dataclass
class IterativeConfig(ModulatedConfig):
    """A release and a projected gradient step every round."""

    name: str = "iterative"
    step: float = MISSING
    radius: float = 10.0


@dataclass
class LocalDpFedAvgConfig(MethodConfig):
    """FedAvg with clipped, noised one-row gradients."""

    name: str = "local_dp_fedavg"
    clip: float = MISSING
    step: float = MISSING
    clip_ratio: float = 1.0
    tail: float = 0.0


@dataclass
class LocalDpTunedConfig(MethodConfig):
    """The same, with the settings that do best on the validation split."""

    name: str = "local_dp_fedavg_tuned"
    tuning: str = "epsilon"  # anew for each epsilon, or once for all: "grid"


@dataclass
class FlowerDpConfig(MethodConfig):
    """Flower's own differential privacy, one node a client."""

    clip: float = MISSING
    step: float = MISSING


@dataclass
class OlsConfig(MethodConfig):
    """Least squares on the rows themselves: not private, not federated."""

    name: str = NOT_PRIVATE


@dataclass
class GuaranteeConfig:
    """Group ``guarantee``."""

    epsilon: float = MISSING
    delta: float = MISSING
    relation: str = MISSING
    radius: float = MISSING
    label_scale: float = 1.0
    accounting: str = "exact"


@dataclass
class EngineConfig:
    """Group ``engine``."""

    name: str = MISSING
    num_nodes: Any = 4  # a whole number, auto or clients
    num_cpus: int | None = None
    payload: str = "auto"
    sampling: str = "rows"
    precision: str = "float64"
    address: str | None = None


@dataclass
class Config:
    """The whole configuration; the entries after ``seed`` are the grid of ``compare``."""

    task: TaskConfig = MISSING
    method: MethodConfig = MISSING
    guarantee: GuaranteeConfig = MISSING
    engine: EngineConfig = MISSING
    seed: int = 0
    tasks: list[str] = MISSING
    methods: list[str] = MISSING
    epsilons: list[float] = MISSING
    num_splits: int = 1
    # Of a method: the name of a variant and its overrides, as on the command line of ``run``.
    variants: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    experiment: str = ""
    workers: int | None = None


def register() -> None:
    """Make the schema known to Hydra; call before ``hydra.main`` composes."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    store.store(group="task", name="schema_task", node=TaskConfig)
    for node in (AutoConfig, RidgeConfig, IterativeConfig, LocalDpFedAvgConfig, LocalDpTunedConfig):
        store.store(group="method", name=f"schema_{node.name}", node=node)
    store.store(group="method", name="schema_flower_dp", node=FlowerDpConfig)
    store.store(group="method", name="schema_ols", node=OlsConfig)
    store.store(group="guarantee", name="schema_guarantee", node=GuaranteeConfig)
    store.store(group="engine", name="schema_engine", node=EngineConfig)


@dataclass(frozen=True, slots=True)
class Cell:
    """One federated run: a task's split, a method, a guarantee.

    ``method`` holds the method's resolved settings, by name.
    """

    task: str
    method: tuple[tuple[str, Any], ...]
    epsilon: float
    delta: float
    relation: str
    radius: float
    label_scale: float
    accounting: str
    seed: int
    num_clients: int = 0
    num_features: int = 0
    variant: str = ""
    experiment: str = ""

    def __post_init__(self) -> None:
        check_name("task.name", self.task, (*TASKS, SYNTHETIC))
        if self.task == SYNTHETIC and min(self.num_clients, self.num_features) < 1:
            raise InvalidParameterError(
                "task.num_clients and task.num_features must be at least 1 for the synthetic task, "
                f"got {self.num_clients} and {self.num_features}"
            )
        if self.task != SYNTHETIC and (self.num_clients or self.num_features):
            raise InvalidParameterError(
                f"task.num_clients and task.num_features are for task=synthetic; {self.task} has a client "
                "for each of its rows, and its own features"
            )
        check_name("method.name", self.method_name, METHODS)
        check_name("guarantee.relation", self.relation, RELATIONS)
        if self.seed < 0:
            raise InvalidParameterError(f"seed must be at least 0, got {self.seed}")
        if self.num_rounds < 1:
            raise InvalidParameterError(f"method.num_rounds must be at least 1, got {self.num_rounds}")
        if self.method_name in MODULATED:
            _ = self.policy.mechanism(self.modulation)
        else:
            _ = Guarantee(self.epsilon, self.delta, self.guarantee_relation)
        check_name("method.tuning", self.setting("tuning", "grid"), ("grid", "epsilon"))

    def setting(self, name: str, default: Any = None) -> Any:
        """One of the method's settings."""
        return dict(self.method).get(name, default)

    @property
    def method_name(self) -> str:
        """Name of the method."""
        return str(self.setting("name"))

    @property
    def identity(self) -> str:
        """What makes two cells the same run, on whatever engine: a short digest."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "experiment"}
        if self.task != SYNTHETIC:
            del values["num_features"]
        if self.setting("tuning") is not None:  # what a search found follows from the rest
            values["method"] = [(name, self.setting(name)) for name in ("name", "tuning", "epsilons")]
        return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def num_rounds(self) -> int:
        """Rounds, in each of which every client answers."""
        return int(self.setting("num_rounds", 1))

    @property
    def guarantee_relation(self) -> Relation:
        """The relation of modulated methods."""
        if self.relation == "distance":
            return Distance(self.radius)
        if self.relation == "replace":
            return Replace(self.radius)
        return ReplaceRecord(self.radius, self.label_scale)

    @property
    def modulation(self) -> Modulation:
        """The public map of modulated methods; plain for the others."""
        names = ("alpha", "amplitude", "frequency", "num_directions")
        return Modulation(**{name: self.setting(name, 0) for name in names})

    @property
    def policy(self) -> Policy:
        """What each simulated device has decided for itself."""
        return Policy(
            Guarantee(self.epsilon, self.delta, self.guarantee_relation),
            num_releases=self.num_rounds,
            sensitivity=self.setting("sensitivity", "conditional"),
            accounting=self.accounting,  # type: ignore[arg-type]
        )


def check_name(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise InvalidParameterError where `value` is not one of `choices`."""
    if value not in choices:
        raise InvalidParameterError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def read_engine(config: DictConfig) -> Engine:
    """Group ``engine`` as a frozen value."""
    return Engine(**_plain(config.engine))


def read_cell(config: DictConfig) -> Cell:
    """The one cell that ``run`` runs: task, method, guarantee, seed.

    Raises
    ------
    InvalidParameterError
        If a value is out of range, or a key was added that nothing reads.
    """
    _refuse_added_keys(config)
    guarantee = _plain(config.guarantee)
    method = _plain(config.method)
    if "tuning" in method:
        method["epsilons"] = (guarantee["epsilon"],)
    return Cell(
        task=config.task.name,
        num_clients=config.task.num_clients,
        num_features=config.task.num_features,
        method=tuple(sorted(method.items())),
        seed=config.seed,
        experiment=config.experiment,
        **guarantee,
    )


@contextmanager
def exit_on_error(interrupted: str = "interrupted") -> Iterator[None]:
    """Turn this package's errors, which say what to do, into a message without traceback, and Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(interrupted) from None
    except ModulatedError as error:
        cell = "".join(f" [{note}]" for note in getattr(error, "__notes__", ()))
        raise SystemExit(f"{type(error).__name__}: {error}{cell}") from None


def _refuse_added_keys(node: DictConfig, path: str = "") -> None:
    """Hydra's ``+key=value`` adds to a structured config: a misspelt key would be lost."""
    kind = OmegaConf.get_type(node)
    if not is_dataclass(kind):
        return
    known = {entry.name for entry in fields(kind)}
    for key in node:
        name = f"{path}{key}"
        if key not in known:
            raise InvalidParameterError(f"{name} is not a setting; known here: {', '.join(sorted(known))}")
        if not OmegaConf.is_missing(node, key) and isinstance(node[key], DictConfig):
            _refuse_added_keys(node[key], f"{name}.")


def _plain(node: Any) -> dict[str, Any]:
    value = OmegaConf.to_object(node)
    return dict(value) if isinstance(value, dict) else asdict(value)
