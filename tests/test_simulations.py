"""What a researcher runs: settings, single runs, sweeps, comparisons, and the baseline's arithmetic."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from rich.console import Console
from scipy import optimize, stats

from flwr_modulated import InsufficientRepliesError, InvalidParameterError
from flwr_modulated.datasets import partition
from simulations import run
from simulations.baselines import LocalDpClient, fedavg_for_numpy_clients
from simulations.comparison import comparison_sheets
from simulations.engines import run_federation
from simulations.grid import read_grid
from simulations.local_dp import LocalDp, clipped_gradients
from simulations.report import records_table, write_report
from simulations.settings import CONF_DIR, Cell, Engine, read_cell, read_engine, register
from simulations.study import local_dp_multiplier, run_study
from simulations.study_reports import Report

ROOT = Path(CONF_DIR).parent
INPROCESS = Engine("inprocess", 4)

# FedAvg samples its nodes from Python's global random state.
global_rng = pytest.mark.global_rng


def options(group: str) -> list[str]:
    """Names of a configuration group: its files."""
    return sorted(path.stem for path in Path(CONF_DIR, group).glob("*.yaml"))


@pytest.fixture(scope="module")
def hydra() -> Iterator[None]:
    register()
    with initialize_config_dir(config_dir=CONF_DIR, version_base="1.3"):
        yield


def cell_of(*overrides: str) -> Cell:
    return read_cell(compose("config", list(overrides)))


def grid_of(*overrides: str) -> list[Cell]:
    return read_grid(compose("config", list(overrides)), overrides)


# Settings


def check_combination(task: str, method: str, guarantee: str, engine: str) -> None:
    config = compose(
        "config", [f"task={task}", f"method={method}", f"guarantee={guarantee}", f"engine={engine}"]
    )
    cell, where = read_cell(config), read_engine(config)
    assert (cell.task, cell.method_name, cell.relation, where.name) == (task, method, guarantee, engine)


METHOD_GUARANTEES = list(itertools.product(options("method"), options("guarantee")))


@pytest.mark.parametrize("number", range(len(METHOD_GUARANTEES)))
def test_settings_compose(hydra: None, number: int) -> None:
    """Every method with every guarantee; tasks and engines take turns."""
    method, guarantee = METHOD_GUARANTEES[number]
    tasks, engines = options("task"), options("engine")
    check_combination(
        tasks[number % len(tasks)], method, guarantee, engines[number // len(tasks) % len(engines)]
    )


@pytest.mark.nightly
def test_all_settings_compose(hydra: None) -> None:
    for names in itertools.product(*map(options, ("task", "method", "guarantee", "engine"))):
        check_combination(*names)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("guarantee.epsilonn=2", "epsilonn"),
        ("method.penalty=1", "penalty"),
        ("engine.nodes=2", "nodes"),
        ("task.selected.gamma=2", "gamma"),
        ("sed=1", "sed"),
        ("guarantee.epsilon=two", "guarantee.epsilon"),
        ("guarantee.radius=[1]", "guarantee.radius"),
        ("method.num_rounds=ten", "method.num_rounds"),
        ("task.selected.step=x", "task.selected.step"),
        ("seed=x", "seed"),
        ("num_splits=many", "num_splits"),
        ("epsilons=[1,a]", "epsilons"),
        ("method=lasso", "method/lasso"),
        ("task=iris", "task/iris"),
        ("guarantee=central", "guarantee/central"),
        ("engine=spark", "engine/spark"),
        ("+experiment=nature", "experiment/nature"),
    ],
)
def test_unknown_keys_and_wrong_types_are_named(hydra: None, override: str, named: str) -> None:
    with pytest.raises(HydraException, match=named):
        compose("config", [override])


@pytest.mark.parametrize("key", ["guarantee.epsilonn", "method.penalty", "task.selected.gamma", "sed"])
def test_added_keys_are_refused_too(hydra: None, key: str) -> None:
    """Hydra's own advice for an unknown key is to add it with a plus, which nothing would read."""
    with pytest.raises(InvalidParameterError, match=f"{key} is not a setting; known here:"):
        cell_of(f"+{key}=1")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["guarantee.epsilon=0"], "epsilon"),
        (["guarantee.epsilon=nan"], "epsilon"),
        (["guarantee.delta=1"], "delta"),
        (["guarantee.radius=-1"], "radius"),
        (["guarantee.relation=zone"], "guarantee.relation must be one of distance, replace, replace_record"),
        (["guarantee.accounting=rdp"], "accounting"),
        (["guarantee.accounting=classical", "guarantee.epsilon=2"], "classical"),
        (["method.alpha=1"], "alpha"),
        (["method.sensitivity=none"], "sensitivity"),
        (["method.num_rounds=0"], "method.num_rounds must be at least 1"),
        (["method=local_dp_fedavg", "guarantee.epsilon=0"], "epsilon"),
        (["seed=-1"], "seed must be at least 0"),
    ],
)
def test_values_out_of_range_are_named(hydra: None, overrides: list[str], words: str) -> None:
    with pytest.raises(InvalidParameterError, match=words):
        cell_of(*overrides)


