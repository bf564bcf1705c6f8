"""Hydra's DictConfig in, frozen values out: the only file that knows DictConfig.

The schema makes an unknown key or a value of a wrong type an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose
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

CONF_DIR = str(Path(__file__).resolve().parent.parent / "conf")

METHODS = ("auto", "iterative", "ridge", "local_dp_fedavg")
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
    """One release per client, nothing to tune."""

    name: str = "auto"


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
    num_nodes: int = 4
    num_cpus: int | None = None


@dataclass
class Config:
    """The whole configuration; the last four entries are the grid of ``compare``."""

    task: TaskConfig = MISSING
    method: MethodConfig = MISSING
    guarantee: GuaranteeConfig = MISSING
    engine: EngineConfig = MISSING
    seed: int = 0
    tasks: list[str] = MISSING
    methods: list[str] = MISSING
    epsilons: list[float] = MISSING
    num_splits: int = 1


def register() -> None:
    """Make the schema known to Hydra; call before ``hydra.main`` composes."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    store.store(group="task", name="schema_task", node=TaskConfig)
    for node in (AutoConfig, RidgeConfig, IterativeConfig, LocalDpFedAvgConfig):
        store.store(group="method", name=f"schema_{node.name}", node=node)
    store.store(group="guarantee", name="schema_guarantee", node=GuaranteeConfig)
    store.store(group="engine", name="schema_engine", node=EngineConfig)


@dataclass(frozen=True, slots=True)
class Engine:
    """Where clients run, and how many nodes host them."""

    name: str
    num_nodes: int
    num_cpus: int | None = None


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

    def __post_init__(self) -> None:
        _check_name("task.name", self.task, TASKS)
        _check_name("method.name", self.method_name, METHODS)
        _check_name("guarantee.relation", self.relation, RELATIONS)
        if self.seed < 0:
            raise InvalidParameterError(f"seed must be at least 0, got {self.seed}")
        if self.num_rounds < 1:
            raise InvalidParameterError(f"method.num_rounds must be at least 1, got {self.num_rounds}")
        if self.method_name == "local_dp_fedavg":
            _ = Guarantee(self.epsilon, self.delta, self.guarantee_relation)
        else:
            _ = self.policy

    def setting(self, name: str, default: Any = None) -> Any:
        """One of the method's settings."""
        return dict(self.method).get(name, default)

    @property
    def method_name(self) -> str:
        """Name of the method."""
        return str(self.setting("name"))

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


def _check_name(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise InvalidParameterError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def read_engine(config: DictConfig) -> Engine:
    """Group ``engine`` as a frozen value."""
    engine = Engine(**_plain(config.engine))
    _check_name("engine.name", engine.name, ("inprocess", "ray"))
    if engine.num_nodes < 1 or (engine.num_cpus is not None and engine.num_cpus < 1):
        raise InvalidParameterError("engine.num_nodes and engine.num_cpus must be at least 1")
    return engine


def read_cell(config: DictConfig) -> Cell:
    """The one cell that ``run`` runs: task, method, guarantee, seed."""
    guarantee = _plain(config.guarantee)
    return Cell(
        task=config.task.name,
        method=tuple(sorted(_plain(config.method).items())),
        seed=config.seed,
        **guarantee,
    )


def read_grid(config: DictConfig, overrides: Sequence[str]) -> list[Cell]:
    """All cells that ``compare`` runs: tasks × methods × epsilons × splits.

    Each task and method is composed by Hydra as ``run`` would compose it, so the
    task's selected values reach the method by interpolation.

    Parameters
    ----------
    config : DictConfig
        The composed configuration.
    overrides : sequence of str
        The command line's overrides, for the composition of each cell.

    Raises
    ------
    InvalidParameterError
        If a name is unknown, the grid is empty, or an override would be lost.
    """
    kept = []
    for override in overrides:
        key = override.lstrip("+~").split("=", 1)[0]
        if key == "method" or key.startswith("method."):
            raise InvalidParameterError(
                f"{override}: compare runs the methods listed in methods=[...] with their own settings; "
                "change one method's settings with `python -m simulations.run -m method=NAME method.KEY=...`"
            )
        if key == "guarantee.epsilon":
            raise InvalidParameterError(f"{override}: compare takes epsilons=[...] instead")
        if key != "task":
            kept.append(override)
    tasks, methods = list(config.tasks), list(config.methods)
    epsilons = [float(value) for value in config.epsilons]
    if not tasks or not methods or not epsilons or config.num_splits < 1:
        raise InvalidParameterError("tasks, methods, epsilons must not be empty and num_splits at least 1")
    for name in tasks:
        _check_name("tasks", name, TASKS)
    for name in methods:
        _check_name("methods", name, METHODS)
    prototypes = {
        (task, method): compose("config", [*kept, f"task={task}", f"method={method}"])
        for task in tasks
        for method in methods
    }
    cells = []
    for task in tasks:
        for split in range(config.num_splits):
            for epsilon in epsilons:
                for method in methods:
                    prototype = read_cell(prototypes[task, method])
                    values = {name: getattr(prototype, name) for name in Cell.__dataclass_fields__}
                    values.update(epsilon=epsilon, seed=prototype.seed + split)
                    cells.append(Cell(**values))
    return cells


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Turn this package's errors, which say what to do, into a message without traceback."""
    try:
        yield
    except ModulatedError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None


def _plain(node: Any) -> dict[str, Any]:
    value = OmegaConf.to_object(node)
    return dict(value) if isinstance(value, dict) else asdict(value)
