"""Released rows and moments as independent units, each with its own unbiased second moment.

What inference and evaluation need of a release is linear in one symmetric matrix per unit,
W = Σ u uᵀ of u = (x, 1, y), estimated without bias from what the unit released (Eq. 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._parts import (
    MODULATION,
    NOISE,
    NOISE_FOURTH,
    ROWS,
    WEIGHT,
    Groups,
    Ids,
    Rows,
    as_matrix,
    tally_up,
)
from ._typing import FloatArray
from ._validate import check_matrix, check_real, check_vector
from .errors import InvalidDataError, InvalidParameterError
from .modulation import Modulation
from .moments import DebiasedMoments, Moments, check_noise_std, modulation_offset

__all__ = ["Group", "Sample"]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Moments of one node, with the public map that its rows went through.

    Parameters
    ----------
    moments : Moments
        Sums over the released rows.
    modulation : Modulation, optional
        The public map; default plain.
    directions : array_like of shape (d, m), optional
        Its directions. Rounds may differ in them: give each its own groups.
    unit : str or int, optional
        Who released. Groups of the same unit count as one, as they must if a node
        releases the same rows in several rounds. By default every group is a unit.
    """

    moments: Moments
    modulation: Modulation | None = None
    directions: ArrayLike | None = None
    unit: str | int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Everything released in a study, by independent units (rows, or nodes).

    Build it with :meth:`from_rows` or :meth:`from_moments`; ``a + b`` puts two
    together, so rounds may use different maps and nodes may send rows or moments.

    Attributes
    ----------
    num_features : int
        Number of features d, without the label of joint records.
    num_units : int
        Number of units that are independent of each other.
    joint_label_scale : float or None
        The s_y of joint records; None where labels travelled beside the rows.
    weights : ndarray of shape (num_units,)
        Released rows of each unit, or after :meth:`weighted` the sum of their weights.
    grouped : bool
        Whether units stand for more than single rows, so that intervals must allow
        for their number.
    """

    num_features: int
    joint_label_scale: float | None
    _parts: tuple[Rows | Groups, ...] = field(repr=False)
    grouped: bool = field(init=False)
    num_units: int = field(init=False)
    weights: FloatArray = field(init=False, repr=False)
    _index: NDArray[np.intp] | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        index, num_units = _unit_index(self._parts)
        object.__setattr__(self, "_index", index)
        object.__setattr__(self, "num_units", num_units)
        grouped = index is not None or any(isinstance(part, Groups) for part in self._parts)
        object.__setattr__(self, "grouped", grouped)
        weights = self._by_unit(np.concatenate([part.tallies[:, WEIGHT] for part in self._parts]))
        object.__setattr__(self, "weights", weights)

    @classmethod
    def from_rows(
        cls,
        released: ArrayLike,
        labels: ArrayLike | None,
        *,
        noise_std: ArrayLike,
        modulation: Modulation | None = None,
        directions: ArrayLike | None = None,
        joint_label_scale: float | None = None,
        units: Sequence[str | int] | None = None,
    ) -> Self:
        """Take each released row as a unit.

        Parameters
        ----------
        released : array_like of shape (n, d), or (n, d + 1) for joint records
            Released rows g̃.
        labels : array_like of shape (n,) or None
            Labels y; None for joint records.
        noise_std : float or array_like of shape (n,)
            Standard deviation σ of each row's noise, in units of the released rows.
        modulation : Modulation, optional
            The public map; default plain.
        directions : array_like, optional
            Its directions, of shape (columns of `released`, m).
        joint_label_scale : float, optional
            The s_y > 0 of joint records (x, y / s_y) (``ReplaceRecord``), in label
            units; with it `labels` must be None.
        units : sequence of str or int of length n, optional
            Who released each row. Rows of the same unit count as one: give it if a
            client has several rows, or releases a row more than once.

        Returns
        -------
        Sample

        Raises
        ------
        InvalidDataError
            If a shape does not fit or a value is not finite.
        InvalidParameterError
            If a noise standard deviation is negative, the directions do not fit the
            modulation, or labels and `joint_label_scale` contradict each other.
        """
        rows = check_matrix("released", released)
        n, columns = rows.shape
        modulation = Modulation() if modulation is None else modulation
        shrink = modulation.contraction
        offset = modulation_offset(modulation, directions, num_features=columns) / shrink**2
        variances = np.broadcast_to(check_noise_std(noise_std, n) ** 2 / shrink**2, (n,))
        scaled = rows / shrink
        if joint_label_scale is None:
            if labels is None:
                raise InvalidParameterError(
                    "labels must be given; for joint records give joint_label_scale instead "
                    "(the label_scale of ReplaceRecord)"
                )
            y = check_vector("labels", labels, length=n)
            vectors = np.column_stack([scaled, np.ones(n), y])
            width = np.append(np.ones(columns), 0.0)
        else:
            if labels is not None:
                raise InvalidParameterError(
                    "labels must be None with joint_label_scale: joint records hold the label"
                )
            if columns < 2:
                raise InvalidDataError("released joint records need at least one feature beside the label")
            scale = check_real("joint_label_scale", joint_label_scale, low=0, low_open=True)
            vectors = np.column_stack([scaled[:, :-1], np.ones(n), scale * scaled[:, -1]])
            width = np.append(np.ones(columns - 1), scale)
        # Noise and modulation reach every column but the constant, the label's only in joint records.
        place = np.delete(np.arange(vectors.shape[1]), -2)
        noise = np.zeros(vectors.shape[1])
        noise[place] = width**2
        full_offset = np.zeros((vectors.shape[1],) * 2)
        padded = np.zeros((len(width),) * 2)
        padded[:columns, :columns] = offset
        full_offset[np.ix_(place, place)] = padded * np.outer(width, width)
        part = Rows(
            vectors=vectors,
            offset=full_offset,
            noise=noise,
            variances=variances,
            weights=np.ones(n),
            tallies=tally_up(
                np.ones(n), variances, variances**2, (modulation.effective_amplitude / shrink) ** 2
            ),
            ids=None if units is None else _ids(units, n),
        )
        return cls(vectors.shape[1] - 2, joint_label_scale, (part,))

    @classmethod
    def from_moments(
        cls,
        groups: Iterable[Moments | Group],
        *,
        modulation: Modulation | None = None,
        directions: ArrayLike | None = None,
        joint_label_scale: float | None = None,
    ) -> Self:
        """Take the moments of each node as a unit.

        Parameters
        ----------
        groups : iterable of Moments or Group
            One a node. A :class:`Group` brings its own modulation and directions;
            those of plain :class:`Moments` are the arguments below.
        modulation : Modulation, optional
            The public map; default plain.
        directions : array_like, optional
            Its directions.
        joint_label_scale : float, optional
            The s_y > 0 of joint records (x, y / s_y) (``ReplaceRecord``).

        Returns
        -------
        Sample

        Raises
        ------
        InvalidDataError
            If there is no group, or their numbers of features differ.
        InvalidParameterError
            If directions do not fit a modulation.
        """
        wrapped = [
            group if isinstance(group, Group) else Group(group, modulation, directions) for group in groups
        ]
        if not wrapped:
            raise InvalidDataError("groups must hold the moments of at least one node, got none")
        debiased = [group.moments.debias(group.modulation, group.directions) for group in wrapped]
        if joint_label_scale is not None:
            scale = check_real("joint_label_scale", joint_label_scale, low=0, low_open=True)
            debiased = [DebiasedMoments.from_joint(part, label_scale=scale) for part in debiased]
        d = debiased[0].num_features
        if any(part.num_features != d for part in debiased):
            raise InvalidDataError("groups must all have the same number of features")
        counts = np.array([part.num_samples for part in debiased], dtype=np.float64)
        named = [group.unit for group in wrapped]
        if any(unit is None for unit in named) and any(unit is not None for unit in named):
            raise InvalidDataError("groups must have a unit each, or none of them; name the others too")
        part = Groups(
            matrices=counts[:, None, None] * np.array([as_matrix(part) for part in debiased]),
            tallies=tally_up(
                counts,
                np.array([part.noise_scale**2 for part in debiased]),
                np.array([part.noise_scale**4 for part in debiased]),
                np.array([part.modulation_scale**2 for part in debiased]),
            ),
            ids=None if named[0] is None else _ids(named, len(named)),
        )
        return cls(d, joint_label_scale, (part,))

    def __add__(self, other: Self) -> Self:
        if not isinstance(other, Sample):
            return NotImplemented
        return self.concatenate([self, other])

    @classmethod
    def concatenate(cls, samples: Iterable[Self]) -> Self:
        """Put samples together, in order.

        Raises
        ------
        InvalidDataError
            If there is none, or their numbers of features differ.
        """
        listed = list(samples)
        if not listed:
            raise InvalidDataError("samples must be at least one, got none")
        d, scale = listed[0].num_features, listed[0].joint_label_scale
        for sample in listed:
            if sample.num_features != d:
                raise InvalidDataError(
                    f"samples must have the same number of features, got {d} and {sample.num_features}"
                )
            if sample.joint_label_scale != scale:
                raise InvalidDataError("samples must all have public labels, or one scale of private labels")
        return cls(d, scale, tuple(part for sample in listed for part in sample._parts))

    def weighted(self) -> Self:
        """Weigh rows of different noise by the information that it leaves.

        Returns
        -------
        Sample
            Rows weigh as in :meth:`DebiasedMoments.combine`, the moments of a node as
            rows with the node's average noise; weights sum to the number of rows. The
            sample itself if all noise is equal.

        Notes
        -----
        The weights depend on the noise, which is public, and on the trace of Σ̂ alone, so
        that scores keep mean zero and squared errors stay unbiased as long as what a
        device has to say does not depend on its budget.
        """
        tallies = np.concatenate([part.tallies for part in self._parts])
        s2, s4, modulation = (tallies[:, j] / tallies[:, ROWS] for j in (NOISE, NOISE_FOURTH, MODULATION))
        if np.allclose(s2, s2[0], rtol=1e-9, atol=0) and np.allclose(modulation, modulation[0], rtol=1e-9):
            return self
        moments = self.moments()
        d, signal = self.num_features, float(np.trace(moments.second_moment))
        if self.joint_label_scale is not None:
            d, signal = d + 1, signal + moments.label_square / self.joint_label_scale**2
        signal = max(signal, 0.0)
        variances = s4 * (d + 1) + (2.0 * signal + modulation) * s2 + signal**2 * (d + 1) / d**2
        if not variances.all():  # rows without noise, and no signal to go by: any weights will do
            return self
        factors = 1.0 / variances
        factors *= tallies[:, ROWS].sum() / (tallies[:, ROWS] @ factors)
        ends = np.cumsum([len(part.tallies) for part in self._parts])[:-1]
        pieces = zip(self._parts, np.split(factors, ends), strict=True)
        return type(self)(
            self.num_features, self.joint_label_scale, tuple(part.reweighted(f) for part, f in pieces)
        )

    @property
    def num_samples(self) -> int:
        """Number of released rows K."""
        return round(sum(float(part.tallies[:, ROWS].sum()) for part in self._parts))

    @property
    def effective_units(self) -> float:
        """Number of equal units that are worth as much, (Σw)² / Σw²."""
        return float(self.weights.sum() ** 2 / (self.weights @ self.weights))

    def products(self, vector: FloatArray) -> FloatArray:
        """W_g v of every unit, shape (num_units, d + 2), for v over (x, 1, y)."""
        return self._by_unit(np.concatenate([part.products(vector) for part in self._parts]))

    def quadratic(self, vector: FloatArray) -> FloatArray:
        """vᵀW_g v of every unit, shape (num_units,), for v over (x, 1, y)."""
        return self.products(vector) @ vector

    def moments(self, keep: NDArray[np.bool_] | None = None) -> DebiasedMoments:
        """Unbiased moments of all units, or of those that the mask (num_units,) keeps."""
        mask = np.ones(self.num_units, dtype=bool) if keep is None else keep
        masks = self._by_part(mask)
        tally = np.zeros(5)
        total = np.zeros((self.num_features + 2,) * 2)
        for part, chosen in zip(self._parts, masks, strict=True):
            tally += part.tallies[chosen].sum(axis=0)
            total += part.total(chosen)
        count, weight = tally[ROWS], tally[WEIGHT]
        if count == 0:
            raise InvalidDataError("moments need at least one unit, got none")
        total /= weight
        d = self.num_features
        return DebiasedMoments(
            num_samples=round(count),
            second_moment=0.5 * (total[:d, :d] + total[:d, :d].T),
            cross_moment=total[:d, d + 1].copy(),
            feature_mean=total[:d, d].copy(),
            label_mean=float(total[d, d + 1]),
            label_square=float(total[d + 1, d + 1]),
            noise_scale=float(np.sqrt(count * tally[NOISE]) / weight),
            modulation_scale=float(np.sqrt(tally[MODULATION] / weight)),
            noise_fourth=float(count * tally[NOISE_FOURTH] / weight**2),
        )

    def _by_unit(self, values: FloatArray) -> FloatArray:
        if self._index is None:
            return values
        result = np.zeros((self.num_units, *values.shape[1:]))
        np.add.at(result, self._index, values)
        return result

    def _by_part(self, mask: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
        spread = mask if self._index is None else mask[self._index]
        ends = np.cumsum([len(part.tallies) for part in self._parts])[:-1]
        return list(np.split(spread, ends))


def _ids(units: Sequence[Any], n: int) -> Ids:
    # As objects: a mixed list of int and str must not turn 1 and "1" into the same unit.
    array = np.empty(len(units), dtype=object)
    array[:] = list(units)
    if len(units) != n:
        raise InvalidDataError(f"units must have length {n}, got {len(units)}")
    return array


def _unit_index(parts: tuple[Rows | Groups, ...]) -> tuple[NDArray[np.intp] | None, int]:
    """Unit of every row and group, or None where each is its own unit."""
    total = sum(len(part.tallies) for part in parts)
    if all(part.ids is None for part in parts):
        return None, total
    seen: dict[Any, int] = {}
    index = np.empty(total, dtype=np.intp)
    position = 0
    for part in parts:
        for offset in range(len(part.tallies)):
            # Unnamed rows are units of their own: a fresh object equals nothing else.
            key = object() if part.ids is None else part.ids[offset]
            index[position] = seen.setdefault(key, len(seen))
            position += 1
    return index, len(seen)
