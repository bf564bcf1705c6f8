"""Names of coefficients, and the affine map from standardised to original units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from ._typing import FloatArray
from ._validate import check_real, check_vector
from .errors import InvalidDataError, InvalidParameterError

INTERCEPT = "const"


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Coefficients in original units are ``matrix @ standardised + shift``."""

    matrix: FloatArray  # (p, p)
    shift: FloatArray  # (p,)
    centre: FloatArray  # (d,)
    label_centre: float

    @classmethod
    def build(
        cls,
        num_features: int,
        fit_intercept: bool,
        centre: ArrayLike,
        scale: ArrayLike,
        label_centre: float,
        label_scale: float,
    ) -> Self:
        """Derive the map from the public constants of a study."""
        d = num_features
        centres = check_vector("centre", np.broadcast_to(np.asarray(centre, float), (d,)))
        scales = check_vector("scale", np.broadcast_to(np.asarray(scale, float), (d,)))
        if (scales <= 0).any():
            raise InvalidParameterError("scale must be in (0, ∞) for every feature; use 1 to keep a feature")
        check_real("label_centre", label_centre)
        check_real("label_scale", label_scale, low=0, low_open=True)
        slopes = label_scale / scales
        matrix = np.diag(np.append(slopes, label_scale) if fit_intercept else slopes)
        shift = np.zeros(len(matrix))
        if fit_intercept:
            matrix[d, :d] = -slopes * centres
            shift[d] = label_centre
        return cls(matrix, shift, centres, float(label_centre))

    def to_original(self, coefficients: FloatArray) -> FloatArray:
        """From standardised to original units."""
        return self.matrix @ coefficients + self.shift

    def to_standardised(self, coefficients: FloatArray) -> FloatArray:
        """From original to standardised units."""
        return np.asarray(np.linalg.solve(self.matrix, coefficients - self.shift))

    def constraints(self, fixed: Sequence[int], values: Sequence[float]) -> FloatArray:
        """Rows c with c·(θ, −1) = 0 exactly where the fixed original coefficients have the values."""
        rows = list(fixed)
        gap = np.asarray(values, float) - self.shift[rows]
        return np.column_stack([self.matrix[rows], gap])


def coefficient_names(
    feature_names: Sequence[str] | None, num_features: int, fit_intercept: bool
) -> tuple[str, ...]:
    """One name a coefficient; the intercept comes last."""
    names = [f"x{j + 1}" for j in range(num_features)] if feature_names is None else list(feature_names)
    if len(names) != num_features:
        raise InvalidDataError(f"feature_names must have {num_features} entries, got {len(names)}")
    if fit_intercept:
        names.append(INTERCEPT)
    if len(set(names)) < len(names):
        raise InvalidDataError("feature_names must differ from each other and from 'const'")
    return tuple(names)
