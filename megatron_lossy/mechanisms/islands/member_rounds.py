"""Exchanges among members that change: :class:`.Rounds` for islands that come and go.

An island uses a mean if it took part when the exchange began, in the life that it has now, and is there when the mean
is due (AsyncMesh, section 4 (d)).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .presence import Presence
from .rounds import Between, Flight, Mean, Rounds
from .vector import read_at, write_at


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
        """The least number of times that an element of a listener was set."""
        return int(self._set[island].min())

    def restart(self, island: int) -> None:
        """``island`` begins again: exchanges under way are not its own."""
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
