"""Private regression from devices that hold one row each, as a Flower plugin.

Importing the package loads the mathematics only; names that need Flower, or that take long
to load, do so on first use.
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
    from .diagnostics import plot_diagnostics
    from .evaluation import Evaluation, cross_validate
    from .flower import ModulatedClient, ModulatedStrategy, Screen
    from .inference import Results
    from .sample import Group, Sample

__version__ = "0.1.0"

__all__ = [
    "Auto",
    "Columns",
    "DebiasedMoments",
    "DeviceNoise",
    "Distance",
    "Evaluation",
    "GradientDescent",
    "Group",
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
    "Results",
    "Ridge",
    "Sample",
    "Screen",
    "cross_validate",
    "draw_directions",
    "gradient",
    "plot_diagnostics",
]

# Where each name that is loaded on first use lives.
_LAZY = {
    "Evaluation": ".evaluation",
    "Group": ".sample",
    "ModulatedClient": ".flower",
    "ModulatedStrategy": ".flower",
    "Results": ".inference",
    "Sample": ".sample",
    "Screen": ".flower",
    "cross_validate": ".evaluation",
    "plot_diagnostics": ".diagnostics",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
