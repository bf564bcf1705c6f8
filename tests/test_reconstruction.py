"""What one release tells about its row: information, bounds, attacks, and telling two rows apart."""

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import j0, ndtri

from flwr_modulated import (
    Distance,
    Guarantee,
    InvalidDataError,
    InvalidParameterError,
    Mechanism,
    Modulation,
    draw_directions,
)
from flwr_modulated.information import (
    averaged_error_bound,
    cosine_noise_information,
    cosine_noise_log_density,
    error_bound,
    fisher_information,
    mean_fisher_information,
    secret_phase_information,
)
from flwr_modulated.privacy import calibrate_noise_multiplier, gaussian_delta
from flwr_modulated.reconstruction import (
    inversion_error,
    invert,
    likelihood_known_phases,
    likelihood_secret_phases,
    prior_error,
    prior_least_squares,
)
from flwr_modulated.tradeoff import (
    best_guess,
    exact_epsilon,
    gaussian_roc_bound,
    log_likelihood_ratio,
    privacy_loss_distribution,
    roc_bound,
    roc_curve,
)

PLAIN = Modulation()
D = 4


def modulated(num_directions=2, **changes):
    values = {"alpha": 0.2, "amplitude": 0.8, "frequency": 0.9, "num_directions": num_directions}
    return Modulation(**(values | changes))


def release(x, v, modulation, noise_std, rng):
    """The map (1) written once more, keeping the phases."""
    m = max(modulation.num_directions, 1)
    phases = rng.uniform(0, 2 * np.pi, (len(x), v.shape[1]))
    waves = np.cos(modulation.frequency * (x @ v) + phases)
    clean = (1 - modulation.alpha) * x + modulation.amplitude / np.sqrt(m) * waves @ v.T
    return clean + noise_std * rng.standard_normal(x.shape), phases


