"""The closed forms against exact averages over noise, phases and directions, and against runs."""

from itertools import product

import numpy as np
import pytest
from designs import VARIANCES, all_releases

from flwr_modulated import (
    Distance,
    Guarantee,
    InvalidDataError,
    InvalidParameterError,
    Mechanism,
    Modulation,
    Moments,
    draw_directions,
    gradient,
)
from flwr_modulated.standard_errors import coefficient_covariance, score_covariance
from flwr_modulated.theory import (
    convergence_bound,
    convergence_floor,
    convergence_floor_as_printed,
    gradient_variance,
    gradient_variance_bound,
    least_squares_floor,
    private_least_squares_floor,
)

PLAIN = Modulation()


class TestGradientVariance:
    @pytest.mark.parametrize("num_directions", [1, 2])
    def test_exact_average_over_noise_and_phases(self, num_directions, rng):
        """One row, d = 3: the design is exact, so the two sides agree to rounding.

        Rows are independent, so one row shows every term of (5); K enters as 1/K (next test).
        """
        d = 3
        mod = Modulation(alpha=0.3, amplitude=0.9, frequency=1.1, num_directions=num_directions)
        mechanism = Mechanism(mod, Guarantee(6.0, 1e-5, Distance(0.8)))
        x, beta = rng.standard_normal(d), rng.standard_normal(d)
        y, sigma = 0.7, mechanism.noise_std
        v = draw_directions(d, num_directions, orthogonal_to=beta, rng=rng)
        rows, weight = all_releases(mechanism, x, v, VARIANCES)
        error = []
        for row in rows:
            debiased = Moments.from_rows(row[None], [y], noise_std=sigma).debias(mod, v)
            error.append(np.sum((gradient(beta, debiased) - x * (x @ beta - y)) ** 2))
        formula = gradient_variance(x[None], [y], beta, modulation=mod, noise_std=sigma)
        assert weight @ error == pytest.approx(formula, rel=1e-12)

    def test_rows_add_up(self, rng):
        """The variance of K different rows is the mean of theirs, over K."""
        x, y, beta = rng.standard_normal((7, 4)), rng.standard_normal(7), rng.standard_normal(4)
        mod = Modulation(alpha=0.1, amplitude=0.5, frequency=1.0, num_directions=1)
        single = [
            gradient_variance(x[i : i + 1], y[i : i + 1], beta, modulation=mod, noise_std=0.8)
            for i in range(7)
        ]
        whole = gradient_variance(x, y, beta, modulation=mod, noise_std=0.8)
        assert whole == pytest.approx(np.mean(single) / 7, rel=1e-12)

    @pytest.mark.statistical
    @pytest.mark.parametrize("num_directions", [0, 3])
    def test_the_mechanism_has_it(self, num_directions, rng):
        """Mean of ‖G − ∇F‖² over n = 40000 sets of 40 released rows, against (5).

        SE: sample deviation / √n (about 0.4 % of the mean); accepted at 5 SE, false alarms
        6e-7, and 5 SE must stay under the 3 % that is claimed. Catches the scale λ/m (off by
        more than 10 % here) and fresh noise left out of one coordinate.
        """
        n, k, d = 40_000, 40, 4
        mod = Modulation(alpha=0.2, amplitude=4.0, frequency=0.3, num_directions=num_directions)
        mechanism = Mechanism(mod, Guarantee(4.0, 1e-5, Distance(0.4)))
        x = rng.standard_normal((k, d))
        beta = rng.standard_normal(d)
        y = x @ beta + 0.5 * rng.standard_normal(k)
        v = draw_directions(d, num_directions, orthogonal_to=beta, rng=rng)
        rows = mechanism.release(np.tile(x, (n, 1)), v, rng=rng).reshape(n, k, d)
        second = np.einsum("nki,nkj->nij", rows, rows) / k - mod.second_moment(v)
        second = (second - mechanism.noise_std**2 * np.eye(d)) / mod.contraction**2
        cross = np.einsum("k,nki->ni", y, rows) / k / mod.contraction
        error = np.sum((second @ beta - cross - x.T @ (x @ beta - y) / k) ** 2, axis=1)
        formula = gradient_variance(x, y, beta, modulation=mod, noise_std=mechanism.noise_std)
        se = error.std() / np.sqrt(n) / formula
        assert 5 * se < 0.03
        assert abs(error.mean() / formula - 1) < 5 * se

    def test_bound_holds_and_is_attained_by_d_equal_1(self, rng):
        """300 problems inside the box stay under the bound; the corner of the box reaches it."""
        for _ in range(300):
            d, k = int(rng.integers(2, 6)), int(rng.integers(1, 9))
            mod = Modulation(alpha=rng.uniform(0, 0.9), amplitude=2.0, frequency=1.0, num_directions=1)
            radius, label, size = rng.uniform(0.1, 3, 3)
            x = rng.standard_normal((k, d))
            x *= (radius * rng.random((k, 1)) / np.linalg.norm(x, axis=1, keepdims=True)) ** 1.0
            beta = rng.standard_normal(d)
            beta *= size * rng.random() / np.linalg.norm(beta)
            y = label * rng.uniform(-1, 1, k)
            sigma = rng.uniform(0, 3)
            bound = gradient_variance_bound(
                num_samples=k,
                num_features=d,
                feature_radius=radius,
                label_radius=label,
                beta_radius=size,
                modulation=mod,
                noise_std=sigma,
            )
            assert gradient_variance(x, y, beta, modulation=mod, noise_std=sigma) <= bound
        corner = gradient_variance([[2.0]], [-3.0], [1.5], modulation=PLAIN, noise_std=0.7)
        assert corner == pytest.approx(
            gradient_variance_bound(
                num_samples=1,
                num_features=1,
                feature_radius=2.0,
                label_radius=3.0,
                beta_radius=1.5,
                modulation=PLAIN,
                noise_std=0.7,
            )
        )

    def test_refuses(self):
        with pytest.raises(InvalidParameterError, match="noise_std must be finite and in"):
            gradient_variance([[1.0]], [1.0], [1.0], modulation=PLAIN, noise_std=-1.0)
        with pytest.raises(InvalidDataError, match="labels must have shape"):
            gradient_variance([[1.0]], [1.0, 2.0], [1.0], modulation=PLAIN, noise_std=1.0)


