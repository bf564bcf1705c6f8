"""How well each method will do, before any data: the package's estimators on draws of its moments."""

from __future__ import annotations

import numpy as np

from ._typing import FloatArray
from .assumptions import Population
from .estimators import Estimator, GradientDescent
from .release_law import ReleaseLaw

__all__ = [
    "coefficient_spread",
    "draw_estimates",
    "draw_iterates",
    "draw_moment_estimates",
    "expected_r2_loss",
    "federated_averaging_loss",
]

# Interquartile range of a standard normal variable.
_NORMAL_IQR = 1.3489795003921634


def expected_r2_loss(
    law: ReleaseLaw,
    estimator: Estimator,
    population: Population,
    *,
    num_draws: int,
    rng: np.random.Generator,
) -> float:
    """Mean R² loss of an estimator over draws of one-shot moments.

    Parameters
    ----------
    law : ReleaseLaw
        What the server receives.
    estimator : Estimator
        What it does with it.
    population : Population
        The rows that it predicts: as they are before clipping.
    num_draws : int
        Number n of independent studies.
    rng : numpy.random.Generator
        Source of the draws.

    Returns
    -------
    float

    Notes
    -----
    The loss of the first-order estimate β + Σ⁻¹(ẑ − Σ̂β) on the same draws serves as control
    variate: its mean is known exactly, and near the truth the two move together.
    """
    second, cross, squares = law.draw_one_shot(num_draws, rng=rng)
    moments = law.debiased((second, cross, squares), num_releases=law.num_releases)
    losses = population.r2_loss(np.array([estimator.estimate(each) for each in moments]))
    second, cross = law.feature_block(second, cross)
    released = law.population
    scores = cross - second @ released.beta
    control = np.sum(scores * np.linalg.solve(released.second_moment, scores.T).T, axis=1)
    mean = float(np.sum(released.second_moment * law.covariance(equal_errors=True)))
    slope = np.mean((losses - losses.mean()) * control) / control.var()
    return float(losses.mean() - slope * (control.mean() - mean))


def draw_estimates(
    law: ReleaseLaw, estimator: Estimator, *, num_draws: int, rng: np.random.Generator
) -> FloatArray:
    """Coefficients that an estimator gives on draws of one-shot moments.

    Parameters
    ----------
    law, estimator, num_draws, rng
        As in :func:`expected_r2_loss`.

    Returns
    -------
    ndarray of shape (n, d)
    """
    drawn = law.draw_one_shot(num_draws, rng=rng)
    moments = law.debiased(drawn, num_releases=law.num_releases)
    return np.array([estimator.estimate(each) for each in moments])


def draw_moment_estimates(law: ReleaseLaw, *, num_draws: int, rng: np.random.Generator) -> FloatArray:
    """The unregularised Σ̂⁻¹ẑ on draws of one-shot moments, all solved at once.

    Parameters
    ----------
    law, num_draws, rng
        As in :func:`expected_r2_loss`.

    Returns
    -------
    ndarray of shape (n, d)
    """
    second, cross = law.feature_block(*law.draw_one_shot(num_draws, rng=rng)[:2])
    return np.asarray(np.linalg.solve(second, cross[:, :, None])[:, :, 0])


def coefficient_spread(law: ReleaseLaw, estimates: FloatArray) -> FloatArray:
    """Standard errors that hold at any noise: interquartile ranges, in normal standard deviations.

    Parameters
    ----------
    law : ReleaseLaw
        Where the estimates come from.
    estimates : ndarray of shape (n, d)
        From :func:`draw_moment_estimates`.

    Returns
    -------
    ndarray of shape (d,)
        In coefficient units. They approach :meth:`ReleaseLaw.standard_errors` as the noise
        ratio vanishes; beyond a ratio of 0.3 the estimator has tails so heavy that its
        standard deviation says nothing.

    Notes
    -----
    The draws take e as independent of x; the asymptotic formula says what the population's
    score moment changes about that.
    """
    quartiles = np.quantile(estimates, [0.25, 0.75], axis=0)
    unequal = law.standard_errors() / law.standard_errors(equal_errors=True)
    return np.asarray((quartiles[1] - quartiles[0]) / _NORMAL_IQR * unequal)


