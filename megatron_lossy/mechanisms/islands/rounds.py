"""Exchanges between islands in their order: begun, under way, used (*AsyncMesh*, Algorithm 1 and section 3.1).

After each iteration, also one that the optimizer skipped, an exchange that is due begins with the current weights. Then
the exchanges that began ``--sync-delay`` iterations ago are used, oldest first. The delay is exact, so that a run can
be repeated; a late island is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from ...config import LossyConfig
from .mean import Mean, Rest
from .presence import Presence
from .rules import Result, make_rule
from .vector import Places, Subset, Vector, read_at, write_at

#: Visits of a rank without elements, or of an island that does not listen.
MANY = 2**31


class Pending(Protocol):
    """An exchange that is under way."""

    def wait(self) -> Mean:
        """Return the result of the exchange. It is kept, and may be asked for again."""


class Crossing(Protocol):
    """Turns the vectors that islands send into a mean. ``rest``: see :class:`.Rest`; ``None``: owners keep nothing."""

    rest: Rest | None

    def begin(self, step: int, sent: torch.Tensor, places: Places | None = None) -> Pending:
        """Begin the exchange of ``sent`` float32[islands of this process, k], keyed by the iteration ``step``.

        ``places``: the places of its elements; ``None``: all of a vector. ``sent`` becomes what others get of it, rounded.
        """

    def forget(self, island: int) -> None:
        """Forget what ``island``, which begins again, keeps of rounded means."""


@dataclass
class Flight:
    """An exchange under way: its number, the iteration before it, its elements, the values that were sent, and the rule's snapshot."""

    number: int
    step: int
    places: Places | None
    sent: torch.Tensor
    snapshot: Sequence[torch.Tensor] | None
    pending: Pending


Between = TypeVar("Between", bound=Crossing)


