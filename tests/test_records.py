"""What travels: round trips through Flower's own layers, and everything that is refused."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import call, over_the_wire, reply_content
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st

from flwr_modulated import InvalidParameterError, ModulatedError, Modulation, Moments, ProtocolError
from flwr_modulated.flower.records import (
    MomentsReply,
    Request,
    RowsReply,
    parse_reply,
    reply_to_fit_result,
    reply_to_recorddict,
)

pytestmark = pytest.mark.usefixtures("task_identity")

# A number that a message about a fault must never show.
SENTINEL = 31337.271828


class Probe(NumPyClient):
    """Keeps what Flower hands to a client, and answers with what it is given."""

    def __init__(self, answer: tuple[list[np.ndarray], int, dict[str, Any]]) -> None:
        self.answer = answer
        self.seen: tuple[list[np.ndarray], dict[str, Any]] = ([], {})

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        self.seen = (parameters, config)
        return self.answer

    def through(self, content: RecordDict) -> RecordDict:
        """The reply of a ClientApp built on this client, to a message of this content."""

        def client_fn(context: Context) -> Client:
            return self.to_client()

        return call(ClientApp(client_fn), content).content


def request_of(num_directions: int = 1, num_columns: int = 3, **changes: Any) -> Request:
    modulation = Modulation(alpha=0.25, amplitude=0.5, frequency=1.5, num_directions=num_directions)
    return Request(1, modulation, np.eye(num_columns)[:, :num_directions], **changes)


def read(content: RecordDict) -> tuple[list[np.ndarray], dict[str, Any]]:
    """A request's arrays and configuration, as a Message-API app reads them."""
    arrays = content.array_records["fitins.parameters"].to_numpy_ndarrays()
    return arrays, dict(content.config_records["fitins.config"])


# Requests


@pytest.mark.parametrize("num_directions", [0, 1, 3])
@pytest.mark.parametrize("way", ["records", "wire", "numpy client"])
def test_a_request_comes_back_as_it_was_sent(num_directions: int, way: str) -> None:
    """Without directions the array has shape (d, 0), which must survive as well."""
    request = Request(
        7,
        Modulation(alpha=0.25, amplitude=0.5, frequency=1.5, num_directions=num_directions),
        np.linalg.qr(np.arange(9.0).reshape(3, 3) ** 2 + np.eye(3))[0][:, :num_directions],
        study="a study",
        payload="moments",
    )
    content = request.to_recorddict()
    if way == "numpy client":
        probe = Probe(([], 0, {}))
        probe.through(content)
        arrays, config = probe.seen
    else:
        arrays, config = read(over_the_wire(content) if way == "wire" else content)
    again = Request.parse(arrays, config)
    assert (again.server_round, again.modulation, again.study, again.payload, again.num_columns) == (
        7,
        request.modulation,
        "a study",
        "moments",
        3,
    )
    assert again.directions.shape == (3, num_directions)
    np.testing.assert_array_equal(again.directions, request.directions)


def test_a_request_holds_public_parameters_only() -> None:
    """Written down: a new entry is a decision about what devices are told."""
    content = request_of(study="s").to_recorddict()
    assert set(content.array_records) == {"fitins.parameters"}
    assert set(content.config_records) == {"fitins.config"}
    assert not content.metric_records
    assert dict(content.config_records["fitins.config"]) == {
        "protocol-version": 2,
        "server-round": 1,
        "study": "s",
        "payload": "rows",
        "release-index": 0,
        "precision": "float64",
        "num-columns": 3,
        "alpha": 0.25,
        "amplitude": 0.5,
        "frequency": 1.5,
        "num-directions": 1,
    }


def test_extra_entries_pass_through_but_replace_nothing() -> None:
    extra = {"site": "north", "alpha": 0.9, "protocol-version": 99}
    config = request_of().to_recorddict(extra).config_records["fitins.config"]
    assert (config["site"], config["alpha"], config["protocol-version"]) == ("north", 0.25, 2)


