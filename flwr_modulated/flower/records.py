"""What travels: requests and replies, built, parsed and validated.

Both directions use Flower's compatibility records, so one wire format serves a
``NumPyClient`` behind ``ClientApp(client_fn)`` and an ``@app.train()`` handler.

A request holds public round parameters only. A reply holds one matrix with a row for
each client, the released row and the label where the device gives it, and the standard
deviation of the noise; or the sums of these over the rows of a node that hosts many
clients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, TypeAlias, cast, get_args

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from .._typing import FloatArray
from ..errors import ProtocolError
from ..modulation import Modulation, check_directions
from ..moments import Moments
from ._npy import read_npy

__all__ = [
    "PROTOCOL_VERSION",
    "MomentsReply",
    "Reply",
    "Request",
    "RowsReply",
    "parse_reply",
    "reply_from_arrays",
    "reply_to_fit_result",
    "reply_to_recorddict",
]

PROTOCOL_VERSION = 2

# Far above any release that carries information. Weights and standard errors need fourth powers of rows, and
# eighth powers of products of theirs, to add up without overflow.
_LARGEST = 1e30
# Arrays of more values are not copied for a check.
_MANY = 1024
# How Flower marks an array that numpy.save wrote.
_NUMPY = "numpy.ndarray"
# Whole numbers above it are no longer exact as floats.
_MOST_SAMPLES = 2**53

FIT_ARRAYS, FIT_CONFIG = "fitins.parameters", "fitins.config"
REPLY_ARRAYS, REPLY_COUNT = "fitres.parameters", "fitres.num_examples"
REPLY_METRICS, REPLY_STATUS = "fitres.metrics", "fitres.status"

Payload: TypeAlias = Literal["rows", "moments"]
Precision: TypeAlias = Literal["float64", "float32"]

# What NumPyClient.fit returns.
FitResult: TypeAlias = tuple[list[np.ndarray], int, dict[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Public parameters of one round, from server to devices.

    Attributes
    ----------
    server_round : int
        Round, from 1.
    modulation : Modulation
        The public map the server asks for.
    directions : ndarray of shape (d, m)
        The round's orthonormal directions; d is the width of a released row.
    study : str
        Name of the study, so that a device can tell requests of one study from
        those of another.
    payload : {"rows", "moments"}
        Whether to answer with released rows or with their sums.
    release_index : int
        Which of the study's releases is asked for, from 0: always 0 where every
        device releases once, so that asking again in a later round is a repeat.
    precision : {"float64", "float32"}
        Of rows as they travel.
    """

    server_round: int
    modulation: Modulation
    directions: FloatArray
    study: str = ""
    payload: Payload = "rows"
    release_index: int = 0
    precision: Precision = "float64"

    @property
    def num_columns(self) -> int:
        """Width of a released row: d, or d + 1 for joint records."""
        return int(self.directions.shape[0])

    def to_recorddict(self, extra: Mapping[str, Any] | None = None) -> RecordDict:
        """Content of a Flower train message; `extra` config entries pass through."""
        config: dict[str, Any] = dict(extra or {})
        config.update(
            {
                "protocol-version": PROTOCOL_VERSION,
                "server-round": self.server_round,
                "study": self.study,
                "payload": self.payload,
                "release-index": self.release_index,
                "precision": self.precision,
                "num-columns": self.num_columns,
                "alpha": float(self.modulation.alpha),
                "amplitude": float(self.modulation.amplitude),
                "frequency": float(self.modulation.frequency),
                "num-directions": int(self.modulation.num_directions),
            }
        )
        return RecordDict({FIT_ARRAYS: ArrayRecord([self.directions]), FIT_CONFIG: ConfigRecord(config)})

    @classmethod
    def parse(cls, arrays: Sequence[Any], config: Mapping[str, Any]) -> Request:
        """Read and check a request on a device.

        Parameters
        ----------
        arrays : sequence of ndarray
            The message's arrays: the directions.
        config : mapping
            The message's configuration.

        Raises
        ------
        ProtocolError
            If the version is unknown or an entry is missing or of the wrong type.
        InvalidParameterError
            If the modulation is out of range or the directions are not orthonormal.
        """
        _check_version(config)
        server_round = _entry(config, "server-round", int)
        columns = _entry(config, "num-columns", int)
        release_index = _entry(config, "release-index", int)
        study = _entry(config, "study", str)
        payload = _entry(config, "payload", str)
        precision = config.get("precision", "float64")
        modulation = _modulation(
            _entry(config, "alpha", float),
            _entry(config, "amplitude", float),
            _entry(config, "frequency", float),
            _entry(config, "num-directions", int),
        )
        if payload not in get_args(Payload):
            raise ProtocolError(f"payload must be one of {', '.join(get_args(Payload))}")
        if precision not in get_args(Precision):
            raise ProtocolError(f"precision must be one of {', '.join(get_args(Precision))}")
        if server_round < 1 or columns < 1 or release_index < 0:
            raise ProtocolError("server-round and num-columns must be at least 1, release-index at least 0")
        if len(arrays) != 1:
            raise ProtocolError(f"a request must carry 1 array, the directions, got {len(arrays)}")
        directions = check_directions(
            arrays[0], num_features=columns, num_directions=modulation.num_directions
        )
        return cls(server_round, modulation, directions, study, payload, release_index, precision)


