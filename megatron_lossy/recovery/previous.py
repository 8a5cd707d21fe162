"""``previous``: a lost gradient is replaced by the last one received from that sender; zero before the first.

Algorithm 1, line 9 of the paper, per sender. The sender substitutes it: with drawn deliveries it knows what the owner
received last. It keeps only what the next step will lose, about p times the buffer, except with a loss scale: then a
step may turn out to have overflowed after the next one is prepared, and everything received last is kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..exchange import BucketUnits
from .base import GradRecovery, Outcome
from .rows import Saved


class Previous(GradRecovery):
    """Substitutes the last received gradient before the sum."""

    def __init__(self, units: BucketUnits) -> None:
        super().__init__(units)
        self._kept: dict[int, tuple[np.ndarray, Saved]] = {}  # step: what it loses, and its substitutes
        self._received: torch.Tensor | None = None  # with a loss scale: last received, of steps that counted
        self._pending: tuple[int, torch.Tensor] | None = None

    def send(self, buffer: torch.Tensor, outcome: Outcome) -> None:
        if outcome.loss_scale is not None:
            self._send_scaled(buffer, outcome)
            return
        rows = self.rows(buffer)
        lost = ~outcome.outgoing
        known = self._kept.get(outcome.step)
        if known is None:
            rows.zero_(buffer, self.units, lost)
        else:
            assert np.array_equal(known[0], lost)
            rows.put_(buffer, self.units, lost, known[1])
        # The buffer now holds the last received gradient of every link.
        coming = ~outcome.next_outgoing()
        self._kept = {outcome.step: known} if known is not None else {}
        self._kept[outcome.step + 1] = (coming, rows.take(buffer, self.units, coming))

    def _send_scaled(self, buffer: torch.Tensor, outcome: Outcome) -> None:
        rows = self.rows(buffer)
        lost = ~outcome.outgoing
        if self._received is None:
            rows.zero_(buffer, self.units, lost)
        else:
            substitutes = rows.take(self._received * outcome.loss_scale, self.units, lost)
            rows.put_(buffer, self.units, lost, substitutes)
        self._pending = (outcome.step, buffer / outcome.loss_scale)

    def finish_step(self, step: int, successful: bool) -> None:
        if self._pending is not None and self._pending[0] == step:
            if successful:
                self._received = self._pending[1]
            self._pending = None

    def state_dict(self) -> dict[str, Any]:
        kept = {step: (torch.from_numpy(lost), saved) for step, (lost, saved) in self._kept.items()}
        return {"kept": kept, "received": self._received}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        self._kept = {
            step: (lost.cpu().numpy(), [tuple(part.to(device) for part in parts) for parts in saved])
            for step, (lost, saved) in state["kept"].items()
        }
        self._received = state["received"].to(device) if state["received"] is not None else None
        self._pending = None
