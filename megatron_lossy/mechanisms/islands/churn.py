"""Islands that come and go by a schedule: who trains, who exchanges, and which epoch holds.

Virtual islands follow it (:mod:`.virtual_churn`), and real ones (:mod:`.scheduled`). It knows no weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ...base.errors import refuse
from ...base.exchange import Delivery
from ...config import LossyConfig
from .epoch_log import line
from .epochs import Epoch
from .presence import Presence, Return
from .schedule import FLAG, Schedule, read_schedule


def of_all_slots(delivery: Delivery, islands: int) -> Delivery:
    """``delivery`` with all slots as its sources: nothing arrives from those that are away."""
    receivers, _, units = delivery.arrived.shape
    arrived = np.zeros((receivers, islands, units), dtype=bool)
    arrived[:, list(delivery.sources)] = delivery.arrived
    return replace(delivery, sources=range(islands), arrived=arrived)


class Churn:
    """``iterations``: of the run, if known. ``note``: gets a record of each epoch. Raises :class:`UsageError`."""

    def __init__(
        self, config: LossyConfig, iterations: int | None, note: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        assert config.island_schedule is not None, config
        self.schedule: Schedule = read_schedule(config.island_schedule, config.islands, iterations)
        self.presence = Presence(
            config.islands,
            config.keep,
            config.rejoin,
            config.overlap,
            self.schedule.empty,
            copies=config.has_outer_optimizer,
        )
        self.epoch = self.presence.epoch(0)
        self._path, self._interval, self._note = config.island_schedule, config.sync_interval, note

    def begin(self, iteration: int) -> list[Return]:
        """Let the events before ``iteration`` happen. Returns the islands that are there again."""
        events, returns = self.schedule.at(iteration), []
        for one in events:
            if one.leaves:
                self.presence.leave(one.slot, one.event)
            else:
                returns.append(self.presence.come(one.slot, iteration))
        if events or not iteration:
            self._enter(iteration, iteration, [one._asdict() for one in events], returns)
        return returns

    def end(self, iteration: int, visits: Callable[[int], int]) -> Epoch | None:
        """``iteration`` is made. Returns the epoch of the exchange that begins after it; ``None`` if none does.

        ``visits``: see :meth:`Presence.about_to_send`.
        """
        now = iteration + 1
        self.presence.trained()
        if now % self._interval:
            return None
        self.presence.about_to_send(now, visits)
        self._enter(iteration, now, [], [])
        self.presence.sent(now)
        return self.epoch

    def _enter(self, iteration: int, now: int, events: list[dict[str, Any]], returns: list[Return]) -> None:
        """Begin a new epoch in ``iteration`` if members or roles are others. ``now``: iterations that are over."""
        epoch = self.presence.epoch(iteration // self._interval)
        if epoch.id != self.epoch.id:
            self.epoch = epoch
        elif not events and now:
            return
        if self._note is None:
            return
        returned = [{"slot": one.slot, "how": one.how, "from": one.source} for one in returns]
        self._note(line(epoch.first, iteration, epoch, self.presence.lags(now), events, returned=returned))

    def state_dict(self, iteration: int) -> dict[str, Any]:
        """The state before ``iteration``: the members, and the events that made them so."""
        past = [list(one) for one in self.schedule.before(iteration)]
        return {"slots": self.presence.state_dict(), "past": past}

    def load_state_dict(self, state: dict[str, Any], iteration: int) -> None:
        """Restore :meth:`state_dict`. Raises :class:`UsageError` if the schedule had other events before."""
        here = [list(one) for one in self.schedule.before(iteration)]
        if state["past"] != here:
            raise refuse(FLAG, self._path, f"has other events before iteration {iteration} than the checkpoint's run")
        self.presence.load_state_dict(state["slots"])
        self.epoch = self.presence.epoch(iteration // self._interval)
