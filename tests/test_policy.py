"""A device's policy: what it refuses, what a request costs, and how it is read from a file."""

from __future__ import annotations

import math
import re
import textwrap
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_modulated import (
    Columns,
    Distance,
    Guarantee,
    InvalidDataError,
    InvalidParameterError,
    Limits,
    Modulation,
    NumpyNoise,
    Policy,
    Replace,
    ReplaceRecord,
    RequestRefusedError,
)
from flwr_modulated.privacy import gaussian_delta, zcdp_rho

SENTINEL = 73519.2468
GUARANTEE = Guarantee(2.0, 1e-5, Replace(3.0))
FRAME = np.eye(4)[:, :1]
WAVY = Modulation(0.2, 0.2, 0.5, 1)

modulations = st.builds(
    Modulation,
    alpha=st.floats(0, 0.999),
    amplitude=st.floats(0, 1e9),
    frequency=st.floats(0, 1e9),
    num_directions=st.integers(0, 50),
)


@given(
    modulation=modulations,
    accounting=st.sampled_from(["exact", "zcdp", "classical"]),
    sensitivity=st.sampled_from(["conditional", "marginal"]),
    num_releases=st.integers(1, 1000),
    rows=st.integers(1, 9),
)
def test_every_request_costs_the_same_share(modulation, accounting, sensitivity, num_releases, rows):
    """Whatever a server asks, the device's own noise makes (Δ/σ)², summed over its rows, equal to `cost`."""
    guarantee = Guarantee(0.7, 1e-5, Replace(3.0), "client", rows)
    policy = Policy(guarantee, num_releases, sensitivity, accounting)
    mechanism = policy.mechanism(modulation)
    spent = rows * (mechanism.l2_sensitivity / mechanism.noise_std) ** 2
    assert spent == pytest.approx(policy.cost, rel=1e-8)
    assert num_releases * spent <= policy.budget * (1 + 1e-12)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_budget_is_the_guarantee(epsilon):
    """Exactly spent, the budget is (ε, δ)-DP; a thousandth more is not. Under zCDP it is 2ρ."""
    guarantee = Guarantee(epsilon, 1e-5, Distance(1.0))
    budget = Policy(guarantee, 7).budget
    assert gaussian_delta(epsilon, 1 / math.sqrt(budget)) <= 1e-5
    assert gaussian_delta(epsilon, 1 / math.sqrt(1.001 * budget)) > 1e-5
    zcdp = Policy(guarantee, 7, accounting="zcdp").budget
    assert 2 * zcdp_rho(epsilon, 1e-5) * (1 - 1e-8) < zcdp <= 2 * zcdp_rho(epsilon, 1e-5)


def test_check_returns_the_frame():
    policy = Policy(GUARANTEE)
    np.testing.assert_array_equal(policy.check(WAVY, FRAME.tolist(), num_rows=5, num_columns=4), FRAME)
    assert policy.check(Modulation(), np.zeros((4, 0)), num_rows=1, num_columns=4).shape == (4, 0)


@pytest.mark.parametrize(
    ("modulation", "name"),
    [
        (Modulation(alpha=0.91), "alpha"),
        (Modulation(amplitude=1e9), "amplitude"),
        (Modulation(frequency=10.1), "frequency"),
        (Modulation(num_directions=33), "num_directions"),
    ],
)
def test_requests_outside_the_limits_are_refused(modulation, name):
    frame = np.eye(40)[:, : modulation.num_directions]
    with pytest.raises(RequestRefusedError, match=f"^{name} must be at most .* on this device"):
        Policy(GUARANTEE).check(modulation, frame, num_rows=1, num_columns=40)
    wider = Limits(max_alpha=0.95, max_amplitude=1e10, max_frequency=11.0, max_directions=33)
    Policy(GUARANTEE, limits=wider).check(modulation, frame, num_rows=1, num_columns=40)


@pytest.mark.parametrize(
    ("directions", "reason"),
    [
        (1000 * FRAME, "orthonormal"),
        (np.full((4, 1), np.nan), "finite"),
        (np.full((4, 1), 1e200), "orthonormal"),
        (FRAME[:3], "shape"),
        (np.eye(4)[:, :2], "shape"),
        ([["a"]] * 4, "numeric"),
        (None, "shape"),
    ],
)
def test_hostile_directions_are_refused(directions, reason):
    with pytest.raises(RequestRefusedError, match=reason) as caught:
        Policy(GUARANTEE).check(WAVY, directions, num_rows=1, num_columns=4)
    assert caught.value.__context__ is None  # nothing travels along
    assert caught.value.__cause__ is None


