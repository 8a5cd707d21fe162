"""Losses of a phase of an iteration: its channel, and its loss rate over iterations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..base.errors import refuse
from ..base.registry import MECHANISMS

Value = TypeVar("Value")

#: Exchanges of data parallelism.
PHASES = ("grad", "param")


def _numbers() -> dict[str, int]:
    """The number of every phase. A mechanism of another package whose phases others have is left out."""
    numbers = {"grad": 0, "param": 1}
    for mechanism in MECHANISMS.all():
        taken = [
            f"the phase {phase!r} with number {number}"
            for phase, number in mechanism.phases.items()
            if phase in numbers or number in numbers.values()
        ]
        if taken:
            known = ", ".join(f"{phase} {number}" for phase, number in numbers.items())
            MECHANISMS.drop(mechanism, f"{' and '.join(taken)} is taken: there are {known}")
        else:
            numbers |= mechanism.phases
    return numbers


#: The number of every phase in the key of random draws.
NUMBERS = _numbers()


def value_of(values: Sequence[Value], phase: str, exchanges: Sequence[str] = PHASES) -> Value:
    """The value for ``phase`` of a flag that takes one for all ``exchanges``, or two, or one for each.

    Of two, the first is that of every other exchange from the first on. Raises ``ValueError`` for another phase.
    """
    return values[list(exchanges).index(phase) % len(values)]


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