def draw_iterates(
    law: ReleaseLaw, descent: GradientDescent, *, num_draws: int, rng: np.random.Generator
) -> FloatArray:
    """Last iterate of the iterative method, one fresh release of the same rows a step.

    Parameters
    ----------
    law : ReleaseLaw
        ``num_releases`` is the number of steps T; `noise_std` must account for all.
    descent : GradientDescent
        The step and the ball; its `num_steps` is not used.
    num_draws : int
        Number n of independent studies.
    rng : numpy.random.Generator
        Source of the draws.

    Returns
    -------
    ndarray of shape (n, d)
    """
    rows = law.draw_rows(num_draws, rng=rng)
    beta = np.zeros((num_draws, law.population.num_features))
    for _ in range(law.num_releases):
        label = np.full((num_draws, law.num_columns - beta.shape[1]), -(law.label_scale or 0.0))
        received = law.debiased(law.draw_release(rows, np.column_stack([beta, label]), rng=rng))
        beta = np.array([descent.update(b, moments) for b, moments in zip(beta, received, strict=True)])
    return beta


def federated_averaging_loss(
    population: Population,
    *,
    num_samples: int,
    noise_multiplier: float,
    num_rounds: int,
    central: bool,
    clips: tuple[float, ...] = (0.5, 1.0, 2.0),
    steps: tuple[float, ...] = (0.1, 0.3, 1.0),
    num_draws: int = 16,
    rng: np.random.Generator,
) -> float:
    """R² loss of DP FedAvg on clipped one-row gradients, at its best clip norm and step.

    Parameters
    ----------
    population : Population
        Of unclipped rows.
    num_samples : int
        K clients, one row each, all in every round.
    noise_multiplier : float
        Noise standard deviation over the sensitivity 2C, in every round.
    num_rounds : int
        T.
    central : bool
        Whether a trusted server adds the noise once to the sum, or every client adds its own.
    clips : tuple of float
        Clip norms C tried, in units of label × feature.
    steps : tuple of float
        Step sizes tried, over the largest eigenvalue of Σ.
    num_draws : int, default 16
        Noise paths averaged over.
    rng : numpy.random.Generator
        Source of the noise.

    Returns
    -------
    float
        Mean loss of the last iterate. Clip and step are picked with hindsight, which flatters it.

    Notes
    -----
    Clipping is evaluated on 512 Gaussian rows whose second moments are exactly the population's;
    the sampling error of K rows enters as E e²·d/K.
    """
    d, sigma = population.num_features, population.second_moment
    z = np.random.default_rng(0).standard_normal((512, d + 1))
    z = np.linalg.qr(z)[0] * np.sqrt(len(z))
    x = z[:, :d] @ np.linalg.cholesky(sigma).T
    y = x @ population.beta + np.sqrt(population.residual_variance) * z[:, d]
    norms = np.linalg.norm(x, axis=1)[:, None]
    smoothness = float(np.linalg.eigvalsh(sigma)[-1])
    grid = np.array([(clip, step / smoothness) for clip in clips for step in steps]).repeat(num_draws, axis=0)
    clip, step = grid.T
    noise_std = 2 * clip * noise_multiplier / (num_samples if central else np.sqrt(num_samples))
    beta = np.zeros((d, len(grid)))
    for _ in range(num_rounds):
        residual = x @ beta - y[:, None]
        residual *= np.minimum(1.0, clip / np.maximum(np.abs(residual) * norms, np.finfo(np.float64).tiny))
        beta -= step * (x.T @ residual / len(x) + noise_std * rng.standard_normal(beta.shape))
    losses = population.r2_loss(beta.T).reshape(-1, num_draws).mean(axis=1)
    return float(losses.min()) + population.residual_variance * d / num_samples / population.label_square