@pytest.mark.parametrize(
    "override", ["engine.num_nodes=0", "engine.num_nodes=2.5", "engine.num_cpus=0", "engine.name=spark"]
)
def test_engines_out_of_range_are_named(hydra: None, override: str) -> None:
    with pytest.raises(InvalidParameterError, match=override.split("=")[0]):
        read_engine(compose("config", [override]))


# Grids


def test_a_grid_has_a_cell_for_each_task_split_epsilon_and_method(hydra: None) -> None:
    cells = grid_of("tasks=[fair,co2]", "methods=[auto,ridge]", "epsilons=[1,4]", "num_splits=3", "seed=5")
    found = [(cell.task, cell.seed, cell.epsilon, cell.method_name) for cell in cells]
    assert sorted(found) == sorted(
        itertools.product(["fair", "co2"], [5, 6, 7], [1.0, 4.0], ["auto", "ridge"])
    )
    assert {cell.setting("penalty") for cell in cells if cell.task == "co2"} == {None, 2.0}
    assert {cell.setting("penalty") for cell in cells if cell.task == "fair"} == {None, 1.0}


def test_a_grid_is_of_the_chosen_task_and_keeps_what_was_overridden(hydra: None) -> None:
    cells = grid_of("task=modechoice", "guarantee=replace", "guarantee.radius=2", "task.selected.penalty=7")
    assert {cell.task for cell in cells} == {"modechoice"}
    assert {(cell.relation, cell.radius) for cell in cells} == {("replace", 2.0)}
    assert {cell.setting("penalty") for cell in cells} == {None, 7.0}
    assert [cell.epsilon for cell in cells[::4]] == [0.5, 1, 2, 4, 8]


def test_a_grid_under_classical_accounting_depends_on_its_own_epsilons(hydra: None) -> None:
    """The guarantee group's default ε = 2 is not in the grid, so it must not refuse it."""
    cells = grid_of("guarantee.accounting=classical", "epsilons=[0.5,1]", "methods=[auto]")
    assert [cell.epsilon for cell in cells] == [0.5, 1.0]
    with pytest.raises(InvalidParameterError, match="classical"):
        grid_of("guarantee.accounting=classical", "epsilons=[0.5,2]", "methods=[auto]")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("method=ridge", "compare runs the methods listed in methods"),
        ("method.num_rounds=3", "compare runs the methods listed in methods"),
        ("guarantee.epsilon=3", r"compare takes epsilons=\[\.\.\.\] instead"),
        ("methods=[lasso]", "methods must be one of auto, iterative"),
        ("tasks=[iris]", "tasks must be one of"),
        ("tasks=[]", "must not be empty"),
        ("epsilons=[]", "must not be empty"),
        ("num_splits=0", "num_splits at least 1"),
        ("+guarantee.epsilonn=3", "guarantee.epsilonn is not a setting"),
    ],
)
def test_a_grid_refuses_what_it_would_lose(hydra: None, override: str, words: str) -> None:
    with pytest.raises(InvalidParameterError, match=words):
        grid_of(override)


