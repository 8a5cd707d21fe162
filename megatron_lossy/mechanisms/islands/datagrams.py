"""Exchanges between islands as datagrams. In both halves, a unit that does not arrive in time is lost, and reported.

All messages have the length of the longest exchange; shorter ones end in zeros.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from ...config import LossyConfig
from ...transport.udp.leaving import Leaving, patiently
from ...transport.udp.process import engine_for
from .flags import SYNC_PHASES


class IslandLink:
    """Exchanges of this island with all others, one after another. One rank of each island opens it, a collective call.

    ``shard``: the most elements of a message, of ``dtype``. ``store``: a new store of these ranks. ``patience``: an
    island that sends nothing for this many seconds counts as gone.
    """

    observes = True

    def __init__(
        self,
        config: LossyConfig,
        name: str,
        island: int,
        store: Any,
        shard: int,
        dtype: torch.dtype,
        patience: float,
    ) -> None:
        self.name, self.rank = f"islands {name}", island
        self._islands, self._shard, self._patience = config.islands, shard, patience
        bucket = (shard * dtype.itemsize, config.packet_bytes // dtype.itemsize * dtype.itemsize)
        buckets = {phase: [bucket] for phase in SYNC_PHASES}
        self._channel = engine_for(config).open(
            self.name, island, config.islands, store, name, buckets, alike=config.sync_subset, phases=SYNC_PHASES
        )
        self._begun = 0
        self._hurries = config.udp_deadline_seconds is not None
        self._leaving = Leaving(config.udp_memory, patience)
        self._silent: list[int] = []  # islands that sent nothing of their latest message

    def scatter(self, pieces: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        """Send ``pieces`` [M, n], one to each island. Returns the pieces for this island [M, n], and the arrived units.

        The second is bool[M, units]. Elements that did not arrive are zero.
        """
        sent = self._padded(pieces)
        return self._cross(SYNC_PHASES[0], sent, list(sent), pieces.shape[1])

    def gather(self, own: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        """[M, n]: ``own`` [n] of every island, and bool[M, units]: the units that came."""
        sent = self._padded(own[None])
        result = self._cross(SYNC_PHASES[1], sent, [sent[0]] * self._islands, len(own))
        self._begun += 1
        return result

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        sent = torch.zeros(len(rows), self._shard, dtype=rows.dtype)
        sent[:, : rows.shape[1]] = rows
        return sent

    def _cross(
        self, phase: str, sent: torch.Tensor, rows: Sequence[torch.Tensor], count: int
    ) -> tuple[torch.Tensor, np.ndarray]:
        received = torch.zeros(self._islands, self._shard, dtype=sent.dtype)
        received[self.rank] = rows[self.rank]
        transfer = self._channel.post(phase, self._begun, 0, self._others(list(received)))
        transfer.keep = received, sent
        self._channel.send(phase, self._begun, 0, self._others(rows, self._left_out()))
        self._leaving.add(transfer, sent.numel() * sent.element_size())
        arrived = patiently(transfer.wait, self._patience).copy()
        self._silent = np.flatnonzero(~arrived.any(axis=1)).tolist()
        return received[:, :count], arrived

    def _left_out(self) -> list[int]:
        """Make room for a message. Returns the islands that get none.

        Data that a stalled island has not taken stays here. If it grows above ``--udp-memory``, silent islands get
        nothing for a while. Without a deadline everybody waits for them anyway.
        """
        while self._leaving.full:
            if self._hurries and self._silent:
                return self._silent
            self._leaving.wait()
        return []

    def _others(self, rows: Sequence[torch.Tensor], left_out: Collection[int] = ()) -> list[int | None]:
        there = [island for island in range(self._islands) if island != self.rank and island not in left_out]
        return [row.data_ptr() if island in there else None for island, row in enumerate(rows)]

    def counters(self) -> dict[int, dict[str, int]]:
        """Counters of every other island."""
        return self._channel.counters()

    def rates(self) -> dict[int, dict[str, float]]:
        """Rates towards every other island."""
        return self._channel.rates()

    def close(self) -> None:
        self._channel.close()