class TestConvergence:
    @pytest.mark.statistical
    def test_floor_at_two_numbers_of_rows(self, rng):
        """Mean excess loss after T = 2 averaged projected steps from the optimum, n = 4000 runs.

        The same 25 rows are used once and 16 times over, so that R, M, B, L_F and F* are the
        same at K = 25 and K = 400. SE: sample deviation / √n. At both K the mean must lie more
        than 5 SE under the bound and more than 5 SE above the printed floor (false alarms
        6e-7); started at the optimum, the bound is its floor. Catches either floor taken for
        the other.
        """
        n, rounds, d, sigma = 4000, 2, 2, 3.0
        angle = 2 * np.pi * np.arange(25) / 25
        base = np.sqrt(2.0) * np.column_stack([np.cos(angle), np.sin(angle)])  # Σ = I, so L_F = 1
        beta_star = np.array([0.6, -0.8])
        for copies in (1, 16):
            x = np.tile(base, (copies, 1))
            k = len(x)
            y = x @ beta_star
            bound = gradient_variance_bound(
                num_samples=k,
                num_features=d,
                feature_radius=np.sqrt(2.0),
                label_radius=np.abs(y).max(),
                beta_radius=1.0,
                modulation=PLAIN,
                noise_std=sigma,
            )
            beta = np.tile(beta_star, (n, 1))
            average = np.zeros_like(beta)
            for _ in range(rounds):
                rows = x + sigma * rng.standard_normal((n, k, d))
                fitted = np.einsum("nki,ni->nk", rows, beta) - y
                step = np.einsum("nki,nk->ni", rows, fitted) / k - sigma**2 * beta
                beta = beta - step
                beta /= np.maximum(np.linalg.norm(beta, axis=1, keepdims=True), 1.0)
                average += beta / rounds
            excess = 0.5 * np.sum((average - beta_star) ** 2, axis=1)
            se = excess.std() / np.sqrt(n)
            printed = convergence_floor_as_printed(smoothness=1.0, variance_bound=bound, num_samples=k)
            assert printed + 5 * se < excess.mean()
            assert excess.mean() < convergence_floor(smoothness=1.0, variance_bound=bound) - 5 * se

    def test_bound_is_distance_over_rounds_plus_floor(self):
        value = convergence_bound(num_rounds=5, initial_distance=2.0, smoothness=3.0, variance_bound=0.6)
        assert value == pytest.approx(3.0 * 4.0 / 10 + 0.2)

    def test_refuses(self):
        with pytest.raises(InvalidParameterError, match="smoothness"):
            convergence_floor(smoothness=0.0, variance_bound=1.0)
        with pytest.raises(InvalidParameterError, match="num_rounds"):
            convergence_bound(num_rounds=0, initial_distance=1.0, smoothness=1.0, variance_bound=1.0)


