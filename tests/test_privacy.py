"""Guarantees and calibration, against 50-digit arithmetic and dp_accounting. Nothing is sampled."""

from __future__ import annotations

import math

import dp_accounting
import mpmath as mp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from flwr_modulated import (
    Distance,
    Guarantee,
    InvalidParameterError,
    Mechanism,
    Modulation,
    Replace,
    ReplaceRecord,
)
from flwr_modulated.privacy import calibrate_noise_multiplier, clip_rows, gaussian_delta, zcdp_rho

EPSILONS = (1e-3, 1e-2, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
DELTAS = (1e-10, 1e-7, 1e-5, 1e-2)
ROUNDS = (1, 3, 10)
RELATIONS = (Distance(0.7), Replace(1.5), ReplaceRecord(2.0, label_scale=3.0))
MAPS = ("plain", "contracted", "conditional", "conditional, m=2", "marginal")


def true_delta(epsilon: float, distance: object, noise_std: object) -> mp.mpf:
    """δ(ε) between N(0, σ² I) and its shift by `distance`, with 50 digits (arXiv:1805.06530, Theorem 5)."""
    with mp.workdps(50):
        eps, ratio = mp.mpf(epsilon), mp.mpf(distance) / mp.mpf(noise_std)
        upper, lower = ratio / 2 - eps / ratio, -ratio / 2 - eps / ratio
        return mp.ncdf(upper) - mp.exp(eps) * mp.ncdf(lower)


def build(
    kind: str, relation: object, epsilon: float, delta: float, rounds: int, accounting: str
) -> Mechanism:
    # A tiny frequency with a large amplitude: then the steepest chord is as steep as the tangent.
    frequency = 1e-4 / relation.separation
    modulation = {
        "plain": Modulation(),
        "contracted": Modulation(alpha=0.3),
        "conditional": Modulation(0.2, 0.3 / frequency, frequency, 1),
        "conditional, m=2": Modulation(0.2, 0.3 / frequency, frequency, 2),
        "marginal": Modulation(0.2, 0.2, 0.5, 2),
    }[kind]
    sensitivity = "marginal" if kind == "marginal" else "conditional"
    guarantee = Guarantee(epsilon, delta, relation)
    return Mechanism(modulation, guarantee, rounds, sensitivity, accounting)


def worst_distance(mechanism: Mechanism) -> mp.mpf:
    """Distance between the maps of the two worst neighbours, from Eq. (1) with 50 digits.

    Given the phases, the worst pair lies along a direction v₁, around the point where the cosine is
    steepest (phase −π/2 at the middle): cos becomes ± sin(ω·separation/2) at the ends. With secret phases
    the worst pair is orthogonal to every direction, where the cosine term cannot tell them apart.
    """
    with mp.workdps(50):
        relation, modulation = mechanism.guarantee.relation, mechanism.modulation
        apart = mp.mpf(relation.radius) * (1 if isinstance(relation, Distance) else 2)
        distance = (1 - mp.mpf(modulation.alpha)) * apart
        if mechanism.sensitivity == "conditional" and modulation.num_directions:
            swing = 2 * mp.sin(mp.mpf(modulation.frequency) * apart / 2)
            distance += mp.mpf(modulation.amplitude) / mp.sqrt(modulation.num_directions) * swing
        return distance


def check_exact_calibration_is_tight(
    epsilons: tuple[float, ...] = (0.1, 2.0),
    deltas: tuple[float, ...] = (1e-5,),
    rounds: tuple[int, ...] = (1, 10),
    kinds: tuple[str, ...] = MAPS,
    relations: tuple[object, ...] = RELATIONS,
) -> None:
    """δ of the worst neighbours over all rounds is at most the target, and above it at 0.999 of the noise."""
    for kind in kinds:
        for relation in relations:
            for num_rounds in rounds:
                for epsilon in epsilons:
                    for delta in deltas:
                        mechanism = build(kind, relation, epsilon, delta, num_rounds, "exact")
                        total = worst_distance(mechanism) * mp.sqrt(num_rounds)
                        case = (kind, relation, num_rounds, epsilon, delta)
                        assert true_delta(epsilon, total, mechanism.noise_std) <= delta, case
                        assert true_delta(epsilon, total, 0.999 * mechanism.noise_std) > delta, case


class TestExact:
    @pytest.mark.parametrize("kind", MAPS)
    @pytest.mark.parametrize("relation", RELATIONS, ids=str)
    def test_worst_neighbours(self, kind: str, relation: object) -> None:
        check_exact_calibration_is_tight(EPSILONS, DELTAS, ROUNDS, (kind,), (relation,))

    @pytest.mark.parametrize(("epsilon", "ratio"), [(0.5, 1.0), (2.0, 0.3), (8.0, 2.0)])
    def test_the_reference_itself_by_quadrature(self, epsilon: float, ratio: float) -> None:
        """∫ max(0, p − e^ε q) for the densities p of N(ratio, 1) and q of N(0, 1), split at its kink."""
        with mp.workdps(30):
            kink = mp.mpf(epsilon) / ratio + mp.mpf(ratio) / 2
            excess = mp.quad(
                lambda t: mp.npdf(t - ratio) - mp.exp(epsilon) * mp.npdf(t), [kink, kink + 5, kink + 40]
            )
            assert abs(excess / true_delta(epsilon, ratio, 1) - 1) < 1e-15

    @given(
        epsilon=st.floats(-12, 3).map(lambda e: 10.0**e),
        delta=st.floats(-300, -0.05).map(lambda e: 10.0**e),
    )
    def test_never_overshoots_even_where_delta_cancels(self, epsilon: float, delta: float) -> None:
        multiplier = calibrate_noise_multiplier(epsilon, delta)
        assert true_delta(epsilon, 1, multiplier) <= delta

    def test_huge_epsilon_ends(self) -> None:
        assert 0 < calibrate_noise_multiplier(1e300, 1e-5) < 1e-100

    @pytest.mark.parametrize("epsilon", EPSILONS)
    @pytest.mark.parametrize("delta", DELTAS)
    def test_agrees_with_dp_accounting(self, epsilon: float, delta: float) -> None:
        """Round trip through the library's own ε, whose root finder stops within 1e-12."""
        multiplier = calibrate_noise_multiplier(epsilon, delta)
        assert multiplier == pytest.approx(dp_accounting.get_sigma_gaussian(epsilon, delta), rel=1e-8)
        back = dp_accounting.get_epsilon_gaussian(multiplier, delta)
        assert back == pytest.approx(epsilon, rel=1e-7, abs=1e-11)

    @pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 1e-5), (1.0, 1e-7), (4.0, 1e-5), (8.0, 1e-10)])
    @pytest.mark.parametrize("rounds", [3, 10])
    def test_composition_agrees_with_privacy_loss_distributions(
        self, epsilon: float, delta: float, rounds: int
    ) -> None:
        """T releases composed numerically, which knows nothing of σ/√T; its discretisation rounds ε up."""
        multiplier = calibrate_noise_multiplier(epsilon, delta, num_compositions=rounds)
        accountant = PLDAccountant().compose(dp_accounting.GaussianDpEvent(multiplier), rounds)
        assert epsilon * (1 - 1e-7) <= accountant.get_epsilon(delta) <= epsilon + 1e-3

    @pytest.mark.parametrize("epsilon", [0.0, *EPSILONS])
    @pytest.mark.parametrize("multiplier", [0.1, 0.5, 1.0, 4.0, 300.0])
    def test_delta_is_rounded_up(self, epsilon: float, multiplier: float) -> None:
        exact = true_delta(epsilon, 1, multiplier)
        if exact < 1e-300:
            assert gaussian_delta(epsilon, multiplier) < 1e-290
        else:
            assert exact <= gaussian_delta(epsilon, multiplier) <= exact * (1 + mp.mpf("1e-7"))


