"""A simulated node that draws its moments from their exact law, in place of its rows' noise."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
from flwr.client import NumPyClient

from flwr_modulated import InvalidParameterError, Mechanism, Moments, Policy
from flwr_modulated._typing import FloatArray
from flwr_modulated.exact_law import draw_moments, noise_free_moments
from flwr_modulated.flower.records import FitResult, MomentsReply, Request, reply_to_fit_result

# Moments without noise, by what they are of: 2 KB each at d = 9.
_KEPT: dict[Hashable, Moments] = {}
_MOST_KEPT = 4096


class ExactLawClient(NumPyClient):
    """Answers with moments of the law that a node's released rows would have, without releasing them.

    Not a device, and not to be used on one: what it keeps in memory is not private.

    Parameters
    ----------
    load : callable
        Returns the hosted clients' features (n, d) and labels (n,). Not called again
        where the map is plain and the moments before noise are known.
    policy : Policy
        What every hosted client has decided for itself.
    key : hashable
        Tells the hosted clients from those of other nodes and tasks.
    rng : callable
        Maps the server round to the node's random stream.
    """

    def __init__(
        self,
        load: Callable[[], tuple[FloatArray, FloatArray]],
        policy: Policy,
        *,
        key: Hashable,
        rng: Callable[[int], np.random.Generator],
    ) -> None:
        self._load, self._policy, self._key, self._rng = load, policy, key, rng

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> FitResult:
        """Draw the moments.

        Raises
        ------
        InvalidParameterError
            If rows are asked for.
        """
        request = Request.parse(parameters, config)
        if request.payload != "moments":
            raise InvalidParameterError("payload must be moments: no rows are drawn")
        mechanism, rng = self._policy.mechanism(request.modulation), self._rng(request.server_round)
        sums = draw_moments(self._noise_free(mechanism, request, rng), mechanism.noise_std, rng=rng)
        return reply_to_fit_result(MomentsReply(request.server_round, sums))

    def _noise_free(self, mechanism: Mechanism, request: Request, rng: np.random.Generator) -> Moments:
        relation = mechanism.guarantee.relation
        key = (self._key, request.modulation, relation)
        if (kept := _KEPT.get(key)) is not None:  # one look: another thread may clear it
            return kept
        features, labels = self._load()
        moments = noise_free_moments(
            mechanism,
            relation.join(features, labels),
            None if relation.hides_labels else labels,
            request.directions,
            rng=rng,
        )
        if request.modulation.is_plain:  # no phases: the same in every round, for every ε and release
            if len(_KEPT) >= _MOST_KEPT:
                _KEPT.clear()
            _KEPT[key] = moments
        return moments
