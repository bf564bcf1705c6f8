"""The device's side: a ``NumPyClient`` that releases its rows privatised, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Message
from flwr.client import NumPyClient
from numpy.typing import ArrayLike

from .._blocks import blocks_of
from .._typing import FloatArray
from .._validate import check_matrix, check_vector, require_finite
from ..errors import InvalidDataError, InvalidParameterError, ModulatedError, RequestRefusedError
from ..ledger import Ledger, Release
from ..moments import Moments
from ..noise import DeviceNoise, NoiseSource
from ..policy import Policy
from .records import (
    FIT_ARRAYS,
    FIT_CONFIG,
    FitResult,
    MomentsReply,
    Reply,
    Request,
    RowsReply,
    reply_to_fit_result,
    reply_to_recorddict,
)

__all__ = ["ModulatedClient"]

Load = Callable[[], tuple[ArrayLike, ArrayLike]]


class ModulatedClient(NumPyClient):
    """Answer a server's request with privatised rows, under the device's own policy.

    Parameters
    ----------
    load : callable
        Returns ``(features, labels)`` of shapes (n, d) and (n,), in raw units if the
        policy has ``columns``, else standardised with public constants. Called for
        each request.
    policy : Policy
        The device's own guarantee. Noise is computed from it and from directions
        that the device has checked, never from what the server says.
    ledger : Ledger, optional
        The device's budget on disk. Required on a device: without one, nothing
        remembers what has been spent.
    rng : callable, optional
        For simulations only, and then explicitly: maps the server round to a
        ``numpy.random.Generator``. By default a release draws OpenDP's Gaussian and the
        operating system's entropy (:class:`DeviceNoise`, extra ``device``).

    Raises
    ------
    InvalidParameterError
        If neither a ledger nor a simulation's `rng` is given.
    ImportError
        If `rng` is not given and OpenDP is not installed.

    Notes
    -----
    1. A reply carries the released rows, the labels (unless the relation hides
       them) and the noise's standard deviation. The number of rows and the labels
       leave the device as they are: labels are public under ``Distance`` and
       ``Replace``.
    2. With a ledger, a spend is on disk before its release leaves, a repeated
       request gets the same bytes, and a request beyond the budget is refused.
    3. Whatever goes wrong, the error that leaves the device holds no data.
    4. ``evaluate`` is not offered: a raw loss would leak the row. The server can
       evaluate from what was released.

    Examples
    --------
    In a ClientApp::

        def client_fn(context: Context):
            return ModulatedClient(load, policy, ledger=Ledger("ledger.db")).to_client()

        app = ClientApp(client_fn)

    or, in a Message-API app::

        @app.train()
        def train(message: Message, context: Context) -> Message:
            return ModulatedClient(load, policy, ledger=Ledger("ledger.db")).train(message)
    """

    def __init__(
        self,
        load: Load,
        policy: Policy,
        *,
        ledger: Ledger | None = None,
        rng: Callable[[int], np.random.Generator] | None = None,
    ) -> None:
        if ledger is None and rng is None:
            raise InvalidParameterError(
                "ledger must be given on a device: Ledger(path) remembers what was spent; "
                "in a simulation give rng=lambda server_round: numpy.random.default_rng(...) instead"
            )
        self._load = load
        self._policy = policy
        self._ledger = ledger
        self._rng: Callable[[int], np.random.Generator | NoiseSource]
        if rng is None:
            device_noise = DeviceNoise()
            self._rng = lambda _: device_noise
        else:
            self._rng = rng

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> FitResult:
        """Answer a request that came through Flower's ``NumPyClient`` interface.

        Parameters
        ----------
        parameters : list of ndarray
            The directions.
        config : dict
            The round's public parameters.

        Returns
        -------
        arrays, num_examples, metrics
            Released rows with their labels, or sums over them; the number of rows;
            protocol version, round, payload and the noise standard deviation.

        Raises
        ------
        RequestRefusedError
            If the request or the data cannot be used; the text holds no data.
        """
        return reply_to_fit_result(self._answer(parameters, config))

    def train(self, message: Message) -> Message:
        """Answer a request in a Message-API app's ``@app.train()`` handler.

        Parameters
        ----------
        message : flwr.app.Message
            A train message from :class:`ModulatedStrategy`.

        Returns
        -------
        flwr.app.Message
            The reply.

        Raises
        ------
        RequestRefusedError
            As :meth:`fit`.
        """
        content = message.content
        arrays = content.array_records.get(FIT_ARRAYS)
        config = content.config_records.get(FIT_CONFIG)
        if arrays is None or config is None:
            raise RequestRefusedError(
                f"the request must carry the records {FIT_ARRAYS} and {FIT_CONFIG}; "
                "send it with ModulatedStrategy"
            )
        reply = self._answer(arrays.to_numpy_ndarrays(), dict(config))
        return Message(reply_to_recorddict(reply), reply_to=message)

    def _answer(self, arrays: list[Any], config: dict[str, Any]) -> Reply:
        """Release the rows, letting no exception out that might hold data."""
        refusal: str
        try:
            return self._release(Request.parse(arrays, config))
        except ModulatedError as error:  # texts of this package hold no data
            refusal = str(error)
        except Exception as error:  # anything else might: its type must do
            refusal = (
                f"the device could not answer ({type(error).__name__}); "
                "its owner can call load() there to see why"
            )
        # Raised outside the handlers, so that the original error is not attached as context.
        raise RequestRefusedError(refusal)

    def _release(self, request: Request) -> Reply:
        relation = self._policy.guarantee.relation
        features, labels = self._standardised()
        records = relation.join(features, labels)
        if records.shape[1] != request.num_columns:
            raise InvalidDataError(
                f"the study releases {request.num_columns} column(s), this device has {records.shape[1]}"
            )
        require_finite("features", records)  # joining may overflow; nothing is spent on what cannot be sent
        directions = self._policy.check(
            request.modulation, request.directions, num_rows=len(records), num_columns=records.shape[1]
        )

        public_labels = None if relation.hides_labels else labels
        mechanism = self._policy.mechanism(request.modulation)
        # Noise is drawn as blocks are asked for: from here on only a modulation that overflows is refused.
        blocks = mechanism.release_blocks(records, directions, rng=self._rng(request.server_round))
        parts, shape, noise_std = blocks, records.shape, mechanism.noise_std
        if self._ledger is not None:
            release = self._ledger.release(
                lambda: Release(np.concatenate(list(blocks)), public_labels, noise_std),
                policy=self._policy,
                modulation=request.modulation,
                directions=directions,
                study=request.study,
                index=request.release_index,
            )
            # Perhaps what was released before, whatever this device holds today.
            parts, shape = blocks_of([release.released]), release.released.shape
            public_labels, noise_std = release.labels, release.noise_std
        if request.payload == "moments":
            sums = Moments.from_blocks(parts, public_labels, noise_std=noise_std)
            return MomentsReply(request.server_round, sums)
        return RowsReply.from_blocks(
            request.server_round, parts, public_labels, noise_std, shape=shape, precision=request.precision
        )

    def _standardised(self) -> tuple[FloatArray, FloatArray]:
        features, labels = self._load()
        if self._policy.columns is not None:
            return self._policy.columns.standardise(features, labels)
        rows = check_matrix("features", features, finite=False)  # the joined records are checked
        return rows, check_vector("labels", labels, length=rows.shape[0])
