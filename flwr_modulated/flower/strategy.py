"""The server's side: ask devices for released rows, debias their moments, estimate."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from logging import INFO, WARNING, getLogger
from typing import Literal, TypeAlias

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from .._typing import FloatArray
from .._validate import check_choice, check_int, check_real
from ..errors import InsufficientRepliesError, InvalidParameterError, ProtocolError
from ..estimators import Auto, Estimator, GradientDescent
from ..modulation import Modulation, draw_directions
from ..moments import DebiasedMoments, Moments
from .records import Payload, Reply, Request, parse_reply

__all__ = ["ModulatedStrategy"]

Mode: TypeAlias = Literal["one-shot", "iterative"]

# Flower's own logger, so that lines appear where its users look for them.
_logger = getLogger("flwr")


class ModulatedStrategy(Strategy):
    """Regression from one privatised release per device, in place of weight averaging.

    Parameters
    ----------
    estimator : Estimator, optional
        From debiased moments to coefficients; default :class:`Auto`, which has
        nothing to tune.
    modulation : Modulation, optional
        The public map that devices are asked to use; default plain.
    mode : {"one-shot", "iterative"}, default "one-shot"
        ``"one-shot"``: every node releases once; later rounds ask only nodes not
        heard from yet, and the coefficients are refreshed from all that arrived.
        ``"iterative"``: every round asks for fresh releases; with
        :class:`GradientDescent` each is one gradient step, with another estimator
        the coefficients come from the round's moments.
    payload : {"rows", "moments"}, default "rows"
        Whether nodes answer with released rows or with their sums. Sums suffice
        for the coefficients; with one row a node they save nothing.
    pool : bool, default False
        In iterative mode, average the moments of all rounds so far instead of
        using the last round's alone.
    label_scale : float, optional
        Set it if devices use ``ReplaceRecord(radius, label_scale)``: released rows
        are then joint records with the label inside. None for public labels.
    fraction_train : float, default 1.0
        Fraction of the available nodes to ask in a round.
    min_train_nodes : int, default 1
        Ask at least so many nodes, as long as there are that many to ask.
    min_available_nodes : int, default 2
        Wait for so many connected nodes before asking any: set it to the number
        the study expects.
    min_replies : int, default 1
        Raise if fewer nodes have answered validly (in one-shot mode: so far).
    wait_timeout : float, default 600.0
        Seconds to wait for `min_available_nodes`.
    study : str, default ""
        Name that travels with each request.
    message_type : str, default "train"
        Use ``"train.ACTION"`` to reach an ``@app.train("ACTION")`` handler.
    rng : numpy.random.Generator, optional
        Source of the public randomness: directions and sampling of nodes. Fresh by
        default.

    Raises
    ------
    InvalidParameterError
        If a parameter is outside its range.

    Notes
    -----
    Start it as any Flower strategy, with zeros for the d coefficients::

        result = strategy.start(grid, initial_arrays=ArrayRecord([np.zeros(d)]), num_rounds=1)
        beta = result.arrays.to_numpy_ndarrays()[0]

    Replies of wrong shape, version or round, with non-finite values, from nodes
    that were not asked, or given twice are refused: they are counted in the
    round's metrics and their reasons are logged.
    """

    def __init__(
        self,
        estimator: Estimator | None = None,
        *,
        modulation: Modulation | None = None,
        mode: Mode = "one-shot",
        payload: Payload = "rows",
        pool: bool = False,
        label_scale: float | None = None,
        fraction_train: float = 1.0,
        min_train_nodes: int = 1,
        min_available_nodes: int = 2,
        min_replies: int = 1,
        wait_timeout: float = 600.0,
        study: str = "",
        message_type: str = "train",
        rng: np.random.Generator | None = None,
    ) -> None:
        check_choice("mode", mode, Mode)
        check_choice("payload", payload, Payload)
        if pool and mode == "one-shot":
            raise InvalidParameterError("pool must be False in mode='one-shot', which pools by itself")
        if label_scale is not None:
            check_real("label_scale", label_scale, low=0, low_open=True)
        self.estimator: Estimator = Auto() if estimator is None else estimator
        if not callable(getattr(self.estimator, "estimate", None)):
            raise InvalidParameterError(
                "estimator must have a method estimate(debiased), such as Auto(), Ridge(penalty) or "
                f"GradientDescent(step), got {type(estimator).__name__}"
            )
        if pool and isinstance(self.estimator, GradientDescent):
            raise InvalidParameterError(
                "pool must be False with GradientDescent, which takes one step on each round's moments; "
                "use Auto() or Ridge(penalty)"
            )
        self.modulation = Modulation() if modulation is None else modulation
        self.mode = mode
        self.payload = payload
        self.pool = pool
        self.label_scale = label_scale
        self.fraction_train = check_real("fraction_train", fraction_train, low=0, high=1, low_open=True)
        self.min_train_nodes = check_int("min_train_nodes", min_train_nodes, low=1)
        self.min_available_nodes = check_int("min_available_nodes", min_available_nodes, low=1)
        self.min_replies = check_int("min_replies", min_replies, low=1)
        self.wait_timeout = check_real("wait_timeout", wait_timeout, low=0)
        self.study = study
        self.message_type = message_type
        self._rng = np.random.default_rng() if rng is None else rng
        self._forget()

    def _forget(self) -> None:
        self.iterates: list[FloatArray] = []
        """Coefficients after each round, each of shape (d,)."""
        self.debiased: DebiasedMoments | None = None
        """The moments that the current coefficients come from."""
        self.bytes_received = 0
        """Size of the arrays of all valid replies."""
        self._beta = np.zeros(0)
        self._request: Request | None = None
        self._asked: set[int] = set()
        self._replies: dict[int, Reply] = {}
        self._rounds: list[DebiasedMoments] = []

    @property
    def average_iterate(self) -> FloatArray:
        """Mean of the coefficients after each round, of shape (d,)."""
        return np.asarray(np.mean(self.iterates, axis=0))

    def summary(self) -> None:
        """Log what will be asked and how coefficients are made."""
        _logger.log(INFO, "\t├──> Modulated learning, %s, estimator %s", self.mode, self.estimator)
        _logger.log(INFO, "\t├──> %s", self.modulation)
        _logger.log(
            INFO,
            "\t└──> Nodes: fraction %.2f, at least %d asked, %d available, %d valid replies",
            self.fraction_train,
            self.min_train_nodes,
            self.min_available_nodes,
            self.min_replies,
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the round's nodes for released rows.

        Parameters
        ----------
        server_round : int
            Round, from 1; round 1 forgets an earlier run.
        arrays : flwr.app.ArrayRecord
            Current coefficients: one array of shape (d,).
        config : flwr.app.ConfigRecord
            Passed through to devices.
        grid : flwr.serverapp.Grid
            Where the nodes are.

        Returns
        -------
        iterable of flwr.app.Message

        Raises
        ------
        InvalidParameterError
            If the coefficients are not one finite vector, or there are too many
            directions for them.
        InsufficientRepliesError
            If too few nodes connect in time.
        """
        if server_round == 1:
            self._forget()
        self._beta = _coefficients(arrays)
        available = self._wait_for_nodes(grid)
        nodes = self._choose(available)
        self._request = self._next_request(server_round)
        self._asked = set(nodes)
        _logger.log(INFO, "configure_train: Asking %s nodes (out of %s)", len(nodes), len(available))
        content = self._request.to_recorddict(dict(config))
        return [Message(content, dst_node_id=node, message_type=self.message_type) for node in nodes]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Debias the moments of all valid replies and refresh the coefficients.

        Parameters
        ----------
        server_round : int
            Round that `configure_train` prepared.
        replies : iterable of flwr.app.Message
            What came back.

        Returns
        -------
        arrays : flwr.app.ArrayRecord
            One array of shape (d,): the coefficients.
        metrics : flwr.app.MetricRecord
            Counts of asked, valid and refused replies, samples, and the noise scale.

        Raises
        ------
        InsufficientRepliesError
            If fewer than `min_replies` nodes have answered validly; the message
            lists the reasons given.
        """
        request = self._request
        if request is None:
            raise ProtocolError("aggregate_train needs configure_train of the same round first")
        valid, refused = self._sort_out(replies, request)
        for reason, count in refused.most_common():
            _logger.log(WARNING, "\t> Without %d replies: %s", count, reason)
        if self.mode == "iterative":
            self._replies = {}
        self._replies.update(valid)
        self.bytes_received += sum(array.nbytes for reply in valid.values() for array in reply.to_arrays())
        if len(self._replies) < self.min_replies:
            raise InsufficientRepliesError(self._too_few(server_round, refused))
        debiased = self._debias(request)
        beta = self._estimate(debiased)
        self.debiased = debiased
        self.iterates.append(beta)
        metrics = MetricRecord(
            {
                "num-asked": len(self._asked),
                "num-valid": len(valid),
                "num-refused": refused.total(),
                "num-samples": debiased.num_samples,
                "noise-scale": debiased.noise_scale,
                "bytes-received": self.bytes_received,
            }
        )
        return ArrayRecord([beta]), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask nothing: a device's raw loss would leak its row."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return None: nothing was asked."""
        return None

    def _wait_for_nodes(self, grid: Grid) -> list[int]:
        deadline = time.monotonic() + self.wait_timeout
        pause = 0.05
        while len(nodes := sorted(grid.get_node_ids())) < self.min_available_nodes:
            if time.monotonic() >= deadline:
                raise InsufficientRepliesError(
                    f"{len(nodes)} of min_available_nodes={self.min_available_nodes} nodes connected within "
                    f"wait_timeout={self.wait_timeout:g} s; start more nodes or lower min_available_nodes"
                )
            if pause >= 1.0:
                _logger.log(
                    INFO,
                    "Waiting for nodes to connect: %d connected (minimum required: %d).",
                    len(nodes),
                    self.min_available_nodes,
                )
            time.sleep(pause)
            pause = min(2.0 * pause, 1.0)
        return nodes

    def _choose(self, available: list[int]) -> list[int]:
        """Choose the nodes to ask; in one-shot mode only those not heard from yet."""
        open_nodes = [node for node in available if node not in self._replies or self.mode == "iterative"]
        wanted = max(round(self.fraction_train * len(available)), self.min_train_nodes)
        if wanted >= len(open_nodes):
            return open_nodes
        return sorted(self._rng.choice(np.array(open_nodes, dtype=object), wanted, replace=False).tolist())

    def _next_request(self, server_round: int) -> Request:
        columns = len(self._beta) + (self.label_scale is not None)
        if self.mode == "one-shot" and self._request is not None:
            # One frame for the whole study: its moments then add up over rounds.
            directions = self._request.directions
        else:
            directions = draw_directions(
                columns,
                self.modulation.num_directions,
                orthogonal_to=self._released_direction(),
                rng=self._rng,
            )
        return Request(server_round, self.modulation, directions, study=self.study, payload=self.payload)

    def _released_direction(self) -> FloatArray:
        """Coefficients as they act on a released row: of x, or of (x, y / label_scale)."""
        if self.label_scale is None or not self._beta.any():
            return np.pad(self._beta, (0, self.label_scale is not None))
        return np.append(self._beta, -self.label_scale)

    def _sort_out(
        self, replies: Iterable[Message], request: Request
    ) -> tuple[dict[int, Reply], Counter[str]]:
        valid: dict[int, Reply] = {}
        refused: Counter[str] = Counter()
        silent = set(self._asked)
        for message in replies:
            node = message.metadata.src_node_id
            silent.discard(node)
            if message.has_error():
                refused[f"error on the device: {_last_line(message.error.reason)}"] += 1
            elif node not in self._asked:
                refused["from a node that was not asked"] += 1
            elif node in valid:
                refused["second reply of a node"] += 1
            else:
                try:
                    valid[node] = parse_reply(
                        message.content, request=request, joint=self.label_scale is not None
                    )
                except ProtocolError as error:
                    refused[str(error)] += 1
        if silent:
            refused["no reply before the deadline"] = len(silent)
        return valid, refused

    def _debias(self, request: Request) -> DebiasedMoments:
        ordered = sorted(self._replies.values(), key=lambda reply: reply.sort_key)
        levels: dict[str, list[Moments]] = defaultdict(list)
        for reply in sorted(self._replies.values(), key=lambda reply: reply.sort_key):
            for moments in reply.moments():
                # Twelve digits: the same noise must not count as two levels by rounding.
                levels[f"{moments.noise_variance_sum / moments.num_samples:.12g}"].append(moments)
        debiased = DebiasedMoments.combine(
            Moments.sum(parts).debias(self.modulation, request.directions)
            for _, parts in sorted(levels.items())
        )
        if self.label_scale is not None:
            debiased = DebiasedMoments.from_joint(debiased, label_scale=self.label_scale)
        if self.pool:
            self._rounds.append(debiased)
            debiased = DebiasedMoments.pool(self._rounds)
        return debiased

    def _estimate(self, debiased: DebiasedMoments) -> FloatArray:
        if self.mode == "iterative" and isinstance(self.estimator, GradientDescent):
            return self.estimator.update(self._beta, debiased)
        return self.estimator.estimate(debiased)

    def _too_few(self, server_round: int, refused: Counter[str]) -> str:
        reasons = "; ".join(f"{count} × {reason}" for reason, count in refused.most_common()) or "none given"
        return (
            f"round {server_round}: {len(self._replies)} valid replies of {len(self._asked)} asked, "
            f"min_replies={self.min_replies}; reasons: {reasons}"
        )


def _coefficients(arrays: ArrayRecord) -> FloatArray:
    values = arrays.to_numpy_ndarrays()
    if len(values) != 1 or values[0].ndim != 1 or values[0].size < 1 or not np.isfinite(values[0]).all():
        raise InvalidParameterError(
            "initial_arrays must hold one finite vector with a coefficient per feature; "
            "use ArrayRecord([np.zeros(num_features)])"
        )
    return np.asarray(values[0], dtype=np.float64)


def _last_line(text: str | None) -> str:
    """Last non-empty line of an error text; in simulation the text is a whole traceback."""
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"
