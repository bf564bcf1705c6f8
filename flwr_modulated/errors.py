"""The errors this package raises, as one tree.

::

    ModulatedError
    ├── InvalidParameterError (ValueError)        an argument is outside its range
    ├── InvalidDataError (ValueError)             features or labels cannot be used
    ├── ProtocolError (RuntimeError)              a message is not what the protocol says
    ├── RequestRefusedError (RuntimeError)        a device declines, before it spends or sends anything
    ├── LedgerError (RuntimeError)                a device's record of its spend cannot be used
    └── InsufficientRepliesError (RuntimeError)   too few valid replies to go on

No message of these errors ever holds a feature, a label, a phase, a noise draw or
a seed: exceptions travel to the server and into logs.
"""

from __future__ import annotations

__all__ = [
    "InsufficientRepliesError",
    "InvalidDataError",
    "InvalidParameterError",
    "LedgerError",
    "ModulatedError",
    "ProtocolError",
    "RequestRefusedError",
]


class ModulatedError(Exception):
    """Base class of every error that this package raises on purpose."""


class InvalidParameterError(ModulatedError, ValueError):
    """An argument is outside its allowed range; nothing was spent or sent."""


class InvalidDataError(ModulatedError, ValueError):
    """Features or labels cannot be used; the message names the fault, never a value."""


class ProtocolError(ModulatedError, RuntimeError):
    """A request or reply does not follow the message protocol."""


class RequestRefusedError(ModulatedError, RuntimeError):
    """A device declines a request before any budget is spent."""


class LedgerError(ModulatedError, RuntimeError):
    """A device's ledger cannot be read, written or trusted, so nothing is released."""


class InsufficientRepliesError(ModulatedError, RuntimeError):
    """Fewer valid replies arrived than the study needs to go on."""
