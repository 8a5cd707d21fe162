"""Bursts: the two-state Markov chain of Gilbert (1960) and Elliott (1963), one chain per link.

The chain advances once per unit, in canonical order, through all steps. Both possible states are driven by the same
uniform number (from good: to bad if u < PGB; from bad: stay if u < 1 - PBG). Where both lead to the same state the
past is forgotten, so that the state at any unit follows from looking back to the last such place: exact, without
saving anything.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ..config import PhaseLoss
from .base import Channel
from .exchange import Exchange

_CHAIN, _LOSS, _START = 1, 2, 3  # purposes of draws


class GilbertElliott(Channel):
    """Loses units in bursts; from four parameters, or from a (scheduled) mean rate and a mean burst length."""

    def __init__(self, loss: PhaseLoss, seed: int, together: bool = False) -> None:
        super().__init__(loss, seed, together)
        self._ends: dict[tuple, tuple[int, bool]] = {}  # last state computed on each link: a cache, never needed

    def parameters(self, step: int) -> tuple[float, float, float, float]:
        """(PGB, PBG, loss when good, loss when bad) of ``step``."""
        if self.loss.transitions is not None:
            return self.loss.transitions
        rate, to_good = self.loss.schedule.rate(step), 1 / self.loss.burst
        return to_good * rate / (1 - rate), to_good, 0.0, 1.0

    def delivered(self, exchange: Exchange, source: int, destination: int, units: int) -> np.ndarray:
        *_, loss_good, loss_bad = self.parameters(exchange.step)
        if self._quiet(exchange.step):
            return np.ones(units, dtype=bool)
        bad = self._states(exchange, source, destination, units)
        if (loss_good, loss_bad) == (0.0, 1.0):
            return ~bad
        draws = self.draw(_LOSS, exchange, source, destination, units)
        return ~np.where(bad, draws.below(loss_bad), draws.below(loss_good))

    def _quiet(self, step: int) -> bool:
        """True if the schedule allows no loss in ``step``; the chain then rests in the good state."""
        return self.loss.transitions is None and self.loss.schedule.rate(step) == 0

    def _moves(self, exchange: Exchange, source: int, destination: int, units: int) -> tuple[np.ndarray, np.ndarray]:
        """bool[units] twice: the state after each unit if it was good before it, and if it was bad."""
        to_bad, to_good, *_ = self.parameters(exchange.step)
        draws = self.draw(_CHAIN, exchange, source, destination, units)
        return draws.below(to_bad), draws.below(1 - to_good)

    def _states(self, exchange: Exchange, source: int, destination: int, units: int) -> np.ndarray:
        """bool[units]: True where the chain is in the bad state at that unit."""
        if_good, if_bad = self._moves(exchange, source, destination, units)
        forced = np.flatnonzero(if_good == if_bad)
        # What is known at a forced place holds until the next one.
        states = np.empty(units, dtype=bool)
        first = int(forced[0]) if forced.size else units
        states[first:] = np.repeat(if_good[forced], np.diff(forced, append=units))
        if first:
            states[:first] = self._state_before(exchange, source, destination, units)
        to_bad, to_good, *_ = self.parameters(exchange.step)
        if to_bad > 1 - to_good:
            # Between forced places good goes to bad and bad to good: every unit flips the state.
            free = if_good != if_bad
            flips = np.cumsum(free)
            flips[first:] -= np.repeat(flips[forced], np.diff(forced, append=units))
            states ^= (flips & 1).astype(bool)
        link = (exchange.phase, exchange.stream, source, destination, units)
        self._ends[link] = (exchange.step, bool(states[-1]))
        return states

    def _state_before(self, exchange: Exchange, source: int, destination: int, units: int) -> bool:
        """The state before the first unit of ``exchange.step``, from the last forced place in earlier steps."""
        flipped = False
        for step in range(exchange.step - 1, -1, -1):
            if self._quiet(step):
                return flipped
            cached = self._ends.get((exchange.phase, exchange.stream, source, destination, units))
            if cached is not None and cached[0] == step:
                return cached[1] ^ flipped
            earlier = dataclasses.replace(exchange, step=step)
            if_good, if_bad = self._moves(earlier, source, destination, units)
            forced = np.flatnonzero(if_good == if_bad)
            if forced.size:
                last = forced[-1]
                return bool(if_good[last]) ^ bool(np.count_nonzero(if_good[last + 1 :]) & 1) ^ flipped
            flipped ^= bool(np.count_nonzero(if_good) & 1)
        to_bad, to_good, *_ = self.parameters(0)
        start = dataclasses.replace(exchange, step=0)
        bad = self.draw(_START, start, source, destination, 1).below(to_bad / (to_bad + to_good))
        return bool(bad[0]) ^ flipped
