"""Exchanges between islands as datagrams: of both halves, what does not arrive in time is lost, and reported.

Messages have one length, that of the longest exchange; shorter ones end in zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...config import LossyConfig
from ...config.islands import SYNC_PHASES
from .process import engine_for
from .stages import patiently


class IslandLink:
    """Exchanges of this island with all others, one after another. Opening it is a collective call of one rank of each.

    ``shard``: the most elements of a piece, of ``dtype``. ``store``: of these ranks, new. ``patience``: seconds after which an
    island counts as gone that sends nothing.
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

    def scatter(self, pieces: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        """[M, n] of ``pieces`` [M, n]: what islands sent here, zeros where nothing came; and bool[M, units]: what came."""
        sent = self._padded(pieces)
        return self._cross(SYNC_PHASES[0], sent, list(sent), pieces.shape[1])

    def gather(self, own: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        """[M, n]: ``own`` [n] of every island, and what of it came."""
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
        self._channel.send(phase, self._begun, 0, self._others(rows))
        arrived = patiently(transfer.wait, self._patience).copy()
        patiently(transfer.sent, self._patience)
        return received[:, :count], arrived

    def _others(self, rows: Sequence[torch.Tensor]) -> list[int | None]:
        return [None if island == self.rank else row.data_ptr() for island, row in enumerate(rows)]

    def counters(self) -> dict[int, dict[str, int]]:
        """Of every other island."""
        return self._channel.counters()

    def rates(self) -> dict[int, dict[str, float]]:
        """Towards every other island."""
        return self._channel.rates()

    def close(self) -> None:
        self._channel.close()
