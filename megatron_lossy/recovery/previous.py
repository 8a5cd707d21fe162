"""``previous``: a lost gradient is replaced by the last one received from that sender; zero before the first.

Algorithm 1, line 9 of the paper, per sender. The sender substitutes it: with drawn deliveries it knows what the owner
received last. It keeps only what the next step will lose, about p times the buffer, except with a loss scale: then a
step may turn out to have overflowed after the next one is prepared, and everything received last is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..exchange import BucketUnits, Delivery
from .base import GradRecovery, Reduction
from .rows import Saved, to_tensor

if TYPE_CHECKING:
    import torch


class Previous(GradRecovery):
    """Substitutes the last received gradient before the sum."""

    name = "previous"
    foresight = True

    def __init__(self, units: BucketUnits, rank: int) -> None:
        super().__init__(units, rank)
        self._kept: dict[int, tuple[np.ndarray, Saved]] = {}  # step: what it loses, and its substitutes
        self._received: torch.Tensor | None = None  # with a loss scale: last received, of steps that counted
        self._pending: tuple[int, torch.Tensor] | None = None

    @classmethod
    def kept_share(cls, lost: float) -> float:
        return 2 * lost  # the substitutes of this step and of the next

    def before(self, buffer: torch.Tensor, delivery: Delivery, reduction: Reduction) -> None:
        if reduction.loss_scale is not None:
            self._before_scaled(buffer, delivery, reduction.loss_scale)
            return
        rows, step = self.rows(buffer), delivery.exchange.step
        lost = ~delivery.outgoing(self.units)
        known = self._kept.get(step)
        if known is None:
            rows.zero_(buffer, self.units, lost)
        else:
            assert np.array_equal(known[0], lost)
            rows.put_(buffer, self.units, lost, known[1])
        # The buffer now holds the last received gradient of every link.
        upcoming = reduction.upcoming()
        coming = ~upcoming.outgoing(self.units) if upcoming is not None else np.zeros_like(lost)
        self._kept = {step: known} if known is not None else {}
        self._kept[step + 1] = (coming, rows.take(buffer, self.units, coming))

    def _before_scaled(self, buffer: torch.Tensor, delivery: Delivery, loss_scale: torch.Tensor | float) -> None:
        rows = self.rows(buffer)
        lost = ~delivery.outgoing(self.units)
        if self._received is None:
            rows.zero_(buffer, self.units, lost)
        else:
            substitutes = rows.take(self._received * loss_scale, self.units, lost)
            rows.put_(buffer, self.units, lost, substitutes)
        self._pending = (delivery.exchange.step, buffer / loss_scale)

    def finish_step(self, step: int, successful: bool) -> None:
        if self._pending is not None and self._pending[0] == step:
            if successful:
                self._received = self._pending[1]
            self._pending = None

    def state_dict(self) -> dict[str, Any]:
        kept = {step: (to_tensor(lost), saved) for step, (lost, saved) in self._kept.items()}
        return {"kept": kept, "received": self._received}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        self._kept = {
            step: (lost.cpu().numpy(), [tuple(part.to(device) for part in parts) for parts in saved])
            for step, (lost, saved) in state["kept"].items()
        }
        self._received = state["received"].to(device) if state["received"] is not None else None
        self._pending = None
