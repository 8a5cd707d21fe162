"""Rules for an island's progress while a mean was under way (*AsyncMesh*, section 3).

``none``: the weights become the mean (Eq. 5; without delay Eq. 4, SPARTA). ``ema``: adds a moving average of the
progress to the mean (Eq. 6 and 7). ``mixing``: the weights move by a gain towards the mean that they should have been;
with gain 1 that is the ablation of section 5.4, and DaSGD. It keeps nothing between exchanges and leaves the mean over
islands as it is. ``smith`` is mixing minus the corrections already applied since the exchange began: the feedback then
has no delay, and cannot diverge (O. J. M. Smith's predictor, 1957).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ...base import theory
from ...config import LossyConfig
from ...config.facts import Facts
from ...config.refusal import check_refusals
from .places import Places, read_at, write_at
from .rule import Back, Rule

# A factor on the bound of equal gaps, for gaps that vary between 1 and 2n - 1 exchanges (``partition``). With n from 2
# to 40 and a delay of n - 1, deviations grow from a gain of 1.25 to 1.4 on, instead of 2; with more overlap the bound
# is nearer to that of equal gaps.
_IRREGULAR = 0.6


class NoCorrection(Rule):
    """The weights become the mean."""

    def apply(self, island: int, now: torch.Tensor, back: Back) -> torch.Tensor:
        return back.where_arrived(back.mean, now)


class Mixing(Rule):
    """w + gain (mean - sent)."""

    keeps_rest = True

    def __init__(self, gain: float) -> None:
        self.gain = gain

    def apply(self, island: int, now: torch.Tensor, back: Back) -> torch.Tensor:
        # This order of operations gives the same bits as ema without delay and with a coefficient of 1.
        if self.gain == 1:
            mixed = (now - back.sent).add_(back.mean)
        else:
            mixed = torch.add(now, back.mean - back.sent, alpha=self.gain)
        return back.where_arrived(mixed, now)


class SmithPredictor(Rule):
    """w + gain ((mean - sent) - the moves of w by means since it was sent).

    An island's deviation from the mean when it sent is mean - sent. Two changes have come since. The island has made
    progress, which no other island knows yet. Exchanges that began earlier have removed part of the deviation, and this
    rule remembers that part. So every mean removes a share of the known deviation, and nothing is removed twice.
    ``size``: elements of the vector.
    """

    keeps_rest = True

    def __init__(self, gain: float, islands: int, size: int, device: torch.device) -> None:
        self.gain = gain
        self.moved = torch.zeros(islands, size, device=device)
        # The moves of each island, by the iteration after which an exchange began.
        self._moved_before: dict[int, list[torch.Tensor]] = {}

    def begin(self, step: int, places: Places | None) -> None:
        self._moved_before[step] = [row.clone() if places is None else places.read(row) for row in self.moved]

    def apply(self, island: int, now: torch.Tensor, back: Back) -> torch.Tensor:
        before = self._moved_before[back.begun][island]
        moved = read_at(self.moved[island], back.places)
        known = moved - before
        off = back.mean - back.sent - known
        write_at(self.moved[island], back.places, back.where_arrived(torch.add(moved, off, alpha=self.gain), moved))
        # Without another exchange under way this equals mixing, to the bit.
        if self.gain == 1:
            corrected = (now - back.sent).add_(back.mean).sub_(known)
        else:
            corrected = torch.add(now, off, alpha=self.gain)
        return back.where_arrived(corrected, now)

    def end(self, begun: int) -> None:
        del self._moved_before[begun]

    def restart(self, island: int) -> None:
        self.moved[island] = 0

    def state_dict(self) -> dict[str, Any]:
        return {"moved": self.moved, "moved before": dict(self._moved_before)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moved.copy_(state["moved"])
        device = self.moved.device
        self._moved_before = {step: [row.to(device) for row in rows] for step, rows in state["moved before"].items()}


class MovingAverage(Rule):
    """mean + d, where d <- (1 - c) d + c (w - sent) for the elements that came back; c falls with time.

    ``size``: elements of the vector. ``steps``: length of the run.
    """

    keeps_rest = True

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
        before = read_at(progress, back.places)
        after = back.where_arrived((now - back.sent).mul_(c).add_((1 - c) * before), before)
        write_at(progress, back.places, after)
        return back.where_arrived(back.mean + after, now)

    def restart(self, island: int) -> None:
        self.progress[island] = 0

    def state_dict(self) -> dict[str, Any]:
        return {"progress": self.progress}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.progress.copy_(state["progress"])


def make_correction(config: LossyConfig, islands: int, size: int, steps: int | None, device: torch.device) -> Rule:
    """The rule of ``--delay-correction`` for ``islands`` of this process and a vector of ``size`` elements.

    ``steps``: length of the run, if known.
    """
    check_refusals(config, Facts(ends=steps is not None))
    if config.correction == "none":
        return NoCorrection()
    if config.correction == "mixing":
        return Mixing(critical_gain(config) if config.gain is None else config.gain)
    if config.correction == "smith":
        gain = predictor_gain(config) if config.gain is None else config.gain
        return SmithPredictor(gain, islands, size, device) if config.may_overlap else Mixing(gain)
    first, last, hold = config.ema_coefficient
    return MovingAverage(islands, size, first, last, hold, steps or 0, device)


def critical_gain(config: LossyConfig) -> float:
    """The gain of ``mixing``: about the fastest one without oscillation."""
    if config.sync_subset == "bernoulli":
        return theory.critical_gain_drawn(config.sync_fraction, config.rounds_under_way)
    return theory.critical_gain(config.overlap)


def predictor_gain(config: LossyConfig) -> float:
    """The gain of ``smith``: 1 without loss, else 1/(1 + p q).

    p is the loss rate; 1 if it is not known. The mean of the islands that arrived differs from the mean of all. This
    error is no deviation, so that nothing corrects it: the mean over islands makes a step of it. Overlapping rounds do
    not know the errors of each other. The mean square of the error is about proportional to p and to the deviation,
    whose age in visits goes as q + 1/2. This gain keeps the error near its value at q = 0, below the noise of the
    islands' own steps (tests/test_averaging.py).
    """
    if config.sync_lossless:
        return 1.0
    lost = config.p_sync if config.p_sync and not config.observed else 1.0
    return 1 / (1 + lost * config.mean_overlap)


def stability_bound(config: LossyConfig) -> float:
    """The least gain at which deviations may grow."""
    if config.sync_subset == "bernoulli":
        return theory.stability_bound_drawn(config.sync_fraction, config.rounds_under_way)
    irregular = config.sync_subset == "partition" and config.parts > 1 and config.rounds_under_way
    return theory.stability_bound(config.overlap) * (_IRREGULAR if irregular else 1)
