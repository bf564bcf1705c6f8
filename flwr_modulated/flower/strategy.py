"""The server's side: ask devices for released rows, debias their moments, estimate."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple
from logging import INFO, WARNING, getLogger
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias, Unpack

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from .._typing import FloatArray
from .._validate import check_choice, check_int, check_real
from ..errors import InsufficientRepliesError, InvalidParameterError, ProtocolError
from ..estimators import Auto, Estimator, GradientDescent
from ..evaluation import cross_validate
from ..inference import ReportOptions, Results
from ..modulation import Modulation, draw_directions
from ..moments import DebiasedMoments
from ..sample import Sample
from .nodes import wait_for_newcomers, wait_for_nodes
from .records import PROTOCOL_VERSION, Payload, Precision, Request
from .screening import Screen, sort_replies
from .state import Round, StudyState

__all__ = ["ModulatedStrategy"]

Mode: TypeAlias = Literal["one-shot", "iterative"]

# Flower's own logger, so that lines appear where its users look for them.
_logger = getLogger("flwr")

_REPEATED = (
    "\t> %d releases are here already and count once: their nodes came back under new ids, "
    "or several nodes share a ledger"
)
_REASONS_SHOWN = 10


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
    precision : {"float64", "float32"}, default "float64"
        Of released rows as they travel. float32 halves them; rounding what is released
        takes nothing from the guarantee.
    pool : bool, default False
        In iterative mode, average the moments of all rounds so far instead of
        using the last round's alone.
    label_scale : float, optional
        Set it if devices use ``ReplaceRecord(radius, label_scale)``: released rows
        are then joint records with the label inside. None for public labels.
    screen : Screen, optional
        Bounds that replies must keep; default: none beyond shape and finiteness.
    evaluation_folds : int, default 5
        Folds of the cross-fitted estimate of MSE and R² that each round reports as
        evaluation metrics, from what was released; 0 leaves it out.
    fraction_train : float, default 1.0
        Fraction of the available nodes to ask in a round.
    min_train_nodes : int, default 1
        Ask at least so many nodes, as long as there are that many to ask.
    min_available_nodes : int, default 2
        Wait for so many connected nodes before asking the first: set it to the number
        the study expects. Nodes that are lost later stop a study only through
        `min_replies`.
    min_replies : int, default 1
        Raise if fewer nodes have answered validly (in one-shot mode: so far).
    grace_rounds : int, default 0
        In one-shot mode, how many rounds at the start may have fewer than
        `min_replies` with a warning, since later rounds collect more.
    wait_timeout : float, default 600.0
        Seconds to wait for `min_available_nodes`.
    late_timeout : float, default 0.0
        In one-shot mode, seconds that each later round waits for a node that has not
        been heard from, if none is connected.
    checkpoint : path-like, optional
        File that keeps what was heard after each round, replaced atomically. If it is
        there at the start, the study goes on from it and asks nobody again.
    study : str, default ""
        Name that travels with each request. Devices with a ledger answer a repeated
        request of the same study with the same release, at no cost.
    message_type : str, default "train"
        Use ``"train.ACTION"`` to reach an ``@app.train("ACTION")`` handler.
    rng : numpy.random.Generator, optional
        Source of the public randomness: directions and sampling of nodes. By default
        derived from the name of the study, so that a second run asks for the same
        releases; fresh for a study without a name.

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
        precision: Precision = "float64",
        pool: bool = False,
        label_scale: float | None = None,
        screen: Screen | None = None,
        evaluation_folds: int = 5,
        fraction_train: float = 1.0,
        min_train_nodes: int = 1,
        min_available_nodes: int = 2,
        min_replies: int = 1,
        grace_rounds: int = 0,
        wait_timeout: float = 600.0,
        late_timeout: float = 0.0,
        checkpoint: str | PathLike[str] | None = None,
        study: str = "",
        message_type: str = "train",
        rng: np.random.Generator | None = None,
    ) -> None:
        check_choice("mode", mode, Mode)
        check_choice("payload", payload, Payload)
        check_choice("precision", precision, Precision)
        if pool and mode == "one-shot":
            raise InvalidParameterError("pool must be False in mode='one-shot', which pools by itself")
        if label_scale is not None:
            check_real("label_scale", label_scale, low=0, low_open=True)
        self.estimator: Estimator = Auto() if estimator is None else estimator
        if isinstance(estimator, type) or not callable(getattr(self.estimator, "estimate", None)):
            given = estimator if isinstance(estimator, type) else type(estimator)
            raise InvalidParameterError(
                "estimator must be an object with a method estimate(debiased), such as Auto(), "
                f"Ridge(penalty) or GradientDescent(step), got {given.__name__}"
            )
        if not isinstance(modulation, Modulation | None):
            raise InvalidParameterError(f"modulation must be a Modulation, got {type(modulation).__name__}")
        if pool and isinstance(self.estimator, GradientDescent):
            raise InvalidParameterError(
                "pool must be False with GradientDescent, which takes one step on each round's moments; "
                "use Auto() or Ridge(penalty)"
            )
        if check_int("grace_rounds", grace_rounds, low=0) and mode != "one-shot":
            raise InvalidParameterError(
                "grace_rounds must be 0 in mode='iterative', where a round does not make up for another"
            )
        if check_int("evaluation_folds", evaluation_folds, low=0) == 1:
            raise InvalidParameterError("evaluation_folds must be 0 or at least 2, got 1")
        self.modulation = Modulation() if modulation is None else modulation
        self.mode = mode
        self.payload: Payload = payload
        self.precision: Precision = precision
        self.pool = pool
        self.label_scale = label_scale
        self.screen = Screen() if screen is None else screen
        self.evaluation_folds = evaluation_folds
        self.fraction_train = check_real("fraction_train", fraction_train, low=0, high=1, low_open=True)
        self.min_train_nodes = check_int("min_train_nodes", min_train_nodes, low=1)
        self.min_available_nodes = check_int("min_available_nodes", min_available_nodes, low=1)
        self.min_replies = check_int("min_replies", min_replies, low=1)
        self.grace_rounds = grace_rounds
        self.wait_timeout = check_real("wait_timeout", wait_timeout, low=0)
        self.late_timeout = check_real("late_timeout", late_timeout, low=0)
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self.study = study
        self.message_type = message_type
        self._given_rng = rng
        self._begin(None)

    def _begin(self, num_features: int | None) -> None:
        """Forget an earlier run, and take up a checkpoint if there is one."""
        self._rng = _public_rng(self.study) if self._given_rng is None else self._given_rng
        # Which nodes are asked depends on who is there; the directions must not depend on that.
        self._choice_rng = np.random.default_rng(self._rng.integers(2**63) if self.fraction_train < 1 else 0)
        self._beta = np.zeros(0)
        self._request: Request | None = None
        self._asked: set[int] = set()
        self._refused: Counter[str] = Counter()
        self._num_resumed = 0
        self._state = StudyState()
        self.debiased: DebiasedMoments | None = None
        if num_features is not None and self.checkpoint is not None and self.checkpoint.exists():
            self._state = StudyState.load(
                self.checkpoint, self._identity(num_features), joint=self.label_scale is not None
            )
            # A one-shot study may still hear from others; iterative rounds are not run again.
            if self.mode == "iterative":
                self._num_resumed = len(self._state.iterates)
                if self.pool:  # a round that stopped with too few replies is asked again as a whole
                    del self._state.rounds[self._num_resumed :]
            if self.iterates:
                self.debiased = self._state.debias(self.label_scale)
            _logger.log(INFO, "Going on from %s: %d rounds done", self.checkpoint, len(self.iterates))

    def _identity(self, num_features: int) -> dict[str, Any]:
        return {
            "protocol": PROTOCOL_VERSION,
            "study": self.study,
            "mode": self.mode,
            "payload": self.payload,
            "precision": self.precision,
            "pool": self.pool,
            "label_scale": self.label_scale,
            "modulation": list(astuple(self.modulation)),
            "num_features": num_features,
        }

    @property
    def iterates(self) -> list[FloatArray]:
        """Coefficients after each round, each of shape (d,)."""
        return self._state.iterates

    @property
    def average_iterate(self) -> FloatArray:
        """Mean of the coefficients after each round, of shape (d,)."""
        return np.asarray(np.mean(self.iterates, axis=0))

    @property
    def bytes_received(self) -> int:
        """Size of the arrays of all valid replies."""
        return self._state.bytes_received

    @property
    def num_nodes(self) -> int:
        """Nodes whose release counts."""
        return len(self._state.nodes)

    @property
    def noise_std_range(self) -> tuple[float, float]:
        """Smallest and largest standard deviation of the noise, as devices state it; NaN if there is none."""
        return self._state.noise_std_range()

    @property
    def refused(self) -> Counter[str]:
        """Why replies were refused or missing in all rounds, with how many each time."""
        return self._refused.copy()

    def sample(self) -> Sample:
        """Everything that counts of what was released, for inference and evaluation.

        Returns
        -------
        Sample
            All rounds in one-shot mode or with ``pool``, else the last round. Rows are
            units, or nodes where they sent moments; a row that a node released in
            several rounds counts as one unit.

        Raises
        ------
        InsufficientRepliesError
            If nothing has been received yet.
        """
        return self._state.sample(self.label_scale)

    def results(self, **report: Unpack[ReportOptions]) -> Results:
        """Fit with standard errors, tests and intervals, from what was released.

        Parameters
        ----------
        **report
            Keywords of :meth:`Results.from_sample`: names, guarantee, units, intercept.

        Returns
        -------
        Results
        """
        report.setdefault("estimator", self.estimator)
        return Results.from_sample(self.sample(), **report)

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
        beta = _coefficients(arrays)
        if server_round == 1:
            self._begin(len(beta))
        self._beta = beta
        if server_round <= self._num_resumed:
            _logger.log(INFO, "configure_train: round %s is in the checkpoint, asking nobody", server_round)
            self._next_request(server_round)  # later rounds draw the same directions as without the stop
            return []
        heard = self._heard()
        if self._request is None:
            available = wait_for_nodes(grid, self.min_available_nodes, timeout=self.wait_timeout, heard=heard)
        else:
            patience = self.late_timeout if self.mode == "one-shot" else 0.0
            available = wait_for_newcomers(grid, heard, timeout=patience)
        nodes = self._choose(available, heard)
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
        if server_round <= self._num_resumed:
            return ArrayRecord([self.iterates[server_round - 1]]), None
        request = self._request
        if request is None:
            raise ProtocolError("aggregate_train needs configure_train of the same round first")
        valid, refused = sort_replies(
            replies,
            request=request,
            asked=self._asked,
            joint=self.label_scale is not None,
            screen=self.screen,
        )
        for reason, count in _shown(refused):
            _logger.log(WARNING, "\t> Without %d replies: %s", count, reason)
        self._refused += refused
        entry = self._round(request)
        if moved := entry.add(valid):
            _logger.log(WARNING, _REPEATED, moved)
        self._state.bytes_received += sum(
            array.nbytes for reply in valid.values() for array in reply.to_arrays()
        )
        if len(entry.replies) < self.min_replies:
            self._save()  # what did arrive is not asked for again
            too_few = self._too_few(server_round, len(entry.replies), refused)
            if server_round > self.grace_rounds:
                raise InsufficientRepliesError(too_few)
            _logger.log(WARNING, "\t> Too few so far: %s", too_few)
            if not entry.replies:
                return None, None
        debiased = self._state.debias(self.label_scale)
        beta = self._estimate(debiased)
        self.debiased = debiased
        self.iterates.append(beta)
        self._save()
        low, high = self.noise_std_range
        if high > low * (1 + 1e-9) and self.screen.min_noise_std == 0:
            _logger.log(
                WARNING,
                "\t> Devices state noise from %.3g to %.3g, and the less they state the more they count: "
                "set Screen(min_noise_std=...) to the least that the study allows",
                low,
                high,
            )
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
        """Estimate MSE and R² from what was released; nothing was asked, nothing is spent.

        Returns
        -------
        flwr.app.MetricRecord or None
            ``estimated-mse``, ``estimated-r2`` and their standard errors, of the
            estimator fitted on the other folds; None without `evaluation_folds`, with
            a single unit, or for gradient steps, which are not a function of one
            round's releases.
        """
        stepping = self.mode == "iterative" and isinstance(self.estimator, GradientDescent)
        nothing = not any(entry.replies for entry in self._state.rounds)
        if self.evaluation_folds == 0 or stepping or nothing or server_round <= self._num_resumed:
            return None
        sample = self.sample()
        if sample.num_units < 2:
            return None
        evaluation = cross_validate(sample, self.estimator, num_folds=self.evaluation_folds)
        estimates = {
            "estimated-mse": evaluation.mse,
            "estimated-mse-se": evaluation.mse_se,
            "estimated-r2": evaluation.r2,
            "estimated-r2-se": evaluation.r2_se,
        }
        return MetricRecord({name: float(value) for name, value in estimates.items()})

    def _heard(self) -> frozenset[int]:
        """Nodes that are not asked again: in one-shot mode those that have answered."""
        if self.mode == "one-shot" and self._state.rounds:
            return frozenset(self._state.rounds[0].replies)
        return frozenset()

    def _choose(self, available: list[int], heard: frozenset[int]) -> list[int]:
        """Choose the nodes to ask."""
        open_nodes = [node for node in available if node not in heard]
        wanted = max(round(self.fraction_train * len(available)), self.min_train_nodes)
        if wanted >= len(open_nodes):
            return open_nodes
        return sorted(
            self._choice_rng.choice(np.array(open_nodes, dtype=object), wanted, replace=False).tolist()
        )

    def _next_request(self, server_round: int) -> Request:
        columns = len(self._beta) + (self.label_scale is not None)
        if self.mode == "one-shot" and self._state.rounds:
            # One frame for the whole study: its moments then add up over rounds.
            directions = self._state.rounds[0].request.directions
        else:
            directions = draw_directions(
                columns,
                self.modulation.num_directions,
                orthogonal_to=self._released_direction(),
                rng=self._rng,
            )
        return Request(
            server_round,
            self.modulation,
            directions,
            study=self.study,
            payload=self.payload,
            release_index=0 if self.mode == "one-shot" else server_round - 1,
            # A rounded number of a single column is not enough to tell releases of many devices apart.
            precision=self.precision if columns > 1 else "float64",
        )

    def _save(self) -> None:
        if self.checkpoint is not None:
            self._state.save(self.checkpoint, self._identity(len(self._beta)))

    def _round(self, request: Request) -> Round:
        """Where the replies to a request belong."""
        rounds = self._state.rounds
        if self.mode == "one-shot" and rounds:
            return rounds[0]
        if not self.pool:
            rounds.clear()
        rounds.append(Round(request))
        return rounds[-1]

    def _released_direction(self) -> FloatArray:
        """Coefficients as they act on a released row: of x, or of (x, y / label_scale)."""
        if self.label_scale is None or not self._beta.any():
            return np.pad(self._beta, (0, self.label_scale is not None))
        return np.append(self._beta, -self.label_scale)

    def _estimate(self, debiased: DebiasedMoments) -> FloatArray:
        if self.mode == "iterative" and isinstance(self.estimator, GradientDescent):
            return self.estimator.update(self._beta, debiased)
        return self.estimator.estimate(debiased)

    def _too_few(self, server_round: int, num_valid: int, refused: Counter[str]) -> str:
        reasons = "; ".join(f"{count} × {reason}" for reason, count in _shown(refused)) or "none given"
        return (
            f"round {server_round}: {num_valid} valid replies of {len(self._asked)} asked, "
            f"min_replies={self.min_replies}; reasons: {reasons}"
        )


def _shown(refused: Counter[str]) -> list[tuple[str, int]]:
    """The most frequent reasons; devices write them, so there may be as many as devices."""
    shown = refused.most_common(_REASONS_SHOWN)
    rest = refused.total() - sum(count for _, count in shown)
    return [*shown, ("other reasons", rest)] if rest else shown


def _public_rng(study: str) -> np.random.Generator:
    if not study:
        return np.random.default_rng()
    digest = hashlib.sha256(study.encode()).digest()
    return np.random.default_rng(np.frombuffer(digest, dtype=np.uint32))


def _coefficients(arrays: ArrayRecord) -> FloatArray:
    values = arrays.to_numpy_ndarrays()
    if len(values) != 1 or values[0].ndim != 1 or values[0].size < 1 or not np.isfinite(values[0]).all():
        raise InvalidParameterError(
            "initial_arrays must hold one finite vector with a coefficient per feature; "
            "use ArrayRecord([np.zeros(num_features)])"
        )
    return np.asarray(values[0], dtype=np.float64)
