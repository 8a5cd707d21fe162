"""Exchanges between islands in their order: begun, under way, used (*AsyncMesh*, Algorithm 1 and section 3.1).

After each iteration, also of one that the optimizer skipped: if an exchange is due it is begun with the weights as they
are; then those that were begun ``--sync-delay`` iterations ago are used, oldest first. The delay is exact, so that a run can
be repeated; whoever is late is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .mean import Crossing, Done, Mean, Pending
from .places import Places
from .rule import Back, Rule
from .subset import Subset


class Weights(Protocol):
    """A vector of an island: its main weights in float32, as the optimizer has them."""

    def read(self, places: Places | None) -> torch.Tensor:
        """A copy [k] of the elements at ``places``; ``None``: all."""

    def write(self, places: Places | None, values: torch.Tensor) -> None:
        """Put ``values`` [k] there, and into the weights that are computed with."""


@dataclass
class Flight:
    """An exchange under way: its number, the iteration after which it was begun, of which elements, what was sent."""

    number: int
    step: int
    places: Places | None
    sent: torch.Tensor
    pending: Pending


class Rounds:
    """The exchanges of one vector of the islands of this process.

    ``rule``: what is made of a mean. ``crossing``: how it is made. ``interval``, ``delay``: in iterations. ``device``:
    where weights are. ``used``: told, when a mean is used, for how many seconds it was waited for, what had been sent
    float32[islands, k], and the mean.
    """

    def __init__(
        self,
        subset: Subset,
        rule: Rule,
        crossing: Crossing,
        interval: int,
        delay: int,
        device: torch.device,
        used: Callable[[float, torch.Tensor, Mean], None] | None = None,
    ) -> None:
        self.rule, self._device = rule, device
        self.flights: list[Flight] = []
        self._subset, self._crossing = subset, crossing
        self._interval, self._delay = interval, delay
        self._used = used

    def after_iteration(self, step: int, weights: Sequence[Weights]) -> int | None:
        """Iteration ``step`` (from 0) is made. Returns how many elements an exchange has that begins now, if one does."""
        begun = None
        if (step + 1) % self._interval == 0:
            begun = self._begin((step + 1) // self._interval - 1, step, weights)
        due = [flight for flight in self.flights if flight.step + self._delay == step]
        self.flights = [flight for flight in self.flights if flight.step + self._delay > step]
        for flight in due:
            began = time.perf_counter()
            mean = flight.pending.wait()
            if self._used is not None:
                self._used(time.perf_counter() - began, flight.sent, mean)
            self._use(flight, mean, step, weights)
        if begun is not None and not due and self.rule.always:
            nothing = Mean(torch.zeros_like(begun.sent[0]), torch.zeros_like(begun.sent, dtype=torch.bool))
            self._use(begun, nothing, step, weights)
        return None if begun is None else begun.sent.shape[1]

    def _begin(self, number: int, step: int, weights: Sequence[Weights]) -> Flight | None:
        places = self._subset.places(number, self._device)
        now = [one.read(places) for one in weights]
        payloads = [self.rule.payload(island, vector) for island, vector in enumerate(now)]
        sent = torch.stack(payloads) if len(payloads) > 1 else payloads[0][None]
        if not sent.shape[1]:  # of a subset that is drawn
            return None
        # As it crosses: what rounding takes away is then progress that an island keeps, until it has become enough to cross.
        sent = sent.to(self._crossing.dtype).float()
        self.rule.begin(step, places)
        flight = Flight(number, step, places, sent, self._crossing.begin(step, sent))
        self.flights.append(flight)
        return flight

    def _use(self, flight: Flight, mean: Mean, step: int, weights: Sequence[Weights]) -> None:
        places = flight.places
        for island, one in enumerate(weights):
            arrived = None if mean.arrived is None else mean.arrived[island]
            values = mean.values
            if mean.owed is not None and self.rule.keeps_rest:
                values = values + mean.owed[island]
            back = Back(flight.sent[island], values, arrived, places, flight.step, step)
            one.write(places, self.rule.apply(island, one.read(places), back))

    def state_dict(self) -> dict[str, Any]:
        """What is under way, waited for, and the state of the rule."""
        flights = []
        for flight in self.flights:
            mean = flight.pending.wait()
            flights.append((flight.number, flight.step, flight.sent, *mean))
        return {"flights": flights, "rule": self.rule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.flights = [
            Flight(number, step, self._subset.places(number, self._device), sent, Done(Mean(*mean)))
            for number, step, sent, *mean in state["flights"]
        ]
        self.rule.load_state_dict(state["rule"])