class TestInformation:
    def test_is_the_jacobian_of_the_map(self, rng):
        """Complex steps through the map give J without rounding; the label adds ββᵀ/σ_y²."""
        mod, v = modulated(), draw_directions(D, 2, rng=rng)
        x, phases, beta = rng.standard_normal(D), rng.uniform(0, 6, 2), rng.standard_normal(D)

        def clean(row):
            waves = np.cos(mod.frequency * (row @ v) + phases)
            return (1 - mod.alpha) * row + mod.amplitude / np.sqrt(2) * (v @ waves)

        jacobian = np.array([clean(x + 1e-30j * e).imag / 1e-30 for e in np.eye(D)]).T
        expected = jacobian.T @ jacobian / 0.7**2 + np.outer(beta, beta) / 0.5**2
        given = fisher_information(x, v, phases, modulation=mod, noise_std=0.7, beta=beta, residual_std=0.5)
        np.testing.assert_allclose(given, expected, rtol=1e-12)

    def test_average_over_phases(self, rng):
        """Three equidistant phases integrate sin and sin² exactly; the row does not matter."""
        mod, v = modulated(), draw_directions(D, 2, rng=rng)
        turns = 2 * np.pi * np.arange(3) / 3
        x = rng.standard_normal(D)
        average = np.mean(
            [fisher_information(x, v, [a, b], modulation=mod, noise_std=0.7) for a in turns for b in turns],
            axis=0,
        )
        np.testing.assert_allclose(
            mean_fisher_information(v, modulation=mod, noise_std=0.7), average, rtol=1e-12, atol=1e-14
        )

    def test_known_phases_add_information_and_secret_ones_remove_it(self, rng):
        mod, v = modulated(), draw_directions(D, 2, rng=rng)
        args = {"modulation": mod, "noise_std": 0.7, "beta": np.ones(D), "residual_std": 1.0}
        plain = (0.8 / 0.7) ** 2 * np.eye(D) + np.ones((D, D))
        more = mean_fisher_information(v, **args) - plain
        less = plain - secret_phase_information(v, **args)
        np.testing.assert_allclose(np.linalg.eigvalsh(more)[:2], 0, atol=1e-12)
        assert np.linalg.eigvalsh(more)[2] > 0.05
        np.testing.assert_allclose(np.linalg.eigvalsh(less)[:2], 0, atol=1e-12)
        assert np.linalg.eigvalsh(less)[2] > 0.05

    @pytest.mark.parametrize("num_directions", [1, 2])
    def test_averaged_bound_against_its_closed_form(self, num_directions, rng):
        """The trapezoid of one phase is exact to rounding, the lattice of two to 1/n."""
        mod, sigma = modulated(num_directions), 0.7
        v = draw_directions(D, num_directions, rng=rng)
        wave = mod.amplitude * mod.frequency / np.sqrt(num_directions)
        along = 0.8 / (0.8**2 - wave**2) ** 1.5
        closed = sigma**2 * ((D - num_directions) / 0.8**2 + num_directions * along) / D
        bound = averaged_error_bound(v, modulation=mod, noise_std=sigma)
        assert bound.trace == pytest.approx(closed, rel=1e-10 if num_directions == 1 else 2e-3)
        weaker = error_bound(mean_fisher_information(v, modulation=mod, noise_std=sigma))
        assert weaker.jensen < weaker.trace < bound.trace
        assert weaker.jensen < bound.jensen < bound.trace

    def test_folding_map_has_no_bound_at_every_phase(self, rng):
        mod = modulated(1, amplitude=2.0)
        v = draw_directions(D, 1, rng=rng)
        assert averaged_error_bound(v, modulation=mod, noise_std=0.5).trace == np.inf

    def test_bounds_of_singular_information(self):
        assert error_bound(np.diag([1.0, 0.0])).trace == np.inf
        assert error_bound(np.diag([1.0, 0.0])).jensen == pytest.approx(2.0)
        assert error_bound(np.zeros((2, 2))).jensen == np.inf

    @pytest.mark.parametrize(("amplitude", "noise_std"), [(0.5, 1.0), (2.0, 0.5), (3.0, 0.3)])
    def test_secret_phase_information_by_another_route(self, amplitude, noise_std):
        """The density as an inverse Fourier transform of J₀(ρt)·exp(−σ²t²/2), by adaptive quadrature."""

        def density(x):
            return quad(
                lambda t: np.cos(t * x) * j0(amplitude * t) * np.exp(-0.5 * (noise_std * t) ** 2) / np.pi,
                0,
                9 / noise_std,
                limit=400,
            )[0]

        def slope(x):
            return quad(
                lambda t: (
                    -t * np.sin(t * x) * j0(amplitude * t) * np.exp(-0.5 * (noise_std * t) ** 2) / np.pi
                ),
                0,
                9 / noise_std,
                limit=400,
            )[0]

        assert np.exp(cosine_noise_log_density(0.4, amplitude, noise_std)) == pytest.approx(density(0.4))
        # The tail beyond 4.5 σ holds 1e-4 of the information at most, and there the transform is only noise.
        grid = np.linspace(0, amplitude + 4.5 * noise_std, 200)
        values = [slope(x) ** 2 / density(x) for x in grid]
        other = 2 * np.trapezoid(values, grid) if hasattr(np, "trapezoid") else 2 * np.trapz(values, grid)  # noqa: NPY201
        given = cosine_noise_information(amplitude, noise_std)
        assert given == pytest.approx(other, rel=1e-3)
        assert 1 / (noise_std**2 + amplitude**2 / 2) < given < 1 / noise_std**2

    def test_refuses(self, rng):
        v = draw_directions(D, 1, rng=rng)
        with pytest.raises(InvalidParameterError, match="beta and residual_std must be given together"):
            mean_fisher_information(v, modulation=modulated(1), noise_std=1.0, beta=np.ones(D))
        with pytest.raises(InvalidDataError, match="square"):
            error_bound(np.ones((2, 3)))
        with pytest.raises(InvalidParameterError, match="noise_std"):
            cosine_noise_information(1.0, 0.0)


def squared_error(guess, x):
    """Mean over rows of the squared error per feature, and its standard error."""
    error = np.mean((guess - x) ** 2, axis=1)
    return error.mean(), error.std() / np.sqrt(len(error))


