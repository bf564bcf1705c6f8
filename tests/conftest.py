"""Shared fixtures: one random stream per test, and a guard on the global random states."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from zlib import crc32

import numpy as np
import pytest
from hypothesis import settings

BASE_SEED = int(os.environ.get("FLWR_MODULATED_TEST_SEED", "0"))

# The base seed 0 is what every change runs, always on the same examples; other seeds search anew.
settings.register_profile(
    "project", deadline=None, database=None, derandomize=BASE_SEED == 0, print_blob=True, max_examples=100
)
settings.load_profile("project")


def pytest_report_header() -> str:
    return f"base seed: {BASE_SEED} (FLWR_MODULATED_TEST_SEED)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the nightly tests out unless -m speaks of them; -m replaces an option in pyproject.toml."""
    if "nightly" in config.option.markexpr:
        return
    nightly = [item for item in items if item.get_closest_marker("nightly")]
    if nightly:
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if item not in nightly]


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A stream that depends on the test's name and the base seed only: order does not matter."""
    return np.random.default_rng([BASE_SEED, crc32(request.node.nodeid.encode())])


def _global_states() -> tuple[object, ...]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return random.getstate(), kind, keys.tobytes(), *rest


@pytest.fixture(autouse=True)
def _global_random_states_untouched(request: pytest.FixtureRequest) -> Iterator[None]:
    """Code that draws from `random` or `np.random` could not be reproduced, nor kept secret."""
    before = _global_states()
    yield
    touched = _global_states() != before  # the states themselves would fill the report
    if touched and "global_rng" not in request.keywords:
        pytest.fail("the global random state was used; draw from a generator, or mark the test global_rng")


@pytest.fixture
def task_identity() -> Iterator[None]:
    """Lets a test create Flower messages outside a run."""
    from simulations.engines import _task_identity

    with _task_identity():
        yield
