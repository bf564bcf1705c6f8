"""A guarantee in words: what is hidden, from whom, how well, and what is not."""

from __future__ import annotations

import math

from ._typing import Accounting
from ._validate import check_choice, check_int
from .noise import NoiseSource
from .privacy import Distance, Guarantee, Replace, calibrate_noise_multiplier

__all__ = ["describe_guarantee"]

_ACCOUNTING = {
    "exact": "the exact accounting of the Gaussian mechanism",
    "zcdp": "zero-concentrated differential privacy",
    "classical": "the classical formula of the Gaussian mechanism",
}


def describe_guarantee(
    guarantee: Guarantee, num_releases: int, accounting: Accounting, noise_source: NoiseSource | None
) -> str:
    """The paragraph behind :meth:`Guarantee.describe`."""
    check_int("num_releases", num_releases, low=1)
    check_choice("accounting", accounting, Accounting)
    epsilon, delta = guarantee.epsilon, guarantee.delta
    calibrate_noise_multiplier(epsilon, delta, accounting=accounting)  # refuses what would be untrue
    releases = "its only release" if num_releases == 1 else f"all of its {num_releases} releases together"
    sentences = [
        f"Hidden from everybody who sees what leaves the device (the server, its operators, and anyone "
        f"they pass it on to): {_secret(guarantee)}.",
        f"This is (ε={epsilon:g}, δ={delta:g})-differential privacy under the relation {guarantee.relation}, "
        f"unit {guarantee.unit}, for {releases}, by {_ACCOUNTING[accounting]}: no conclusion "
        f"becomes more than e^ε = {_power(epsilon)} times as likely if the device holds one of the two "
        f"rather than the other, beyond an extra probability of δ.",
    ]
    if epsilon > 10:
        sentences.append("At such a large ε the promise is weak.")
    if isinstance(guarantee.relation, Distance):
        sentences.append(_farther(guarantee, accounting))
    sentences.append(
        f"Not hidden: {_public(guarantee)}that the device takes part and when, how many rows it holds, and "
        "that it refuses or fails; what other people's data or general knowledge say about it."
    )
    sentences.append(
        "No credit is taken for other devices' noise or for sampling: the server is not trusted."
    )
    if noise_source is not None:
        sentences.append(f"Noise: {noise_source.description}.")
    return " ".join(sentences)


def _secret(guarantee: Guarantee) -> str:
    relation = guarantee.relation
    if isinstance(relation, Distance):
        rows = (
            f"which of two rows of features it holds, if they are within distance {relation.radius:g} "
            "of each other (in standardised units)"
        )
    elif isinstance(relation, Replace):
        rows = (
            f"which row of features it holds, after clipping to norm {relation.radius:g} "
            "(in standardised units)"
        )
    else:
        rows = (
            f"which record of features and label it holds, after clipping to norm {relation.radius:g} "
            f"(in standardised units, the label divided by {relation.label_scale:g})"
        )
    if guarantee.unit == "client":
        return f"{rows}, for all of its up to {guarantee.rows_per_client} rows at once"
    return f"{rows}, for each row by itself"


def _farther(guarantee: Guarantee, accounting: Accounting) -> str:
    radius = guarantee.relation.separation
    told = [
        f"ε={guarantee.convert(Distance(times * radius), accounting=accounting).epsilon:.3g} "
        f"at distance {times * radius:g}"
        for times in (2, 10)
    ]
    return (
        f"Rows farther apart are hidden less, at the same δ: {' and '.join(told)}. A row of d standardised "
        "features is typically √d away from the average one, so this does not hide a row altogether."
    )


def _public(guarantee: Guarantee) -> str:
    labels = "" if guarantee.relation.hides_labels else "labels, which leave the device as they are; "
    together = "what several rows of one person show together; " if guarantee.unit == "row" else ""
    return labels + together


def _power(epsilon: float) -> str:
    if epsilon < 20:
        return f"{math.exp(epsilon):.3g}"
    return f"10^{epsilon / math.log(10):.0f}"