@pytest.mark.statistical
class TestAttacks:
    """n = 200000 rows each; SE: sample deviation of the row errors / √n; accepted at 5 SE (6e-7)."""

    N = 200_000

    def draw(self, mod, sigma, rng):
        x = rng.standard_normal((self.N, D))
        v = draw_directions(D, mod.num_directions, rng=rng)
        g, phases = release(x, v, mod, sigma, rng)
        return x, v, g, phases

    def test_unbiased_attack_is_efficient_without_modulation(self, rng):
        """Catches a bound that is 1 % too high or a release with less noise than it says."""
        x, v, g, _ = self.draw(PLAIN, 0.9, rng)
        error, se = squared_error(invert(g, modulation=PLAIN), x)
        bound = error_bound(mean_fisher_information(v, modulation=PLAIN, noise_std=0.9))
        assert bound.trace == pytest.approx(0.81)
        assert abs(error - bound.trace) < 5 * se < 0.01 * bound.trace

    def test_unbiased_attack_stays_above_its_bound(self, rng):
        """Secret phases: error as predicted, above the bound; catches λ²/d for λ²/(2d)."""
        mod, sigma = modulated(amplitude=3.0), 0.6
        x, v, g, _ = self.draw(mod, sigma, rng)
        error, se = squared_error(invert(g, modulation=mod), x)
        bound = error_bound(secret_phase_information(v, modulation=mod, noise_std=sigma))
        assert abs(error - inversion_error(num_features=D, modulation=mod, noise_std=sigma)) < 5 * se
        assert error > bound.trace + 5 * se

    def test_known_phases_undo_the_modulation(self, rng):
        """Little noise: maximum likelihood attains the averaged bound, far below unbiased inversion.

        At σ = 0.01 its bias adds O(σ²) = 1e-4 of the error, less than the SE of 0.2 %. Catches
        the bound of plain releases taken for this one: 15 % lower.
        """
        mod, sigma = modulated(), 0.01
        x, v, g, phases = self.draw(mod, sigma, rng)
        error, se = squared_error(likelihood_known_phases(g, v, phases, modulation=mod), x)
        bound = averaged_error_bound(v, modulation=mod, noise_std=sigma).trace
        assert abs(error - bound) < 5 * se
        assert error < 0.01 * inversion_error(num_features=D, modulation=mod, noise_std=sigma)
        # Without noise nothing at all is hidden from somebody who has the phases.
        exact = likelihood_known_phases(
            release(x[:9], v, mod, 0.0, np.random.default_rng(1))[0],
            v,
            np.random.default_rng(1).uniform(0, 2 * np.pi, (9, 2)),
            modulation=mod,
        )
        np.testing.assert_allclose(exact, x[:9], atol=1e-12)

    def test_likelihood_is_no_better_than_inversion_with_secret_phases(self, rng):
        """One mode while ρ is small against σ, two beyond; inversion has the smallest error."""
        for amplitude in (0.3, 4.0):
            mod, sigma = modulated(1, amplitude=amplitude), 0.7
            x, v, g, _ = self.draw(mod, sigma, rng)
            guess = likelihood_secret_phases(g, v, modulation=mod, noise_std=sigma, rng=rng)
            error, se = squared_error(guess, x)
            best, best_se = squared_error(invert(g, modulation=mod), x)
            if amplitude == 0.3:
                np.testing.assert_allclose(guess, invert(g, modulation=mod))
            else:
                assert error > best + 5 * (se + best_se)

    @pytest.mark.parametrize("with_label", [False, True])
    def test_prior_beats_the_bound_on_unbiased_attackers(self, with_label, rng):
        """The error is as predicted and below the bound; catches a posterior without the label."""
        mod, sigma = modulated(amplitude=1.5), 1.2
        root = rng.standard_normal((D, D)) / 2
        prior = root @ root.T + 0.2 * np.eye(D)
        mean, beta, residual_std = rng.standard_normal(D), np.array([1.0, -1.0, 0.5, 0.0]), 0.6
        x = mean + rng.standard_normal((self.N, D)) @ np.linalg.cholesky(prior).T
        y = x @ beta + residual_std * rng.standard_normal(self.N)
        v = draw_directions(D, 2, rng=rng)
        g, _ = release(x, v, mod, sigma, rng)
        label = {"beta": beta, "residual_std": residual_std} if with_label else {}
        guess = prior_least_squares(
            g,
            v,
            modulation=mod,
            noise_std=sigma,
            prior_mean=mean,
            prior_covariance=prior,
            labels=y if with_label else None,
            **label,
        )
        error, se = squared_error(guess, x)
        expected = prior_error(v, modulation=mod, noise_std=sigma, prior_covariance=prior, **label)
        assert abs(error - expected) < 5 * se
        bound = error_bound(secret_phase_information(v, modulation=mod, noise_std=sigma, **label))
        assert error < bound.trace - 5 * se


