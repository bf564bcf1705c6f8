"""The ServerApp of the reference app: one study from its run config to its files."""

from __future__ import annotations

import time
from dataclasses import dataclass
from logging import INFO, WARNING, getLogger
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result

from ..datasets import Split, ols_r2, r2_score
from ..errors import InvalidParameterError, ModulatedError
from ..inference import ReportOptions, Results
from ..policy import Policy
from ..privacy import ReplaceRecord
from .outputs import Record, versions, write_outputs
from .run_config import RunConfig
from .screening import Screen
from .simulated import simulated_split
from .strategy import ModulatedStrategy

__all__ = ["app", "main"]

_logger = getLogger("flwr")

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the study that the run config describes, and leave its results on disk.

    Parameters
    ----------
    grid : flwr.serverapp.Grid
        The nodes.
    context : flwr.app.Context
        ``run_config`` as in :class:`RunConfig`.

    Raises
    ------
    ModulatedError
        If the study cannot be done; Flower then marks the run as failed.
    """
    try:
        run_study(grid, RunConfig.read(context.run_config), run_id=context.run_id)
    except ModulatedError as error:
        _logger.error("flwr-modulated: the study has failed, no results were written: %s", error)
        raise


def run_study(grid: Grid, config: RunConfig, *, run_id: int) -> Record:
    """Run one study, write its files and return its record."""
    begin = time.perf_counter()
    study = _Study.of(config)
    _logger.log(WARNING if config.simulated else INFO, study.announcement)
    if config.simulated:
        _settle(grid)
    strategy = study.strategy(run_id)
    result = strategy.start(
        grid,
        initial_arrays=ArrayRecord([np.zeros(len(study.names))]),
        num_rounds=config.num_server_rounds,
        timeout=config.round_timeout,
    )
    results = strategy.results(**study.report)
    record = study.record(strategy, results, result)
    record |= {"run_id": str(run_id), "seconds": round(time.perf_counter() - begin, 3)}
    folder = write_outputs(config.output_path, record, results)
    for line in str(results.summary()).splitlines():
        _logger.log(INFO, "%s", line)
    if "r2_test" in record:
        _logger.log(
            INFO,
            "R² on %d test rows: %.3f; without privacy, by least squares: %.3f",
            record["num_test_rows"],
            record["r2_test"],
            record["r2_test_without_privacy"],
        )
    _logger.log(INFO, "Results: %s", folder)
    return record


@dataclass(frozen=True, slots=True)
class _Study:
    """What a run config amounts to."""

    config: RunConfig
    policy: Policy
    names: tuple[str, ...]
    label: str
    split: Split | None

    @classmethod
    def of(cls, config: RunConfig) -> _Study:
        policy = config.read_policy()
        if config.simulated:
            try:
                split = simulated_split(config)
            except ImportError as error:
                raise InvalidParameterError(str(error)) from None
            return cls(config, policy, split.feature_names, split.label_name, split)
        names = config.feature_names
        if policy.columns is not None and len(policy.columns.centre) != len(names):
            raise InvalidParameterError(
                f"the policy's [columns] are for {len(policy.columns.centre)} features, the run config "
                f"names {len(names)}: {', '.join(names)}"
            )
        return cls(config, policy, names, config.label, None)

    @property
    def announcement(self) -> str:
        guarantee = self.policy.guarantee
        if self.config.simulated:
            return (
                f"SIMULATION: nodes hold shares of the task {self.config.task}, standardised with statistics "
                f"of its training rows, and draw NumPy's noise for {guarantee}. No real person is protected."
            )
        return (
            f"Study {self.config.study}: each device's noise comes from its own policy, "
            f"and is refused if it is less than {guarantee} asks for"
        )

    def strategy(self, run_id: int) -> ModulatedStrategy:
        config, relation = self.config, self.policy.guarantee.relation
        one_shot = not config.iterative
        return ModulatedStrategy(
            config.make_estimator(),
            modulation=config.modulation,
            mode="one-shot" if one_shot else "iterative",
            label_scale=relation.label_scale if isinstance(relation, ReplaceRecord) else None,
            # Less noise would break what the report states, and let one device outweigh the others.
            screen=Screen(
                feature_radius=relation.clip_radius,
                min_noise_std=self.policy.mechanism(config.modulation).noise_std,
            ),
            fraction_train=config.fraction_train,
            min_available_nodes=config.min_available_nodes,
            min_replies=config.min_replies,
            grace_rounds=config.num_server_rounds - 1 if one_shot else 0,
            wait_timeout=config.wait_timeout,
            late_timeout=config.late_timeout,
            # Simulated devices forget: what they released in an earlier run must not mix with this one.
            checkpoint=None if config.simulated else config.output_path / f"{config.study}.checkpoint.npz",
            study=f"simulation-{run_id}" if config.simulated else config.study,
        )

    @property
    def report(self) -> ReportOptions:
        """Names, units and guarantee of the results."""
        options = ReportOptions(
            guarantee=self.policy.guarantee,
            feature_names=self.names,
            label_name=self.label,
            fit_intercept=self.config.intercept,
        )
        columns = self.split or self.policy.columns
        if columns is not None:
            options |= ReportOptions(
                centre=columns.centre,
                scale=columns.scale,
                label_centre=columns.label_centre,
                label_scale=columns.label_scale,
            )
        return options

    def record(self, strategy: ModulatedStrategy, results: Results, result: Result) -> Record:
        """What the run was and what came out: one line of JSON."""
        config, (low, high) = self.config, strategy.noise_std_range
        record: Record = {
            "kind": "app-run",
            "study": config.study,
            "simulated": config.simulated,
            "settings": {name: getattr(config, name) for name in config.__dataclass_fields__},
            "guarantee": str(self.policy.guarantee),
            "num_nodes": strategy.num_nodes,
            "num_rows": results.num_samples,
            "noise_std": [low, high],
            "refused": dict(strategy.refused),
            "bytes_received": strategy.bytes_received,
            "names": list(results.names),
            "params": results.params.tolist(),
            "standard_errors": results.bse.tolist(),
            "predicting_params": results.shrunk_params.tolist(),
            "iterate_standardised": strategy.iterates[-1].tolist(),
            "identification_ratio": results.identification_ratio,
            "caveats": list(results.caveats),
            "rounds": rounds_of(result),
            "versions": versions(),
        }
        if self.split is not None:
            record |= self._measured(self.split, strategy, results)
        return record

    def _measured(self, split: Split, strategy: ModulatedStrategy, results: Results) -> Record:
        features, labels = split.test_features, split.test_labels
        if self.config.iterative:
            r2 = r2_score(features, labels, strategy.iterates[-1])
        else:
            predicted = results.predict(features * split.scale + split.centre)
            standardised = (predicted - split.label_centre) / split.label_scale
            r2 = float(1 - np.sum((labels - standardised) ** 2) / np.sum((labels - labels.mean()) ** 2))
        return {"r2_test": r2, "r2_test_without_privacy": ols_r2(split), "num_test_rows": len(labels)}


def rounds_of(result: Result) -> list[dict[str, Any]]:
    """Metrics by round."""
    sources = (
        result.train_metrics_clientapp,
        result.evaluate_metrics_clientapp,
        result.evaluate_metrics_serverapp,
    )
    numbers = sorted({number for source in sources for number in source})
    return [
        {"round": number}
        | {key: value for source in sources for key, value in source.get(number, {}).items()}
        for number in numbers
    ]


def _settle(grid: Grid) -> None:
    """Wait until simulated nodes stop appearing: each holds a share of the data."""
    count, since = len(list(grid.get_node_ids())), time.monotonic()
    while time.monotonic() - since < 1.0:
        time.sleep(0.1)
        if (now := len(list(grid.get_node_ids()))) != count:
            count, since = now, time.monotonic()
