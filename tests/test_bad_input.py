"""Data and arguments that cannot be used: errors name them, say what to do, and hold no value."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable

import numpy as np
import pytest
from test_mechanism import mechanism_of

from flwr_modulated import (
    Distance,
    Guarantee,
    InvalidDataError,
    InvalidParameterError,
    Mechanism,
    ModulatedError,
    Modulation,
    Moments,
    gradient,
)

SENTINEL = 271828.1828


def bad_data() -> dict[str, tuple[Callable[[], object], str]]:
    """Calls with data that cannot be used, and what their errors must say."""
    s, plain = SENTINEL, mechanism_of(Modulation())
    rng, h = np.random.default_rng(0), math.sqrt(0.5)
    moments = Moments.from_rows([[s, 1.0]], [s], noise_std=1.0)

    def release(rows: object) -> Callable[[], object]:
        return lambda: plain.release(rows, rng=rng)

    return {
        "NaN": (release([[s, math.nan]]), "features must be finite"),
        "infinite": (release([[s, -math.inf]]), "features must be finite"),
        "flat": (release([s, s]), r"features must have shape \(rows, features\).*reshape"),
        "deep": (release([[[s]]]), "features must have shape"),
        "no rows": (release(np.zeros((0, 3))), "at least 1 row"),
        "no columns": (release(np.zeros((3, 0))), "one column"),
        "text": (release([[f"secret {s}", "b"]]), "features must be numeric"),
        "ragged": (release([[s, s], [s]]), "features must be numeric"),
        "objects": (release([[{"x": s}]]), "features must be numeric"),
        "overflow": (
            lambda: mechanism_of().release([[1.7e308] * 3], [[h, 0], [h, 0], [0, 1]], rng=rng),
            "features must be small enough",
        ),
        "labels: NaN": (lambda: Moments.from_rows([[s]], [math.nan], noise_std=1.0), "labels must be finite"),
        "labels: text": (
            lambda: Moments.from_rows([[s]], [f"{s}!"], noise_std=1.0),
            "labels must be numeric",
        ),
        "labels: too many": (
            lambda: Moments.from_rows([[s]], [s, s], noise_std=1.0),
            "labels must have",
        ),
        "labels: column": (lambda: Moments.from_rows([[s]], [[s]], noise_std=1.0), "labels must have shape"),
        "released: NaN": (
            lambda: Moments.from_rows([[s, math.nan]], [s], noise_std=1.0),
            "released must be finite",
        ),
        "beta: NaN": (lambda: gradient([s, math.nan], moments.debias()), "beta must be finite"),
        "beta: length": (lambda: gradient([s], moments.debias()), r"beta must have shape \(2,\)"),
    }


def check_errors_keep_secrets() -> None:
    """Errors on data name argument, constraint and what to do, and hold no value: they may travel."""
    for case, (call, message) in bad_data().items():
        with pytest.raises(InvalidDataError, match=message) as caught:
            call()
        assert isinstance(caught.value, ModulatedError)
        assert isinstance(caught.value, ValueError)
        shown = "".join(traceback.format_exception(caught.value))
        for form in (str(SENTINEL), "271828", "2.718"):
            assert form not in shown, case


class TestBadInput:
    def test_errors_keep_secrets(self) -> None:
        check_errors_keep_secrets()

    @pytest.mark.parametrize(
        ("change", "name"),
        [
            ({"modulation": None}, "modulation"),
            ({"modulation": Guarantee(1.0, 1e-5, Distance(1.0))}, "modulation"),
            ({"guarantee": (1.0, 1e-5)}, "guarantee"),
            ({"num_releases": 0}, "num_releases"),
            ({"num_releases": True}, "num_releases"),
            ({"num_releases": 1.0}, "num_releases"),
            ({"sensitivity": "local"}, "sensitivity"),
            ({"accounting": "rdp"}, "accounting"),
            ({"modulation": Modulation(0.0, 1e300, 1e300, 1)}, "noise_std"),
        ],
    )
    def test_bad_mechanisms(self, change: dict[str, object], name: str) -> None:
        good = {"modulation": Modulation(), "guarantee": Guarantee(1.0, 1e-5, Distance(1.0))}
        with pytest.raises(InvalidParameterError, match=f"{name} must be"):
            Mechanism(**(good | change))

    @pytest.mark.parametrize(
        ("directions", "message"),
        [
            (None, "directions must be given when num_directions=2"),
            (1000 * np.eye(3)[:, :2], "orthonormal"),
            (np.eye(3)[:, [0, 0]], "orthonormal"),
            (np.eye(3), r"directions must have shape \(3, 2\)"),
        ],
    )
    def test_bad_directions_release_nothing(self, directions: object, message: str) -> None:
        stream = np.random.default_rng(0)
        state = stream.bit_generator.state
        with pytest.raises(InvalidParameterError, match=message):
            mechanism_of().release(np.ones((2, 3)), directions, rng=stream)
        assert stream.bit_generator.state == state

    def test_more_directions_than_features(self, rng: np.random.Generator) -> None:
        with pytest.raises(InvalidParameterError, match="num_directions must be at most"):
            mechanism_of().release([[1.0]], [[1.0, 0.0]], rng=rng)

    @pytest.mark.parametrize("bad", [None, 0, np.random.RandomState(0), np.random])
    def test_only_a_generator_will_do(self, bad: object) -> None:
        with pytest.raises(InvalidParameterError, match="rng must be"):
            mechanism_of(Modulation()).release([[1.0]], rng=bad)
