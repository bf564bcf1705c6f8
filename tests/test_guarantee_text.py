"""A guarantee in words, and what it means under another relation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian
from hypothesis import given
from hypothesis import strategies as st

from flwr_modulated import (
    DeviceNoise,
    Distance,
    Guarantee,
    InvalidParameterError,
    Mechanism,
    Modulation,
    NumpyNoise,
    Replace,
    ReplaceRecord,
)
from flwr_modulated.privacy import calibrate_noise_multiplier, gaussian_delta, gaussian_epsilon

RELATIONS = [Distance(1.5), Replace(3.0), ReplaceRecord(2.0, 1.5)]


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("unit", [("row", 1), ("client", 4)])
@pytest.mark.parametrize("accounting", ["exact", "zcdp", "classical"])
def test_describe_says_what_when_and_what_not(relation, unit, accounting):
    guarantee = Guarantee(0.75, 1e-6, relation, *unit)
    text = guarantee.describe(num_releases=3, accounting=accounting)
    for part in (
        "ε=0.75",
        "δ=1e-06",
        str(relation),
        f"unit {unit[0]}",
        "3 releases",
        "Hidden from",
        "Not hidden",
    ):
        assert part in text
    assert "\n" not in text
    hidden, public = text.split("Not hidden")
    assert ("labels, which leave the device as they are" in public) == (not relation.hides_labels)
    assert ("label" in hidden) == relation.hides_labels
    assert ("up to 4 rows" in hidden) == (unit[0] == "client")
    assert "takes part" in public
    assert ("farther apart" in text) == isinstance(relation, Distance)


def test_describe_one_release_and_large_epsilon():
    text = Guarantee(16.0, 1e-5, Replace(3.0)).describe()
    assert "only release" in text
    assert "weak" in text
    assert "weak" not in Guarantee(2.0, 1e-5, Replace(3.0)).describe()
    assert "10^434 times" in Guarantee(1000.0, 1e-5, Replace(3.0)).describe()  # e^1000 overflows a double


def test_describe_names_the_noise_and_its_arithmetic():
    guarantee = Guarantee(2.0, 1e-5, Replace(3.0))
    assert "idealised" in guarantee.describe(noise_source=NumpyNoise(np.random.default_rng(0)))
    text = guarantee.describe(noise_source=DeviceNoise())
    assert "OpenDP" in text
    assert "idealised" not in text
    assert "Noise" not in guarantee.describe()


def test_describe_refuses_what_would_be_untrue():
    with pytest.raises(InvalidParameterError, match="theorem for ε ≤ 1"):
        Guarantee(2.0, 1e-5, Replace(3.0)).describe(accounting="classical")
    with pytest.raises(InvalidParameterError, match="num_releases"):
        Guarantee(2.0, 1e-5, Replace(3.0)).describe(num_releases=0)
    with pytest.raises(InvalidParameterError, match="accounting"):
        Guarantee(2.0, 1e-5, Replace(3.0)).describe(accounting="rdp")


def test_mechanism_states_what_invalid_classical_noise_really_gives():
    """At ε = 10, δ = 1e-5 the classical formula gives σ/Δ = 0.4844 and so a larger ε than 10."""
    guarantee = Guarantee(10.0, 1e-5, Replace(3.0))
    mechanism = Mechanism(Modulation(), guarantee, 4, accounting="classical", allow_invalid_classical=True)
    true = get_epsilon_gaussian(math.sqrt(2 * math.log(1.25 / 1e-5)) / 10.0, 1e-5)
    assert true > 10.2
    assert f"ε={true:g}" in mechanism.describe()
    assert "ε=10," not in mechanism.describe()


def test_mechanism_says_when_it_relies_on_secret_phases():
    guarantee, modulation = Guarantee(2.0, 1e-5, Distance(1.0)), Modulation(0.2, 0.2, 0.5, 1)
    assert "secret" in Mechanism(modulation, guarantee, sensitivity="marginal").describe()
    assert "secret" not in Mechanism(modulation, guarantee).describe()
    assert "secret" not in Mechanism(Modulation(), guarantee, sensitivity="marginal").describe()


@given(
    delta=st.floats(-10, -2).map(lambda power: 10.0**power),
    multiplier=st.floats(-1.5, 2.5).map(lambda power: 10.0**power),
)
def test_gaussian_epsilon_inverts_delta_from_the_safe_side(delta, multiplier):
    epsilon = gaussian_epsilon(delta, multiplier)
    assert gaussian_delta(epsilon, multiplier) <= delta * (1 + 1e-12)
    if epsilon > 0:
        assert gaussian_delta(epsilon * (1 - 1e-6), multiplier) > delta


@pytest.mark.parametrize("multiplier", [0.1, 0.5, 1.0, 4.0, 30.0])
def test_gaussian_epsilon_agrees_with_dp_accounting(multiplier):
    assert gaussian_epsilon(1e-5, multiplier) == pytest.approx(
        get_epsilon_gaussian(multiplier, 1e-5), rel=1e-6
    )


@pytest.mark.parametrize(
    ("mine", "other", "ratio"),
    [
        (Distance(1.0), Replace(3.0), 6.0),
        (Distance(1.0), Distance(2.5), 2.5),
        (Distance(2.0), Distance(1.0), 0.5),
        (Replace(3.0), Distance(1.0), 1 / 6),
        (Replace(3.0), Distance(50.0), 1.0),  # clipped rows are never farther apart than 2R
        (Replace(3.0), Replace(9.0), 1.0),
        (Replace(3.0), Replace(1.5), 0.5),
        (ReplaceRecord(3.0, 2.0), Replace(1.0), 1 / 3),
        (ReplaceRecord(3.0, 2.0), ReplaceRecord(1.5, 2.0), 0.5),
    ],
)
@pytest.mark.parametrize("accounting", ["exact", "zcdp"])
def test_convert_scales_the_distance(mine, other, ratio, accounting):
    """The reference is dp_accounting's ε at noise multiplier / ratio; calibration's slack is 1e-9."""
    guarantee = Guarantee(1.5, 1e-5, mine, "client", 3)
    converted = guarantee.convert(other, accounting=accounting)
    multiplier = calibrate_noise_multiplier(1.5, 1e-5, accounting=accounting)
    assert converted.epsilon == pytest.approx(get_epsilon_gaussian(multiplier / ratio, 1e-5), rel=1e-6)
    assert (converted.delta, converted.relation, converted.unit, converted.rows_per_client) == (
        1e-5,
        other,
        "client",
        3,
    )


def test_convert_to_itself_changes_nothing():
    guarantee = Guarantee(2.0, 1e-5, Distance(1.0))
    same = guarantee.convert(Distance(1.0)).epsilon
    assert 2.0 * (1 - 1e-7) < same <= 2.0


def test_convert_to_almost_no_distance_stays_a_guarantee():
    assert Guarantee(0.1, 1e-3, Distance(1.0)).convert(Distance(1e-9)).epsilon <= 1e-8


def test_convert_there_and_back_is_never_better():
    guarantee = Guarantee(2.0, 1e-5, Distance(1.0))
    back = guarantee.convert(Distance(7.0)).convert(Distance(1.0))
    assert 2.0 * (1 - 1e-7) < back.epsilon < 2.0 * (1 + 1e-7)


@pytest.mark.parametrize(
    ("mine", "other", "reason"),
    [
        (Distance(1.0), ReplaceRecord(3.0), "no ε hides them"),
        (Replace(1.0), ReplaceRecord(1.0), "no ε hides them"),
        (ReplaceRecord(1.0, 2.0), ReplaceRecord(1.0, 3.0), "label_scale"),
        (Replace(1.0), 3.0, "relation"),
    ],
)
def test_convert_refuses_what_the_guarantee_does_not_say(mine, other, reason):
    with pytest.raises(InvalidParameterError, match=reason):
        Guarantee(2.0, 1e-5, mine).convert(other)
