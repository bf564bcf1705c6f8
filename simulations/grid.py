"""The grid of an experiment: tasks × methods × variants × epsilons × splits, as cells."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from flwr_modulated import InvalidParameterError
from flwr_modulated.datasets import TASKS

from .settings import METHODS, SYNTHETIC, Cell, check_name, read_cell


def read_grid(config: DictConfig, overrides: Sequence[str]) -> list[Cell]:
    """All cells that ``compare`` runs.

    Each task, method and variant is what ``run`` would compose, so the task's selected
    values reach the method by interpolation.

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
    kept = _kept(overrides)
    tasks, methods = list(config.tasks), list(config.methods)
    epsilons = [float(value) for value in config.epsilons]
    if not tasks or not methods or not epsilons or config.num_splits < 1:
        raise InvalidParameterError("tasks, methods, epsilons must not be empty and num_splits at least 1")
    for name in tasks:
        check_name("tasks", name, (*TASKS, SYNTHETIC))
    for name in methods:
        check_name("methods", name, METHODS)
    variants = OmegaConf.to_object(config.variants)
    assert isinstance(variants, dict)
    for name in variants:
        check_name("variants", name, methods)
    # Not the guarantee's own epsilon, which classical accounting may refuse.
    composer = _Composer((*kept, f"guarantee.epsilon={epsilons[0]}"), tasks)
    prototypes = {
        task: [
            _prototype(composer.config(task, method, changes), variant, epsilons)
            for method in methods
            for variant, changes in (variants.get(method) or {"": []}).items()
        ]
        for task in tasks
    }
    return [
        replace(prototype, epsilon=epsilon, seed=prototype.seed + split)
        for task in tasks
        for split in range(config.num_splits)
        for epsilon in epsilons
        for prototype in prototypes[task]
    ]


class _Composer:
    """Composes with Hydra once for each choice of groups, and sets single values on copies.

    Composing anew for every task and variant would give the same and take half a minute.
    """

    def __init__(self, overrides: Sequence[str], tasks: Sequence[str]) -> None:
        self._overrides = list(overrides)
        self._tasks = {task: self._compose(f"task={task}").task for task in tasks}
        self._composed: dict[tuple[str, ...], DictConfig] = {}

    def _compose(self, *overrides: str) -> DictConfig:
        return compose("config", [*self._overrides, *overrides])

    def config(self, task: str, method: str, changes: Sequence[str]) -> DictConfig:
        """The configuration of a task, a method, and a variant's overrides."""
        parsed = OverridesParser.create().parse_overrides(list(changes))
        groups = (
            f"method={method}",
            *(text for text, change in zip(changes, parsed, strict=True) if "." not in change.key_or_group),
        )
        if groups not in self._composed:
            self._composed[groups] = self._compose(*groups)
        config = deepcopy(self._composed[groups])
        config.task = deepcopy(self._tasks[task])
        for change in parsed:
            if "." in change.key_or_group:
                OmegaConf.update(config, change.key_or_group, change.value())
        return config


def _prototype(config: DictConfig, variant: str, epsilons: list[float]) -> Cell:
    cell = replace(read_cell(config), variant=variant)
    if cell.setting("tuning") is None:
        return cell
    settings = {**dict(cell.method), "epsilons": tuple(epsilons)}
    return replace(cell, method=tuple(sorted(settings.items())))


def override_key(override: str) -> str:
    """What an override of the command line sets, adds or removes."""
    return override.lstrip("+~").split("=", 1)[0]


def _kept(overrides: Sequence[str]) -> list[str]:
    kept = []
    for override in overrides:
        key = override_key(override)
        if key == "method" or key.startswith("method."):
            raise InvalidParameterError(
                f"{override}: compare runs the methods listed in methods=[...] with their own settings; "
                "change one method's settings with `python -m simulations.run -m method=NAME method.KEY=...`"
            )
        if key == "guarantee.epsilon":
            raise InvalidParameterError(f"{override}: compare takes epsilons=[...] instead")
        if key != "task":
            kept.append(override)
    return kept
