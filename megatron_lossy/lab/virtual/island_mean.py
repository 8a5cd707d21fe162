"""The exchange of islands in one process: a row of the exchanged values for each.

Its twin is :class:`megatron_lossy.mechanisms.islands.between_ranks.RankExchanges`, of islands of real ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...base.exchange import BucketUnits, Delivery, Exchange, Stream
from ...config import LossyConfig
from ...mechanisms.islands.flags import SYNC_PHASES
from ...mechanisms.islands.mean import Form, Mean, Rest, elements_of, finite_rows, mean_of, networks_between
from ...mechanisms.islands.vector import Places
from ...transport.base import draw


class InMemory:
    """All islands in this process. ``deliveries``: those of the latest exchange; empty without loss."""

    def __init__(self, config: LossyConfig, stream: Stream, steps: int | None) -> None:
        self._config, self._stream = config, stream
        self._form = Form(config)
        self.rest = None if self._form.exact else Rest(self._form)
        self._networks = networks_between(config, stream, steps)
        self.deliveries: list[Delivery] = []
        self._senders: Sequence[int] = range(config.islands)
        self._receivers: Sequence[int] = range(config.islands)

    def among(self, senders: Sequence[int], receivers: Sequence[int]) -> None:
        """Average only ``senders`` from the next exchange on, which own the means; ``receivers`` get these."""
        self._senders, self._receivers = senders, receivers

    def forget(self, island: int) -> None:
        """Let ``island`` begin again, without rests of means."""
        if self.rest is not None:
            self.rest.forget(island)

    def begin(self, step: int, sent: torch.Tensor, places: Places | None = None) -> Mean:
        """Make the exchange of ``sent`` float32[islands, k], keyed by the iteration ``step``. ``sent`` becomes what others get, rounded.

        ``places``: the places of its elements; ``None``: all of a vector.
        """
        senders, receivers, (islands, count) = self._senders, self._receivers, sent.shape
        owners = len(senders)
        shard = self._form.share(count, owners)
        units = self._form.cut(shard)
        crossing = torch.zeros(islands, owners * shard, device=sent.device)
        crossing[:, :count] = sent
        if not self._form.exact:
            self._round(crossing.view(-1, shard), units)
            sent.copy_(crossing[:, :count])
        crossing = crossing if owners == islands else crossing[senders]
        reduced, gathered = self._arrived(step, units, finite_rows(sent))
        self.deliveries = [
            Delivery(Exchange(phase, self._stream, step), senders, receiving, arrived, [units])
            for phase, receiving, arrived in zip(SYNC_PHASES, (senders, receivers), (reduced, gathered), strict=True)
            if arrived is not None
        ]
        here = None if reduced is None else elements_of(reduced, units, sent.device)
        means = mean_of(crossing.view(owners, owners, shard), here)  # [owners, shard]
        if self.rest is not None:
            means = self._rounded(self.rest, means, units, here, places, count)
        values = means.view(-1)[:count]
        if not self.deliveries:
            return Mean(values, None)
        if gathered is None:
            gathered = np.ones((len(receivers), owners, units.count), dtype=bool)
        back = elements_of(gathered, units, sent.device).reshape(len(receivers), -1)[:, :count]
        if len(receivers) == islands:
            return Mean(values, back)
        arrived = back.new_zeros(islands, count)
        arrived[receivers] = back
        return Mean(values, arrived)

    def _round(self, values: torch.Tensor, units: BucketUnits) -> torch.Tensor:
        """Replace ``values`` float32[R, shard] by those that arrive, and return them."""
        rows = values.new_empty(len(values), self._form.items(units), dtype=self._form.dtype)
        self._form.encode(values, units, rows)
        return values.copy_(self._form.decode(rows, units))

    def _rounded(
        self,
        rest: Rest,
        exact: torch.Tensor,
        units: BucketUnits,
        here: torch.Tensor | None,
        places: Places | None,
        count: int,
    ) -> torch.Tensor:
        """Return the means [owners, shard] that cross for those before rounding; zero without a sender."""
        averaged = [None] * len(exact) if here is None else here.any(dim=1)

        def crosses(values: torch.Tensor) -> torch.Tensor:
            return self._round(values.clone()[None], units)[0]

        rows = [
            rest.crossing(owner, place, places, count, exact[place], averaged[place], crosses)
            for place, owner in enumerate(self._senders)
        ]
        return torch.stack(rows).nan_to_num_(0.0)

    def _arrived(self, step: int, units: BucketUnits, finite: np.ndarray) -> list[np.ndarray | None]:
        """Return bool[receivers, senders, units] for each phase: the units that arrive; ``None``: all.

        A mean without a sender is lost. Means are received by all receivers, and what they are made of by their owners.
        """
        receivers = (self._senders, self._receivers)
        reduced, gathered = (
            self._drawn(phase, step, units, finite, there) for phase, there in zip(SYNC_PHASES, receivers, strict=True)
        )
        sent = None if reduced is None else reduced.any(axis=1)  # [owners, units]
        if sent is not None and not sent.all():
            shape = (len(self._receivers), *sent.shape)
            gathered = np.broadcast_to(sent[None] & (True if gathered is None else gathered), shape)
        return [reduced, gathered]

    def _drawn(
        self, phase: str, step: int, units: BucketUnits, finite: np.ndarray, receivers: Sequence[int]
    ) -> np.ndarray | None:
        """Return the units that the draw delivers. Islands that are not ``finite`` neither send nor receive."""
        network, senders = self._networks[phase], self._senders
        sound, heard = finite[list(senders)], finite[list(receivers)]
        if network.lossless and sound.all() and heard.all():
            return None
        arrived = draw(network, Exchange(phase, self._stream, step), senders, receivers, units.count).copy()
        arrived[:, ~sound] = False
        arrived[~heard] = False
        return arrived
