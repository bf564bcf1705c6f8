"""Standard errors, tests and intervals: against statsmodels, exact expectations and closed forms."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
from designs import SECOND_MOMENTS, all_releases
from numpy.typing import NDArray
from scipy import stats

from flwr_modulated import (
    Auto,
    DebiasedMoments,
    Distance,
    Guarantee,
    InvalidDataError,
    InvalidParameterError,
    Mechanism,
    Modulation,
    Moments,
    ReplaceRecord,
    Ridge,
    draw_directions,
)
from flwr_modulated import sample as sample_module
from flwr_modulated.inference import Results
from flwr_modulated.sample import Group, Sample
from flwr_modulated.score import ScoreStatistic

FloatArray = NDArray[np.float64]

ROWS = np.array([[0.5, -1.0, 2.0], [1.5, -0.75, -0.5], [-1.0, 2.0, 1.0]])
LABELS = np.array([1.0, -2.0, 0.5])
CONTRAST = np.array([0.3, -0.7, 1.1, 0.4, -1.0])  # slopes, intercept, label
EPSILONS = (2.0, 6.0, 3.0)


def regression(n: int = 300, *, seed: int = 0) -> tuple[FloatArray, FloatArray]:
    """Correlated features off the origin, errors whose variance depends on them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 3)) @ np.array([[1.0, 0.4, 0.0], [0.0, 1.0, -0.3], [0.0, 0.0, 1.0]]) + 0.5
    return x, x @ [1.0, -0.5, 0.0] + 0.7 + (0.5 + np.abs(x[:, 0])) * rng.standard_normal(n)


def noisy(
    sigma: float, *, n: int = 400, d: int = 3, seed: int = 1, modulation: Modulation | None = None
) -> tuple[Sample, FloatArray]:
    rng = np.random.default_rng(seed)
    beta = np.linspace(1.0, -0.5, d)
    x = rng.standard_normal((n, d))
    y = x @ beta + rng.standard_normal(n)
    modulation = Modulation() if modulation is None else modulation
    v = draw_directions(d, modulation.num_directions, rng=rng)
    released = modulation.apply(x, v, rng=rng) + sigma * rng.standard_normal((n, d))
    return Sample.from_rows(released, y, noise_std=sigma, modulation=modulation, directions=v), beta


