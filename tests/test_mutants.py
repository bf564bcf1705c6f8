"""Each broken twin is caught by the checks that it names, and each check catches one."""

from __future__ import annotations

import inspect
import random
from importlib import import_module

import numpy as np
import pytest
from conftest import _global_states
from mutants import MUTANTS, Mutant

PAIRS = [(mutant, check) for mutant in MUTANTS for check in mutant.caught_by]
SLOW = ("check_sampled_variance", "check_sampled_mean")
MODULES = (
    "test_bad_input",
    "test_estimators",
    "test_gradient_variance",
    "test_mechanism",
    "test_modulation",
    "test_moments",
    "test_privacy",
)


def run(check: str, rng: np.random.Generator) -> None:
    module, name = check.split(":")
    function = getattr(import_module(module), name)
    function(**({"rng": rng} if "rng" in inspect.signature(function).parameters else {}))


@pytest.mark.global_rng  # one mutant draws from it
@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        pytest.param(
            mutant,
            check,
            id=f"{mutant.name}-{check.split(':')[1]}",
            marks=[pytest.mark.statistical] if check.endswith(SLOW) else [],
        )
        for mutant, check in PAIRS
    ],
)
def test_caught(
    mutant: Mutant, check: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run(check, rng)


def test_every_check_catches_something() -> None:
    """A check that sees no defect would be deleted."""
    checks = {
        f"{module}:{name}"
        for module in MODULES
        for name, function in vars(import_module(module)).items()
        if name.startswith("check_")
        and function.__module__ == module
        and all(
            p.default is not p.empty or p.name == "rng"
            for p in inspect.signature(function).parameters.values()
        )
    }
    assert checks == {check for _, check in PAIRS}
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.global_rng
@pytest.mark.parametrize("draw", [random.random, np.random.random], ids=["random", "numpy"])
def test_the_guard_sees_a_draw_from_the_global_state(draw: object) -> None:
    before = _global_states()
    draw()
    assert _global_states() != before
