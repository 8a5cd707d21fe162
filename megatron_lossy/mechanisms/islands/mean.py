"""The lossy mean over islands: a reduce-scatter to owners and an all-gather of their means.

An exchange of k elements is cut into one shard per island. The owner of a shard averages the copies that arrive (its
own always does), and sends the mean back. An island that does not get it goes on without. Nothing is sent again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...base.exchange import BucketUnits, Delivery, Exchange, Stream
from ...base.fingerprint import finite
from ...config import LossyConfig
from ...recovery.rows import to_device
from ...transport import Network
from ...transport.base import draw
from .flags import SYNC_PHASES
from .form import Codes, Rest, form_of
from .rounds import Mean
from .vector import Places


class InMemory:
    """All islands in this process. ``deliveries``: those of the latest exchange; empty without loss."""

    def __init__(self, config: LossyConfig, stream: Stream, steps: int | None) -> None:
        self._config, self._stream = config, stream
        self._form = form_of(config)
        self.rest = Rest() if isinstance(self._form, Codes) else None
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
        senders, receivers, (islands, count) = self._senders, self._receivers, sent.shape
        owners = len(senders)
        shard = -(-count // owners)
        units = self._form.cut(shard)
        crossing = torch.zeros(islands, owners * shard, device=sent.device)
        crossing[:, :count] = sent
        if not self._form.exact:
            self._form.round_(crossing.view(-1, shard), units)
            sent.copy_(crossing[:, :count])
        crossing = crossing if owners == islands else crossing[senders]
        reduced, gathered = self._arrived(step, units, finite_rows(sent))
        self.deliveries = [
            Delivery(Exchange(phase, self._stream, step), senders, receiving, arrived, [units])
            for phase, receiving, arrived in zip(SYNC_PHASES, (senders, receivers), (reduced, gathered), strict=True)
            if arrived is not None
        ]
        here = None if reduced is None else elements_of(reduced, units, sent.device)
        exact = mean_of(crossing.view(owners, owners, shard), here)  # [owners, shard]
        rounded, owed = exact, None
        if self.rest is not None:
            rounded = self._coded(self.rest, exact, units, here, places, count)
        elif not self._form.exact:
            rounded = self._form.round_(exact.clone(), units)
            owed = _of_slots(owed_to(range(owners), exact - rounded, owners)[:, :count], senders, islands)
        values = rounded.view(-1)[:count]
        if not self.deliveries:
            return Mean(values, None, owed)
        if gathered is None:
            gathered = np.ones((len(receivers), owners, units.count), dtype=bool)
        back = elements_of(gathered, units, sent.device).reshape(len(receivers), -1)[:, :count]
        return Mean(values, _of_slots(back, receivers, islands), owed)

    def _coded(
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
            return self._form.round_(values.clone()[None], units)[0]

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


def _of_slots(rows: torch.Tensor, slots: Sequence[int], islands: int) -> torch.Tensor:
    """Return ``rows`` [n, k] of ``slots`` as [islands, k], with zeros for the others."""
    if len(slots) == islands:
        return rows
    result = rows.new_zeros(islands, rows.shape[1])
    result[slots] = rows
    return result


def networks_between(config: LossyConfig, stream: Stream, steps: int | None) -> dict[str, Network]:
    """Return the networks between islands, by phase. Raise :class:`UsageError` for a channel that cannot serve them."""
    networks = {phase: Network(config, phase, config.islands) for phase in SYNC_PHASES}
    for phase, network in networks.items():
        if not network.lossless:
            network.channel.check(phase, stream, config.islands, None, steps)
    return networks


def mean_of(sent: Any, arrived: torch.Tensor | None) -> torch.Tensor:
    """Return the mean [owners, shard] of the elements of ``sent`` float32[sources, owners, shard] that arrived.

    Elements without a delivery are zero; these zeros are no means. ``arrived`` bool[owners, sources, shard]; ``None``: all, and
    ``sent`` may then be a list of the sources' tensors, of one shape. Sums are taken in the order of the islands.
    """
    if arrived is not None:
        sent = torch.where(arrived.transpose(0, 1), sent, torch.zeros((), device=sent.device))
    total = sent[0].clone()
    for values in sent[1:]:
        total += values
    count = len(sent) if arrived is None else arrived.sum(dim=1).clamp_(min=1)
    return total / count


def owed_to(owners: Sequence[int], rest: torch.Tensor, islands: int) -> torch.Tensor:
    """Return :attr:`Mean.owed` [owners, islands x shard]. ``rest`` [owners, shard]: removed by rounding."""
    owed = torch.zeros(len(owners), islands, rest.shape[1], device=rest.device)
    for row, owner in enumerate(owners):
        owed[row, owner] = islands * rest[row]
    return owed.flatten(1)


def finite_rows(rows: torch.Tensor) -> np.ndarray:
    """Return bool[M]: for each of ``rows`` [M, n] whether all of it is finite."""
    return torch.stack([finite([row]) for row in rows]).cpu().numpy()


def elements_of(arrived: np.ndarray, units: BucketUnits, device: torch.device) -> torch.Tensor:
    """Return bool[receivers, sources, shard] of bool[receivers, sources, units]."""
    by_unit = torch.from_numpy(arrived) if device.type == "cpu" else to_device(arrived, device)
    return by_unit.repeat_interleave(units.elements, dim=2)[:, :, : units.shard]
