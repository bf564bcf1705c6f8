"""Is the R² estimated without budget right? ``python -m simulations.estimated_r2`` prints the table.

On random splits of each task the training rows are released once, and the cross-fitted estimate is
compared with the R² on the test rows in the clear. Takes about ten seconds.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import numpy as np

from flwr_modulated import Auto, Distance, Guarantee, Mechanism, Modulation
from flwr_modulated.datasets import TASKS, load_task, r2_score, split_task
from flwr_modulated.evaluation import cross_validate
from flwr_modulated.sample import Sample

DELTA = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Estimated against true R² over splits, means and standard errors over splits.

    `error` compares like with like: the estimate with the mean test R² of the very fits
    that it evaluates, those of the folds. `full_error` compares it with the test R² of
    the fit to all training rows, which has seen a quarter more rows. `se_ratio` is the
    spread of the error over the mean reported standard error; test rows, too, have a
    part in that spread. `optimism` is nominal minus true R² of the full fit.
    """

    task: str
    epsilon: float
    estimated: float
    true: float
    error: float
    error_se: float
    full_error: float
    full_error_se: float
    se_ratio: float
    optimism: float


def compare(task_name: str, epsilon: float, *, num_splits: int, seed: int = 0) -> Comparison:
    """Estimate and truth on `num_splits` splits of a task at one ε."""
    mechanism = Mechanism(Modulation(), Guarantee(epsilon, DELTA, Distance(1.0)))
    task = load_task(task_name)
    draws = []
    for number in range(num_splits):
        split = split_task(task, number)
        rng = np.random.default_rng([seed, number, round(1000 * epsilon)])
        released = mechanism.release(split.train_features, rng=rng)
        sample = Sample.from_rows(released, split.train_labels, noise_std=mechanism.noise_std)
        result = cross_validate(sample)
        folds = [r2_score(split.test_features, split.test_labels, beta) for beta in result.fold_params]
        full = r2_score(split.test_features, split.test_labels, Auto().estimate(sample.moments()))
        draws.append((result.r2, result.r2_se, result.nominal_r2, float(np.mean(folds)), full))
    estimated, errors, nominal, true, full_fit = np.array(draws).T
    error, full_error = estimated - true, estimated - full_fit
    root = math.sqrt(num_splits)
    return Comparison(
        task=task_name,
        epsilon=epsilon,
        estimated=float(estimated.mean()),
        true=float(true.mean()),
        error=float(error.mean()),
        error_se=float(error.std(ddof=1) / root),
        full_error=float(full_error.mean()),
        full_error_se=float(full_error.std(ddof=1) / root),
        se_ratio=float(error.std(ddof=1) / errors.mean()),
        optimism=float((nominal - full_fit).mean()),
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m simulations.estimated_r2", description=__doc__)
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 2.0, 4.0, 8.0])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"δ = {DELTA:g}, relation {Distance(1.0)}, unit row, labels public; {options.splits} splits\n")
    print("| task | ε | estimated | true | error ± SE | error/SE | against full fit | SD/SE | optimism |")
    print("|---|---|---|---|---|---|---|---|---|")
    for task in TASKS:
        for epsilon in options.epsilons:
            c = compare(task, epsilon, num_splits=options.splits, seed=options.seed)
            print(
                f"| {task} | {epsilon:g} | {c.estimated:.3f} | {c.true:.3f} "
                f"| {c.error:+.4f} ± {c.error_se:.4f} | {c.error / c.error_se:+.2f} "
                f"| {c.full_error:+.4f} ± {c.full_error_se:.4f} | {c.se_ratio:.2f} | {c.optimism:+.3f} |"
            )


if __name__ == "__main__":
    main()