class TestTradeoff:
    def test_bound_of_a_guarantee(self):
        rate = np.array([0.0, 0.01, 0.3, 1.0])
        given = roc_bound(rate, epsilon=np.log(4.0), delta=0.02)
        np.testing.assert_allclose(given, [0.02, 0.06, 1 - (1 - 0.02 - 0.3) / 4, 1.0])
        np.testing.assert_allclose(roc_bound(rate, epsilon=800.0, delta=0.0), [0.0, 1.0, 1.0, 1.0])

    @pytest.mark.parametrize("epsilon", [0.3, 2.0, 8.0])
    def test_gaussian_curve_touches_the_bound_from_below(self, epsilon):
        """At log likelihood ratio ε the two have the same slope, and the same value exactly."""
        multiplier = calibrate_noise_multiplier(epsilon, 1e-3)
        rate = np.concatenate([[0.0], np.logspace(-12, 0, 400)])
        gap = roc_bound(rate, epsilon=epsilon, delta=1e-3) - gaussian_roc_bound(
            rate, noise_multiplier=multiplier
        )
        assert gap.min() > -1e-9
        assert gap[1:-1].min() < 2e-5
        assert gaussian_delta(epsilon, multiplier) == pytest.approx(1e-3, rel=1e-6)

    def test_exact_epsilon_inverts_the_calibration(self):
        for epsilon in (0.1, 1.0, 20.0):
            assert exact_epsilon(calibrate_noise_multiplier(epsilon, 1e-6), 1e-6) == pytest.approx(epsilon)
        assert exact_epsilon(1e4, 1e-2) == 0.0

    def test_best_guess_is_the_middle_of_the_curve(self):
        """With equal priors the best guess is right with (TPR + 1 − FPR)/2 at its best threshold."""
        rate = np.linspace(0, 1, 20_001)
        best = np.max(gaussian_roc_bound(rate, noise_multiplier=0.8) - rate)
        assert best_guess(0.8) == pytest.approx(0.5 + best / 2, abs=1e-8)

    def test_privacy_loss_distribution_agrees(self):
        """dp-accounting discretises pessimistically: at most 1 % above the exact δ, never below."""
        mechanism = Mechanism(PLAIN, Guarantee(2.0, 1e-5, Distance(1.0)), num_releases=3)
        delta = privacy_loss_distribution(mechanism).get_delta_for_epsilon(2.0)
        assert 1e-5 * (1 - 1e-6) <= delta <= 1.01e-5

    def test_roc_curve_counts(self):
        false, true = roc_curve([0.0, 1.0, 2.0, 3.0], [2.0, 5.0])
        np.testing.assert_allclose(false, [0, 0, 0.25, 0.5, 0.5, 0.75, 1.0])
        np.testing.assert_allclose(true, [0, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0])

    def test_refuses(self):
        with pytest.raises(InvalidDataError, match="false_positive_rate must be in"):
            roc_bound([1.5], epsilon=1.0, delta=0.0)
        with pytest.raises(InvalidDataError, match="at least one score"):
            roc_curve([], [1.0])