@dataclass(frozen=True, slots=True, eq=False)
class RowsReply:
    """Released rows, from a device to the server.

    Attributes
    ----------
    server_round : int
        The round that is answered.
    rows : ndarray of shape (n, d + 1) or (n, d)
        Released rows g̃, each with its label; without it for joint records, whose label
        is inside the released row. float32 where the request asks for it: rounding what
        is released is post-processing, which takes nothing from the guarantee, and moves
        each number by less than 6e-8 of itself, or 1e-45.
    noise_std : float
        σ, standard deviation of the noise of each coordinate of all rows.
    joint : bool, default False
        Whether labels are inside the released rows.
    """

    server_round: int
    rows: FloatArray
    noise_std: float
    joint: bool = False

    payload: ClassVar[Payload] = "rows"

    @classmethod
    def from_blocks(
        cls,
        server_round: int,
        blocks: Iterable[FloatArray],
        labels: FloatArray | None,
        noise_std: float,
        *,
        shape: tuple[int, ...],
        precision: Precision = "float64",
    ) -> RowsReply:
        """Put blocks of released rows, of this shape together, beside their labels, in one matrix."""
        n, d = shape
        rows = np.empty((n, d if labels is None else d + 1), dtype=precision)
        start = 0
        for block in blocks:  # a block and its labels while it is in cache
            end = start + len(block)
            rows[start:end, :d] = block
            if labels is not None:
                rows[start:end, d] = labels[start:end]
            start = end
        return cls(server_round, rows, noise_std, joint=labels is None)

    @property
    def released(self) -> FloatArray:
        """Released rows (n, d)."""
        return self.rows if self.joint else self.rows[:, :-1]

    @property
    def labels(self) -> FloatArray | None:
        """Labels (n,); None where they are inside the released rows."""
        return None if self.joint else self.rows[:, -1].astype(np.float64)

    @property
    def num_samples(self) -> int:
        """Number of released rows n."""
        return len(self.rows)

    @property
    def sort_key(self) -> bytes:
        """Key that orders replies by content: node ids and arrival differ from run to run."""
        return bytes(self.released[0].tobytes())

    @property
    def has_noise(self) -> bool:
        """Whether two equal replies must be one release: noise never comes twice."""
        return self.noise_std > 0

    def to_arrays(self) -> list[FloatArray]:
        """Arrays as they travel: one, since each costs Flower more than a row of numbers does."""
        return [self.rows]

    def to_entries(self) -> dict[str, float]:
        """Numbers that travel beside the arrays."""
        return {"noise-std": float(self.noise_std)}

    @classmethod
    def from_arrays(
        cls,
        arrays: Sequence[FloatArray],
        entries: Mapping[str, Any],
        *,
        request: Request,
        server_round: int,
        joint: bool,
    ) -> RowsReply:
        """Check shapes and signs of arrays that are known to be finite, and what travels beside them."""
        if len(arrays) != 1:
            raise ProtocolError("wrong number of arrays")
        rows, width = arrays[0], request.num_columns if joint else request.num_columns + 1
        if rows.ndim != 2 or len(rows) < 1 or rows.shape[1] != width:
            raise ProtocolError("wrong shape of rows")
        noise_std = _entry(entries, "noise-std", float)
        if not 0 <= noise_std <= _LARGEST:
            raise ProtocolError("negative noise-std" if noise_std < 0 else "values too large")
        return cls(server_round, rows, noise_std, joint)


