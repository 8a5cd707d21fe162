"""Losses of a phase of an iteration: its channel, and its loss rate over iterations."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from ..errors import refuse
from ..registry import MECHANISMS

#: Exchanges of data parallelism.
PHASES = ("grad", "param")
#: The number of every phase in the key of random draws.
NUMBERS = {"grad": 0, "param": 1}
for _mechanism in MECHANISMS.all():
    for _phase, _number in _mechanism.phases.items():
        assert _phase not in NUMBERS and _number not in NUMBERS.values(), f"two phases are {_phase!r}, or {_number}"
        NUMBERS[_phase] = _number


def split_model(model: str) -> tuple[str, str | None]:
    """The channel that a value of ``--loss-model`` names, and what follows a colon."""
    name, colon, argument = model.partition(":")
    return name, argument if colon else None


@dataclass(frozen=True)
class Schedule:
    """Loss rates over iterations: ``starts[k]`` is the first iteration (from 0) with rate ``rates[k]``."""

    starts: tuple[int, ...]
    rates: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read ``ITERATION:RATE,ITERATION:RATE,…``. Raises :class:`UsageError`."""
        allowed = "must read ITERATION:RATE,… with iterations rising from 0 and rates in [0, 1)"
        try:
            pairs = [item.split(":") for item in text.split(",")]
            starts = tuple(int(start) for start, _ in pairs)
            rates = tuple(float(rate) for _, rate in pairs)
        except ValueError:
            raise refuse("--loss-schedule", text, allowed) from None
        rising = all(a < b for a, b in itertools.pairwise(starts))
        if not starts or starts[0] != 0 or not rising or not all(0 <= rate < 1 for rate in rates):
            raise refuse("--loss-schedule", text, allowed)
        return cls(starts, rates)

    def rate(self, step: int) -> float:
        """The loss rate of iteration ``step`` (counted from 0)."""
        current = self.rates[0]
        for start, rate in zip(self.starts, self.rates):
            if start > step:
                break
            current = rate
        return current


@dataclass(frozen=True)
class PhaseLoss:
    """The losses of one phase, after every flag has been read: the settings of its channel.

    ``model``: the channel's name. ``schedule``: the loss rate over iterations (constant for a plain rate).
    ``lossless``: nothing can ever be lost. ``burst``: mean length of bursts; ``transitions``: the four
    Gilbert-Elliott parameters (at most one of the two is set). ``matrix`` and ``trace``: files.
    """

    model: str
    schedule: Schedule
    lossless: bool = False
    burst: float | None = None
    transitions: tuple[float, float, float, float] | None = None
    matrix: Path | None = None
    trace: Path | None = None

    @property
    def sets_rate(self) -> bool:
        """Whether the channel has rates of its own, so that no schedule matters."""
        return self.transitions is not None or self.matrix is not None or self.trace is not None
