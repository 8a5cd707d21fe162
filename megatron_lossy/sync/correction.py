"""What becomes of an island's progress while a mean was under way (*AsyncMesh*, section 3).

``none``: the weights become the mean (Eq. 5; without delay Eq. 4, SPARTA). ``ema``: a moving average of the progress is
added to it (Eq. 6 and 7). ``mixing``: the weights move by a gain towards where the mean says they should have been; with
gain 1 that is the ablation of section 5.4, and DaSGD. It keeps nothing between exchanges and leaves the mean over
islands as it is.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .. import theory
from ..config import LossyConfig
from .rule import Back, Rule


class NoCorrection(Rule):
    """The weights become the mean."""

    def apply(self, island: int, now: torch.Tensor, back: Back) -> torch.Tensor:
        return back.where_arrived(back.mean, now)


class Mixing(Rule):
    """w + gain (mean - sent)."""

    def __init__(self, gain: float) -> None:
        self.gain = gain

    def apply(self, island: int, now: torch.Tensor, back: Back) -> torch.Tensor:
        # So that without delay, and with a coefficient of 1, ema comes to the same bits.
        if self.gain == 1:
            mixed = (now - back.sent).add_(back.mean)
        else:
            mixed = torch.add(now, back.mean - back.sent, alpha=self.gain)
        return back.where_arrived(mixed, now)


class MovingAverage(Rule):
    """mean + d, where d <- (1 - c) d + c (w - sent) for the elements that came back; c falls with time.

    ``size``: elements of the vector. ``steps``: length of the run.
    """

    def __init__(
        self, islands: int, size: int, first: float, last: float, hold: int, steps: int, device: torch.device
    ) -> None:
        self._first, self._last, self._hold, self._steps = first, last, hold, steps
        self.progress = torch.zeros(islands, size, device=device)

    def coefficient(self, step: int) -> float:
        """The coefficient of iteration ``step`` (from 0): half a cosine after the hold, to the end of the run."""
        if step < self._hold:
            return self._first
        share = min(1.0, (step - self._hold) / max(1, self._steps - self._hold))
        return self._last + (self._first - self._last) * (1 + math.cos(math.pi * share)) / 2

    def apply(self, island: int, now: torch.Tensor, back: Back) -> torch.Tensor:
        progress, c = self.progress[island], self.coefficient(back.step)
        before = progress if back.places is None else back.places.read(progress)
        after = back.where_arrived((now - back.sent).mul_(c).add_((1 - c) * before), before)
        if back.places is None:
            progress.copy_(after)
        else:
            back.places.write(progress, after)
        return back.where_arrived(back.mean + after, now)

    def state_dict(self) -> dict[str, Any]:
        return {"progress": self.progress}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.progress.copy_(state["progress"])


def make_correction(config: LossyConfig, islands: int, size: int, steps: int, device: torch.device) -> Rule:
    """The rule of ``--delay-correction`` for ``islands`` of this process and a vector of ``size`` elements."""
    if config.delay_correction == "none":
        return NoCorrection()
    if config.delay_correction == "mixing":
        return Mixing(theory.critical_gain(config.overlap) if config.gain is None else config.gain)
    first, last = config.ema_coefficient
    return MovingAverage(islands, size, first, last, config.ema_hold_iters, steps, device)
