"""What a study has heard so far, and its atomic checkpoint on disk."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .._blocks import blocks_of
from .._typing import FloatArray
from ..errors import InsufficientRepliesError, InvalidParameterError
from ..modulation import Modulation
from ..moments import DebiasedMoments, Moments
from ..sample import Group, Sample
from .records import MomentsReply, Reply, Request, RowsReply, reply_from_arrays

__all__ = ["Round", "StudyState"]

_FORMAT = 2


@dataclass(slots=True)
class Round:
    """A request and the valid replies to it, by node."""

    request: Request
    replies: dict[int, Reply] = field(default_factory=dict)

    def add(self, replies: dict[int, Reply]) -> int:
        """Take in replies by node, and count each release once.

        A SuperNode that restarts without a key of its own comes back under another
        id, and its ledger gives the same release again: that one moves to the new id.

        Returns
        -------
        int
            How many moved.
        """
        owners = {reply.sort_key: node for node, reply in self.replies.items() if reply.has_noise}
        moved = 0
        for node, reply in replies.items():
            if reply.has_noise:
                before = owners.get(reply.sort_key, node)
                owners[reply.sort_key] = node
                if before != node:
                    del self.replies[before]
                    moved += 1
            self.replies[node] = reply
        return moved

    def row_moments(self) -> list[Moments]:
        """Sums of all released rows, one for each level of noise."""
        levels: dict[float, list[RowsReply]] = defaultdict(list)
        for _, reply in self.row_replies():
            levels[reply.noise_std].append(reply)
        return [
            Moments.from_blocks(
                blocks_of([reply.released for reply in replies]), _labels(replies), noise_std=level
            )
            for level, replies in levels.items()
        ]

    def row_replies(self) -> list[tuple[int, RowsReply]]:
        """Nodes that sent rows; ordered by content, since node ids and arrival differ from run to run."""
        found = [(node, reply) for node, reply in self.replies.items() if isinstance(reply, RowsReply)]
        return sorted(found, key=lambda item: item[1].sort_key)

    def sums(self) -> list[tuple[str, Moments]]:
        """Sums of the nodes that sent moments, each with its node; ordered by content."""
        found = [(node, reply) for node, reply in self.replies.items() if isinstance(reply, MomentsReply)]
        found.sort(key=lambda item: item[1].sort_key)
        return [(str(node), reply.sums) for node, reply in found]


@dataclass(slots=True)
class StudyState:
    """Rounds that still count, and the coefficients after each round.

    Attributes
    ----------
    rounds : list of Round
        One in one-shot mode, the last one in iterative mode, all where rounds are
        pooled.
    iterates : list of ndarray of shape (d,)
        Coefficients after each round.
    bytes_received : int
        Size of the arrays of all valid replies.
    """

    rounds: list[Round] = field(default_factory=list)
    iterates: list[FloatArray] = field(default_factory=list)
    bytes_received: int = 0

    @property
    def nodes(self) -> set[int]:
        """Nodes whose release counts."""
        return {node for entry in self.rounds for node in entry.replies}

    def noise_std_range(self) -> tuple[float, float]:
        """Smallest and largest noise of a node, root mean square over its rows where it sent sums."""
        levels = [math.nan]
        for reply in (reply for entry in self.rounds for reply in entry.replies.values()):
            if isinstance(reply, RowsReply):
                levels.append(reply.noise_std)
            else:
                levels.append(math.sqrt(reply.sums.noise_variance_sum / reply.num_samples))
        return float(np.fmin.reduce(levels)), float(np.fmax.reduce(levels))

    def debias(self, label_scale: float | None) -> DebiasedMoments:
        """Unbiased moments of the private rows, from all rounds that count.

        Rows of a round are weighted by the information that their noise leaves;
        rounds are averaged.

        Parameters
        ----------
        label_scale : float or None
            Of joint records; None where labels travel beside the rows.

        Returns
        -------
        DebiasedMoments
        """
        rounds = []
        for entry in self.rounds:
            levels: dict[str, list[Moments]] = defaultdict(list)
            for moments in entry.row_moments() + [sums for _, sums in entry.sums()]:
                # Twelve digits: the same noise must not count as two levels by rounding.
                levels[f"{moments.noise_variance_sum / moments.num_samples:.12g}"].append(moments)
            debiased = DebiasedMoments.combine(
                Moments.sum(sums).debias(entry.request.modulation, entry.request.directions)
                for _, sums in sorted(levels.items())
            )
            if label_scale is not None:
                debiased = DebiasedMoments.from_joint(debiased, label_scale=label_scale)
            rounds.append(debiased)
        return DebiasedMoments.pool(rounds)

    def sample(self, label_scale: float | None) -> Sample:
        """Everything that counts of what was released, for inference and evaluation.

        Parameters
        ----------
        label_scale : float or None
            Of joint records; None where labels travel beside the rows.

        Returns
        -------
        Sample

        Raises
        ------
        InsufficientRepliesError
            If nothing has been received yet.
        """
        samples: list[Sample] = []
        repeated = len(self.rounds) > 1
        for entry in self.rounds:
            modulation, directions = entry.request.modulation, entry.request.directions
            found = entry.row_replies()
            if found:
                replies = [reply for _, reply in found]
                samples.append(
                    Sample.from_rows(
                        np.concatenate([reply.released for reply in replies]),
                        _labels(replies),
                        noise_std=np.repeat(
                            [reply.noise_std for reply in replies], [reply.num_samples for reply in replies]
                        ),
                        modulation=modulation,
                        directions=directions,
                        joint_label_scale=label_scale,
                        units=_row_units(found) if repeated else None,
                    )
                )
            groups = [
                Group(sums, modulation, directions, unit=node if repeated else None)
                for node, sums in entry.sums()
            ]
            if groups:
                samples.append(Sample.from_moments(groups, joint_label_scale=label_scale))
        if not samples:
            raise InsufficientRepliesError("nothing has been received yet; run strategy.start first")
        return Sample.concatenate(samples)

    def save(self, path: Path, identity: dict[str, Any]) -> None:
        """Write the state to disk at once: a stop in between leaves the old file.

        Parameters
        ----------
        path : pathlib.Path
            Where to.
        identity : dict
            What the study is; :meth:`load` refuses the file of another.
        """
        arrays: dict[str, np.ndarray] = {"iterates": np.array(self.iterates)}
        rounds = []
        for index, entry in enumerate(self.rounds):
            request = entry.request
            arrays[f"{index}/directions"] = request.directions
            replies = []
            for position, (node, reply) in enumerate(entry.replies.items()):
                # As text: node ids may pass what JSON readers take for a number.
                replies.append([str(node), reply.server_round, reply.to_entries()])
                for part, array in enumerate(reply.to_arrays()):
                    arrays[f"{index}/{position}/{part}"] = array
            modulation = request.modulation
            rounds.append(
                {
                    "server_round": request.server_round,
                    "study": request.study,
                    "payload": request.payload,
                    "release_index": request.release_index,
                    "precision": request.precision,
                    "modulation": [
                        modulation.alpha,
                        modulation.amplitude,
                        modulation.frequency,
                        modulation.num_directions,
                    ],
                    "replies": replies,
                }
            )
        meta = {
            "format": _FORMAT,
            "identity": identity,
            "bytes_received": self.bytes_received,
            "rounds": rounds,
        }
        arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        with partial.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)

    @classmethod
    def load(cls, path: Path, identity: dict[str, Any], *, joint: bool) -> StudyState:
        """Read what :meth:`save` wrote.

        Raises
        ------
        InvalidParameterError
            If the file is damaged or belongs to another study.
        """
        try:
            with np.load(path, allow_pickle=False) as arrays:
                meta = json.loads(arrays["meta"].tobytes())
                if meta["format"] != _FORMAT or meta["identity"] != identity:
                    raise InvalidParameterError(
                        f"checkpoint {path.name} belongs to another study or version; "
                        "choose another path, or remove it to ask devices anew"
                    )
                state = cls(iterates=list(arrays["iterates"]), bytes_received=int(meta["bytes_received"]))
                for index, entry in enumerate(meta["rounds"]):
                    request = Request(
                        entry["server_round"],
                        Modulation(*entry["modulation"]),
                        arrays[f"{index}/directions"],
                        study=entry["study"],
                        payload=entry["payload"],
                        release_index=entry["release_index"],
                        precision=entry["precision"],
                    )
                    replies = {}
                    for position, (node, server_round, entries) in enumerate(entry["replies"]):
                        parts: list[FloatArray] = []
                        while (name := f"{index}/{position}/{len(parts)}") in arrays:
                            parts.append(arrays[name])
                        replies[int(node)] = reply_from_arrays(
                            parts, entries, request=request, server_round=server_round, joint=joint
                        )
                    state.rounds.append(Round(request, replies))
        except InvalidParameterError:
            raise
        except Exception as error:
            raise InvalidParameterError(
                f"checkpoint {path.name} cannot be read ({type(error).__name__}); "
                "remove it to ask devices anew"
            ) from None
        return state


def _labels(replies: list[RowsReply]) -> FloatArray | None:
    """Labels of all rows; None for joint records."""
    found = [labels for reply in replies if (labels := reply.labels) is not None]  # each look is a copy
    return np.concatenate(found) if found else None


def _row_units(found: list[tuple[int, RowsReply]]) -> list[str]:
    """Of each released row its node and its place there."""
    return [f"{node}/{row}" for node, reply in found for row in range(reply.num_samples)]