# arXiv:2605.07233, Table 2: iterative step, one-shot penalty, clip and step of DP-SGD.
SELECTED = {
    "co2": (0.80, 2.00, 2.249, 0.05),
    "fair": (0.80, 1.00, 2.059, 0.10),
    "modechoice": (1.00, 0.50, 1.816, 0.05),
    "randhie_lncoins": (0.80, 0.50, 2.270, 0.10),
    "randhie_fmde": (0.50, 0.50, 2.256, 0.10),
}


def test_the_paper_preset_is_the_papers_conventions(hydra: None) -> None:
    """Every value of every cell, written down."""
    cells = grid_of("+experiment=paper")
    epsilons, methods = [0.25, 0.5, 1, 2, 4, 8, 16, 32], ["auto", "iterative", "ridge", "local_dp_fedavg"]
    assert len(cells) == len(SELECTED) * len(epsilons) * len(methods)
    assert {(c.task, c.epsilon, c.method_name) for c in cells} == set(
        itertools.product(SELECTED, epsilons, methods)
    )
    for cell in cells:
        step, penalty, clip, fedavg_step = SELECTED[cell.task]
        assert (cell.delta, cell.relation, cell.radius, cell.accounting) == (1e-5, "distance", 1.0, "zcdp")
        modulation = cell.modulation
        public = (modulation.alpha, modulation.amplitude, modulation.frequency, modulation.num_directions)
        if cell.method_name in ("iterative", "ridge"):
            assert public == (0.2, 0.2, 0.5, 1)
            assert cell.setting("sensitivity") == "conditional"
        else:
            assert public == (0, 0, 0, 0)
        expected: dict[str, dict[str, Any]] = {
            "auto": {"num_rounds": 1},
            "iterative": {"num_rounds": 10, "step": step},
            "ridge": {"num_rounds": 1, "penalty": penalty},
            "local_dp_fedavg": {"num_rounds": 10, "clip": clip, "step": fedavg_step},
        }
        for name, value in expected[cell.method_name].items():
            assert cell.setting(name) == value, (cell.task, cell.method_name, name)
        if cell.method_name == "local_dp_fedavg":
            assert (cell.setting("clip_ratio", 1.0), cell.setting("tail", 0.0)) == (1.0, 0.0)


# Records


RECORD_KEYS = {
    "task", "method", "epsilon", "delta", "relation", "accounting", "sensitivity", "alpha", "amplitude",
    "frequency", "num_directions", "num_rounds", "noise_std", "num_clients", "num_nodes", "engine", "seed",
    "r2", "r2_ols", "beta", "seconds", "versions",
}  # fmt: skip


def zcdp_multiplier(epsilon: float, delta: float) -> float:
    """Noise over sensitivity of one release: ε = ρ + 2√(ρ ln(1/δ)), σ² = Δ²/(2ρ)."""
    log = math.log(1 / delta)
    rho = (math.sqrt(log + epsilon) - math.sqrt(log)) ** 2
    return 1 / math.sqrt(2 * rho)


def exact_multiplier(epsilon: float, delta: float) -> float:
    """The root of δ = Φ(Δ/2σ − εσ/Δ) − e^ε Φ(−Δ/2σ − εσ/Δ) (Balle and Wang 2018)."""

    def excess(z: float) -> float:
        a, b = 1 / (2 * z), epsilon * z
        return stats.norm.cdf(a - b) - math.exp(epsilon + stats.norm.logcdf(-a - b)) - delta

    return optimize.brentq(excess, 1e-3, 1e3, xtol=1e-14)


MULTIPLIERS = {"zcdp": zcdp_multiplier, "exact": exact_multiplier}


