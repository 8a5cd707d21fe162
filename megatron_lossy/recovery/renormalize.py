"""``renormalize``: the mean of what arrived (paper, section 3 (2), Corollary 3.2).

The owner multiplies the sum of the K survivors by N/K; the division by N is Megatron's. A unit without survivor stays
zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .base import GradRecovery, Outcome
from .rows import scale_


class Renormalize(GradRecovery):
    """Scales each unit by N/K."""

    def receive(self, shard: torch.Tensor, outcome: Outcome, sent: Any) -> None:
        survivors = outcome.incoming.sum(axis=0)
        scale_(shard, self.units, len(outcome.incoming) / np.maximum(survivors, 1))
