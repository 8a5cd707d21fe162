"""Means of the gradients that arrived (paper, section 3 (2), Corollary 3.2).

``renormalize``: the owner multiplies the sum of the K survivors by N/K; the division by N is Megatron's. A unit without
survivor stays zero.

``renormalize-remote``: own weight 1/N, the mean of the remote survivors (N-1)/N; the own gradient if there is none. If a
remote survivor exists, the expectation is the plain mean for any gradients. The own shard stays out of the sum where
something is missing, so that the owner can weight the two parts apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.errors import refuse
from ..base.exchange import Delivery, Lost
from .base import Gradients, GradRecovery
from .rows import Saved

if TYPE_CHECKING:
    import torch

    from ..config import LossyConfig


class Renormalize(GradRecovery):
    """Scales each unit by N/K."""

    name = "renormalize"

    def after(self, shard: torch.Tensor, delivery: Delivery, kept: Any, x: Gradients) -> None:
        survivors = delivery.survivors(self.units)
        self.rows.scale_(shard, self.units, len(delivery.sources) / np.maximum(survivors, 1))


class RenormalizeRemote(GradRecovery):
    """Scales the remote sum by (N-1)/K and adds the own gradient."""

    name = "renormalize-remote"

    @classmethod
    def check(cls, config: LossyConfig) -> None:
        if config.lossy_self:
            why = "that rule gives the own shard, always there, the weight 1/N; choose renormalize, previous or zero"
            raise refuse("--lossy-self", f"with --grad-recovery {cls.name}", why)

    def before(
        self, buffer: torch.Tensor, lost: Lost, delivery: Delivery, x: Gradients
    ) -> tuple[Lost, Saved, torch.dtype]:
        # Units of the own shard that stay out of the sum.
        rows, kept_out = self.rows, Lost((delivery.survivors(self.units) < len(delivery.sources))[None])
        own = buffer[self.rank * self.units.shard : (self.rank + 1) * self.units.shard]
        saved = rows.take(own, self.units, kept_out)
        rows.zero_(buffer, self.units, lost)
        rows.zero_(own, self.units, kept_out)
        return kept_out, saved, buffer.dtype

    def after(
        self, shard: torch.Tensor, delivery: Delivery, kept: tuple[Lost, Saved, torch.dtype], x: Gradients
    ) -> None:
        rows, (kept_out, saved, dtype) = self.rows, kept
        if rows.nothing(kept_out):
            return
        size, remote = len(delivery.sources), delivery.survivors(self.units) - 1
        rows.scale_(shard, self.units, np.where(remote > 0, (size - 1) / np.maximum(remote, 1), 1.0))
        part = shard.new_zeros(shard.shape, dtype=dtype)
        rows.put_(part, self.units, kept_out, saved)
        # Without remote survivors the own gradient is the mean: it must survive the division by N.
        own_weight = np.where(remote > 0, 1.0, float(size)) / (size if x.averaged else 1)
        rows.scale_(part, self.units, own_weight)
        shard.add_(part)
