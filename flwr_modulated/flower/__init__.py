"""The Flower glue: what travels, the device's client, the server's strategy.

Names load on first use: a device does not need what the server computes with.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import ModulatedClient
    from .screening import Screen
    from .strategy import ModulatedStrategy

__all__ = ["ModulatedClient", "ModulatedStrategy", "Screen"]

_LAZY = {"ModulatedClient": ".client", "ModulatedStrategy": ".strategy", "Screen": ".screening"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