class TestAgainstStatsmodels:
    """Reference: statsmodels, whose covariances are an independent implementation."""

    @pytest.fixture
    def sm(self):  # type: ignore[no-untyped-def]
        return pytest.importorskip("statsmodels.api")

    @pytest.mark.parametrize("intercept", [False, True])
    def test_hc0_without_noise(self, sm, intercept: bool) -> None:  # type: ignore[no-untyped-def]
        """Rows without noise are ordinary least squares with HC0 errors, to 1e-8."""
        x, y = regression()
        ours = Results.from_rows(x, y, noise_std=0.0, fit_intercept=intercept)
        design = np.column_stack([x, np.ones(len(x))]) if intercept else x
        theirs = sm.OLS(y, design).fit(cov_type="HC0")
        np.testing.assert_allclose(ours.params, theirs.params, rtol=1e-8)
        np.testing.assert_allclose(ours.bse, theirs.bse, rtol=1e-8)
        np.testing.assert_allclose(ours.tvalues, theirs.tvalues, rtol=1e-8)
        np.testing.assert_allclose(ours.pvalues, theirs.pvalues, rtol=1e-8, atol=1e-300)
        np.testing.assert_allclose(ours.cov_params(), theirs.cov_params(), rtol=1e-8, atol=1e-14)
        np.testing.assert_allclose(ours.conf_int(0.1), theirs.conf_int(0.1), rtol=1e-8)
        restrictions = np.array([[1.0, 2.0, 0.0], [0.0, 1.0, 1.0]])
        if intercept:
            restrictions = np.column_stack([restrictions, [0.0, 1.0]])
        expected = theirs.wald_test((restrictions, [0.1, -0.4]), use_f=False, scalar=True)
        test = ours.wald_test(restrictions, [0.1, -0.4])
        assert test.statistic == pytest.approx(float(expected.statistic), rel=1e-8)
        assert test.pvalue == pytest.approx(float(expected.pvalue), rel=1e-8)
        assert test.distribution == "chi2(2)"

    def test_units(self, sm) -> None:  # type: ignore[no-untyped-def]
        """Standardised rows report what a fit to the original rows and labels reports."""
        x, y = regression()
        centre, scale = x.mean(axis=0) + 0.3, np.array([2.0, 0.1, 5.0])
        ours = Results.from_rows(
            (x - centre) / scale,
            (y - 0.2) / 3.0,
            noise_std=0.0,
            fit_intercept=True,
            centre=centre,
            scale=scale,
            label_centre=0.2,
            label_scale=3.0,
        )
        theirs = sm.OLS(y, np.column_stack([x, np.ones(len(x))])).fit(cov_type="HC0")
        np.testing.assert_allclose(ours.params, theirs.params, rtol=1e-8)
        np.testing.assert_allclose(ours.cov_params(), theirs.cov_params(), rtol=1e-8, atol=1e-14)
        np.testing.assert_allclose(ours.predict(x), theirs.fittedvalues, rtol=1e-8)

    def test_units_without_intercept(self) -> None:
        """Prediction then goes through the public centre, where the label is `label_centre`."""
        x, y = regression()
        ours = Results.from_rows(
            (x - 1.0) / 2.0,
            (y - 0.2) / 3.0,
            noise_std=0,
            centre=1.0,
            scale=2.0,
            label_centre=0.2,
            label_scale=3.0,
        )
        slopes = np.linalg.lstsq(x - 1.0, y - 0.2)[0]
        np.testing.assert_allclose(ours.params, slopes, rtol=1e-10)
        np.testing.assert_allclose(ours.predict(x), 0.2 + (x - 1.0) @ slopes, rtol=1e-9)

    def test_clusters_without_noise(self, sm) -> None:  # type: ignore[no-untyped-def]
        """Nodes of one size are statsmodels' clusters times G/(G−1), with t of G−1 degrees of freedom."""
        x, y = regression()
        nodes = np.repeat(np.arange(20), 15)
        groups = [Moments.from_rows(x[nodes == g], y[nodes == g], noise_std=0.0) for g in range(20)]
        ours = Results.from_moments(groups, fit_intercept=True)
        options = {"groups": nodes, "use_correction": False}
        theirs = sm.OLS(y, np.column_stack([x, np.ones(300)])).fit(
            cov_type="cluster", cov_kwds=options, use_t=True
        )
        np.testing.assert_allclose(ours.cov_params(), theirs.cov_params() * 20 / 19, rtol=1e-8, atol=1e-14)
        assert ours.df_units == pytest.approx(19.0)
        width = stats.t.isf(0.025, 19) * ours.bse
        np.testing.assert_allclose(ours.conf_int()[:, 1] - ours.params, width, rtol=1e-10)
        by_rows = Results.from_rows(x, y, noise_std=0.0, units=nodes.tolist(), fit_intercept=True)
        np.testing.assert_allclose(by_rows.cov_params(), ours.cov_params(), rtol=1e-8, atol=1e-14)

    def test_score_statistic_is_the_auxiliary_regression(self, sm) -> None:  # type: ignore[no-untyped-def]
        """Q is n times the uncentred R² of a column of ones on the scores (the LM test's textbook form)."""
        sample, beta = noisy(1.0)
        test = Results.from_sample(sample).score_test(beta)
        scores = ScoreStatistic(sample, 3).scores(np.append(beta, -1.0))
        fit = sm.OLS(np.ones(len(scores)), scores).fit()
        expected = fit.ess / fit.uncentered_tss * len(scores)
        assert test.statistic == pytest.approx(expected, rel=1e-8)
        assert test.pvalue == pytest.approx(float(stats.chi2.sf(expected, 3)), rel=1e-8)