@dataclass(frozen=True, slots=True, eq=False)
class MomentsReply:
    """Sums over released rows, from a node that hosts many clients to the server.

    Attributes
    ----------
    server_round : int
        The round that is answered.
    sums : Moments
        Of the node's released rows.
    """

    server_round: int
    sums: Moments

    payload: ClassVar[Payload] = "moments"

    @property
    def num_samples(self) -> int:
        """Number of released rows that were summed."""
        return self.sums.num_samples

    @property
    def sort_key(self) -> bytes:
        """Key that orders replies by content: node ids and arrival differ from run to run."""
        return bytes(self.sums.total.tobytes())

    @property
    def has_noise(self) -> bool:
        """Whether two equal replies must be one release: noise never comes twice."""
        return self.sums.noise_variance_sum > 0

    def to_arrays(self) -> list[FloatArray]:
        """Arrays as they travel."""
        sums = self.sums
        scalars = [sums.num_samples, sums.label_sum, sums.label_square_sum, sums.noise_variance_sum]
        return [sums.gram, sums.cross, sums.total, np.array(scalars, dtype=np.float64)]

    def to_entries(self) -> dict[str, float]:
        """Numbers that travel beside the arrays: none."""
        return {}

    @classmethod
    def from_arrays(
        cls,
        arrays: Sequence[FloatArray],
        entries: Mapping[str, Any],
        *,
        request: Request,
        server_round: int,
        joint: bool,
    ) -> MomentsReply:
        """Check shapes and signs of arrays that are known to be finite."""
        if len(arrays) != 4:
            raise ProtocolError("wrong number of arrays")
        gram, cross, total, scalars = arrays
        d = request.num_columns
        if gram.shape != (d, d) or cross.shape != (d,) or total.shape != (d,) or scalars.shape != (4,):
            raise ProtocolError("wrong shape of moments")
        count, label_sum, label_square_sum, noise_variance_sum = scalars.tolist()
        if not 1 <= count <= _MOST_SAMPLES or count != int(count):
            raise ProtocolError("number of samples must be a whole number, at least 1")
        if noise_variance_sum < 0 or label_square_sum < 0 or (np.diag(gram) < 0).any():
            raise ProtocolError("negative sum of squares")
        if joint and (label_sum or label_square_sum or cross.any()):
            raise ProtocolError("labels beside joint records")
        sums = Moments(
            num_samples=int(count),
            gram=0.5 * (gram + gram.T),
            cross=cross,
            total=total,
            label_sum=label_sum,
            label_square_sum=label_square_sum,
            noise_variance_sum=noise_variance_sum,
        )
        return cls(server_round, sums)


Reply: TypeAlias = RowsReply | MomentsReply


def reply_to_fit_result(reply: Reply) -> FitResult:
    """What a ``NumPyClient`` returns from ``fit``: arrays, number of samples, metrics."""
    metrics = {
        "protocol-version": PROTOCOL_VERSION,
        "server-round": reply.server_round,
        "payload": reply.payload,
        **reply.to_entries(),
    }
    return reply.to_arrays(), reply.num_samples, metrics


def reply_to_recorddict(reply: Reply) -> RecordDict:
    """Content of a Flower reply, as the compatibility layer would build it."""
    arrays, count, metrics = reply_to_fit_result(reply)
    return RecordDict(
        {
            REPLY_ARRAYS: ArrayRecord(arrays),
            REPLY_COUNT: MetricRecord({"num_examples": count}),
            REPLY_METRICS: ConfigRecord(metrics),
            REPLY_STATUS: ConfigRecord({"code": 0, "message": "Success"}),
        }
    )