def exact_score_covariance(rows, labels, beta, mechanism, directions, label_scale=None):
    """Second moment of ψ over equally likely rows, noise and phases, by the exact design."""
    records = rows if label_scale is None else np.column_stack([rows, labels / label_scale])
    p, mod = records.shape[1], mechanism.modulation
    offset = mechanism.noise_std**2 * np.eye(p) + mod.second_moment(directions)
    total = 0.0
    for record, y in zip(records, labels, strict=True):
        released, weight = all_releases(mechanism, record, directions, VARIANCES)
        u = released / mod.contraction
        if label_scale is None:
            psi = u * (u @ beta - y)[:, None] - offset @ beta / mod.contraction**2
        else:
            b = np.append(beta, -label_scale)
            psi = (u * (u @ b)[:, None] - offset @ b / mod.contraction**2)[:, :-1]
        total = total + (psi * weight[:, None]).T @ psi / len(rows)
    return total


class TestScoreCovariance:
    @pytest.mark.parametrize("label_scale", [None, 1.7])
    @pytest.mark.parametrize("num_directions", [1, 2])
    def test_exact_for_given_directions(self, num_directions, label_scale, rng):
        """Five rows with errors that depend on them, directions not orthogonal to beta."""
        d = 2
        mod = Modulation(alpha=0.25, amplitude=1.3, frequency=0.8, num_directions=num_directions)
        mechanism = Mechanism(mod, Guarantee(8.0, 1e-5, Distance(0.5)))
        x, y = rng.standard_normal((5, d)), rng.standard_normal(5)
        sigma = x.T @ x / 5
        beta = np.linalg.solve(sigma, x.T @ y / 5)
        e = y - x @ beta
        v = draw_directions(d + (label_scale is not None), num_directions, rng=rng)
        formula = score_covariance(
            sigma,
            beta,
            np.mean(e**2),
            modulation=mod,
            noise_std=mechanism.noise_std,
            directions=v,
            score_moment=(x * e[:, None] ** 2).T @ x / 5,
            label_scale=label_scale,
        )
        brute = exact_score_covariance(x, y, beta, mechanism, v, label_scale)
        np.testing.assert_allclose(formula, brute, rtol=1e-11, atol=1e-13)

    @pytest.mark.parametrize("num_directions", [1, 2, 3])
    def test_default_is_the_average_over_random_frames(self, num_directions, rng):
        """Euler angles on a grid integrate polynomials of degree 4 in a rotation exactly."""
        sigma, beta = np.diag([1.0, 2.0, 0.5]), rng.standard_normal(3)
        mod = Modulation(alpha=0.2, amplitude=1.5, frequency=1.0, num_directions=num_directions)
        nodes, weights = np.polynomial.legendre.leggauss(5)
        average = np.zeros((3, 3))
        turns = 2 * np.pi * np.arange(6) / 6
        for first, second, (height, weight) in product(turns, turns, zip(nodes, weights, strict=True)):
            tilt = np.array(
                [
                    [height, 0, np.sqrt(1 - height**2)],
                    [0, 1, 0],
                    [-np.sqrt(1 - height**2), 0, height],
                ]
            )
            frame = about_z(first) @ tilt @ about_z(second)
            average += (
                weight
                / 2
                / 36
                * score_covariance(
                    sigma, beta, 0.4, modulation=mod, noise_std=0.7, directions=frame[:, :num_directions]
                )
            )
        default = score_covariance(sigma, beta, 0.4, modulation=mod, noise_std=0.7)
        np.testing.assert_allclose(default, average, rtol=1e-11)

    def test_one_feature(self):
        """In one dimension a random direction is ±1."""
        mod = Modulation(alpha=0.2, amplitude=1.5, frequency=1.0, num_directions=1)
        args = {"modulation": mod, "noise_std": 0.7}
        default = score_covariance([[2.0]], [0.6], 0.4, **args)
        np.testing.assert_allclose(default, score_covariance([[2.0]], [0.6], 0.4, directions=[[1.0]], **args))

    def test_more_releases_average_the_noise_only(self):
        one = score_covariance(np.eye(2), [1.0, 0.0], 0.3, modulation=PLAIN, noise_std=1.0)
        four = score_covariance(np.eye(2), [1.0, 0.0], 0.3, modulation=PLAIN, noise_std=1.0, num_releases=4)
        np.testing.assert_allclose(four - 0.3 * np.eye(2), (one - 0.3 * np.eye(2)) / 4)

    def test_refuses_more_directions_than_columns(self):
        mod = Modulation(amplitude=1.0, frequency=1.0, num_directions=3)
        with pytest.raises(InvalidParameterError, match="num_directions must be at most the 2"):
            score_covariance(np.eye(2), [1.0, 0.0], 0.3, modulation=mod, noise_std=1.0)