def check_zcdp_conversion(epsilons: tuple[float, ...] = EPSILONS, deltas: tuple[float, ...] = DELTAS) -> None:
    """ε is the minimum over orders a of ρa + ln(1/δ)/(a−1), ρ = T/2k² the budget of T releases.

    That is the Rényi conversion of arXiv:1702.07476, Proposition 3, with the Gaussian's Rényi divergence ρa:
    minimised numerically here, in closed form in the code.
    """
    for epsilon in epsilons:
        for delta in deltas:
            for rounds in ROUNDS:
                multiplier = calibrate_noise_multiplier(
                    epsilon, delta, num_compositions=rounds, accounting="zcdp"
                )
                rho, log_inverse = rounds / (2 * multiplier**2), math.log(1 / delta)
                best = minimize_scalar(
                    lambda t, rho=rho, c=log_inverse: rho * (1 + math.exp(t)) + c * math.exp(-t),
                    bounds=(-12, 25),
                    method="bounded",
                    options={"xatol": 1e-10},
                )
                assert best.fun == pytest.approx(epsilon, rel=1e-8), (epsilon, delta, rounds)
                assert true_delta(epsilon, math.sqrt(rounds), multiplier) <= delta


class TestZcdp:
    def test_conversion(self) -> None:
        check_zcdp_conversion()

    @pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
    def test_covers_dp_accountings_renyi_accountant(self, epsilon: float) -> None:
        """The library's conversion (arXiv:2004.00010) is tighter, so it may only find a smaller ε."""
        multiplier = calibrate_noise_multiplier(epsilon, 1e-5, num_compositions=10, accounting="zcdp")
        orders = 1 + np.geomspace(0.01, 1e3, 2000)

        def found(noise: float) -> float:
            accountant = RdpAccountant(orders).compose(dp_accounting.GaussianDpEvent(noise), 10)
            return accountant.get_epsilon(1e-5)

        event = dp_accounting.ZCDpEvent(zcdp_rho(epsilon, 1e-5))
        assert found(multiplier) == pytest.approx(
            RdpAccountant(orders).compose(event).get_epsilon(1e-5), rel=1e-7
        )
        assert found(multiplier) <= epsilon < found(0.75 * multiplier)