def exceedance(scores, bound, slope):
    """Excess of the empirical true positive rate over a bound, in its standard errors.

    At 41 thresholds fixed in advance; SE² = TPR(1 − TPR)/n + slope² FPR(1 − FPR)/n with the
    slope of the bound at the empirical FPR, plus 1/n² so that empty corners count nothing.
    """
    first, second = scores
    n = len(first)
    thresholds = np.linspace(-6, 6, 41)
    false = 1 - np.searchsorted(np.sort(first), thresholds) / n
    true = 1 - np.searchsorted(np.sort(second), thresholds) / n
    se = np.sqrt(true * (1 - true) / n + slope(false) ** 2 * false * (1 - false) / n + 1 / n**2)
    return (true - bound(false)) / se


@pytest.mark.statistical
class TestBestAttackAgainstTheGuarantee:
    """Likelihood-ratio tests on n = 200000 releases of either of two worst neighbours, ε = 2, δ = 1e-5.

    The statistic is the excess over the curve in standard errors, at 41 thresholds; accepted up
    to 6 (41 × 1e-9). Halving the noise must be rejected: the excess is then between 9 and 21.
    """

    N = 200_000
    GUARANTEE = Guarantee(2.0, 1e-5, Distance(1.0))

    def scores(self, mechanism, noise_factor, known_phases, rng):
        mod = mechanism.modulation
        v = np.eye(D)[:, : mod.num_directions]
        # Apart along the first direction, where the modulation acts; the guarantee allows distance 1.
        first, second = np.zeros(D), np.eye(D)[0]
        both = []
        for row in (first, second):
            g, phases = release(np.tile(row, (self.N, 1)), v, mod, noise_factor * mechanism.noise_std, rng)
            # The attacker knows the true noise; scores are monotone in the likelihood ratio it implies.
            actual = Mechanism(
                mod, Guarantee(2.0, 1e-5, Distance(noise_factor)), sensitivity=mechanism.sensitivity
            )
            assert actual.noise_std == pytest.approx(noise_factor * mechanism.noise_std)
            both.append(
                log_likelihood_ratio(
                    g,
                    first,
                    second,
                    mechanism=actual,
                    directions=v,
                    phases=phases if known_phases else None,
                )
            )
        return both

    def excess(self, scores):
        return exceedance(
            scores,
            lambda rate: roc_bound(rate, epsilon=2.0, delta=1e-5),
            lambda rate: np.where(rate < (1 - 1e-5) / (1 + np.exp(2.0)), np.exp(2.0), np.exp(-2.0)),
        ).max()

    @pytest.mark.parametrize(
        ("modulation", "sensitivity", "known_phases"),
        [
            (PLAIN, "conditional", False),
            (Modulation(alpha=0.2, amplitude=1.0, frequency=0.6, num_directions=1), "conditional", True),
            (Modulation(alpha=0.2, amplitude=1.0, frequency=1.5, num_directions=1), "marginal", False),
        ],
    )
    def test_never_above_and_above_with_half_the_noise(self, modulation, sensitivity, known_phases, rng):
        mechanism = Mechanism(modulation, self.GUARANTEE, sensitivity=sensitivity)
        assert self.excess(self.scores(mechanism, 1.0, known_phases, rng)) < 6
        assert self.excess(self.scores(mechanism, 0.5, known_phases, rng)) > 6

    def test_marginal_sensitivity_does_not_survive_leaked_phases(self, rng):
        """The same noise, but the attacker has the phases: the curve is broken, as documented."""
        mod = Modulation(alpha=0.2, amplitude=2.0, frequency=1.5, num_directions=1)
        mechanism = Mechanism(mod, self.GUARANTEE, sensitivity="marginal")
        assert self.excess(self.scores(mechanism, 1.0, True, rng)) > 6

    def test_plain_attack_attains_the_gaussian_curve(self, rng):
        """Two-sided: nothing better exists, so a weaker attack would show here."""
        mechanism = Mechanism(PLAIN, self.GUARANTEE)
        multiplier = mechanism.noise_std / mechanism.l2_sensitivity
        excess = exceedance(
            self.scores(mechanism, 1.0, False, rng),
            lambda rate: gaussian_roc_bound(rate, noise_multiplier=multiplier),
            lambda rate: np.exp(
                -ndtri(np.clip(rate, 1 / self.N, 1 - 1 / self.N)) / multiplier - 0.5 / multiplier**2
            ),
        )
        assert np.abs(excess).max() < 6