MISSING = object()


@pytest.mark.parametrize(
    ("key", "value", "error", "words"),
    [
        ("protocol-version", 3, ProtocolError, "protocol-version must be 2; install the same"),
        ("protocol-version", MISSING, ProtocolError, "protocol-version must be present"),
        ("protocol-version", True, ProtocolError, "protocol-version must be present and of type int"),
        ("protocol-version", 2.0, ProtocolError, "protocol-version must be present and of type int"),
        ("server-round", 0, ProtocolError, "server-round"),
        ("server-round", "1", ProtocolError, "server-round must be present and of type int"),
        ("server-round", True, ProtocolError, "server-round must be present and of type int"),
        ("num-columns", 0, ProtocolError, "num-columns"),
        ("num-columns", 4, InvalidParameterError, r"directions must have shape \(4, 1\)"),
        ("num-columns", 10**18, InvalidParameterError, "directions must have shape"),
        ("study", 3, ProtocolError, "study must be present and of type str"),
        ("study", MISSING, ProtocolError, "study must be present"),
        ("payload", "raw", ProtocolError, "payload must be one of rows, moments"),
        ("payload", b"rows", ProtocolError, "payload must be present and of type str"),
        ("alpha", 1.0, InvalidParameterError, "alpha must be finite and in"),
        ("alpha", -0.1, InvalidParameterError, "alpha"),
        ("alpha", float("nan"), ProtocolError, "alpha must be finite"),
        ("alpha", "0.25", ProtocolError, "alpha must be present and of type float"),
        ("amplitude", -1.0, InvalidParameterError, "amplitude"),
        ("amplitude", float("inf"), ProtocolError, "amplitude must be finite"),
        ("amplitude", False, ProtocolError, "amplitude must be present and of type float"),
        ("frequency", [1.5], ProtocolError, "frequency must be present and of type float"),
        ("num-directions", 2, InvalidParameterError, r"directions must have shape \(3, 2\)"),
        ("num-directions", -1, InvalidParameterError, "num_directions"),
        ("num-directions", 1.0, ProtocolError, "num-directions must be present and of type int"),
    ],
)
def test_a_device_refuses_a_request_with(
    key: str, value: object, error: type[ModulatedError], words: str
) -> None:
    arrays, config = read(request_of().to_recorddict())
    if value is MISSING:
        del config[key]
    else:
        config[key] = value
    with pytest.raises(error, match=words):
        Request.parse(arrays, config)


def test_whole_numbers_stand_for_floats() -> None:
    """A server's command line may turn 1.0 into 1."""
    arrays, config = read(request_of().to_recorddict())
    config.update({"alpha": 0, "amplitude": 2, "frequency": 3})
    assert Request.parse(arrays, config).modulation == Modulation(0.0, 2.0, 3.0, 1)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ([], "must carry 1 array, the directions, got 0"),
        ([np.eye(3)[:, :1]] * 2, "must carry 1 array, the directions, got 2"),
        ([np.array([[2.0], [0.0], [0.0]])], "orthonormal"),
        ([np.array([[1.0 + 1e-6], [0.0], [0.0]])], "orthonormal"),
        ([np.array([[np.nan], [0.0], [0.0]])], "finite"),
        ([np.array([["a"], ["b"], ["c"]])], "numeric"),
        ([np.eye(3)[0]], "shape"),
    ],
)
def test_a_device_checks_the_directions_itself(arrays: list[np.ndarray], words: str) -> None:
    """A longer direction would raise the true sensitivity without raising the noise."""
    _, config = read(request_of().to_recorddict())
    with pytest.raises(ModulatedError, match=words):
        Request.parse(arrays, config)


# Replies


def rows_reply(joint: bool = False) -> RowsReply:
    released = np.array([[1.5, -2.0, 0.25], [0.0, 1e-30, 7.0]])
    labels = None if joint else np.array([3.0, -0.5])
    return RowsReply.from_blocks(1, [released[:1], released[1:]], labels, 0.75, shape=(2, 3))


