"""``previous``: the last gradient received from a sender replaces a lost one; zero before the first.

This is Algorithm 1, line 9 of the paper, per sender. The sender substitutes it: with drawn deliveries it computes which
gradient the owner received last. If the owner gets pieces, the owner substitutes it. If the next step is also certain,
and no step can be rejected, that rank keeps only the units that the next step will lose, about p times
the buffer. Otherwise it keeps all gradients received last, and twice as many while a step may still be rejected.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..base.exchange import BucketUnits, Delivery, Lost
from .base import Gradients, GradRecovery
from .rows import Saved, used_here

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class Previous(GradRecovery):
    """Substitutes the last received gradient before the sum."""

    name = "previous"
    foresight = True
    carries_over = True
    _warned: ClassVar[bool] = False

    def __init__(self, units: BucketUnits, rank: int) -> None:
        super().__init__(units, rank)
        self._kept: dict[int, tuple[Lost, Saved]] = {}  # by step: its lost units, and their substitutes
        self._received: torch.Tensor | None = None  # the gradients last received on every link in steps that counted
        self._pending: tuple[int, torch.Tensor] | None = None  # the same gradients after a step that may not count
        self._step: int | None = None  # the latest exchange

    def before(self, buffer: torch.Tensor, lost: Lost, delivery: Delivery, x: Gradients) -> None:
        step = x.exchange.step
        self._count_pending(step)
        self._step = step
        scale = x.loss_scale()
        self._substitute(buffer, step, lost, scale)
        # The buffer now holds the last received gradient of every link.
        if x.coming is None or scale is not None:
            self._pending = (step, buffer.clone() if scale is None else buffer / scale)
            self._kept = {number: kept for number, kept in self._kept.items() if number == step}
            return
        known = self._kept.get(step)
        self._kept = {step: known} if known is not None else {}  # the step may be repeated
        coming = x.coming()
        if coming is not None:
            self._kept[step + 1] = (coming, self.rows.take(buffer, self.units, coming))

    def _substitute(self, buffer: torch.Tensor, step: int, lost: Lost, scale: Any) -> None:
        rows, known = self.rows, self._kept.get(step)
        if known is not None and np.array_equal(known[0].mask, lost.mask):
            rows.put_(buffer, self.units, lost, known[1])
        elif known is not None and lost.mask.any():
            raise RuntimeError(f"--grad-recovery {self.name}: step {step} loses other units than was foreseen")
        elif self._received is not None:
            used_here((self._received,))
            scaled = self._received if scale is None else self._received * scale
            rows.put_(buffer, self.units, lost, rows.take(scaled, self.units, lost))
        else:
            rows.zero_(buffer, self.units, lost)

    def _count_pending(self, step: int) -> None:
        if self._pending is not None and self._pending[0] < step:
            self._received, self._pending = self._pending[1], None

    def finish_step(self, step: int, successful: bool) -> None:
        if successful:
            self._count_pending(step + 1)
            if any(number > step for number in self._kept):
                self._received = None
            return
        self._pending = None
        # The substitutes were kept for a step that must not follow, or that did not come.
        useless = {number for number in self._kept if (number > step if step == self._step else number == step)}
        if useless:
            self._kept = {number: kept for number, kept in self._kept.items() if number not in useless}
            if not Previous._warned:
                Previous._warned = True
                why = "what the step after it loses counts as zero (said once)"
                logger.warning(
                    "--grad-recovery %s: step %d was not used, against expectation; %s", self.name, step, why
                )

    def restart(self) -> None:
        super().restart()
        self._kept, self._received, self._pending, self._step = {}, None, None, None

    def state_dict(self) -> dict[str, Any]:
        import torch

        kept = {step: (torch.from_numpy(lost.mask), saved) for step, (lost, saved) in self._kept.items()}
        return {"kept": kept, "received": self._received}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        self._kept = {
            step: (Lost(lost.cpu().numpy()), [tuple(part.to(device) for part in parts) for parts in saved])
            for step, (lost, saved) in state["kept"].items()
        }
        self._received = state["received"].to(device) if state["received"] is not None else None
        self._pending = None