@global_rng
@pytest.mark.parametrize("accounting", MULTIPLIERS)
def test_records_say_what_was_run_and_with_how_much_noise(hydra: None, accounting: str) -> None:
    """σ by hand: √T · multiplier · L · r with L = 1 − α + λω/√m, or 2C in place of L · r."""
    cells = grid_of(
        "task=modechoice", "epsilons=[2]", f"guarantee.accounting={accounting}", "guarantee.radius=1.5",
        "seed=3",
    )  # fmt: skip
    records = {record["method"]: record for record in run_study(cells, INPROCESS)}
    assert set(records) == {"auto", "iterative", "ridge", "local_dp_fedavg"}
    z = MULTIPLIERS[accounting](2.0, 1e-5)
    expected = {
        "auto": z * 1.5,
        "ridge": z * 0.9 * 1.5,
        "iterative": math.sqrt(10) * z * 0.9 * 1.5,
        "local_dp_fedavg": math.sqrt(10) * z * 2 * 1.816,
    }
    for method, record in records.items():
        assert set(record) >= RECORD_KEYS
        assert record["noise_std"] == pytest.approx(expected[method], rel=1e-7), method
        assert (record["epsilon"], record["delta"], record["seed"]) == (2.0, 1e-5, 3)
        assert (record["num_clients"], record["num_nodes"], record["engine"]) == (504, 4, "inprocess")
        assert record["relation"] == (
            "replace_record(any)" if method == "local_dp_fedavg" else "distance(1.5)"
        )
        assert len(record["beta"]) == len(record["feature_names"]) == 7
        assert record["r2"] < record["r2_ols"] < 1
        assert {"flwr", "flwr-modulated", "numpy", "ray", "python"} <= set(record["versions"])
        json.dumps(record, allow_nan=False)
    assert (records["ridge"]["alpha"], records["ridge"]["num_directions"]) == (0.2, 1)


def test_records_hold_the_test_r2_of_their_coefficients(hydra: None) -> None:
    """1 − RSS/TSS of `beta` on the standardised test rows, and of OLS, computed here."""
    from flwr_modulated.datasets import load_task, split_task

    (record,) = run_study([cell_of("task=modechoice", "guarantee.epsilon=8", "seed=2")], INPROCESS)
    split = split_task(load_task("modechoice"), 2)
    x, y = split.test_features, split.test_labels

    def r2(beta: np.ndarray) -> float:
        return float(1 - np.sum((y - x @ beta) ** 2) / np.sum((y - y.mean()) ** 2))

    ols = np.linalg.lstsq(split.train_features, split.train_labels, rcond=None)[0]
    assert record["r2"] == pytest.approx(r2(np.array(record["beta"])), abs=1e-12)
    assert record["r2_ols"] == pytest.approx(r2(ols), abs=1e-9)


@global_rng
def test_a_run_repeats_and_its_seed_matters(hydra: None) -> None:
    for method in ("auto", "local_dp_fedavg"):
        first, again, other = (
            run_study([cell_of("task=modechoice", f"method={method}", f"seed={seed}")], INPROCESS)[0]
            for seed in (4, 4, 5)
        )
        np.testing.assert_allclose(first["beta"], again["beta"], rtol=1e-12)
        assert first["beta"] != other["beta"]


def test_cells_in_one_study_keep_their_own_settings(hydra: None) -> None:
    """Same task and method, other modulation, δ or relation: each device must find its own policy."""
    cells = [
        cell_of("task=modechoice", *changes)
        for changes in (
            [],
            ["method.amplitude=0.5", "method.frequency=1", "method.num_directions=1"],
            ["guarantee.delta=1e-3"],
            ["guarantee=replace", "guarantee.epsilon=2"],
            ["guarantee.epsilon=4"],
            ["seed=1"],
        )
    ]
    together = run_study(cells, INPROCESS)
    for cell, record in zip(cells, together, strict=True):
        (alone,) = run_study([cell], INPROCESS)
        assert record["beta"] == alone["beta"]
        assert record["noise_std"] == alone["noise_std"]
    assert len({tuple(record["beta"]) for record in together}) == len(cells)


def test_more_nodes_than_clients_stop_before_the_run(hydra: None) -> None:
    with pytest.raises(InvalidParameterError, match=r"engine\.num_nodes must be at most .* 504, got 505"):
        run_study([cell_of("task=modechoice", "seed=7")], Engine("inprocess", 505))


# Local DP FedAvg


