"""The app's data, as it was before: rows of a node, standardised with public constants."""

from __future__ import annotations

import numpy as np

FEATURES = ("age", "hours", "caffeine")


def load_rows(partition_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Features (5000, 3) and labels (5000,) of a node that hosts 5000 people with a row each."""
    rng = np.random.default_rng(partition_id)
    features = rng.standard_normal((5000, len(FEATURES)))
    labels = features @ [0.3, -0.8, 0.2] + 0.5 * rng.standard_normal(5000)
    return features, labels