class TestClassical:
    @pytest.mark.parametrize("epsilon", [e for e in EPSILONS if e <= 1])
    @pytest.mark.parametrize("delta", DELTAS)
    @pytest.mark.parametrize("rounds", ROUNDS)
    def test_formula_and_true_delta(self, epsilon: float, delta: float, rounds: int) -> None:
        multiplier = calibrate_noise_multiplier(
            epsilon, delta, num_compositions=rounds, accounting="classical"
        )
        with mp.workdps(50):
            wanted = mp.sqrt(2 * mp.log(mp.mpf("1.25") / mp.mpf(delta)) * rounds) / mp.mpf(epsilon)
            assert wanted <= multiplier <= wanted * (1 + mp.mpf("1e-8"))
        assert true_delta(epsilon, math.sqrt(rounds), multiplier) <= delta

    def test_refused_above_one_with_the_reason(self) -> None:
        with pytest.raises(InvalidParameterError, match=r"theorem for ε ≤ 1 only.*accounting='exact'"):
            calibrate_noise_multiplier(1.0000001, 1e-5, accounting="classical")
        with pytest.raises(InvalidParameterError, match="classical"):
            Mechanism(Modulation(), Guarantee(2.0, 1e-5, Distance(1.0)), accounting="classical")

    def test_override_and_why_it_must_be_explicit(self) -> None:
        """At ε = 10, δ = 1e-5 the formula's true δ is 2.3e-5 (computed here with 50 digits)."""
        mechanism = Mechanism(
            Modulation(),
            Guarantee(10.0, 1e-5, Distance(1.0)),
            accounting="classical",
            allow_invalid_classical=True,
        )
        assert float(true_delta(10.0, 1, mechanism.noise_std)) == pytest.approx(2.3e-5, rel=0.02)


