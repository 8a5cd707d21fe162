"""``error-feedback``: a sender keeps its losses, and sends them again with the next gradient (SMART, equations 3 to 5).

The owner adds up the units that arrive and divides by N. All gradients of a sender count in the end. So the mean over
time is the plain mean, whatever the gradients: over T steps the applied sum is the sum of the gradients minus the
residual that is still kept. The weight is always 1/N: with weights of survivors alone, a repeated gradient would count
twice.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..base.exchange import BucketUnits, Delivery, Lost
from .base import Gradients, GradRecovery, SentUnits
from .rows import Saved, times

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class ErrorFeedback(GradRecovery):
    """Adds the lost units of a step to the next payload.

    A residual has the dtype of the gradients that it was sent in. With a loss scale it is float32, divided by the
    scale. It counts from the next step on if the optimizer used this step; else the residual before it stays.
    """

    name = "error-feedback"
    feeds_back = True
    minds_spared = True
    rounds = True
    _warned: ClassVar[bool] = False

    def __init__(self, units: BucketUnits, rank: int) -> None:
        super().__init__(units, rank)
        self._residuals: list[tuple[Lost, Saved]] = []
        self._added: list[tuple[Lost, Saved]] = []  # the residuals that the payload of the latest exchange contains
        self._pending: tuple[int, Lost, Saved] | None = None  # the residual of a step that may not count
        self._payloads: dict[int, tuple[torch.Tensor, bool]] = {}  # late steps: the payload, and whether it counts
        self._ages: np.ndarray | None = None  # number of steps that a unit has been in the residual

    def before(self, buffer: torch.Tensor, lost: Lost, delivery: Delivery, x: Gradients) -> None:
        self.correct(buffer, x)
        self.remove(buffer, lost, delivery, x)

    def correct(self, buffer: torch.Tensor, x: Gradients) -> None:
        """Add the residual to ``buffer`` [N * shard]."""
        scale = x.loss_scale()
        self._added = list(self._residuals)
        for lost, saved in self._added:
            self.rows.add_(buffer, self.units, lost, saved if scale is None else times(saved, scale))

    def remove(self, buffer: torch.Tensor, lost: Lost, delivery: Delivery, x: Gradients) -> None:
        """Keep the units of the corrected ``buffer`` that are ``lost``, and take them out of it."""
        kept = self.rows.take(buffer, self.units, lost)
        self.rows.clear_(buffer, self.units, lost, kept)
        self._keep(x.exchange.step, lost, kept, x.loss_scale())
        if x.rounding is not None:
            x.rounding(buffer)

    def keep(self, step: int, payload: torch.Tensor, lost: Lost, loss_scale: Any) -> None:
        """Keep the units of ``payload`` [N * shard], sent in ``step``, that are ``lost`` for good."""
        self._keep(step, lost, self.rows.take(payload, self.units, lost), loss_scale)

    def _keep(self, step: int, lost: Lost, kept: Saved, loss_scale: Any) -> None:
        self._pending = (step, lost, kept if loss_scale is None else times(kept, 1 / loss_scale))

    def settle(self, left: Lost) -> None:
        """Keep only the units ``left`` of the latest exchange, lost for good; :meth:`remove` had spared ones."""
        if self._pending is not None and self._pending[1].spared is not None:
            step, lost, kept = self._pending
            self._pending = (step, left, self.rows.narrow(self.units, lost, left, kept))

    def keep_all(self, step: int, payload: torch.Tensor, loss_scale: Any) -> None:
        """Keep all of ``payload``, sent in ``step`` and soon overwritten, until a report says which units arrived.

        A late report delays the lost units; it drops none of them.
        """
        self._payloads[step] = (payload.clone() if loss_scale is None else payload.float() / loss_scale, False)

    def keep_late(self, step: int, lost: Lost) -> None:
        """Keep the units that are ``lost`` for good, from the payload given to :meth:`keep_all`."""
        if step in self._payloads:
            payload, counts = self._payloads.pop(step)
            if counts:
                self._residuals.append((lost, self.rows.take(payload, self.units, lost)))

    def note(self, told: SentUnits, lost: Lost) -> None:
        """Complete ``told``, the record of the units of the latest exchange."""
        told.oldest = int(self._aged(lost).max(initial=0))
        if told.residual > told.payload - told.residual and not ErrorFeedback._warned:
            ErrorFeedback._warned = True
            logger.warning(
                "--grad-recovery %s: more of the gradients is lost and kept than arrives (sums of absolute values: %.3g kept, "
                "%.3g sent); consider --grad-priority packet-mean:K, or a larger K (said once)",
                self.name,
                told.residual,
                told.payload,
            )

    def _aged(self, lost: Lost) -> np.ndarray:
        before = 0 if self._ages is None else self._ages
        return np.where(lost.mask, before + 1, 0).astype(np.int32)

    def finish_step(self, step: int, successful: bool) -> None:
        if successful:
            counted = self._pending is not None and self._pending[0] == step
            if counted or step in self._payloads:  # the added residual has been sent
                self._residuals = [kept for kept in self._residuals if not any(kept is added for added in self._added)]
            if counted:
                assert self._pending is not None
                _, lost, kept = self._pending
                self._ages = self._aged(lost)
                self._residuals.append((lost, kept))
            if step in self._payloads:
                self._payloads[step] = (self._payloads[step][0], True)
        else:
            self._payloads.pop(step, None)
        self._pending, self._added = None, []

    def restart(self) -> None:
        super().restart()
        self._residuals, self._added, self._payloads = [], [], {}
        self._pending = self._ages = None

    def state_dict(self) -> dict[str, Any]:
        import torch

        if not self._residuals:
            return {}
        ages = None if self._ages is None else torch.from_numpy(self._ages)
        return {"residuals": [(torch.from_numpy(lost.mask), saved) for lost, saved in self._residuals], "ages": ages}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        self.restart()
        if state:
            self._residuals = [
                (Lost(lost.cpu().numpy()), [tuple(part.to(device) for part in parts) for parts in saved])
                for lost, saved in state["residuals"]
            ]
            self._ages = None if state["ages"] is None else state["ages"].cpu().numpy()
