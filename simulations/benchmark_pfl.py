"""Apple's pfl with local differential privacy on one-row users, for the benchmark.

Imports nothing of this project, so that it can run in an environment of its own: pfl asks
for another release of dp-accounting. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.common_types import Population
from pfl.context import CentralContext
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import ModelHyperParams
from pfl.internal.ops import numpy_ops
from pfl.internal.ops.selector import set_framework_module
from pfl.metrics import Metrics
from pfl.model.base import StatefulModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.stats import MappedVectorStatistics


class LinearModel(StatefulModel):
    """Coefficients of a linear regression."""

    def __init__(self, num_features: int) -> None:
        self.beta = np.zeros(num_features, dtype=np.float32)

    def save(self, dir_path: str) -> None:
        """Nothing is kept."""

    def load(self, dir_path: str) -> None:
        """Nothing is kept."""

    def evaluate(self, dataset: Any, name_formatting_fn: Any = None, eval_params: Any = None) -> Metrics:
        """No metrics."""
        return Metrics()

    def get_parameters(self, placeholders: Any = None) -> MappedVectorStatistics:
        """Current coefficients."""
        return MappedVectorStatistics({"beta": self.beta.copy()})

    def set_parameters(self, w: MappedVectorStatistics) -> None:
        """Set the coefficients."""
        self.beta = w["beta"].copy()

    def get_model_difference(self, other_parameters: Any, clone: bool = False) -> MappedVectorStatistics:
        """Difference to other coefficients."""
        return MappedVectorStatistics({"beta": self.beta - other_parameters["beta"]})

    def apply_model_update(self, statistics: MappedVectorStatistics) -> tuple[LinearModel, Metrics]:
        """Add an update."""
        self.beta = self.beta + statistics["beta"]
        return self, Metrics()


class GradientStep(FederatedAveraging):
    """One gradient step on a user's row."""

    def train_one_user(
        self, initial_model_state: Any, model: LinearModel, user_dataset: Any, central_context: Any
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """Step and take the difference."""
        features, labels = user_dataset.raw_data
        residuals = features @ model.beta - labels
        model.beta = model.beta - np.float32(0.1) * (residuals @ features)
        return model.get_model_difference(initial_model_state), Metrics()


def main() -> None:
    """Run some rounds and print seconds for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("num_clients", type=int)
    parser.add_argument("num_features", type=int)
    parser.add_argument("num_rounds", type=int)
    arguments = parser.parse_args()
    n, d = arguments.num_clients, arguments.num_features
    np.random.seed(0)  # noqa: NPY002 - pfl draws from the global state
    set_framework_module(numpy_ops)
    rng = np.random.default_rng(0)
    features = rng.standard_normal((n, d)).astype(np.float32)
    labels = features.sum(axis=1)
    users = FederatedDataset(
        lambda user: Dataset((features[user : user + 1], labels[user : user + 1]), user_id=str(user)),
        get_user_sampler("minimize_reuse", list(range(n))),
    )
    backend = SimulatedBackend(users, users, postprocessors=[GaussianMechanism(1.0, 1.0)])
    algorithm, model, seconds = GradientStep(), LinearModel(d), []
    for iteration in range(arguments.num_rounds):
        start = time.perf_counter()
        if not iteration:
            ready = time.time()
        context = CentralContext(
            current_central_iteration=iteration,
            do_evaluation=False,
            cohort_size=n,
            population=Population.TRAIN,
            algorithm_params=NNAlgorithmParams(arguments.num_rounds, 0, n, None),
            model_train_params=ModelHyperParams(),
            seed=iteration,
        )
        statistics, metrics = backend.gather_results(model, algorithm, central_context=context)
        model, _ = algorithm.process_aggregated_statistics(context, metrics, model, statistics)
        seconds.append(time.perf_counter() - start)
    assert np.isfinite(model.beta).all()
    assert model.beta.any()
    print(json.dumps({"ready": ready, "seconds": seconds}))


if __name__ == "__main__":
    main()
