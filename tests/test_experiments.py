"""Experiments: their files compose, they resume, and the search finds what it should."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from simulations import experiment as experiment_module
from simulations import paper
from simulations.data import cell_split
from simulations.experiment import SEARCHES, run_experiment
from simulations.grid import read_grid
from simulations.local_dp import clipped_gradients, noise_multiplier
from simulations.records import RECORDS, Record
from simulations.settings import CONF_DIR, Cell, Engine, read_cell, register
from simulations.tuning import SearchSpace, needs_search, resolve, search, search_identity

register()
EXPERIMENTS = sorted(path.stem for path in Path(CONF_DIR, "experiment").glob("*.yaml"))
TASKS = sorted(path.stem for path in Path(CONF_DIR, "task").glob("*.yaml"))
ENGINE = Engine("inprocess", 2)
SMALL = SearchSpace(num_rounds=(2, 3), clip=(0.5, 2.0), step=(0.1, 0.4), clip_ratio=(0.5,), tail=(0.0, 1.0))


@pytest.fixture
def hydra() -> Iterator[None]:
    GlobalHydra.instance().clear()
    with initialize_config_dir(CONF_DIR, version_base="1.3"):
        yield


def tuned(tuning: str = "epsilon", epsilons: tuple[float, ...] = (1.0, 8.0)) -> Cell:
    settings = {"epsilons": epsilons, "name": "local_dp_fedavg_tuned", "num_rounds": 1, "tuning": tuning}
    method = tuple(sorted(settings.items()))
    return Cell("modechoice", method, 8.0, 1e-5, "distance", 1.0, 1.0, "zcdp", 0)


def grid() -> list[Cell]:
    auto = Cell("modechoice", (("name", "auto"),), 1.0, 1e-5, "distance", 1.0, 1.0, "exact", 0)
    return [replace(auto, epsilon=epsilon, seed=seed) for epsilon in (1.0, 4.0) for seed in (0, 1)]


def told(records: list[Record]) -> list[Record]:
    """What records say, but for how long it took; sorted."""
    kept = [{key: value for key, value in record.items() if key != "seconds"} for record in records]
    return sorted(kept, key=lambda record: record["id"])


# -- Files


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_to_cells_that_differ(hydra, name):
    overrides = [f"+experiment={name}"]
    config = compose("config", [*overrides, "num_splits=2"])
    config.tasks = config.tasks[:1]
    cells = read_grid(config, overrides)
    assert len({cell.identity for cell in cells}) == len(cells) > 0
    assert {cell.seed for cell in cells} == {0, 1}
    assert {cell.experiment for cell in cells} == {name if name != "paper" else ""}


@pytest.mark.parametrize("task", TASKS)
def test_conf_holds_the_papers_table_2(hydra, task):
    if task == "synthetic":
        pytest.skip("not in the paper")
    selected = compose("config", [f"task={task}"]).task.selected
    found = (selected.step, selected.penalty, selected.clip, selected.fedavg_step)
    assert found == paper.TABLE_2[task]


def test_variants_are_what_run_would_compose(hydra):
    """The grid sets values on copies; ``run`` composes the same overrides whole."""
    overrides = ["+experiment=matched"]
    config = compose("config", [*overrides, "epsilons=[2]", "num_splits=1", "tasks=[co2,fair]"])
    cells = {(cell.task, cell.variant): cell for cell in read_grid(config, overrides)}
    for task, variant in (("fair", "replace 0.25"), ("co2", "record 4 0.5")):
        changes = config.variants.auto[variant]
        whole = compose("config", [*overrides, f"task={task}", "guarantee.epsilon=2", *changes])
        assert replace(read_cell(whole), variant=variant) == cells[task, variant]


def test_variant_changes_its_cells_only(hydra):
    overrides = ["+experiment=ablation"]
    cells = read_grid(compose("config", [*overrides, "tasks=[fair]"]), overrides)
    by_variant = {cell.variant: cell for cell in cells}
    assert by_variant["alpha=0.4"].modulation.alpha == 0.4
    assert by_variant["base"].modulation.alpha == 0.2
    assert by_variant["accounting=zcdp"].accounting == "zcdp"
    assert by_variant["releases=10"].num_rounds == 10


@pytest.mark.parametrize(
    "change",
    [{"task": "fair"}, {"epsilon": 2.0}, {"delta": 1e-6}, {"radius": 2.0}, {"relation": "replace"},
     {"accounting": "zcdp"}, {"seed": 1}, {"method": (("alpha", 0.1), ("name", "auto"))}],
)  # fmt: skip
def test_identity_changes_with_what_changes_the_run(change):
    assert replace(grid()[0], **change).identity != grid()[0].identity


def test_identity_is_that_of_the_run_not_of_the_experiment_nor_of_the_search():
    assert replace(grid()[0], experiment="another").identity == grid()[0].identity
    assert resolve(tuned(), search(tuned(), SMALL)).identity == tuned().identity
    assert tuned(epsilons=(8.0,)).identity != tuned().identity


# -- Resuming


def test_finished_cells_are_not_run_again(tmp_path, monkeypatch):
    first = run_experiment(grid(), ENGINE, tmp_path, workers=1)

    def never(*arguments: object) -> None:
        raise AssertionError("ran a finished cell")

    monkeypatch.setattr(experiment_module, "run_study", never)
    assert run_experiment(grid(), ENGINE, tmp_path, workers=1) == first


@pytest.mark.parametrize("stop_after", [1, 3])
def test_stopped_midway_it_completes_to_the_same_records(tmp_path, stop_after):
    whole = run_experiment(grid(), ENGINE, tmp_path / "whole", workers=1)

    def stop(done: int, total: int, label: str) -> None:
        if done == stop_after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_experiment(grid(), ENGINE, tmp_path / "parts", workers=1, on_progress=stop)
    lines = (tmp_path / "parts" / RECORDS).read_text().splitlines()
    assert len(lines) == stop_after
    assert told(run_experiment(grid(), ENGINE, tmp_path / "parts", workers=1)) == told(whole)


def test_a_line_that_a_crash_left_unfinished_is_run_again(tmp_path):
    whole = run_experiment(grid(), ENGINE, tmp_path, workers=1)
    path = tmp_path / RECORDS
    path.write_text(path.read_text()[:-40])
    asked: list[int] = []
    again = run_experiment(
        grid(), ENGINE, tmp_path, workers=1, on_progress=lambda done, total, label: asked.append(total)
    )
    assert told(again) == told(whole)
    assert asked[0] == 1
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == len(grid())


@pytest.mark.simulation
@pytest.mark.global_rng  # FedAvg samples its nodes with `random`
def test_worker_processes_give_the_records_of_one(tmp_path):
    """Tuned cells too: their searches run first, once for all that share one."""
    cells = [*grid(), replace(tuned(), seed=1), replace(tuned(), seed=1, epsilon=1.0)]
    alone = run_experiment(cells, ENGINE, tmp_path / "alone", workers=1)
    together = run_experiment(cells, ENGINE, tmp_path / "together", workers=2)
    assert told(together) == told(alone)
    assert len((tmp_path / "together" / SEARCHES).read_text().splitlines()) == 1


# -- The search


def test_search_scores_what_a_naive_loop_scores():
    """At an ε so large that the noise vanishes, so that no draw has to be repeated."""
    cell = tuned(epsilons=(1e9,))
    record, split = search(cell, SMALL), cell_split(cell)
    assert noise_multiplier(1e9, 1e-5, 3, "zcdp") < 1e-3
    for settings, (score,) in zip(record["settings"], record["r2_validation"], strict=True):
        rounds, clip, step, ratio, tail = settings
        beta, iterates = np.zeros(split.num_features), []
        for t in range(int(rounds)):
            bound = clip * ratio ** (t / (rounds - 1))
            gradients = clipped_gradients(beta, split.train_features, split.train_labels, bound)
            beta = beta - step * gradients.mean(axis=0)
            iterates.append(beta)
        final = np.mean(iterates, axis=0) if tail == 1.0 else beta
        residual = split.validation_labels - split.validation_features @ final
        total = np.sum((split.validation_labels - split.validation_labels.mean()) ** 2)
        assert score == pytest.approx(1 - residual @ residual / total, abs=2e-3)


def test_selection_is_the_best_of_the_recorded_scores():
    cell = tuned()
    record = search(cell, SMALL)
    table = np.array(record["r2_validation"])
    # Scores are rounded to 0.001 in the record.
    assert table[record["selected_by_epsilon"], [0, 1]] == pytest.approx(table.max(axis=0), abs=1e-3)
    assert table[record["selected"]].clip(min=0).mean() == pytest.approx(
        table.clip(min=0).mean(axis=1).max(), abs=1e-3
    )
    found = resolve(cell, record)
    settings = dict(zip(record["fields"], record["settings"][record["selected_by_epsilon"][1]], strict=True))
    assert {name: found.setting(name) for name in settings} == settings
    assert not needs_search(found)
    once = resolve(tuned("grid"), record)
    assert once.setting("clip") == record["settings"][record["selected"]][1]


def test_search_depends_on_the_split_and_the_guarantee_not_on_the_relation():
    cell = tuned()
    assert search_identity(replace(cell, relation="replace", epsilon=1.0)) == search_identity(cell)
    for change in ({"seed": 1}, {"accounting": "exact"}, {"delta": 1e-6}, {"task": "fair"}):
        assert search_identity(replace(cell, **change)) != search_identity(cell)
