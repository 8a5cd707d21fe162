"""``renormalize-remote``: own weight 1/N, the mean of the remote survivors (N-1)/N; the own gradient if there is none.

In expectation the plain mean for any gradients, if a remote survivor exists. The own shard stays out of the sum where
something is missing, so that the owner can weight the two parts apart.
"""

from __future__ import annotations

import numpy as np
import torch

from .base import GradRecovery, Outcome
from .rows import Saved, scale_


class RenormalizeRemote(GradRecovery):
    """Scales the remote sum by (N-1)/K and adds the own gradient."""

    def send(self, buffer: torch.Tensor, outcome: Outcome) -> Saved:
        rows, kept_out = self.rows(buffer), self._kept_out(outcome)
        own = self._shard(buffer, outcome.rank)
        saved = rows.take(own, self.units, kept_out)
        rows.zero_(buffer, self.units, ~outcome.outgoing)
        rows.zero_(own, self.units, kept_out)
        return saved

    def receive(self, shard: torch.Tensor, outcome: Outcome, sent: Saved) -> None:
        kept_out = self._kept_out(outcome)
        if not kept_out.any() and shard.device.type != "hpu":
            return
        size = len(outcome.incoming)
        remote = outcome.incoming.sum(axis=0) - 1
        scale_(shard, self.units, np.where(remote > 0, (size - 1) / np.maximum(remote, 1), 1.0))
        part = torch.zeros_like(shard)
        self.rows(shard).put_(part, self.units, kept_out, sent)
        # Alone, the own gradient is the mean: it must survive the division by N.
        own_weight = np.where(remote > 0, 1.0, float(size)) / (size if outcome.averaged else 1)
        scale_(part, self.units, own_weight)
        shard.add_(part)

    def _kept_out(self, outcome: Outcome) -> np.ndarray:
        """bool[1, count]: units of the own shard that stay out of the sum."""
        return ~outcome.incoming.all(axis=0, keepdims=True)

    def _shard(self, buffer: torch.Tensor, rank: int) -> torch.Tensor:
        return buffer[rank * self.units.shard : (rank + 1) * self.units.shard]
