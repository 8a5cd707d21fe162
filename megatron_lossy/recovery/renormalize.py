"""``renormalize``: the mean of the units that arrived (paper, section 3 (2), Corollary 3.2).

The owner multiplies the sum of the K survivors by N/K; the division by N is Megatron's. A unit without survivor stays
zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.exchange import Delivery
from .base import Gradients, GradRecovery

if TYPE_CHECKING:
    import torch


class Renormalize(GradRecovery):
    """Scales each unit by N/K."""

    name = "renormalize"

    def after(self, shard: torch.Tensor, delivery: Delivery, kept: Any, x: Gradients) -> None:
        survivors = delivery.survivors(self.units)
        self.rows(shard).scale_(shard, self.units, len(delivery.sources) / np.maximum(survivors, 1))
