"""Private regression from devices that hold one row each, as a Flower plugin.

Importing the package loads the mathematics only; the names that need Flower
(`ModulatedClient`, `ModulatedStrategy`) load it on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import (
    InsufficientRepliesError,
    InvalidDataError,
    InvalidParameterError,
    LedgerError,
    ModulatedError,
    ProtocolError,
    RequestRefusedError,
)
from .estimators import Auto, GradientDescent, Ridge, gradient
from .ledger import Ledger, Release
from .mechanism import Mechanism
from .modulation import Modulation, draw_directions
from .moments import DebiasedMoments, Moments
from .noise import DeviceNoise, NoiseSource, NumpyNoise
from .policy import Columns, Limits, Policy
from .privacy import Distance, Guarantee, Replace, ReplaceRecord

if TYPE_CHECKING:
    from .flower import ModulatedClient, ModulatedStrategy

__version__ = "0.1.0"

__all__ = [
    "Auto",
    "Columns",
    "DebiasedMoments",
    "DeviceNoise",
    "Distance",
    "GradientDescent",
    "Guarantee",
    "InsufficientRepliesError",
    "InvalidDataError",
    "InvalidParameterError",
    "Ledger",
    "LedgerError",
    "Limits",
    "Mechanism",
    "ModulatedClient",
    "ModulatedError",
    "ModulatedStrategy",
    "Modulation",
    "Moments",
    "NoiseSource",
    "NumpyNoise",
    "Policy",
    "ProtocolError",
    "Release",
    "Replace",
    "ReplaceRecord",
    "RequestRefusedError",
    "Ridge",
    "draw_directions",
    "gradient",
]

_NEED_FLOWER = {"ModulatedClient", "ModulatedStrategy"}


def __getattr__(name: str) -> Any:
    if name in _NEED_FLOWER:
        return getattr(import_module(".flower", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