def moments_reply(joint: bool = False) -> MomentsReply:
    released, labels = np.array([[1.5, -2.0, 0.25], [0.0, 1e-30, 7.0]]), np.array([3.0, -0.5])
    return MomentsReply(1, Moments.from_rows(released, None if joint else labels, noise_std=0.75))


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("payload", ["rows", "moments"])
@pytest.mark.parametrize("way", ["records", "wire", "numpy client"])
def test_a_reply_comes_back_as_it_was_sent(payload: str, joint: bool, way: str) -> None:
    reply = rows_reply(joint) if payload == "rows" else moments_reply(joint)
    request = request_of(payload=payload)
    if way == "numpy client":
        content = Probe(reply_to_fit_result(reply)).through(request.to_recorddict())
    else:
        content = reply_to_recorddict(reply)
    if way != "records":
        content = over_the_wire(content)
    again = parse_reply(content, request=request, joint=joint)
    assert type(again) is type(reply)
    assert (again.server_round, again.num_samples, again.sort_key) == (1, 2, reply.sort_key)
    for got, sent in zip(again.to_arrays(), reply.to_arrays(), strict=True):
        np.testing.assert_array_equal(got, sent)
    if payload == "rows":
        assert again.noise_std == 0.75
        np.testing.assert_array_equal(again.released, [[1.5, -2.0, 0.25], [0.0, 1e-30, 7.0]])
        np.testing.assert_array_equal([] if joint else [3.0, -0.5], [] if joint else again.labels)
        assert (again.labels is None) == joint


@pytest.mark.parametrize("payload", ["rows", "moments"])
def test_both_kinds_of_client_give_the_same_records(payload: str) -> None:
    reply = rows_reply() if payload == "rows" else moments_reply()
    mine = reply_to_recorddict(reply)
    flowers = Probe(reply_to_fit_result(reply)).through(request_of(payload=payload).to_recorddict())
    assert (
        set(mine)
        == set(flowers)
        == {f"fitres.{x}" for x in ("parameters", "num_examples", "metrics", "status")}
    )
    for name in ("fitres.num_examples", "fitres.metrics", "fitres.status"):
        assert mine[name] == flowers[name]
    data = [
        [array.data for array in content.array_records["fitres.parameters"].values()]
        for content in (mine, flowers)
    ]
    assert data[0] == data[1]


def test_a_reply_says_nothing_but_version_round_payload_noise_and_count() -> None:
    content = reply_to_recorddict(rows_reply())
    assert dict(content.config_records["fitres.metrics"]) == {
        "protocol-version": 2,
        "server-round": 1,
        "payload": "rows",
        "noise-std": 0.75,
    }
    assert dict(content.metric_records["fitres.num_examples"]) == {"num_examples": 2}


# Two rows: what is released, and the label.
ROWS = np.full((2, 4), SENTINEL)