def parse_reply(content: RecordDict, *, request: Request, joint: bool = False) -> Reply:
    """Read and check a reply on the server.

    Parameters
    ----------
    content : RecordDict
        The reply's content.
    request : Request
        What was asked; round, payload and width must fit.
    joint : bool, default False
        Whether labels are inside the released rows (``ReplaceRecord``).

    Returns
    -------
    RowsReply or MomentsReply

    Raises
    ------
    ProtocolError
        If the reply does not fit; the message says how, never a value.
    """
    # Not through content.config_records: it copies the whole content for each look.
    status = content.get(REPLY_STATUS)
    if isinstance(status, ConfigRecord) and status.get("code", 0) != 0:
        raise ProtocolError("the device reported a failure status")
    metrics, record = content.get(REPLY_METRICS), content.get(REPLY_ARRAYS)
    if not isinstance(metrics, ConfigRecord) or not isinstance(record, ArrayRecord):
        raise ProtocolError("records missing")
    _check_version(metrics)
    if _entry(metrics, "server-round", int) != request.server_round:
        raise ProtocolError("wrong round")
    if _entry(metrics, "payload", str) != request.payload:
        raise ProtocolError("wrong payload")
    arrays = _read_arrays(record, keep_float32=request.payload == "rows")
    largest = _LARGEST if request.payload == "rows" else _LARGEST**2  # sums are of squares and products
    for array in arrays:
        span = _largest_value(array)
        if not math.isfinite(span):
            raise ProtocolError("non-finite values")
        if span > largest:
            raise ProtocolError("values too large")
    return reply_from_arrays(arrays, metrics, request=request, server_round=request.server_round, joint=joint)


def reply_from_arrays(
    arrays: Sequence[FloatArray],
    entries: Mapping[str, Any],
    *,
    request: Request,
    server_round: int,
    joint: bool,
) -> Reply:
    """Read a reply from finite arrays and what travels beside them, checking shapes and signs.

    Raises
    ------
    ProtocolError
        If they do not fit the request.
    """
    reply = RowsReply if request.payload == "rows" else MomentsReply
    return reply.from_arrays(arrays, entries, request=request, server_round=server_round, joint=joint)


def _read_arrays(record: ArrayRecord, *, keep_float32: bool) -> list[FloatArray]:
    """Arrays as float64, or as float32 where they are and may be; without unpickling anything."""
    try:
        if any(array.stype != _NUMPY for array in record.values()):
            raise ValueError("not written by numpy.save")
        arrays = [read_npy(array.data) for array in record.values()]
        if all(array.dtype.kind in "fiu" for array in arrays):
            return [
                cast(FloatArray, array)
                if keep_float32 and array.dtype == np.float32
                else np.asarray(array, dtype=np.float64)
                for array in arrays
            ]
    except Exception:  # whatever a hostile reply provokes
        raise ProtocolError("arrays cannot be read") from None
    raise ProtocolError("arrays must be of real numbers")


# All devices of a simulation read the same request.
_modulation = lru_cache(maxsize=64)(Modulation)


def _largest_value(array: FloatArray) -> float:
    """Largest absolute value, 0 of nothing; NaN where there is one."""
    if array.size > _MANY:  # without a copy of what may be a million rows
        return float(np.maximum(array.max(), -array.min()))
    return float(np.abs(array).max(initial=0.0))


def _check_version(config: Mapping[str, Any]) -> None:
    version = _entry(config, "protocol-version", int)
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"protocol-version must be {PROTOCOL_VERSION}; "
            "install the same flwr-modulated on server and devices"
        )


def _entry(config: Mapping[str, Any], key: str, kind: type) -> Any:
    value = config.get(key)
    if type(value) is kind and (not isinstance(value, float) or math.isfinite(value)):
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ProtocolError(f"{key} must be present and of type {kind.__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ProtocolError(f"{key} must be finite")
    return value
