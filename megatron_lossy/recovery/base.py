"""What a gradient recovery rule is: what the sender removes and how the owner corrects the sum."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..exchange import BucketUnits
from .rows import Rows, rows_for


@dataclass(frozen=True)
class Outcome:
    """The outcome of one gradient exchange of one bucket, as rank ``rank`` sees it.

    ``outgoing`` [N, count]: what of this rank's shards arrives at each owner; ``incoming`` [N, count]: what arrives
    here from each source; ``next_outgoing()``: the former, one step later. ``averaged``: the collective divides the
    sum by N. ``loss_scale``: what the gradients are multiplied with (a number or a scalar tensor), or ``None``.
    """

    step: int
    rank: int
    outgoing: np.ndarray
    incoming: np.ndarray
    next_outgoing: Callable[[], np.ndarray]
    averaged: bool = False
    loss_scale: torch.Tensor | float | None = None


class GradRecovery(ABC):
    """One rule for one bucket. Rules that keep gradients between steps hold them here.

    A step may be exchanged more than once (Megatron's rerun machine); the result must not depend on that.
    """

    def __init__(self, units: BucketUnits) -> None:
        self.units = units

    @staticmethod
    def rows(buffer: torch.Tensor) -> Rows:
        """How to change units of ``buffer``."""
        return rows_for(buffer.device)

    def send(self, buffer: torch.Tensor, outcome: Outcome) -> Any:
        """Remove from ``buffer`` [N * shard] what will not arrive. The result is given to :meth:`receive`."""
        self.rows(buffer).zero_(buffer, self.units, ~outcome.outgoing)

    def receive(self, shard: torch.Tensor, outcome: Outcome, sent: Any) -> None:
        """Correct the reduced ``shard`` [shard] of this rank in place."""

    def finish_step(self, step: int, successful: bool) -> None:
        """The optimizer used (or, after an overflow, threw away) the gradients of ``step``."""

    def state_dict(self) -> dict[str, Any]:
        """What must be saved for a run to continue bit for bit."""
        return {}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore :meth:`state_dict`, with tensors on ``device``."""