def test_repeated_direction_is_refused():
    with pytest.raises(RequestRefusedError, match="orthonormal"):
        Policy(GUARANTEE).check(Modulation(0.2, 0.2, 0.5, 2), np.eye(4)[:, [1, 1]], num_rows=1, num_columns=4)


def test_not_a_modulation_is_refused():
    with pytest.raises(RequestRefusedError, match="modulation"):
        Policy(GUARANTEE).check({"alpha": -5}, FRAME, num_rows=1, num_columns=4)


def test_client_unit_covers_no_more_rows_than_it_says():
    policy = Policy(Guarantee(2.0, 1e-5, Replace(3.0), "client", 3))
    policy.check(WAVY, FRAME, num_rows=3, num_columns=4)
    with pytest.raises(RequestRefusedError, match=r"at most 3 row\(s\)"):
        policy.check(WAVY, FRAME, num_rows=4, num_columns=4)
    Policy(GUARANTEE).check(WAVY, FRAME, num_rows=10_000, num_columns=4)  # unit row: each by itself


def test_labels_need_consent_or_a_relation_that_hides_them():
    with pytest.raises(InvalidParameterError, match="release_labels must be True"):
        Policy(GUARANTEE, release_labels=False)
    Policy(Guarantee(2.0, 1e-5, ReplaceRecord(3.0)), release_labels=False)


@pytest.mark.parametrize(
    "settings",
    [
        {"on_exhausted": "ask"},
        {"release_labels": 1},
        {"columns": {"centre": [0.0]}},
        {"limits": None},
        {"num_releases": 0},
        {"accounting": "rdp"},
    ],
)
def test_bad_settings_name_themselves(settings):
    (name,) = settings
    with pytest.raises(InvalidParameterError, match=name):
        Policy(GUARANTEE, **settings)


def test_columns_standardise():
    columns = Columns(centre=[10.0, -1.0], scale=[2.0, 4.0], label_centre=5.0, label_scale=10.0)
    features, labels = columns.standardise([[12.0, 3.0], [10.0, -5.0]], [5.0, 25.0])
    np.testing.assert_array_equal(features, [[1.0, 1.0], [0.0, -1.0]])
    np.testing.assert_array_equal(labels, [0.0, 2.0])


@pytest.mark.parametrize(
    ("features", "labels"),
    [
        ([[SENTINEL]], [1.0]),
        ([[SENTINEL, np.nan]], [1.0]),
        ([[SENTINEL, 1.0]], [1.0, 2.0]),
        ([[1.0, 1.0]], [np.inf]),
        ([[SENTINEL, "x"]], [1.0]),
    ],
)
def test_data_errors_hold_no_data(features, labels):
    with pytest.raises(InvalidDataError) as caught:
        Columns(centre=(0.0, 0.0), scale=(1.0, 1.0)).standardise(features, labels)
    assert "73519" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"centre": [0.0], "scale": [0.0]}, r"scale\[0\]"),
        ({"centre": [0.0, 1.0], "scale": [1.0]}, "centre and scale"),
        ({"centre": [], "scale": []}, "centre and scale"),
        ({"centre": [math.nan], "scale": [1.0]}, r"centre\[0\]"),
        ({"centre": "12", "scale": [1.0, 1.0]}, "centre"),
        ({"centre": 0.0, "scale": [1.0]}, "centre"),
        ({"centre": [0.0], "scale": [1.0], "label_scale": -1.0}, "label_scale"),
    ],
)
def test_bad_columns_name_themselves(settings, name):
    with pytest.raises(InvalidParameterError, match=name):
        Columns(**settings)


@pytest.mark.parametrize("name", ["max_alpha", "max_amplitude", "max_frequency", "max_directions"])
def test_bad_limits_name_themselves(name):
    with pytest.raises(InvalidParameterError, match=name):
        Limits(**{name: -1})