@pytest.mark.parametrize("accounting", ["exact", "zcdp", "classical"])
@pytest.mark.parametrize("epsilon", [1e-3, 0.5, 1.0])
def test_exact_never_needs_more_noise(accounting: str, epsilon: float) -> None:
    exact = calibrate_noise_multiplier(epsilon, 1e-6)
    assert exact <= calibrate_noise_multiplier(epsilon, 1e-6, accounting=accounting)


@pytest.mark.parametrize("accounting", ["exact", "zcdp", "classical"])
def test_a_clients_rows_compose_like_releases(accounting: str) -> None:
    """Replacing all s rows at once costs what s releases of one row cost; T releases of each multiply."""
    by_row = Mechanism(Modulation(), Guarantee(1.0, 1e-5, Replace(1.0)), 12, accounting=accounting)
    guarantee = Guarantee(1.0, 1e-5, Replace(1.0), "client", rows_per_client=4)
    by_client = Mechanism(Modulation(), guarantee, 3, accounting=accounting)
    assert by_client.noise_std == pytest.approx(by_row.noise_std, rel=1e-12)
    if accounting != "classical":
        total = mp.mpf(2) * mp.sqrt(12)
        assert true_delta(1.0, total, by_client.noise_std) <= 1e-5


class TestGuarantee:
    def test_is_never_printed_without_delta_relation_and_unit(self) -> None:
        text = str(Guarantee(2.0, 1e-5, ReplaceRecord(3.0, 0.5), "client", rows_per_client=7))
        for part in ("ε=2", "δ=1e-05", "replace_record(3", "0.5", "client", "7 rows", "labels private"):
            assert part in text
        assert "labels public" in str(Guarantee(2.0, 1e-5, Distance(1.0)))

    @pytest.mark.parametrize(
        ("relation", "separation", "clip", "hides"),
        [
            (Distance(3.0), 3.0, None, False),
            (Replace(3.0), 6.0, 3.0, False),
            (ReplaceRecord(3.0), 6.0, 3.0, True),
        ],
    )
    def test_relations(self, relation: object, separation: float, clip: float | None, hides: bool) -> None:
        assert relation.separation == separation
        assert relation.clip_radius == clip
        assert relation.hides_labels is hides

    @pytest.mark.parametrize("epsilon", [0, 0.0, -1.0, math.nan, math.inf, True, "1", None, 1j])
    def test_bad_epsilon(self, epsilon: object) -> None:
        for use in (
            lambda: Guarantee(epsilon, 1e-5, Distance(1.0)),
            lambda: calibrate_noise_multiplier(epsilon, 1e-5),
            lambda: zcdp_rho(epsilon, 1e-5),
        ):
            with pytest.raises(InvalidParameterError, match="epsilon must be"):
                use()

    @pytest.mark.parametrize("delta", [0, 0.0, 1, 1.0, -1e-5, 2.0, math.nan, True, "1e-5", None])
    def test_bad_delta(self, delta: object) -> None:
        for use in (
            lambda: Guarantee(1.0, delta, Distance(1.0)),
            lambda: calibrate_noise_multiplier(1.0, delta),
            lambda: zcdp_rho(1.0, delta),
        ):
            with pytest.raises(InvalidParameterError, match="delta must be"):
                use()

    def test_a_true_epsilon_is_refused_after_one_was_accepted(self) -> None:
        """A cache in front of the checks would take True for 1."""
        calibrate_noise_multiplier(1, 1e-5)
        with pytest.raises(InvalidParameterError, match="epsilon"):
            calibrate_noise_multiplier(True, 1e-5)

    @pytest.mark.parametrize("kind", [Distance, Replace, ReplaceRecord])
    @pytest.mark.parametrize("radius", [0.0, -1.0, math.nan, math.inf, True, "1", None])
    def test_bad_radius(self, kind: type, radius: object) -> None:
        with pytest.raises(InvalidParameterError, match="radius must be"):
            kind(radius)

    @pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, "1"])
    def test_bad_label_scale(self, scale: object) -> None:
        with pytest.raises(InvalidParameterError, match="label_scale must be"):
            ReplaceRecord(1.0, scale)

    @pytest.mark.parametrize(
        ("change", "name"),
        [
            ({"relation": "distance"}, "relation"),
            ({"relation": Distance}, "relation"),
            ({"unit": "person"}, "unit"),
            ({"rows_per_client": 2}, "rows_per_client"),
            ({"unit": "client", "rows_per_client": 0}, "rows_per_client"),
            ({"unit": "client", "rows_per_client": 1.5}, "rows_per_client"),
            ({"unit": "client", "rows_per_client": True}, "rows_per_client"),
        ],
    )
    def test_other_bad_arguments(self, change: dict[str, object], name: str) -> None:
        with pytest.raises(InvalidParameterError, match=f"{name} must be"):
            Guarantee(**({"epsilon": 1.0, "delta": 1e-5, "relation": Distance(1.0)} | change))

    @pytest.mark.parametrize(
        ("change", "name"),
        [
            ({"accounting": "rdp"}, "accounting"),
            ({"num_compositions": 0}, "num_compositions"),
            ({"num_compositions": 2.0}, "num_compositions"),
        ],
    )
    def test_bad_calibration(self, change: dict[str, object], name: str) -> None:
        with pytest.raises(InvalidParameterError, match=f"{name} must be"):
            calibrate_noise_multiplier(1.0, 1e-5, **change)

    def test_bad_multiplier(self) -> None:
        with pytest.raises(InvalidParameterError, match="noise_multiplier must be"):
            gaussian_delta(1.0, 0.0)