def check_scores_are_unbiased() -> None:
    """E W_i v = (x, 1, y)·(xᵀβ + b − y) for every row, exactly: own noise, m = 0 … 3, private labels."""
    for m in range(4):
        modulation = Modulation(0.3, 1.3, 0.9, m)
        for i, (row, label) in enumerate(zip(ROWS, LABELS, strict=True)):
            augmented = np.concatenate([row, [1.0, label]])
            expected = augmented * (augmented @ CONTRAST)
            mechanism = Mechanism(modulation, Guarantee(EPSILONS[i], 1e-3, Distance(1.0)))
            directions = draw_directions(3, m, rng=np.random.default_rng(3))
            released, weights = all_releases(mechanism, row, directions, SECOND_MOMENTS)
            sample = Sample.from_rows(
                released,
                np.full(len(released), label),
                noise_std=np.full(len(released), mechanism.noise_std),
                modulation=modulation,
                directions=directions,
            )
            np.testing.assert_allclose(weights @ sample.products(CONTRAST), expected, rtol=0, atol=1e-11)
        if m < 3:
            check_joint_scores_are_unbiased(modulation)


def check_joint_scores_are_unbiased(modulation: Modulation) -> None:
    scale = 2.5
    mechanism = Mechanism(modulation, Guarantee(8.0, 1e-2, ReplaceRecord(4.0, scale)))
    directions = draw_directions(3, modulation.num_directions, rng=np.random.default_rng(6))
    row, label = ROWS[1, :2], LABELS[1]
    record = np.append(row, label / scale)
    released, weights = all_releases(mechanism, record, directions, SECOND_MOMENTS)
    options = {"modulation": modulation, "directions": directions, "joint_label_scale": scale}
    contrast = CONTRAST[[0, 1, 3, 4]]
    augmented = np.concatenate([row, [1.0, label]])
    expected = augmented * (augmented @ contrast)
    sample = Sample.from_rows(released, None, noise_std=mechanism.noise_std, **options)
    np.testing.assert_allclose(weights @ sample.products(contrast), expected, rtol=0, atol=1e-11)


