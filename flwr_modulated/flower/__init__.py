"""The Flower glue: what travels, the device's client, the server's strategy."""

from __future__ import annotations

from .client import ModulatedClient
from .screening import Screen
from .strategy import ModulatedStrategy

__all__ = ["ModulatedClient", "ModulatedStrategy", "Screen"]
