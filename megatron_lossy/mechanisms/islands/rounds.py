"""Exchanges between islands in their order: begun, under way, used (*AsyncMesh*, Algorithm 1 and section 3.1).

After each iteration, also one that the optimizer skipped, an exchange that is due begins with the current weights. Then
the exchanges that began ``--sync-delay`` iterations ago are used, oldest first. The delay is exact, so that a run can
be repeated; a late island is waited for.
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
        """Put ``values`` [k] at ``places`` of the main weights, and into the weights of forward and backward passes."""


@dataclass
class Flight:
    """An exchange under way: its number, the iteration before it, its elements, and the values that were sent."""

    number: int
    step: int
    places: Places | None
    sent: torch.Tensor
    pending: Pending


class Rounds:
    """The exchanges of one vector of the islands of this process.

    ``rule``: applies a mean. ``crossing``: makes it. ``interval``, ``delay``: in iterations. ``device``: the device of
    the weights. ``used``: called when a mean is used, with the seconds of waiting for it, the values that had been sent
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
        """Begin and use the exchanges that are due after iteration ``step`` (from 0).

        Returns the number of elements of the exchange that begins, or ``None`` if none does.
        """
        number, left = divmod(step + 1, self._interval)
        begun = None if left else self._begin(number - 1, step, weights)
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
        if not sent.shape[1]:  # a drawn subset may be empty
            return None
        self.rule.begin(step, places)
        # The values become what is rounded of them: the rest is progress that an island keeps until it is large enough to cross.
        pending = self._crossing.begin(step, sent, places)
        flight = Flight(number, step, places, sent, pending)
        self.flights.append(flight)
        return flight

    def _use(self, flight: Flight, mean: Mean, step: int, weights: Sequence[Weights]) -> None:
        places = flight.places
        for island in self._takers(flight):
            one = weights[island]
            arrived = None if mean.arrived is None else mean.arrived[island]
            values = mean.values
            if mean.owed is not None and self.rule.keeps_rest:
                values = values + mean.owed[island]
            back = Back(flight.sent[island], values, arrived, places, flight.step, step)
            one.write(places, self.rule.apply(island, one.read(places), back))
        self.rule.end(flight.step)

    def _takers(self, flight: Flight) -> Sequence[int]:
        """The islands of this process that use the mean of ``flight``."""
        return range(len(flight.sent))

    def state_dict(self) -> dict[str, Any]:
        """The exchanges under way, which are waited for, the state of the rule, and what owners keep of rounded means."""
        flights = []
        for flight in self.flights:
            mean = flight.pending.wait()
            flights.append((flight.number, flight.step, flight.sent, *mean))
        state = {"flights": flights, "rule": self.rule.state_dict()}
        rest = self._crossing.rest
        return state if rest is None else state | {"rest": rest.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.flights = [
            Flight(number, step, self._subset.places(number, self._device), sent, Done(Mean(*mean)))
            for number, step, sent, *mean in state["flights"]
        ]
        self.rule.load_state_dict(state["rule"])
        if self._crossing.rest is not None:
            self._crossing.rest.load_state_dict(state["rest"])