class TestSample:
    def test_scores_are_unbiased(self) -> None:
        check_scores_are_unbiased()

    @pytest.mark.parametrize("mutant", ["without the modulation's term", "noise variance off by 10 %"])
    def test_mutants_are_caught(self, monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
        if mutant.startswith("without"):
            monkeypatch.setattr(
                sample_module,
                "modulation_offset",
                lambda modulation, directions, *, num_features: np.zeros((num_features,) * 2),
            )
        else:
            whole = sample_module.Rows.products

            def lazy(self: sample_module.Rows, vector: FloatArray) -> FloatArray:
                return whole(replace(self, variances=0.9 * self.variances), vector)

            monkeypatch.setattr(sample_module.Rows, "products", lazy)
        with pytest.raises(AssertionError):
            check_scores_are_unbiased()

    @pytest.mark.parametrize("joint", [False, True])
    def test_rows_and_nodes_agree(self, joint: bool, rng: np.random.Generator) -> None:
        """Moments of a sample are those of its parts, whichever way they arrived."""
        modulation = Modulation(0.2, 0.7, 0.5, 2)
        columns = 4 if joint else 3
        directions = draw_directions(columns, 2, rng=rng)
        rows, y = rng.standard_normal((30, columns)), None if joint else rng.standard_normal(30)
        std = rng.uniform(0.5, 1.5, 30)
        options = {
            "modulation": modulation,
            "directions": directions,
            "joint_label_scale": 2.5 if joint else None,
        }
        by_rows = Sample.from_rows(rows, y, noise_std=std, **options)
        parts = [slice(0, 7), slice(7, 12), slice(12, 30)]
        groups = [Moments.from_rows(rows[s], None if joint else y[s], noise_std=std[s]) for s in parts]
        by_nodes = Sample.from_moments(groups, **options)
        whole = Moments.sum(groups).debias(modulation, directions)
        if joint:
            whole = DebiasedMoments.from_joint(whole, label_scale=2.5)
        for sample in (by_rows, by_nodes):
            moments = sample.moments()
            np.testing.assert_allclose(moments.second_moment, whole.second_moment, atol=1e-12)
            np.testing.assert_allclose(moments.cross_moment, whole.cross_moment, atol=1e-12)
            np.testing.assert_allclose(moments.feature_mean, whole.feature_mean, atol=1e-12)
            for name in ("num_samples", "label_mean", "label_square", "noise_scale", "modulation_scale"):
                assert getattr(moments, name) == pytest.approx(getattr(whole, name), rel=1e-12)
        vector = rng.standard_normal(by_rows.num_features + 2)
        by_row = by_rows.products(vector)
        np.testing.assert_allclose(
            by_nodes.products(vector), [by_row[s].sum(axis=0) for s in parts], atol=1e-10
        )
        np.testing.assert_allclose(by_rows.quadratic(vector), by_row @ vector, atol=1e-12)
        keep = np.array([True, False, True])
        one = by_nodes.moments(keep)
        other = by_rows.moments(np.repeat(keep, [7, 5, 18]))
        np.testing.assert_allclose(one.second_moment, other.second_moment, atol=1e-12)
        assert by_nodes.effective_units == pytest.approx(30**2 / (7**2 + 5**2 + 18**2))

    def test_rounds_with_their_own_directions(self, rng: np.random.Generator) -> None:
        """Nodes of several rounds pool to the average of the rounds' debiased moments."""
        modulation = Modulation(0.2, 0.7, 0.5, 1)
        rounds, groups = [], []
        for size in (20, 40):
            v = draw_directions(3, 1, rng=rng)
            moments = Moments.from_rows(
                rng.standard_normal((size, 3)), rng.standard_normal(size), noise_std=0.5
            )
            rounds.append(moments.debias(modulation, v))
            groups.append(Group(moments, modulation, v))
        pooled = DebiasedMoments.pool(rounds)
        np.testing.assert_allclose(
            Sample.from_moments(groups).moments().second_moment, pooled.second_moment, atol=1e-12
        )
        apart = Sample.from_moments(groups[:1]) + Sample.from_moments(groups[1:])
        assert apart.num_units == 2
        np.testing.assert_allclose(apart.moments().second_moment, pooled.second_moment, atol=1e-12)

    @pytest.mark.parametrize("joint", [False, True])
    def test_weights_of_rows_with_noise_of_their_own(self, joint: bool, rng: np.random.Generator) -> None:
        """Weighted rows have the moments that combine makes of the two noise levels."""
        scale = 2.0 if joint else None
        rows, y = rng.standard_normal((50, 4)), None if joint else rng.standard_normal(50)
        std = np.where(np.arange(50) < 20, 0.4, 1.7)
        weighted = Sample.from_rows(rows, y, noise_std=std, joint_label_scale=scale).weighted()
        levels = [
            Moments.from_rows(rows[s], None if joint else y[s], noise_std=std[s])
            for s in (slice(0, 20), slice(20, 50))
        ]
        expected = DebiasedMoments.combine(level.debias() for level in levels)
        if joint:
            expected = DebiasedMoments.from_joint(expected, label_scale=2.0)
        nodes = Sample.from_moments(levels, joint_label_scale=scale).weighted()
        for moments in (weighted.moments(), nodes.moments()):
            np.testing.assert_allclose(moments.second_moment, expected.second_moment, rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(moments.cross_moment, expected.cross_moment, rtol=1e-10, atol=1e-12)
            for name in ("num_samples", "label_mean", "label_square", "noise_scale", "noise_fourth"):
                assert getattr(moments, name) == pytest.approx(getattr(expected, name), rel=1e-10)
        assert weighted.weights.sum() == pytest.approx(50.0)
        assert weighted.weights[0] > weighted.weights[-1]

    def test_equal_noise_needs_no_weights(self) -> None:
        sample, _ = noisy(0.7, modulation=Modulation(0.2, 0.6, 0.5, 1))
        assert sample.weighted() is sample
        own = Sample.from_rows(np.eye(3), np.ones(3), noise_std=[0.1, 0.1, 0.5])
        assert own.weighted() is not own
        without_signal = Sample.from_rows(np.eye(3), np.ones(3), noise_std=[0.0, 0.0, 1.0])
        assert without_signal.moments().second_moment == pytest.approx(0.0)
        assert without_signal.weighted() is without_signal

    def test_weights_sharpen_inference(self, rng: np.random.Generator) -> None:
        """Half the devices without privacy: their rows should decide, not be drowned by the others'."""
        x, y = regression(2000)
        std = np.where(np.arange(2000) % 2 == 0, 0.0, 5.0)
        released = x + std[:, None] * rng.standard_normal(x.shape)
        half = Results.from_rows(x[::2], y[::2], noise_std=0.0)
        both = Results.from_rows(released, y, noise_std=std)
        assert (both.bse < 1.1 * half.bse).all()

    def test_repeated_releases_of_a_unit_count_once(self) -> None:
        """Releasing the same rows again without noise adds rows but no information."""
        x, y = regression(60)
        once = Sample.from_rows(x, y, noise_std=0.0)
        names = [f"client {i}" for i in range(60)]
        first = Sample.from_rows(x, y, noise_std=0.0, units=names)
        twice = first + first
        assert (twice.num_samples, twice.num_units, twice.grouped) == (120, 60, True)
        plain, repeated = Results.from_sample(once), Results.from_sample(twice)
        np.testing.assert_allclose(repeated.params, plain.params, rtol=1e-12)
        np.testing.assert_allclose(repeated.cov_params(), plain.cov_params() * 60 / 59, rtol=1e-10)
        groups = [
            Group(Moments.from_rows(x[i : i + 1], y[i : i + 1], noise_std=0), unit=i) for i in range(60)
        ]
        by_nodes = Results.from_moments(groups + groups)
        np.testing.assert_allclose(by_nodes.cov_params(), repeated.cov_params(), rtol=1e-10)

    def test_ids_of_different_types_are_different_units(self) -> None:
        sample = Sample.from_rows(np.eye(3), np.ones(3), noise_std=0, units=[1, "1", 1])
        assert sample.num_units == 2
        np.testing.assert_array_equal(sample.weights, [2, 1])
        unnamed = sample + Sample.from_rows(np.eye(3), np.ones(3), noise_std=0)
        assert unnamed.num_units == 5


class TestScore:
    def test_zero_at_the_estimate_and_the_same_in_all_units(self) -> None:
        x, y = regression()
        centre, scale = np.array([1.0, -2.0, 0.5]), np.array([2.0, 0.5, 3.0])
        rng = np.random.default_rng(5)
        released = (x - centre) / scale + 0.4 * rng.standard_normal(x.shape)
        plain = Results.from_rows(released, y, noise_std=0.4, fit_intercept=True)
        original = Results.from_rows(
            released,
            y / 2.0 - 1.0,
            noise_std=0.4,
            fit_intercept=True,
            centre=centre,
            scale=scale,
            label_centre=2.0,
            label_scale=2.0,
        )
        assert plain.score_test(plain.params).statistic == pytest.approx(0.0, abs=1e-10)
        slopes = np.array([2.0, -0.2, 0.1])
        there = original.score_test(np.append(slopes / scale, 0.6 - centre @ (slopes / scale)))
        assert plain.score_test(np.append(slopes, 0.6)).statistic == pytest.approx(there.statistic, rel=1e-8)
        assert not original.in_confidence_region(np.append(slopes / scale, 50.0))
        assert original.in_confidence_region(original.params)
        fixed = {"x1": 2.0 / scale[0]}
        assert original.score_test(fixed).statistic == pytest.approx(
            plain.score_test({"x1": 2.0}).statistic, rel=1e-4, abs=1e-6
        )

    @pytest.mark.parametrize("sigma", [0.0, 1.0, 8.0])
    def test_gradient(self, sigma: float) -> None:
        sample, _ = noisy(sigma, modulation=Modulation(0.2, 0.6, 0.5, 1))
        score = ScoreStatistic(sample, 4)
        v = np.array([0.5, -1.0, 0.3, 0.2, -0.8])
        _, slope = score.value_and_gradient(v)
        steps = 1e-6 * np.eye(5)
        numeric = [(score.value(v + e) - score.value(v - e)) / 2e-6 for e in steps]
        np.testing.assert_allclose(slope, numeric, rtol=1e-4, atol=1e-5)
        assert slope @ v == pytest.approx(0.0, abs=1e-8)  # Q does not depend on the length of v

    @pytest.mark.parametrize("seed", range(2))
    @pytest.mark.parametrize("sigma", [0.5, 2.0, 10.0])
    def test_minimum_over_one_free_coefficient(self, sigma: float, seed: int) -> None:
        """Against all directions of a fine half circle, infinity included, in two dimensions."""
        sample, _ = noisy(sigma, d=2, seed=seed)
        results = Results.from_sample(sample)
        score = ScoreStatistic(sample, 2)
        angles = np.linspace(0.0, math.pi, 1001)
        found = results.score_test([3.0, np.nan])
        grid = min(score.value(np.array([-3.0 * np.cos(a), np.sin(a), np.cos(a)])) for a in angles.tolist())
        assert grid - 5e-3 * max(grid, 1e-2) <= found.statistic <= grid + 1e-9
        assert found.distribution == "chi2(1)"

    @pytest.mark.parametrize(("sigma", "bounded"), [(0.0, True), (1.0, True), (30.0, False)])
    def test_interval_of_a_single_coefficient_in_closed_form(self, sigma: float, bounded: bool) -> None:
        """One feature: s(b)² ≤ c·Σψ(b)² is a quadratic inequality (Fieller)."""
        sample, _ = noisy(sigma, d=1, n=100)
        unit = np.eye(3)
        a, b = sample.products(unit[0])[:, 0], sample.products(unit[2])[:, 0]
        c = float(stats.chi2.isf(0.1, 1))
        quadratic = [
            a.sum() ** 2 - c * (a @ a),
            -2.0 * (a.sum() * b.sum() - c * (a @ b)),
            b.sum() ** 2 - c * (b @ b),
        ]
        low, high = Results.from_sample(sample).score_interval("x1", alpha=0.1)
        if bounded:
            assert quadratic[0] > 0
            np.testing.assert_allclose([low, high], sorted(np.roots(quadratic)), rtol=1e-5)
        else:
            assert quadratic[0] < 0
            assert (low, high) == (-math.inf, math.inf)

    def test_interval_ends_are_where_the_test_rejects(self) -> None:
        sample, _ = noisy(0.5)
        for results in (
            Results.from_sample(sample, feature_names=["a", "b", "c"]),
            Results.from_sample(
                sample, feature_names=["a", "b", "c"], fit_intercept=True, scale=[2.0, 3.0, 0.5], centre=1.0
            ),
        ):
            for end in results.score_interval("b", alpha=0.2):
                assert results.score_test({"b": end}).pvalue == pytest.approx(0.2, abs=1e-3)
        assert results.score_interval(1, alpha=0.2) == results.score_interval("b", alpha=0.2)

    def test_groups_use_hotelling(self) -> None:
        """Equal nodes: the F of the statistic is that of Hotelling's T² of the nodes' scores."""
        x, y = regression(160)
        groups = [Moments.from_rows(x[i::16], y[i::16], noise_std=0.0) for i in range(16)]
        test = Results.from_moments(groups).score_test([1.1, -0.4, 0.2])
        scores = np.array([(x[i::16] @ [1.1, -0.4, 0.2] - y[i::16]) @ x[i::16] for i in range(16)])
        mean, covariance = scores.mean(axis=0), np.cov(scores.T)
        t2 = 16 * mean @ np.linalg.solve(covariance, mean)
        expected = t2 * (16 - 3) / (3 * 15)
        assert test.statistic == pytest.approx(expected, rel=1e-8)
        assert test.pvalue == pytest.approx(float(stats.f.sf(expected, 3, 13)), rel=1e-8)

    def test_wald_of_groups_is_t_squared(self) -> None:
        x, y = regression(160)
        groups = [Moments.from_rows(x[i::16], y[i::16], noise_std=0.0) for i in range(16)]
        results = Results.from_moments(groups)
        test = results.wald_test([0.0, 1.0, 0.0])
        assert test.statistic == pytest.approx(results.tvalues[1] ** 2, rel=1e-10)
        assert test.pvalue == pytest.approx(results.pvalues[1], rel=1e-10)


class TestReport:
    GUARANTEE = Guarantee(2.0, 1e-5, ReplaceRecord(3.0, 12.345678), unit="client", rows_per_client=12)

    def results(self, sigma: float, **options: object) -> Results:
        sample, _ = noisy(sigma, d=2)
        return Results.from_sample(sample, **options)  # type: ignore[arg-type]

    def test_summary(self) -> None:
        names = ["income", "a name that is much longer than its column"]
        results = self.results(
            0.2,
            guarantee=self.GUARANTEE,
            feature_names=names,
            label_name="spending",
            fit_intercept=True,
            scale=[1e-7, 1e7],
        )
        text = str(results.summary())
        assert max(len(line) for line in text.splitlines()) <= 80
        assert str(self.GUARANTEE) in " ".join(text.split())
        for part in ("spending", "income", "a name that is", "const", "400", "0.2", "τ / λ_min"):
            assert part in text
        assert "WARNING" not in text
        assert repr(results.summary()) == text

    @pytest.mark.parametrize(("sigma", "trusted"), [(0.0, True), (0.3, True), (2.0, False), (20.0, False)])
    def test_warning(self, sigma: float, trusted: bool) -> None:
        """Above τ/λ_min = 0.3, and without a positive definite Σ̂, summaries say not to trust them."""
        results = self.results(sigma)
        assert (results.identification_ratio <= 0.3) == trusted
        assert (not results.caveats) == trusted
        assert ("WARNING" in str(results.summary())) == (not trusted)

    def test_no_standard_errors_without_a_definite_second_moment(self) -> None:
        sample, _ = noisy(20.0, d=2, seed=3)
        results = Results.from_sample(sample)
        assert results.spectrum[0] < 0
        assert results.identification_ratio == math.inf
        assert np.isnan(results.bse).all()
        assert np.isnan(results.conf_int()).all()
        assert np.isnan(results.pvalues).all()
        assert "not positive definite" in str(results.summary())
        with pytest.raises(InvalidParameterError, match="score_test"):
            results.wald_test([1.0, 0.0])
        assert 0 <= results.score_test([1.0, -0.5]).pvalue <= 1

    def test_collinear_features(self) -> None:
        x, y = regression()
        results = Results.from_rows(x[:, [0, 1, 1]], y, noise_std=0.0)
        assert results.identification_ratio == math.inf
        np.testing.assert_allclose(results.params[1], results.params[2], rtol=1e-8)

    def test_few_nodes(self) -> None:
        x, y = regression(30)
        groups = [Moments.from_rows(x[i::3], y[i::3], noise_std=0.0) for i in range(3)]
        results = Results.from_moments(groups)
        assert np.isfinite(results.bse).all()
        assert "too few" in str(results.summary())
        with pytest.raises(InvalidParameterError, match="more than 3 nodes"):
            results.score_test([1.0, 0.0, 0.0])
        with pytest.raises(InvalidParameterError, match="more than 3 nodes"):
            results.wald_test(np.eye(3))
        alone = Results.from_moments(groups[:1])
        assert np.isnan(alone.bse).all()
        np.testing.assert_allclose(alone.params, np.linalg.lstsq(x[::3], y[::3])[0], rtol=1e-8)

    def test_shrunk_params(self) -> None:
        sample, _ = noisy(1.0)
        moments = sample.moments()
        np.testing.assert_array_equal(Results.from_sample(sample).shrunk_params, Auto().estimate(moments))
        ridge = Results.from_sample(sample, estimator=Ridge(0.5), fit_intercept=True)
        slopes = Ridge(0.5).estimate(moments.centred())
        np.testing.assert_allclose(ridge.shrunk_params[:3], slopes, rtol=1e-12)
        np.testing.assert_allclose(
            ridge.shrunk_params[3], moments.label_mean - moments.feature_mean @ slopes, rtol=1e-12
        )
        np.testing.assert_allclose(ridge.params, Results.from_sample(sample, fit_intercept=True).params)

    def test_private_labels_without_noise(self) -> None:
        """Joint records (x, y / s_y) without noise give the same as rows with their labels."""
        x, y = regression()
        guarantee = Guarantee(1.0, 1e-5, ReplaceRecord(5.0, 4.0))
        records = np.column_stack([x, y / 4.0])
        joint = Results.from_rows(records, None, noise_std=0.0, guarantee=guarantee, fit_intercept=True)
        public = Results.from_rows(x, y, noise_std=0.0, fit_intercept=True)
        np.testing.assert_allclose(joint.params, public.params, rtol=1e-9)
        np.testing.assert_allclose(joint.cov_params(), public.cov_params(), rtol=1e-8, atol=1e-14)
        halves = [Moments.from_rows(records[i::2], None, noise_std=0.0) for i in range(2)]
        np.testing.assert_allclose(
            Results.from_moments(halves, guarantee=guarantee, fit_intercept=True).params,
            public.params,
            rtol=1e-9,
        )

    def test_diagnostics_figure(self) -> None:
        """One call, with or without a definite Σ̂; it leaves no figure open and warns of nothing."""
        pytest.importorskip("matplotlib")
        from flwr_modulated.diagnostics import plot_diagnostics

        for sigma in (0.0, 0.3, 20.0):
            results = self.results(sigma, guarantee=self.GUARANTEE, fit_intercept=True)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                figure = plot_diagnostics(results)
                figure.canvas.draw()
            assert len(figure.axes) == 3
            left, middle, _ = figure.axes
            assert [tick.get_text() for tick in left.get_yticklabels()] == ["x1", "x2"]
            drawn = [line.get_ydata() for line in middle.lines if line.get_label() == "eigenvalues"]
            np.testing.assert_array_equal(drawn, [results.spectrum[::-1]])
            assert "labels private" in figure.get_suptitle()


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"feature_names": ["a"]}, "feature_names"),
            ({"feature_names": ["a", "a", "b"]}, "differ"),
            ({"feature_names": ["a", "const", "b"], "fit_intercept": True}, "const"),
            ({"scale": 0.0}, "scale"),
            ({"label_scale": -1.0}, "label_scale"),
            ({"centre": np.nan}, "centre"),
        ],
    )
    def test_report(self, options: dict[str, object], message: str) -> None:
        sample, _ = noisy(0.1)
        with pytest.raises((InvalidDataError, InvalidParameterError), match=message):
            Results.from_sample(sample, **options)  # type: ignore[arg-type]

    def test_hypotheses(self) -> None:
        results = Results.from_sample(noisy(0.1)[0])
        for call, message in (
            (lambda: results.score_test([1.0, 2.0]), "beta0"),
            (lambda: results.score_test([np.nan] * 3), "fix at least one"),
            (lambda: results.score_test({"x9": 1.0}), "x1, x2, x3"),
            (lambda: results.score_interval(3), "position"),
            (lambda: results.score_interval("x1", alpha=1.0), "alpha"),
            (lambda: results.conf_int(0.0), "alpha"),
            (lambda: results.wald_test([1.0, 0.0]), "R must have 3"),
            (lambda: results.wald_test(np.ones((2, 3))), "independent"),
        ):
            with pytest.raises((InvalidDataError, InvalidParameterError), match=message):
                call()

    def test_samples(self) -> None:
        rows, y = np.eye(3), np.ones(3)
        moments = Moments.from_rows(rows, y, noise_std=0.1)
        for call, message in (
            (lambda: Sample.from_rows(rows, None, noise_std=0.1), "joint_label_scale"),
            (lambda: Sample.from_rows(rows, y, noise_std=0.1, joint_label_scale=1.0), "labels must be None"),
            (lambda: Sample.from_rows(rows[:, :1], None, noise_std=0.1, joint_label_scale=1.0), "beside"),
            (lambda: Sample.from_rows(rows, y, noise_std=-0.1), "noise_std"),
            (lambda: Sample.from_rows(rows, y, noise_std=[0.1, 0.2]), "noise_std"),
            (lambda: Sample.from_rows(rows, y, noise_std=0.1, units=["a"]), "units"),
            (
                lambda: Sample.from_rows(rows, y, noise_std=0.1, modulation=Modulation(0, 1, 1, 1)),
                "directions",
            ),
            (lambda: Sample.from_moments([]), "at least one node"),
            (lambda: Sample.from_moments([Group(moments, unit="a"), Group(moments)]), "unit each"),
            (
                lambda: Sample.from_moments([moments]) + Sample.from_rows(rows[:, :2], y, noise_std=0),
                "same number",
            ),
            (
                lambda: (
                    Sample.from_moments([moments])
                    + Sample.from_rows(np.eye(4), None, noise_std=0, joint_label_scale=1.0)
                ),
                "public labels",
            ),
            (lambda: Sample.from_moments([moments]).moments(np.array([False])), "at least one unit"),
        ):
            with pytest.raises((InvalidDataError, InvalidParameterError), match=message):
                call()
        guarantee = Guarantee(1.0, 1e-5, ReplaceRecord(1.0, 2.0))
        with pytest.raises(InvalidParameterError, match="must equal the label_scale 2"):
            Results.from_rows(rows, None, noise_std=0.1, guarantee=guarantee, joint_label_scale=1.0)