class Rounds(Generic[Between]):
    """The exchanges of one vector, or shard of it, of the islands of this process: ``vectors``, one for each island.

    ``subset``: chooses the elements of each exchange. ``crossing``: makes means. ``steps``: length of the run, if known. ``device``: that
    of the weights. ``used``: called when a mean is used, with the seconds of waiting for it, the values that had been sent
    float32[islands, k], and the mean.
    """

    def __init__(
        self,
        config: LossyConfig,
        subset: Subset,
        vectors: Sequence[Vector],
        crossing: Between,
        steps: int | None,
        device: torch.device,
        used: Callable[[float, torch.Tensor, Mean], None] | None = None,
    ) -> None:
        self.subset, self.vectors, self.crossing = subset, vectors, crossing
        with torch.no_grad():
            self.rule = make_rule(config, [vector.read(None) for vector in vectors], steps)
        self.flights: list[Flight] = []
        self._interval, self._delay = config.sync_interval, config.sync_delay
        self._device, self._used = device, used

    @torch.no_grad()
    def after_iteration(self, step: int) -> int | None:
        """Begin and use the exchanges that are due after iteration ``step`` (from 0).

        Return the number of elements of the exchange that begins, or ``None`` if none does.
        """
        number, left = divmod(step + 1, self._interval)
        if left and (step + 1 - self._delay) % self._interval:
            return None
        for vector in self.vectors:
            vector.gather_weights()
        begun = None if left else self._begin(number - 1, step)
        due = [flight for flight in self.flights if flight.step + self._delay == step]
        self.flights = [flight for flight in self.flights if flight.step + self._delay > step]
        for flight in due:
            began = time.perf_counter()
            mean = flight.pending.wait()
            if self._used is not None:
                self._used(time.perf_counter() - began, flight.sent, mean)
            self._use(flight, mean, step)
        if begun is not None and not due and self.rule.always:
            nothing = Mean(torch.zeros_like(begun.sent[0]), torch.zeros_like(begun.sent, dtype=torch.bool))
            self._use(begun, nothing, step)
        for vector in self.vectors:
            vector.scatter_weights()
        return None if begun is None else begun.sent.shape[1]

    def _begin(self, number: int, step: int) -> Flight | None:
        places = self.subset.places(number, self._device)
        now = [vector.read(places) for vector in self.vectors]
        sent = self.rule.payload(torch.stack(now) if len(now) > 1 else now[0][None], places)
        if not sent.shape[1]:  # a drawn subset may be empty
            return None
        snapshot = self.rule.snapshot(places)
        # The values become what is rounded of them: the rest is progress that an island keeps until it is large enough to cross.
        pending = self.crossing.begin(step, sent, places)
        flight = Flight(number, step, places, sent, snapshot, pending)
        self.flights.append(flight)
        return flight

    def _use(self, flight: Flight, mean: Mean, step: int) -> None:
        places = flight.places
        for island in self._takers(flight):
            vector = self.vectors[island]
            arrived = None if mean.arrived is None else mean.arrived[island]
            values = mean.values
            if mean.owed is not None and self.rule.keeps_rest:
                values = values + mean.owed[island]
            snapshot = None if flight.snapshot is None else flight.snapshot[island]
            result = Result(flight.sent[island], values, arrived, places, snapshot, step)
            vector.write(places, self.rule.apply(island, vector.read(places), result))

    def _takers(self, flight: Flight) -> Sequence[int]:
        """Return the islands of this process that use the mean of ``flight``."""
        return range(len(flight.sent))

    def state_dict(self) -> dict[str, Any]:
        """Return the exchanges under way, which are waited for, the state of the rule, and what owners keep of rounded means."""
        flights = []
        for flight in self.flights:
            mean = flight.pending.wait()
            flights.append((flight.number, flight.step, flight.sent, flight.snapshot, *mean))
        state = {"flights": flights, "rule": self.rule.state_dict()}
        rest = self.crossing.rest
        return state if rest is None else state | {"rest": rest.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.flights = [
            Flight(number, step, self.subset.places(number, self._device), sent, snapshot, Mean(*mean))
            for number, step, sent, snapshot, *mean in state["flights"]
        ]
        self.rule.load_state_dict(state["rule"])
        if self.crossing.rest is not None:
            self.crossing.rest.load_state_dict(state["rest"])


class MemberRounds(Rounds[Between]):
    """``presence``: the islands that are there. Other arguments: those of :class:`.Rounds`."""

    def __init__(self, *arguments: Any, presence: Presence) -> None:
        super().__init__(*arguments)
        self._presence = presence
        #: The islands that took part in each exchange under way, by the iteration before it.
        self._took_part: dict[int, list[int]] = {}
        #: int16[islands, size]: how often a mean has set each element of a listener since it began to listen.
        self._set = torch.zeros(len(presence.slots), self.subset.size, dtype=torch.int16, device=self._device)

    def visits(self, island: int) -> int:
        """Return the least number of times that an element of a listener was set."""
        return int(self._set[island].min()) if self.subset.size else MANY

    def restart(self, island: int) -> None:
        """Let ``island`` begin again, without the exchanges under way."""
        for members in self._took_part.values():
            if island in members:
                members.remove(island)
        self._set[island] = 0
        self.rule.restart(island)
        self.crossing.forget(island)

    def give_up(self) -> None:
        """Wait for none of the exchanges under way."""
        self.flights = []
        self._took_part.clear()

    def _begin(self, number: int, step: int) -> Flight | None:
        flight = super()._begin(number, step)
        if flight is not None:
            self._took_part[step] = list(self._presence.members)
        return flight

    def _use(self, flight: Flight, mean: Mean, step: int) -> None:
        super()._use(flight, mean, step)
        for island in self._takers(flight):
            if self._presence.slots[island].listens:
                self._count(island, flight, mean)
        del self._took_part[flight.step]

    def _takers(self, flight: Flight) -> Sequence[int]:
        there = self._presence.members
        return [island for island in self._took_part[flight.step] if island in there]

    def _count(self, island: int, flight: Flight, mean: Mean) -> None:
        """Note that a mean has set elements of ``island``."""
        row, places = self._set[island], flight.places
        came = torch.ones_like(flight.sent[island], dtype=torch.bool) if mean.arrived is None else mean.arrived[island]
        write_at(row, places, read_at(row, places) + came.to(torch.int16))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "took part": self._took_part, "set": self._set}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._took_part = {step: list(members) for step, members in state["took part"].items()}
        self._set.copy_(state["set"])
