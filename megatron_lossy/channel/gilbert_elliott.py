"""Bursts: the two-state Markov chain of Gilbert (1960) and Elliott (1963), one chain per link.

The chain advances once per unit, in canonical order, through all steps. Both possible states are driven by the same
uniform number (from good: to bad if u < PGB; from bad: stay if u < 1 - PBG). Where both lead to the same state the
past is forgotten, so that the state at any unit follows from looking back to the last such place: exact, without
saving anything.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..base import theory
from ..base.errors import refuse
from ..base.exchange import Exchange, Stream
from ..config import LossyConfig, PhaseLoss, split_model
from .draws import DrawnChannel

_CHAIN, _LOSS, _START = 1, 2, 3  # purposes of draws
#: Mean length of bursts, in units.
_BURST = 4.0


class GilbertElliott(DrawnChannel):
    """Loses units in bursts. The flags give four parameters, or a (scheduled) mean rate and a mean burst length."""

    name = "gilbert-elliott"

    def __init__(self, loss: PhaseLoss, seed: int, together: bool = False) -> None:
        super().__init__(loss, seed, together)
        self._ends: dict[tuple[str, Stream, int], _LastStates] = {}

    @classmethod
    def plan(cls, config: LossyConfig, phase: str) -> PhaseLoss:
        loss = super().plan(config, phase)
        numbers = cls._numbers(config.model_argument(phase))
        if len(numbers) == 4:
            return dataclasses.replace(loss, transitions=numbers, lossless=False)
        (burst,), worst = numbers, max(loss.schedule.rates)
        if worst / (1 - worst) > burst:
            why = f"must be at most B/(1+B) = {burst / (1 + burst):.4g} with bursts of B = {burst:g} units"
            raise refuse(config.rate_flag(phase) if config.loss_schedule is None else "--loss-schedule", worst, why)
        return dataclasses.replace(loss, burst=burst)

    @classmethod
    def sets_rate(cls, config: LossyConfig, phase: str) -> str | None:
        numbers = cls._numbers(config.model_argument(phase))
        if len(numbers) == 1:
            return None
        flag, text = "--loss-model", f"{cls.name}:{','.join(map(str, numbers))}"
        if not all(0 <= value <= 1 for value in numbers):
            raise refuse(flag, text, "must be four probabilities PGB,PBG,LG,LB in [0, 1]")
        to_bad, to_good, loss_good, loss_bad = numbers
        if to_bad + to_good == 0:
            raise refuse(flag, text, "PGB + PBG must be positive, or the chain never leaves its first state")
        stationary_bad = to_bad / (to_bad + to_good)
        if (1 - stationary_bad) * loss_good + stationary_bad * loss_bad >= 1:
            raise refuse(flag, text, "the mean loss rate must be below 1")
        return f"{flag} {cls.name}:PGB,PBG,LG,LB"

    @classmethod
    def _numbers(cls, text: str | None) -> tuple[float, ...]:
        """Return the mean length of a burst, or the four parameters, in ``text``. Raise :class:`UsageError`."""
        if text is None:
            return (_BURST,)
        try:
            numbers = tuple(map(float, text.split(",")))
            if len(numbers) not in (1, 4) or (len(numbers) == 1 and not 1 <= numbers[0] < math.inf):
                raise ValueError
        except ValueError:
            allowed = "takes a mean burst B of at least 1 unit, or four parameters PGB,PBG,LG,LB"
            raise refuse("--loss-model", f"{cls.name}:{text}", allowed) from None
        return numbers

    @classmethod
    def label(cls, flags: Mapping[str, Any], phase: str) -> str:
        numbers = cls._numbers(split_model(flags["loss_model"])[1])
        if len(numbers) == 4:
            return "GE " + " ".join(f"{value:g}" for value in numbers)
        return super().label(flags, phase)

    @classmethod
    def drift(cls, loss: PhaseLoss, step: int, units: int) -> tuple[float, float] | None:
        return _drift(cls(loss, seed=0).parameters(step), units)

    def lag(self, step: int, source: int, destinations: np.ndarray, units: int) -> tuple[float, float] | None:
        losing = [start for start in self.loss.schedule.starts if not self._quiet(start)]
        if any(_lag(self.parameters(start), units) is None for start in losing):
            return None  # of all steps, also of those whose lag is known: callers that count begin with the first step
        return (0.0, 0.0) if self._quiet(step) else _lag(self.parameters(step), units)

    def parameters(self, step: int) -> tuple[float, float, float, float]:
        """Return (PGB, PBG, loss when good, loss when bad) of ``step``."""
        if self.loss.transitions is not None:
            return self.loss.transitions
        assert self.loss.burst is not None, "plan sets one of the two"
        rate, to_good = self.rate(step), 1 / self.loss.burst
        return to_good * rate / (1 - rate), to_good, 0.0, 1.0

    def draw_links(self, exchange: Exchange, sources: np.ndarray, destinations: np.ndarray, units: int) -> np.ndarray:
        *_, loss_good, loss_bad = self.parameters(exchange.step)
        if self._quiet(exchange.step):
            return np.ones((len(sources), units), dtype=bool)
        bad = self._states(exchange, sources, destinations, units)
        if (loss_good, loss_bad) == (0.0, 1.0):
            return ~bad
        draws = self.uniforms(_LOSS, exchange, sources, destinations, units)
        return ~np.where(bad, draws.below(loss_bad), draws.below(loss_good))

    def _quiet(self, step: int) -> bool:
        """Return whether the schedule allows no loss in ``step``; the chain then rests in the good state."""
        return self.loss.transitions is None and self.rate(step) == 0

    def _moves(self, exchange: Exchange, sources: np.ndarray, destinations: np.ndarray, units: int) -> _Transitions:
        to_bad, to_good, *_ = self.parameters(exchange.step)
        draws = self.uniforms(_CHAIN, exchange, sources, destinations, units)
        return _Transitions(draws.below(to_bad), draws.below(1 - to_good), alternates=to_bad > 1 - to_good)

    def _states(self, exchange: Exchange, sources: np.ndarray, destinations: np.ndarray, units: int) -> np.ndarray:
        """Return bool[L, units]: True where the chain is in the bad state at that unit."""
        moves = self._moves(exchange, sources, destinations, units)
        before = np.zeros(len(sources), dtype=bool)
        links = np.flatnonzero(~moves.first)
        before[links] = self._states_before(exchange, sources[links], destinations[links], units)
        states = moves.states(before)
        self._known(exchange, units).put(sources, destinations, exchange.step, states[:, -1])
        return states

    def _states_before(
        self, exchange: Exchange, sources: np.ndarray, destinations: np.ndarray, units: int
    ) -> np.ndarray:
        """Return bool[L]: the states before the first unit of ``exchange.step``.

        The search goes back step by step, for the links whose state is not known yet. It computes the state after the
        step from a good state, and from a bad one. If both are the same the state is known; if not, the step keeps the
        state or turns it over.
        """
        result = np.zeros(len(sources), dtype=bool)
        turned = np.zeros(len(sources), dtype=bool)
        links = np.arange(len(sources))  # whose state is open
        known = self._known(exchange, units)
        for step in range(exchange.step - 1, -1, -1):
            if self._quiet(step):
                result[links] = turned[links]
                return result
            found, states = known.get(sources[links], destinations[links], step)
            result[links[found]] = states[found] ^ turned[links[found]]
            links = links[~found]
            if not links.size:
                return result
            earlier = dataclasses.replace(exchange, step=step)
            moves = self._moves(earlier, sources[links], destinations[links], units)
            if_good, if_bad = (moves.states(np.full(len(links), state))[:, -1] for state in (False, True))
            turned[links] ^= if_good
            found = if_good == if_bad
            result[links[found]] = turned[links[found]]
            links = links[~found]
        to_bad, to_good, *_ = self.parameters(0)
        start = dataclasses.replace(exchange, step=0)
        draws = self.uniforms(_START, start, sources[links], destinations[links], 1)
        result[links] = draws.below(to_bad / (to_bad + to_good))[:, 0] ^ turned[links]
        return result

    def _known(self, exchange: Exchange, units: int) -> _LastStates:
        return self._ends.setdefault((exchange.phase, exchange.stream, units), _LastStates())


@functools.lru_cache
def _drift(transitions: tuple[float, ...], units: int) -> tuple[float, float] | None:
    """Return drift to the owner and between two receivers; ``None`` if ages of thousands of steps matter."""
    tail = _tail(transitions, units)
    return None if tail is None else theory.drift_of_ages(tail)


@functools.lru_cache
def _lag(transitions: tuple[float, ...], units: int) -> tuple[float, float] | None:
    """Return share of losses and mean age; ``None`` if ages of thousands of steps matter."""
    tail = _tail(transitions, units)
    return None if tail is None else (float(tail[0]), float(tail.sum()))


def _tail(transitions: tuple[float, ...], units: int) -> np.ndarray | None:
    for steps in (64, 512, 4096):
        tail = theory.burst_tail(transitions, steps, units)
        if tail[-1] <= 1e-9 * tail[0]:
            return tail
    return None


class _Transitions:
    """The effect of the units of L links on the state of the chain.

    ``if_good``, ``if_bad`` bool[L, units]: the state after each unit if it was good before it, and if it was bad.
    """

    def __init__(self, if_good: np.ndarray, if_bad: np.ndarray, alternates: bool) -> None:
        self.first = if_good[:, 0] == if_bad[:, 0]  # whether the first unit forgets the earlier state
        # Where nothing is forced the state stays, or alternates; then the chain that differs from it at every other
        # unit stays.
        self._odd = None
        if alternates:
            self._odd = np.arange(1, if_good.shape[1] + 1) % 2 == 1
            free = if_good & ~if_bad
            if_good = (if_good ^ self._odd) & ~free
            if_bad = if_good | free
        self._if_good, self._if_bad = if_good, if_bad

    def states(self, before: np.ndarray) -> np.ndarray:
        """Return bool[L, units]: the state after each unit, given the states ``before`` the first, bool[L]."""
        links, units = self._if_good.shape
        # A unit is a pair of binary digits that makes a carry (forced to bad), stops it (forced to good) or passes it
        # on: one addition of long integers runs all chains. In front of each link's units is its state before.
        digits = np.empty((2, links, units + 1), dtype=bool)
        digits[:, :, 0] = before
        digits[0, :, 1:] = self._if_good
        digits[1, :, 1:] = self._if_bad
        states = _carries(*digits)[:, 1:]
        return states if self._odd is None else states ^ self._odd


def _carries(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return bool, of the same shape: the carry out of each digit in the sum of two binary numbers, lowest first."""
    a, b = (int.from_bytes(np.packbits(digits, bitorder="little").tobytes(), "little") for digits in (first, second))
    carries = (a + b ^ a ^ b) >> 1
    packed = np.frombuffer(carries.to_bytes(-(-first.size // 8), "little"), dtype=np.uint8)
    return np.unpackbits(packed, bitorder="little", count=first.size).view(bool).reshape(first.shape)


class _LastStates:
    """The last state computed on each link, and its step. A cache: nothing needs it, and any thread may write to it."""

    def __init__(self) -> None:
        self._packed = np.full((0, 0), -1, dtype=np.int64)  # 2 * step + state

    def get(self, sources: np.ndarray, destinations: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return bool[L] twice: whether the last state computed on each link is that of ``step``, and that state."""
        packed = self._fitting(sources, destinations)[sources, destinations]
        return packed >> 1 == step, packed & 1 == 1

    def put(self, sources: np.ndarray, destinations: np.ndarray, step: int, states: np.ndarray) -> None:
        """Store ``states``, the states of L links at the end of ``step``."""
        self._fitting(sources, destinations)[sources, destinations] = 2 * step + states

    def _fitting(self, sources: np.ndarray, destinations: np.ndarray) -> np.ndarray:
        packed, size = self._packed, 1 + max(sources.max(initial=0), destinations.max(initial=0))
        if len(packed) < size:
            grown = np.full((size, size), -1, dtype=np.int64)
            grown[: len(packed), : len(packed)] = packed
            self._packed = packed = grown
        return packed