ENTRIES = st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=True)


def check_clip(row: list[float], radius: float) -> None:
    """The clipped row has norm at most R and the same direction; shorter rows come back bit for bit."""
    clipped = clip_rows(np.array([row]), radius)[0]
    with mp.workdps(40):
        norm = mp.sqrt(sum(mp.mpf(v) ** 2 for v in row))
        length = mp.sqrt(sum(mp.mpf(float(v)) ** 2 for v in clipped))
        # Entries that fall below the smallest normal number lose digits, at most this much.
        lost = len(row) * mp.mpf(np.finfo(float).tiny)
        assert length <= radius * (1 + mp.mpf("1e-15") * len(row)) + lost
        if norm <= radius * (1 - 1e-14):
            np.testing.assert_array_equal(clipped, row)
        elif norm > radius * (1 + 1e-14) and norm > 1e-290:
            for value, kept in zip(row, clipped, strict=True):
                assert abs(mp.mpf(float(kept)) - mp.mpf(value) * radius / norm) <= 1e-14 * radius + lost


class TestClipping:
    @given(st.lists(ENTRIES, min_size=1, max_size=4), st.floats(-200, 3).map(lambda e: 10.0**e))
    def test_any_row(self, row: list[float], radius: float) -> None:
        check_clip(row, radius)

    @pytest.mark.parametrize(
        "row",
        [
            [0.0, 0.0],
            [5e-324, 0.0],
            [5e-324, 1e-310],
            [1e300, -1e300, 1e300],
            [1.7e308, 1.7e308],
            [1e308, 1e-308],
            [1.0, 0.0],
            [3.0, 4.0],
        ],
    )
    @pytest.mark.parametrize("radius", [1e-14, 1.0, 5.0])
    def test_extreme_rows(self, row: list[float], radius: float) -> None:
        check_clip(row, radius)

    def test_no_radius_clips_nothing(self) -> None:
        rows = np.array([[1e300, 5.0]])
        assert clip_rows(rows, None) is rows
