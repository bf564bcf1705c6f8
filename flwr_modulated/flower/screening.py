"""What a server accepts of the replies it gets, judged from public constants only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from flwr.app import Message
from scipy.special import chdtri

from .._validate import check_int, check_real
from ..errors import InvalidParameterError, ProtocolError
from ..moments import Moments
from .records import MomentsReply, Reply, Request, RowsReply, parse_reply

__all__ = ["Screen", "sort_replies"]

# How often the norm bound may refuse an honest reply.
_FALSE_ALARM = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """Bounds that honest replies keep, so that a faulty or hostile one does less harm.

    Parameters
    ----------
    feature_radius : float, optional
        Public bound on the norm of a standardised row (of a joint record, under
        ``ReplaceRecord``): the radius R of ``Replace``, or a constant of the study.
        Released rows are refused above the norm that an honest reply passes with
        probability 1e-9.
    label_radius : float, optional
        Public bound on the absolute value of a label.
    min_noise_std, max_noise_std : float, optional
        Range of the noise that the study allows its devices.
    max_samples : int, default 1_000_000_000
        The most rows of one node; 1 for devices that hold one row each.

    Raises
    ------
    InvalidParameterError
        If a bound is outside its range.

    Notes
    -----
    A norm bound limits what one node can do to the moments, not what many can do
    together: see the documentation on colluding nodes.
    """

    feature_radius: float | None = None
    label_radius: float | None = None
    min_noise_std: float = 0.0
    max_noise_std: float = math.inf
    max_samples: int = 1_000_000_000

    def __post_init__(self) -> None:
        for name in ("feature_radius", "label_radius"):
            if getattr(self, name) is not None:
                check_real(name, getattr(self, name), low=0, low_open=True)
        check_real("min_noise_std", self.min_noise_std, low=0)
        if not self.max_noise_std >= self.min_noise_std:
            raise InvalidParameterError(
                f"max_noise_std must be at least min_noise_std={self.min_noise_std:g}, "
                f"got {self.max_noise_std:g}"
            )
        check_int("max_samples", self.max_samples, low=1)

    def check(self, reply: Reply, request: Request) -> None:
        """Refuse a reply that breaks a bound.

        Raises
        ------
        ProtocolError
            The message names the bound, never a value of the reply.
        """
        if reply.num_samples > self.max_samples:
            raise ProtocolError("more rows than max_samples")
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is beyond every bound
            if isinstance(reply, RowsReply):
                self._check_rows(reply, request)
            else:
                self._check_moments(reply, request)

    def _check_rows(self, reply: RowsReply, request: Request) -> None:
        slack = 1e-9  # the same number may be computed in another order on a device
        if not self.min_noise_std * (1 - slack) <= reply.noise_std <= self.max_noise_std * (1 + slack):
            raise ProtocolError("noise_std outside what the study allows")
        if self.feature_radius is not None:
            bound = self._mapped_radius(request) + reply.noise_std * _noise_quantile(reply, request)
            if (np.linalg.norm(reply.released, axis=1) > bound).any():
                raise ProtocolError("a released row longer than any honest one")
        if self.label_radius is not None and (labels := reply.labels) is not None:
            slack = 1e-6  # labels may travel as float32
            if (np.abs(labels) > self.label_radius * (1 + slack)).any():
                raise ProtocolError("a label beyond label_radius")

    def _check_moments(self, reply: MomentsReply, request: Request) -> None:
        sums, n = reply.sums, reply.num_samples
        if not _of_real_rows(sums):
            raise ProtocolError("sums that no rows have")
        slack = 1e-9
        level = math.sqrt(sums.noise_variance_sum / n)
        if not self.min_noise_std * (1 - slack) <= level <= self.max_noise_std * (1 + slack):
            raise ProtocolError("noise_std outside what the study allows")
        if self.feature_radius is not None:
            noise = _noise_norm(sums.noise_variance_sum, request.num_columns, self.max_noise_std)
            if math.sqrt(np.trace(sums.gram)) > math.sqrt(n) * self._mapped_radius(request) + noise:
                raise ProtocolError("released rows longer than any honest ones")
        if self.label_radius is not None and sums.label_square_sum > n * self.label_radius**2 * (1 + slack):
            raise ProtocolError("a label beyond label_radius")

    def _mapped_radius(self, request: Request) -> float:
        """Largest norm of the noise-free map: (1 − α)R + λ."""
        assert self.feature_radius is not None
        modulation = request.modulation
        return modulation.contraction * self.feature_radius + modulation.effective_amplitude


def sort_replies(
    replies: Iterable[Message], *, request: Request, asked: set[int], joint: bool, screen: Screen
) -> tuple[dict[int, Reply], Counter[str]]:
    """Separate valid replies from refused ones.

    Parameters
    ----------
    replies : iterable of flwr.app.Message
        What came back.
    request : Request
        What was asked.
    asked : set of int
        Nodes that were asked.
    joint : bool
        Whether labels are inside the released rows.
    screen : Screen
        Bounds that replies must keep.

    Returns
    -------
    valid : dict of int to Reply
        By node.
    refused : collections.Counter
        Reasons, with how many replies each cost.
    """
    valid: dict[int, Reply] = {}
    refused: Counter[str] = Counter()
    silent = set(asked)
    for message in replies:
        node = message.metadata.src_node_id
        silent.discard(node)
        if message.has_error():
            refused[f"error on the device: {_reason(message.error.reason)}"] += 1
        elif node not in asked:
            refused["from a node that was not asked"] += 1
        elif node in valid:
            refused["second reply of a node"] += 1
        else:
            try:
                reply = parse_reply(message.content, request=request, joint=joint)
                screen.check(reply, request)
            except ProtocolError as error:
                refused[str(error)] += 1
            else:
                valid[node] = reply
    if silent:
        refused["no reply before the deadline"] = len(silent)
    return valid, refused


def _noise_quantile(reply: Reply, request: Request) -> float:
    """Norm of d standard normals that any of n rows passes with probability at most 1e-9."""
    return math.sqrt(chdtri(request.num_columns, _FALSE_ALARM / reply.num_samples))


def _noise_norm(variance_sum: float, num_columns: int, max_noise_std: float) -> float:
    """Norm of all rows' noise together that is passed with probability at most 1e-9.

    Whatever the σ_i of the rows, of which only Σ σ_i² and a bound are known: Laurent and Massart
    (2000), *Adaptive estimation of a quadratic functional*, Lemma 1, for Σ σ_i² χ²_d.
    """
    x = -math.log(_FALSE_ALARM)
    largest = min(max_noise_std, math.sqrt(variance_sum)) ** 2
    mean = num_columns * variance_sum
    return math.sqrt(mean + 2.0 * math.sqrt(x * mean * largest) + 2.0 * x * largest)


def _of_real_rows(sums: Moments) -> bool:
    """Whether sums can be those of real rows (1, g̃, y): their Gram matrix has no negative eigenvalue."""
    d = sums.num_features
    gram = np.zeros((d + 2, d + 2))
    gram[0, 0], gram[0, 1:-1], gram[0, -1] = sums.num_samples, sums.total, sums.label_sum
    gram[1:-1, 1:-1], gram[1:-1, -1] = sums.gram, sums.cross
    gram[-1, -1] = sums.label_square_sum
    scale = np.sqrt(np.diag(gram))
    scale[scale == 0] = 1.0  # an empty column must be zero throughout
    unit = gram / scale / scale[:, None]
    # On the unit diagonal sums of 1e9 rows are off by less than 1e-6. Cauchy and Schwarz first: LAPACK
    # gives up on infinite entries.
    return bool((np.abs(unit) <= 1 + 1e-6).all() and np.linalg.eigvalsh(unit, UPLO="U")[0] >= -1e-6)


def _reason(text: str | None) -> str:
    """What the device says, without what Flower wraps around it: in simulation a whole traceback."""
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    last = (lines[-1] if lines else "no reason given").removesuffix("'>")
    for wrapping in ("occurred. Message: ", "RequestRefusedError'>:<'", "RequestRefusedError: "):
        last = last.rpartition(wrapping)[2]
    # The device writes it: printing it must not move a cursor or a colour.
    return "".join(letter if letter.isprintable() else "?" for letter in last[:300])
