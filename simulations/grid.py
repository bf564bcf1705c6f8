"""The grid of an experiment: tasks × methods × variants × epsilons × splits, as cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hydra import compose
from omegaconf import DictConfig, OmegaConf

from flwr_modulated import InvalidParameterError
from flwr_modulated.datasets import TASKS

from .settings import METHODS, SYNTHETIC, Cell, check_name, read_cell


def read_grid(config: DictConfig, overrides: Sequence[str]) -> list[Cell]:
    """All cells that ``compare`` runs.

    Each task, method and variant is composed by Hydra as ``run`` would compose it, so
    the task's selected values reach the method by interpolation.

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
    first = [f"guarantee.epsilon={epsilons[0]}"]
    prototypes = {
        task: [
            _prototype([*kept, f"task={task}", f"method={method}", *first, *changes], variant, epsilons)
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


def _prototype(overrides: list[str], variant: str, epsilons: list[float]) -> Cell:
    cell = replace(read_cell(compose("config", overrides)), variant=variant)
    if cell.setting("tuning") is None:
        return cell
    settings = {**dict(cell.method), "epsilons": tuple(epsilons)}
    return replace(cell, method=tuple(sorted(settings.items())))


def _kept(overrides: Sequence[str]) -> list[str]:
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
    return kept