def reference_fedavg(
    x: np.ndarray, y: np.ndarray, *, clip: float, step: float, num_rounds: int
) -> np.ndarray:
    """One client after another: gradient of ½(xᵀβ − y)², clipped, stepped; then the plain mean."""
    beta = np.zeros(x.shape[1])
    for _ in range(num_rounds):
        models = []
        for row, label in zip(x, y, strict=True):
            gradient = (row @ beta - label) * row
            norm = math.sqrt(sum(value * value for value in gradient))
            if norm > clip:
                gradient = gradient * (clip / norm)
            models.append(beta - step * gradient)
        beta = sum(models) / len(models)
    return beta


def fedavg(
    x: np.ndarray,
    y: np.ndarray,
    num_nodes: int,
    settings: LocalDp,
    multiplier: float,
    rng: Callable[[int], np.random.Generator],
    wrap: Callable[[int, NumPyClient], NumPyClient] = lambda node, client: client,
) -> np.ndarray:
    """The package's clients under Flower's FedAvg."""

    def client_fn(context: Context) -> Client:
        node = int(context.node_config["partition-id"])
        share = partition(len(y), num_nodes, node)
        client = LocalDpClient(x[share], y[share], settings=settings, multiplier=multiplier, rng=rng)
        return wrap(node, client).to_client()

    found: list[np.ndarray] = []

    def server(grid: Grid) -> None:
        result = fedavg_for_numpy_clients(num_nodes).start(
            grid,
            initial_arrays=ArrayRecord([np.zeros(x.shape[1])]),
            num_rounds=settings.num_rounds,
            train_config=ConfigRecord({"study": "any"}),
        )
        found.append(result.arrays.to_numpy_ndarrays()[0])

    run_federation(server, ClientApp(client_fn), Engine("inprocess", num_nodes))
    return found[0]