def about_z(angle):
    c, s = np.cos(angle), np.sin(angle)
    return np.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]])


class TestFloors:
    @pytest.mark.statistical
    def test_least_squares_reaches_its_floor(self, rng):
        """Mean excess risk of least squares on 20 Gaussian rows, d = 3, n = 20000 samples.

        SE: sample deviation / √n (0.7 %). It must be E e²·d/(K − d − 1) within 5 SE (false
        alarms 6e-7), hence above the floor. Catches K in place of K − d + 1 as a floor that
        is too low to be of use: 15 % apart.
        """
        n, k, d = 20_000, 20, 3
        x = rng.standard_normal((n, k, d))
        e = np.sqrt(0.5) * rng.standard_normal((n, k))
        error = np.linalg.solve(x.transpose(0, 2, 1) @ x, np.einsum("nki,nk->ni", x, e)[..., None])[..., 0]
        risk = np.sum(error**2, axis=1)
        se = risk.std() / np.sqrt(n)
        floor = least_squares_floor(num_samples=k, num_features=d, residual_variance=0.5)
        assert abs(risk.mean() - 0.5 * d / (k - d - 1)) < 5 * se
        assert floor < risk.mean() - 5 * se
        assert risk.mean() < 1.3 * floor

    @pytest.mark.statistical
    def test_private_floor_is_what_known_second_moments_reach(self, rng):
        """With Σ known, least squares of y on ΣM⁻¹u is efficient for its mean: n = 1500, K = 2000.

        SE of the mean risk: sample deviation / √n (1.9 %); within 5 SE of the floor (false
        alarms 6e-7), O(d/K) = 0.2 % aside. Catches v without βᵀ(Σ − ΣM⁻¹Σ)β: a factor 2.4 here.
        """
        n, k, noise_std, alpha = 1500, 2000, 0.9, 0.25
        sigma = np.array([[1.0, 0.5, 0.0], [0.5, 1.0, 0.2], [0.0, 0.2, 1.0]])
        beta = np.array([0.8, -0.4, 0.6])
        mod = Modulation(alpha=alpha)
        s2 = (noise_std / (1 - alpha)) ** 2
        x = rng.standard_normal((n, k, 3)) @ np.linalg.cholesky(sigma).T
        y = x @ beta + np.sqrt(0.4) * rng.standard_normal((n, k))
        u = x + np.sqrt(s2) * rng.standard_normal(x.shape)
        best = u @ np.linalg.solve(sigma + s2 * np.eye(3), sigma)
        fit = np.linalg.solve(best.transpose(0, 2, 1) @ best, np.einsum("nki,nk->ni", best, y)[..., None])
        error = fit[..., 0] - beta
        risk = np.einsum("ni,ij,nj->n", error, sigma, error)
        floor = private_least_squares_floor(
            sigma, beta, 0.4, num_samples=k, modulation=mod, noise_std=noise_std
        )
        assert abs(risk.mean() / floor - 1) < 5 * risk.std() / np.sqrt(n) / floor + 0.002

    def test_sandwich_never_beats_the_private_floor(self, rng):
        for _ in range(100):
            root = rng.standard_normal((3, 3))
            sigma, beta = root @ root.T + 0.1 * np.eye(3), rng.standard_normal(3)
            args = {"num_samples": 10, "modulation": PLAIN, "noise_std": rng.uniform(0, 3)}
            risk = np.trace(sigma @ coefficient_covariance(sigma, beta, 0.4, **args))
            assert private_least_squares_floor(sigma, beta, 0.4, **args) <= risk * (1 + 1e-12)

    def test_no_noise_is_least_squares(self):
        sigma = np.array([[2.0, 0.3], [0.3, 1.0]])
        args = {"num_samples": 50, "modulation": PLAIN, "noise_std": 0.0}
        np.testing.assert_allclose(
            coefficient_covariance(sigma, [1.0, 2.0], 0.4, **args), 0.4 * np.linalg.inv(sigma) / 50
        )
        assert private_least_squares_floor(sigma, [1.0, 2.0], 0.4, **args) == pytest.approx(0.4 * 2 / 50)

    def test_refuses_fewer_rows_than_features(self):
        with pytest.raises(InvalidParameterError, match="num_samples must be in"):
            least_squares_floor(num_samples=2, num_features=3, residual_variance=1.0)