def test_describe_adds_that_phases_must_stay_secret():
    assert "phases" in Policy(GUARANTEE, sensitivity="marginal").describe()
    text = Policy(GUARANTEE, 3).describe(NumpyNoise(np.random.default_rng(0)))
    assert "3 releases" in text
    assert "idealised" in text
    assert "phases" not in text


# ---------------------------------------------------------------- TOML

MINIMAL = """
    release_labels = true
    [guarantee]
    epsilon = 2.0
    delta = 1e-5
    relation = "replace"
    radius = 3.0
"""


@pytest.fixture
def read(tmp_path):
    def read(text: str) -> Policy:
        path = tmp_path / "policy.toml"
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return Policy.from_toml(path)

    return read


def test_minimal_file(read):
    assert read(MINIMAL) == Policy(GUARANTEE)


def test_documented_example_is_complete_and_states_the_defaults(read):
    """The example in the docstring is a working file; its commented values are the defaults."""
    example = Policy.from_toml.__doc__.split("may be left out::")[1]
    policy = read(example)
    assert policy == Policy(GUARANTEE, columns=Columns(centre=[40.0, 3.5], scale=[12.0, 1.5]))
    keys = set(re.findall(r"^(?:# )?(\w+) =", textwrap.dedent(example), flags=re.MULTILINE))
    assert keys == {item.name for kind in (Policy, Guarantee, Columns, Limits) for item in fields(kind)} - {
        "guarantee",
        "columns",
        "limits",
    } | {"radius", "label_scale"}


def test_full_file_with_private_labels(read):
    policy = read("""
        num_releases = 10
        accounting = "zcdp"
        sensitivity = "marginal"
        on_exhausted = "repeat"
        [guarantee]
        epsilon = 1
        delta = 1e-6
        relation = "replace_record"
        radius = 4
        label_scale = 2.5
        unit = "client"
        rows_per_client = 3
        [limits]
        max_alpha = 0.5
    """)
    guarantee = Guarantee(1, 1e-6, ReplaceRecord(4, 2.5), "client", 3)
    assert policy == Policy(
        guarantee, 10, "marginal", "zcdp", on_exhausted="repeat", limits=Limits(max_alpha=0.5)
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("epsilon = 2.0", "epsilon = -2.0"), "epsilon must be"),
        (("epsilon = 2.0", 'epsilon = "2"'), "epsilon must be a number"),
        (("epsilon = 2.0", "epsylon = 2.0"), r"\[guarantee\] has unknown key\(s\) epsylon"),
        (("epsilon = 2.0", ""), r"\[guarantee\] must have the key\(s\) epsilon"),
        (("release_labels = true", ""), "release_labels must be said"),
        (("release_labels = true", "release_labels = false"), "release_labels must be True"),
        (('"replace"', '"replac"'), "relation must be one of distance, replace, replace_record"),
        (('"replace"', "3"), "relation must be one of"),
        (("radius = 3.0", "radius = 3.0\n    label_scale = 2.0"), "label_scale"),
        (("release_labels", "noise_std = 0.1\n    release_labels"), "unknown key.* noise_std"),
        (("[guarantee]", "[limits]\n    max_noise = 1\n    [guarantee]"), "unknown key.* max_noise"),
        (("[guarantee]", "[columns]\n    centre = [1.0]\n    [guarantee]"), "must have the key.* scale"),
        (("[guarantee]", "columns = 3\n    [guarantee]"), "columns must be a table"),
        (("[guarantee]", "[guarantee"), "must be a TOML file"),
        (("release_labels = true", "guarantee = 2\n    [limits]"), "TOML file"),
    ],
)
def test_bad_files_are_clear(read, change, reason):
    assert change[0] in MINIMAL
    with pytest.raises(InvalidParameterError, match=reason):
        read(MINIMAL.replace(*change))


def test_other_bad_files(read, tmp_path):
    with pytest.raises(InvalidParameterError, match="guarantee must be a table"):
        read("guarantee = 2")
    with pytest.raises(InvalidParameterError, match=r"the policy must have the key\(s\) guarantee"):
        read("")
    (tmp_path / "latin.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidParameterError, match="TOML"):
        Policy.from_toml(tmp_path / "latin.toml")
    with pytest.raises(FileNotFoundError):
        Policy.from_toml(tmp_path / "none.toml")