def changed(array: np.ndarray, index: Any, value: float) -> np.ndarray:
    copy = array.copy()
    copy[index] = value
    return copy


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ([], "wrong number of arrays"),
        ([ROWS, ROWS], "wrong number of arrays"),
        ([ROWS[:, 1:]], "wrong shape of rows"),
        ([np.pad(ROWS, (0, 1))], "wrong shape of rows"),
        ([ROWS[0]], "wrong shape of rows"),
        ([ROWS[:0]], "wrong shape of rows"),
        ([ROWS[:, :, None]], "wrong shape of rows"),
        ([changed(ROWS, (0, 0), np.nan)], "non-finite values"),
        ([changed(ROWS, (1, 3), np.inf)], "non-finite values"),
        ([changed(ROWS, (0, 0), 1e160)], "values too large"),
        ([changed(ROWS, (0, 3), -1e160)], "values too large"),
        ([ROWS.astype(complex)], "real numbers"),
        ([ROWS.astype(str)], "real numbers"),
        ([ROWS > 0], "real numbers"),
        ([ROWS.astype("datetime64[s]")], "real numbers"),
    ],
)
def test_the_server_refuses_rows_with(arrays: list[np.ndarray], words: str) -> None:
    """Complex numbers would lose their imaginary part; a square above 1e308 would poison every sum."""
    with pytest.raises(ProtocolError, match=words) as caught:
        parse_reply(reply_content(arrays, noise_std=1.0), request=request_of())
    assert "31337" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_labels_beside_joint_records_are_refused() -> None:
    """A device that hides its label must not have it read from beside the record by mistake."""
    with pytest.raises(ProtocolError, match="wrong shape of rows"):
        parse_reply(reply_content([ROWS], noise_std=1.0), request=request_of(), joint=True)
    content = reply_content([ROWS[:, 1:]], noise_std=1.0)
    assert parse_reply(content, request=request_of(), joint=True).labels is None


M, C, T = np.diag([SENTINEL, 2.0, 3.0]), np.full(3, SENTINEL), np.full(3, SENTINEL)
SUMS = np.array([2.0, SENTINEL, SENTINEL**2, 0.5])


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ([ROWS], "wrong number of arrays"),
        ([M[:2], C, T, SUMS], "wrong shape of moments"),
        ([M, C[:2], T, SUMS], "wrong shape of moments"),
        ([M, C, T[:, None], SUMS], "wrong shape of moments"),
        ([M, C, T, SUMS[:3]], "wrong shape of moments"),
        ([M, C, T, changed(SUMS, 0, 0.0)], "whole number, at least 1"),
        ([M, C, T, changed(SUMS, 0, -1.0)], "whole number, at least 1"),
        ([M, C, T, changed(SUMS, 0, 1.5)], "whole number, at least 1"),
        ([M, C, T, changed(SUMS, 0, 2.0**60)], "whole number, at least 1"),
        ([M, C, T, changed(SUMS, 2, -1.0)], "negative sum of squares"),
        ([M, C, T, changed(SUMS, 3, -1.0)], "negative sum of squares"),
        ([-M, C, T, SUMS], "negative sum of squares"),
        ([M, C, T, changed(SUMS, 3, np.nan)], "non-finite values"),
        ([changed(M, (0, 1), np.inf), C, T, SUMS], "non-finite values"),
        ([changed(M, (0, 0), 1e160), C, T, SUMS], "values too large"),
    ],
)
def test_the_server_refuses_moments_with(arrays: list[np.ndarray], words: str) -> None:
    with pytest.raises(ProtocolError, match=words) as caught:
        parse_reply(reply_content(arrays, payload="moments"), request=request_of(payload="moments"))
    assert "31337" not in str(caught.value)


@pytest.mark.parametrize("scalars", [[2.0, 1.0, 0.0, 0.5], [2.0, 0.0, 1.0, 0.5]])
def test_label_sums_beside_joint_records_are_refused(scalars: list[float]) -> None:
    request, zeros = request_of(payload="moments"), np.zeros(3)
    for cross, sums in ((zeros, scalars), (C, [2.0, 0.0, 0.0, 0.5])):
        content = reply_content([M, cross, T, np.array(sums)], payload="moments")
        with pytest.raises(ProtocolError, match="labels beside joint records"):
            parse_reply(content, request=request, joint=True)


