"""Rules: what an island makes of the mean that comes back, by ``--sync-method`` and ``--delay-correction``.

``parameters`` (*AsyncMesh*, section 3) corrects for an island's progress while a mean was under way. ``none``: the weights become the
mean (Eq. 5; without delay Eq. 4, SPARTA). ``ema``: adds a moving average of the progress to the mean (Eq. 6 and 7). ``mixing``: the
weights move by a gain towards the mean that they should have been; with gain 1 that is the ablation of section 5.4, and DaSGD. It keeps
nothing between exchanges and leaves the mean over islands as it is. ``smith`` is mixing minus the corrections already applied since the
exchange began: the feedback then has no delay, and cannot diverge (O. J. M. Smith's predictor, 1957).

``diloco`` (Douillard et al., arXiv:2311.08105) is an outer optimizer over the islands' progress: all islands start from the outer
weights. Every K iterations these take a step of SGD with Nesterov momentum along their distance to the mean of the islands, and islands
go on from there; in parts, and late, that is Streaming DiLoCo (arXiv:2501.18512). ``eager-diloco`` (Kale, Douillard and Donchev,
arXiv:2502.12996): the mean is used K iterations later. An island takes the mean distance of the round before, with its own part in it
replaced by its own distance of now,

    mean(before) + (own - own before) / M.

In the first round there is no earlier mean, and an island takes own / M alone. So the progress of each island counts once in the end.
With all of its own progress in the first round, an island would stay (1 - 1/M) of it away from the others, and many times as much with
momentum. Nothing pulls outer weights together again once they differ: with ``eager-diloco`` a mean must not be lost.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from ...base import theory
from ...config import LossyConfig
from ...config.facts import Facts
from ...config.refusal import check_refusals
from .flags import REFRESH
from .mean import Form
from .vector import Places, read_at, write_at

# A factor on the bound of equal gaps, for gaps that vary between 1 and 2n - 1 exchanges (``partition``). With n from 2
# to 40 and a delay of n - 1, deviations grow from a gain of 1.25 to 1.4 on, instead of 2; with more overlap the bound
# is nearer to that of equal gaps.
_IRREGULAR = 0.6


@dataclass(frozen=True)
class Result:
    """The result of the exchange ``number`` for one island.

    ``sent``, ``mean`` float32[k]: the values that it sent, and the mean of all. ``arrived`` bool[k]: the elements whose
    mean is here; ``None``: all. ``places``: the places of these elements; ``None``: all of the vector. ``snapshot`` [k]: see
    :meth:`Rule.snapshot`. ``step``: the iteration that has just ended.
    """

    sent: torch.Tensor
    mean: torch.Tensor
    arrived: torch.Tensor | None
    places: Places | None
    snapshot: torch.Tensor | None
    step: int
    number: int

    def where_arrived(self, there: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
        """Return ``there`` where the mean arrived, and ``otherwise`` elsewhere."""
        return there if self.arrived is None else torch.where(self.arrived, there, otherwise)


class Rule(ABC):
    """One rule for one vector of the islands of this process. Islands are numbered from 0 within the process."""

    #: Whether the rule acts at every exchange, also when no mean has come back yet.
    always: ClassVar[bool] = False
    #: The names of its state, tensors [islands, size].
    kept: ClassVar[tuple[str, ...]] = ()
    #: Whether that belongs to the weights, so that an island that copies another one takes it, too. Otherwise it begins at zero.
    belongs: ClassVar[bool] = False

    def payload(self, now: torch.Tensor, places: Places | None, number: int) -> torch.Tensor:
        """Return what islands with the weights ``now`` [islands, k] at ``places`` send in the exchange ``number``; it may be ``now``.

        [islands, k], or flat (:class:`.Form`).
        """
        return now

    def set_by(self, number: int, arrived: torch.Tensor, count: int) -> torch.Tensor:
        """Return bool[k]: which of ``count`` elements the mean of the exchange ``number`` sets, if ``arrived`` of it is here."""
        return arrived

    def snapshot(self, places: Places | None) -> list[torch.Tensor] | None:
        """Return by island a copy [k] of the state at ``places``, for the result of the exchange that begins; ``None``: not needed."""
        return None

    @abstractmethod
    def apply(self, island: int, now: torch.Tensor, result: Result) -> torch.Tensor:
        """Return the new weights float32[k] of ``island``, whose weights are ``now`` float32[k]."""

    def restart(self, island: int) -> None:
        """Forget ``island``, which was away and begins again. It does not use exchanges that began before."""
        for kept in () if self.belongs else self.state_dict().values():
            kept[island] = 0

    def copied(self) -> dict[str, torch.Tensor]:
        """Return the state by name, if it belongs to the weights."""
        return self.state_dict() if self.belongs else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that must be saved for a run to continue bit for bit."""
        return {name: getattr(self, name) for name in self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        for name, kept in self.state_dict().items():
            kept.copy_(state[name])


class NoCorrection(Rule):
    """The weights become the mean."""

    def apply(self, island: int, now: torch.Tensor, result: Result) -> torch.Tensor:
        return result.where_arrived(result.mean, now)


class Mixing(Rule):
    """w + gain (mean - sent)."""

    def __init__(self, gain: float) -> None:
        self.gain = gain

    def apply(self, island: int, now: torch.Tensor, result: Result) -> torch.Tensor:
        # This order of operations gives the same bits as ema without delay and with a coefficient of 1.
        if self.gain == 1:
            mixed = (now - result.sent).add_(result.mean)
        else:
            mixed = torch.add(now, result.mean - result.sent, alpha=self.gain)
        return result.where_arrived(mixed, now)


class SmithPredictor(Rule):
    """w + gain ((mean - sent) - the moves of w by means since it was sent).

    An island's deviation from the mean when it sent is mean - sent. Two changes have come since. The island has made
    progress, which no other island has yet. Exchanges that began earlier have removed part of the deviation, and this
    rule remembers that part. So every mean removes a share of the known deviation, and nothing is removed twice.
    ``size``: elements of the vector.
    """

    kept = ("moved",)

    def __init__(self, gain: float, islands: int, size: int, device: torch.device) -> None:
        self.gain = gain
        self.moved = torch.zeros(islands, size, device=device)

    def snapshot(self, places: Places | None) -> list[torch.Tensor]:
        return [row.clone() if places is None else places.read(row) for row in self.moved]

    def apply(self, island: int, now: torch.Tensor, result: Result) -> torch.Tensor:
        assert result.snapshot is not None
        moved = read_at(self.moved[island], result.places)
        known = moved - result.snapshot
        off = result.mean - result.sent - known
        write_at(self.moved[island], result.places, result.where_arrived(torch.add(moved, off, alpha=self.gain), moved))
        # Without another exchange under way this equals mixing, to the bit.
        if self.gain == 1:
            corrected = (now - result.sent).add_(result.mean).sub_(known)
        else:
            corrected = torch.add(now, off, alpha=self.gain)
        return result.where_arrived(corrected, now)


class MovingAverage(Rule):
    """mean + d, where d <- (1 - c) d + c (w - sent) for the elements that came back; c falls with time.

    ``size``: elements of the vector. ``steps``: length of the run.
    """

    kept = ("progress",)

    def __init__(self, config: LossyConfig, islands: int, size: int, steps: int, device: torch.device) -> None:
        self._first, self._last, self._hold = config.ema_coefficient
        self._steps = steps
        self.progress = torch.zeros(islands, size, device=device)

    def coefficient(self, step: int) -> float:
        """Return the coefficient of iteration ``step`` (from 0): half a cosine after the hold, to the run's end."""
        if step < self._hold:
            return self._first
        share = min(1.0, (step - self._hold) / max(1, self._steps - self._hold))
        return self._last + (self._first - self._last) * (1 + math.cos(math.pi * share)) / 2

    def apply(self, island: int, now: torch.Tensor, result: Result) -> torch.Tensor:
        progress, c = self.progress[island], self.coefficient(result.step)
        before = read_at(progress, result.places)
        after = result.where_arrived((now - result.sent).mul_(c).add_((1 - c) * before), before)
        write_at(progress, result.places, after)
        return result.where_arrived(result.mean + after, now)


class DiLoCo(Rule):
    """b <- mu b + D, v <- v - lr (D + mu b), with the outer weights v and D = v - mean; w becomes v.

    In codes islands send v - w instead of w. With codes, or a delay, w becomes v and what the island has not sent: its progress while
    the mean was under way, and what codes rounded away. So the next v - w has it too. ``start``: the weights [size] of each island of
    this process. Elements without a mean keep w, v and b.
    """

    kept, belongs = ("outer", "buffer"), True

    def __init__(self, start: Sequence[torch.Tensor], config: LossyConfig) -> None:
        self._islands, (self._lr, self._momentum) = config.islands, config.outer_optimizer
        self._distances, self._keeps = config.sends_distances, bool(config.sync_bits or config.sync_delay)
        self.outer = torch.stack(list(start))
        self.buffer = torch.zeros_like(self.outer)

    def payload(self, now: torch.Tensor, places: Places | None, number: int) -> torch.Tensor:
        return torch.stack([read_at(row, places) for row in self.outer]) - now if self._distances else now

    def apply(self, island: int, now: torch.Tensor, result: Result) -> torch.Tensor:
        if self._distances:
            outer = read_at(self.outer[island], result.places)
            result = replace(result, mean=outer - result.mean, sent=outer - result.sent)
        step = self._step(island, result)
        return result.where_arrived(step.add_(now - result.sent) if self._keeps else step, now)

    def _step(self, island: int, result: Result) -> torch.Tensor:
        """Make the step of the outer weights of ``island``, and return them [k]."""
        outer, buffer = (read_at(kept[island], result.places) for kept in (self.outer, self.buffer))
        distance = outer - result.mean
        moved = self._momentum * buffer + distance
        # v - lr (D + mu b), written in terms of the mean: with lr = 1 and mu = 0 it is the mean, to the bit.
        step = result.mean + (1 - self._lr) * distance - self._lr * self._momentum * moved
        step = result.where_arrived(step, outer)
        write_at(self.buffer[island], result.places, result.where_arrived(moved, buffer))
        write_at(self.outer[island], result.places, step)
        return step


class RefreshingDiLoCo(DiLoCo):
    """The same in codes whose means may be lost. Distances alone would leave v of an island apart from then on.

    So after each block of codes cross, as they are, v of one of every :data:`.REFRESH` elements, in each visit of the next one. Their
    mean takes the place of v, and w moves with it. The momentum needs nothing: what it has of a lost mean decays.
    """

    def __init__(self, start: Sequence[torch.Tensor], config: LossyConfig) -> None:
        super().__init__(start, config)
        self._form, self._parts = Form(config), config.parts

    def payload(self, now: torch.Tensor, places: Places | None, number: int) -> torch.Tensor:
        outer = torch.stack([read_at(row, places) for row in self.outer])
        return self._form.joined(outer - now, self._turn(self._form.blocks(outer), number).flatten(1))

    def set_by(self, number: int, arrived: torch.Tensor, count: int) -> torch.Tensor:
        found = self._form.blocks(arrived.new_zeros(1, count))
        self._turn(found, number).copy_(self._apart(arrived, count)[1].view(1, -1))
        return found[0, :count]

    def apply(self, island: int, now: torch.Tensor, result: Result) -> torch.Tensor:
        count, places, came = len(now), result.places, None
        (sent, ours), (mean, theirs) = (self._apart(row, count) for row in (result.sent, result.mean))
        arrived = result.arrived
        if arrived is not None:
            arrived, came = self._apart(arrived, count)
        moved = super().apply(island, now, replace(result, sent=sent, mean=mean, arrived=arrived))
        off = self._form.blocks(now.new_zeros(1, count))
        self._turn(off, result.number).copy_(theirs - ours if came is None else torch.where(came, theirs - ours, 0.0))
        write_at(self.outer[island], places, read_at(self.outer[island], places) + off[0, :count])
        return moved + off[0, :count]

    def _apart(self, row: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values [k] and the outer weights [n] of ``row``, flat."""
        values, outer = self._form.apart(row[None], count)
        return values[0], outer[0]

    def _turn(self, rows: torch.Tensor, number: int) -> torch.Tensor:
        """Return a view [R, n] of ``rows`` [R, whole blocks]: of the elements whose v crosses in the exchange ``number``."""
        return rows.view(len(rows), -1, REFRESH)[:, :, number // self._parts % REFRESH]


class EagerDiLoCo(DiLoCo):
    """The same with D = mean(before) + (own - own before) / M. Islands send their distance to v."""

    always: ClassVar[bool] = True

    def apply(self, island: int, now: torch.Tensor, result: Result) -> torch.Tensor:
        own = (self.outer[island] - now) / self._islands
        distance = result.where_arrived(result.mean + own - result.sent / self._islands, own)
        return self._step(island, replace(result, mean=self.outer[island] - distance, arrived=None))


def make_rule(config: LossyConfig, weights: Sequence[torch.Tensor], steps: int | None) -> Rule:
    """Return the rule for the islands of this process, each with its ``weights`` [size]. ``steps``: length of the run, if known."""
    if config.sync_method == "diloco":
        return RefreshingDiLoCo(weights, config) if config.refreshes else DiLoCo(weights, config)
    if config.sync_method == "eager-diloco":
        return EagerDiLoCo(weights, config)
    check_refusals(config, Facts(ends=steps is not None))
    if config.correction == "none":
        return NoCorrection()
    if config.correction == "mixing":
        return Mixing(critical_gain(config) if config.gain is None else config.gain)
    islands, size, device = len(weights), len(weights[0]), weights[0].device
    if config.correction == "smith":
        gain = predictor_gain(config) if config.gain is None else config.gain
        return SmithPredictor(gain, islands, size, device) if config.may_overlap else Mixing(gain)
    return MovingAverage(config, islands, size, steps or 0, device)


def critical_gain(config: LossyConfig) -> float:
    """Return the gain of ``mixing``: about the fastest one without oscillation."""
    if config.sync_subset == "bernoulli":
        return theory.critical_gain_drawn(config.sync_fraction, config.rounds_under_way)
    return theory.critical_gain(config.overlap)


def predictor_gain(config: LossyConfig) -> float:
    """Return the gain of ``smith``: 1 without loss, else 1/(1 + p q).

    p is the loss rate; 1 if it is not known. The mean of the islands that arrived differs from the mean of all. This
    error is no deviation, so that nothing corrects it: the mean over islands makes a step of it. Overlapping rounds do
    not include the errors of each other. The mean square of the error is about proportional to p and to the deviation,
    whose age in visits goes as q + 1/2. This gain keeps the error near its value at q = 0, below the noise of the
    islands' own steps (tests/test_averaging.py).
    """
    if config.sync_lossless:
        return 1.0
    lost = config.p_sync if config.p_sync and not config.observed else 1.0
    return 1 / (1 + lost * config.mean_overlap)


def stability_bound(config: LossyConfig) -> float:
    """Return the least gain at which deviations may grow."""
    if config.sync_subset == "bernoulli":
        return theory.stability_bound_drawn(config.sync_fraction, config.rounds_under_way)
    irregular = config.sync_subset == "partition" and config.parts > 1 and config.rounds_under_way
    return theory.stability_bound(config.overlap) * (_IRREGULAR if irregular else 1)
