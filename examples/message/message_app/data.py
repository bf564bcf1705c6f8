"""The rows of a node: private ones for the regression, and ones it may train on openly."""

from __future__ import annotations

import numpy as np

FEATURES = ("age", "hours", "caffeine")


def load_rows(partition_id: int, *, private: bool) -> tuple[np.ndarray, np.ndarray]:
    """Features (5000, 3) and labels (5000,), standardised with public constants."""
    rng = np.random.default_rng([partition_id, private])
    features = rng.standard_normal((5000, len(FEATURES)))
    labels = features @ [0.3, -0.8, 0.2] + 0.5 * rng.standard_normal(5000)
    return features, labels
