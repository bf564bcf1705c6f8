"""What a device has decided about its own privacy, before any server asks."""

from __future__ import annotations

from dataclasses import dataclass

from ._typing import Accounting, Sensitivity
from .mechanism import Mechanism
from .modulation import Modulation
from .privacy import Guarantee

__all__ = ["Policy"]


@dataclass(frozen=True, slots=True)
class Policy:
    """A device's own budget and how it is accounted for.

    Parameters
    ----------
    guarantee : Guarantee
        Holds for all releases of the device together.
    num_releases : int, default 1
        The most releases that the device ever makes of a row; the noise of each is
        calibrated so that all of them together keep the guarantee.
    sensitivity : {"conditional", "marginal"}, default "conditional"
        See :class:`~flwr_modulated.mechanism.Mechanism`.
    accounting : {"exact", "zcdp", "classical"}, default "exact"
        See :class:`~flwr_modulated.mechanism.Mechanism`.

    Raises
    ------
    InvalidParameterError
        If a parameter is outside its range.
    """

    guarantee: Guarantee
    num_releases: int = 1
    sensitivity: Sensitivity = "conditional"
    accounting: Accounting = "exact"

    def __post_init__(self) -> None:
        self.mechanism(Modulation())

    def mechanism(self, modulation: Modulation) -> Mechanism:
        """The mechanism for a modulation that a server asks for, with this device's own noise."""
        return Mechanism(
            modulation,
            self.guarantee,
            num_releases=self.num_releases,
            sensitivity=self.sensitivity,
            accounting=self.accounting,
        )