@pytest.fixture
def rows(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    x = rng.standard_normal((50, 3))
    return x, x @ [1.0, -2.0, 0.5] + rng.standard_normal(50)


@global_rng
@pytest.mark.parametrize("num_nodes", [1, 3, 50])
def test_many_rows_on_a_node_are_as_many_clients(
    num_nodes: int, rows: tuple[np.ndarray, np.ndarray], rng: np.random.Generator
) -> None:
    """Without noise, whatever the layout (17, 17 and 16 rows on three nodes): the plain mean over
    clients of a loop written for it. Weighting nodes alike instead of by their rows is off by 1e-3.
    """
    settings = LocalDp(num_rounds=5, clip=1.5, step=0.4)
    beta = fedavg(*rows, num_nodes, settings, 0.0, lambda r: rng)
    np.testing.assert_allclose(
        beta, reference_fedavg(*rows, clip=1.5, step=0.4, num_rounds=5), rtol=1e-12, atol=1e-14
    )


def test_gradients_are_clipped_to_the_norm_and_no_further() -> None:
    """By hand, β = (1, 0): residuals 3 − 0 and 0.5 − 0, gradients (9, 12) of norm 15 and (0.25, 0)."""
    x, y = np.array([[3.0, 4.0], [0.5, 0.0]]), np.zeros(2)
    gradients = clipped_gradients(np.array([1.0, 0.0]), x, y, 5.0)
    np.testing.assert_allclose(gradients, [[3.0, 4.0], [0.25, 0.0]], rtol=1e-14)


class Ones(np.random.Generator):
    """A generator whose every normal is 1."""

    def __init__(self) -> None:
        super().__init__(np.random.PCG64(0))

    def standard_normal(self, size: Any = None, *args: Any, **kwargs: Any) -> Any:
        return np.ones(size)


@global_rng
@pytest.mark.parametrize("accounting", MULTIPLIERS)
@pytest.mark.parametrize("num_rounds", [1, 4])
def test_every_client_adds_2_c_sqrt_t_times_the_multiplier(
    hydra: None, accounting: str, num_rounds: int
) -> None:
    """Rows of zeros have no gradient: with every normal 1 each round moves β by −step · 2C√T z."""
    cell = cell_of(
        "method=local_dp_fedavg", f"method.num_rounds={num_rounds}", "method.clip=1.7", "method.step=0.25",
        f"guarantee.accounting={accounting}", "guarantee.epsilon=3",
    )  # fmt: skip
    settings = LocalDp(num_rounds, clip=1.7, step=0.25)
    beta = fedavg(np.zeros((8, 2)), np.zeros(8), 2, settings, local_dp_multiplier(cell), lambda r: Ones())
    sigma = 2 * 1.7 * math.sqrt(num_rounds) * MULTIPLIERS[accounting](3.0, 1e-5)
    np.testing.assert_allclose(beta, -num_rounds * 0.25 * sigma, rtol=1e-7)


@global_rng
def test_clients_noise_is_drawn_for_each_alone(rng: np.random.Generator) -> None:
    """n = 20,000 clients without gradient, one node: their mean noise has variance σ²/n.

    Statistic: n β²/(step σ)² summed over d = 50 coordinates, χ²₅₀ under the law, false alarm 1e-6
    (two-sided, exact quantiles 13.6 and 119). One draw shared by a node's clients gives n times as much.
    """
    n, d, step, clip, z = 20_000, 50, 0.5, 0.7, 1.3
    settings = LocalDp(1, clip=clip, step=step)
    beta = fedavg(np.zeros((n, d)), np.zeros(n), 1, settings, z, lambda r: rng)
    statistic = n * float(beta @ beta) / (step * 2 * clip * z) ** 2
    assert stats.chi2.ppf(5e-7, d) < statistic < stats.chi2.isf(5e-7, d)


@global_rng
@pytest.mark.parametrize("broken", [1, 3], ids=["one node", "all nodes"])
def test_fedavg_does_not_go_on_without_a_node(broken: int, rows: tuple[np.ndarray, np.ndarray]) -> None:
    """Flower's own would average the others, and with none left return the start as a result."""

    class Failing(NumPyClient):
        def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any:
            raise ValueError("flat battery")

    with pytest.raises(
        InsufficientRepliesError, match=rf"round 1: {3 - broken} models of 3 nodes; .*flat battery"
    ):
        fedavg(
            *rows,
            3,
            LocalDp(2, clip=1.0, step=0.1),
            0.0,
            lambda r: np.random.default_rng(0),
            lambda node, client: Failing() if node < broken else client,
        )


# End to end, against code of its own


def fair_r2(epsilon: float, num_splits: int, rng: np.random.Generator) -> np.ndarray:
    """Test R² of `auto` on the task fair under zCDP and distance(1), in NumPy and pandas alone."""
    import statsmodels.api as sm

    frame = sm.datasets.fair.load_pandas().data
    labels = frame["yrs_married"].to_numpy(float)
    features = frame.drop(columns="yrs_married").to_numpy(float)
    n, d = features.shape
    k, sigma = n * 3 // 5, zcdp_multiplier(epsilon, 1e-5)
    scores = np.empty(num_splits)
    for split in range(num_splits):
        order = rng.permutation(n)
        train, test = order[:k], order[k + n // 5 :]
        centre, scale = features[train].mean(0), features[train].std(0)
        x, x_test = (features[train] - centre) / scale, (features[test] - centre) / scale
        middle, spread = labels[train].mean(), labels[train].std()
        y, y_test = (labels[train] - middle) / spread, (labels[test] - middle) / spread
        g = x + sigma * rng.standard_normal(x.shape)
        Sigma, z = g.T @ g / k - sigma**2 * np.eye(d), y @ g / k
        w, u = np.linalg.eigh(Sigma)
        tau2 = (sigma**4 * (d + 1) + 2 * sigma**2 * max(np.trace(Sigma), 0)) / k
        beta = u @ ((u.T @ z) / np.sqrt(np.maximum(w, 0) ** 2 + tau2))
        scores[split] = 1 - np.sum((y_test - x_test @ beta) ** 2) / np.sum((y_test - y_test.mean()) ** 2)
    return scores


@pytest.mark.statistical
@pytest.mark.parametrize(("epsilon", "widest"), [(1.0, 0.1), (4.0, 0.03)])
def test_auto_on_fair_scores_what_an_independent_version_scores(
    hydra: None, epsilon: float, widest: float, rng: np.random.Generator
) -> None:
    """Statistic: the mean of five splits' test R², minus the mean of 300 splits of a version written
    here. SE = s·√(1/5 + 1/300), s the 300 scores' standard deviation; the tolerance is the two-sided
    1e-6 quantile of Student's t with 299 degrees of freedom, about 5.0 SE. The median must lie in the
    same range.

    Caught (mean R² at ε = 1 and 4; right is 0.761 and 0.851, tolerance 0.080 and 0.020): twice the noise
    (0.426, 0.789), no debiasing (0.109, 0.636); at ε = 1 also three times the shrinkage (0.554) and none.
    """
    reference = fair_r2(epsilon, 300, rng)
    cells = grid_of(
        "task=fair", "methods=[auto]", f"epsilons=[{epsilon}]", "num_splits=5", "guarantee.accounting=zcdp"
    )
    scores = np.array([record["r2"] for record in run_study(cells, INPROCESS)])
    error = reference.std(ddof=1) * math.sqrt(1 / 5 + 1 / 300)
    tolerance = stats.t.isf(5e-7, 299) * error
    assert tolerance < widest
    assert abs(scores.mean() - reference.mean()) < tolerance
    assert abs(np.median(scores) - np.median(reference)) < tolerance


# The commands


def command(module: str, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "FLWR_TELEMETRY_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "-m", f"simulations.{module}", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_run_appends_one_record(tmp_path: Path) -> None:
    done = command(
        "run", "task=modechoice", "method=auto", "guarantee.epsilon=2", "engine=inprocess",
        f"hydra.run.dir={tmp_path}",
    )  # fmt: skip
    (record,) = lines(tmp_path / "records.jsonl")
    assert set(record) >= RECORD_KEYS
    assert (record["task"], record["method"], record["epsilon"]) == ("modechoice", "auto", 2.0)
    assert f"{record['r2']:.3f}" in done.stdout
    assert "Relation distance(1)" in done.stdout
    assert done.stderr == ""


def test_a_sweep_gives_a_record_for_each_combination(tmp_path: Path) -> None:
    command(
        "run", "-m", "task=modechoice", "guarantee.epsilon=1,8", "method=auto,ridge", "engine=inprocess",
        f"hydra.sweep.dir={tmp_path}",
    )  # fmt: skip
    found = [record for path in tmp_path.rglob("records.jsonl") for record in lines(path)]
    assert {(record["epsilon"], record["method"]) for record in found} == set(
        itertools.product([1.0, 8.0], ["auto", "ridge"])
    )
    assert len(found) == 4


def test_compare_writes_records_table_and_figure_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    arguments = [
        "task=modechoice", "epsilons=[1,8]", "methods=[auto,local_dp_fedavg]", "engine=inprocess",
        "workers=1", f"hydra.run.dir={tmp_path}",
    ]  # fmt: skip
    done = command("compare", *arguments)
    records = lines(tmp_path / "records.jsonl")
    assert {(record["epsilon"], record["method"]) for record in records} == set(
        itertools.product([1.0, 8.0], ["auto", "local_dp_fedavg"])
    )
    table = (tmp_path / "comparison.md").read_text(encoding="utf-8")
    for record in records:
        if record["method"] == "auto":
            assert f"{record['r2']:.3f}" in table
            assert f"{record['r2']:.3f}" in done.stdout
    for text in (table, done.stdout):
        assert "distance(1): auto; replace_record(any): local_dp_fedavg" in " ".join(text.split())
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    command("compare", *arguments)
    assert lines(tmp_path / "records.jsonl") == records


def test_a_failure_midway_keeps_what_is_finished_and_names_the_cell(tmp_path: Path) -> None:
    """A step of 1e300 leaves no finite coefficients."""
    done = command(
        "compare", "task=modechoice", "epsilons=[1]", "methods=[auto,local_dp_fedavg,ridge]",
        "task.selected.fedavg_step=1e300", "engine=inprocess", "workers=1", f"hydra.run.dir={tmp_path}",
        code=1,
    )  # fmt: skip
    assert [record["method"] for record in lines(tmp_path / "records.jsonl")] == ["auto"]
    assert "modechoice local_dp_fedavg ε=1 seed=0" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("module", "override", "words"),
    [
        ("compare", "method=ridge", "methods=[...]"),
        ("run", "guarantee.epsilonn=1", "epsilonn"),
    ],
)
def test_a_mistake_ends_a_command_with_what_to_do(
    module: str, override: str, words: str, tmp_path: Path
) -> None:
    done = command(module, override, "engine=inprocess", f"hydra.run.dir={tmp_path}", code=1)
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "records.jsonl").exists()


@pytest.mark.simulation
def test_run_on_ray_ends_well(tmp_path: Path) -> None:
    """The clean exit; what Ray computes is compared in test_engines."""
    done = command(
        "run", "task=modechoice", "engine=ray", "engine.num_nodes=2", "engine.num_cpus=2",
        f"hydra.run.dir={tmp_path}",
    )  # fmt: skip
    (record,) = lines(tmp_path / "records.jsonl")
    assert (record["engine"], record["num_nodes"]) == ("ray", 2)
    assert "Traceback" not in done.stderr


# Reports, from records written by hand


def record_of(
    method: str, epsilon: float, r2: float, seed: int = 0, task: str = "fair", **changes: Any
) -> dict[str, Any]:
    values = {
        "task": task, "method": method, "epsilon": epsilon, "r2": r2, "seed": seed, "delta": 1e-5,
        "accounting": "zcdp", "relation": "distance(1)", "r2_ols": 0.9, "num_clients": 3819,
        "seconds": 0.25, "variant": "", "kind": "run", "experiment": "",
        "id": f"{method} {epsilon} {seed} {task}",
    }  # fmt: skip
    return {**values, **changes}


RECORDS = [
    record_of("auto", 1.0, 0.5),
    record_of("ridge", 4.0, 0.3),
    record_of("local_dp_fedavg", 4.0, -0.25, relation="replace_record(any)"),
]


def printed(*tables: Any) -> str:
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(width=120, record=True, file=nowhere)
        for table in tables:
            console.print(table)
        return console.export_text()


def test_no_epsilon_is_shown_without_delta_relation_accounting_and_unit() -> None:
    """Also where records mix them: then all are stated, none is left out."""
    mixed = [*RECORDS, record_of("auto", 1.0, 0.5, delta=1e-6, accounting="exact", relation="replace(3)")]
    for records in (RECORDS, mixed):
        (sheet,) = comparison_sheets(records)
        for text in (sheet.markdown(), printed(sheet.rich()), printed(records_table(records))):
            flat = " ".join(text.split())
            for key in ("delta", "accounting", "relation"):
                for value in {record[key] for record in records}:
                    assert (f"{value:g}" if key == "delta" else value) in flat
            assert "unit row" in flat


# What would be lost, and what stops


@pytest.mark.parametrize("override", ["num_splits=3", "methods=[ridge]", "+experiment=paper", "epsilons=[1]"])
def test_run_refuses_what_only_compare_reads(override: str) -> None:
    with pytest.raises(InvalidParameterError, match=r"run runs one cell; use .*compare"):
        run._refuse_grids(["task=fair", override])
    run._refuse_grids(["task=fair", "guarantee.epsilon=1", "method=ridge", "method.penalty=2"])


@pytest.mark.usefixtures("hydra")
def test_clients_of_a_real_task_cannot_be_chosen() -> None:
    with pytest.raises(InvalidParameterError, match=r"task\.num_clients .* are for task=synthetic"):
        cell_of("task=fair", "task.num_clients=100")


def test_an_output_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidParameterError, match=r"the output directory .* cannot be made"):
        write_report(Report([], {}), "x", tmp_path / "file")


@pytest.mark.simulation
def test_ctrl_c_stops_a_grid_on_ray_and_says_how_it_goes_on(tmp_path: Path) -> None:
    """Flower's own threads would wait for one another for ever."""
    command = [sys.executable, "-m", "simulations.compare", "num_splits=50", f"hydra.run.dir={tmp_path}"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        records = tmp_path / "records.jsonl"
        deadline = time.monotonic() + 120
        while not (records.exists() and records.read_bytes().count(b"\n")) and time.monotonic() < deadline:
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"hydra.run.dir={tmp_path}" in output.decode().replace("\n", "")
    assert b"Traceback" not in output
    assert all(json.loads(line)["r2"] is not None for line in records.read_text().splitlines())