def test_moments_are_read_symmetric() -> None:
    """A gram matrix that is symmetric up to rounding must not tilt the eigenvectors."""
    content = reply_content([changed(M, (0, 1), 1.0), C, T, SUMS], payload="moments")
    reply = parse_reply(content, request=request_of(payload="moments"))
    assert isinstance(reply, MomentsReply)
    gram = reply.sums.gram
    np.testing.assert_array_equal(gram, gram.T)
    assert gram[0, 1] == 0.5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol_version": 3}, "protocol-version must be 2"),
        ({"protocol_version": None}, "protocol-version must be present"),
        ({"protocol_version": True}, "protocol-version must be present and of type int"),
        ({"server_round": 2}, "wrong round"),
        ({"server_round": 1.0}, "server-round must be present and of type int"),
        ({"server_round": None}, "server-round must be present"),
        ({"payload": "moments"}, "wrong payload"),
        ({"payload": None}, "payload must be present"),
    ],
)
def test_the_server_refuses_a_reply_with(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        parse_reply(reply_content([ROWS], **{"noise_std": 1.0, **changes}), request=request_of())


@pytest.mark.parametrize("missing", ["fitres.parameters", "fitres.metrics"])
def test_the_server_refuses_a_reply_without(missing: str) -> None:
    content = reply_content([ROWS], noise_std=1.0)
    del content[missing]
    with pytest.raises(ProtocolError, match="records missing"):
        parse_reply(content, request=request_of())


def test_the_server_refuses_a_failure_status_whatever_comes_with_it() -> None:
    content = reply_content([ROWS], noise_std=1.0)
    content.config_records["fitres.status"] = ConfigRecord({"code": 3, "message": f"x = {SENTINEL}"})
    with pytest.raises(ProtocolError, match="the device reported a failure status") as caught:
        parse_reply(content, request=request_of())
    assert "31337" not in str(caught.value)


# Bytes


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def array_of_bytes(data: bytes, stype: str = "numpy.ndarray") -> ArrayRecord:
    return ArrayRecord({"0": Array(dtype="", shape=(), stype=stype, data=data)})


def pickled_array(path: Path) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([[Bomb(path)]], dtype=object), allow_pickle=True)
    return buffer.getvalue()


def test_nothing_that_arrives_is_unpickled(tmp_path: Path) -> None:
    """The control shows that the bytes are live: an unwary reader runs them."""
    path = tmp_path / "made by a pickle"
    data = pickled_array(path)

    reply = reply_content([ROWS], noise_std=1.0)
    reply.array_records["fitres.parameters"] = array_of_bytes(data)
    with pytest.raises(ProtocolError, match="arrays cannot be read"):
        parse_reply(reply, request=request_of())

    request = request_of().to_recorddict()
    request.array_records["fitins.parameters"] = array_of_bytes(data)
    with pytest.raises(ValueError, match="allow_pickle"):
        Probe(([], 0, {})).through(request)

    assert not path.exists()
    np.load(io.BytesIO(data), allow_pickle=True)
    assert path.exists()


HEADER = b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (2, 3), }"


@given(
    st.one_of(
        st.binary(max_size=300),
        st.binary(max_size=200).map(lambda tail: b"\x93NUMPY\x01\x00" + tail),
        st.binary(max_size=200).map(lambda tail: b"PK\x03\x04" + tail),
        st.binary(max_size=200).map(lambda tail: HEADER.ljust(127) + b"\n" + tail),
    ),
    st.sampled_from(["numpy.ndarray", "torch.tensor", ""]),
)
def test_any_bytes_give_a_protocol_error(data: bytes, stype: str) -> None:
    """Truncated arrays, other formats, noise: one kind of error, so that one reply costs one reply."""
    content = reply_content([ROWS], noise_std=1.0)
    content.array_records["fitres.parameters"] = array_of_bytes(data, stype)
    with pytest.raises(ProtocolError):
        parse_reply(content, request=request_of())


def test_an_array_that_claims_terabytes_is_refused() -> None:
    data = HEADER.replace(b"(2, 3)", b"(1000000000000, 3)").ljust(127) + b"\n" + b"\0" * 48
    content = reply_content([ROWS], noise_std=1.0)
    content.array_records["fitres.parameters"] = array_of_bytes(data)
    with pytest.raises(ProtocolError, match="arrays cannot be read"):
        parse_reply(content, request=request_of())
