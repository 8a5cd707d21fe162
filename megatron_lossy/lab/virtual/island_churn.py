"""Virtual islands that come and go by ``--island-schedule`` (docs/islands.md#islands-that-come-and-go).

A death is known at once, and a copy takes no time: there are no networks here. An island that stops keeps its state, as
if it had saved at its last iteration. Replicas within an island that has stood still begin equal again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...base.errors import refuse
from ...base.exchange import Delivery
from ...config import LossyConfig
from ...mechanisms.islands.epochs import Epoch, EpochLog, line
from ...mechanisms.islands.mean import InMemory
from ...mechanisms.islands.member_rounds import MemberRounds
from ...mechanisms.islands.presence import Presence, Return
from ...mechanisms.islands.rounds import Rounds
from ...mechanisms.islands.schedule import FLAG, Schedule, read_schedule
from .islands import VirtualIslands


class Churn:
    """Presence of islands by a schedule, and the epoch that holds; it has no weights.

    ``iterations``: of the run, if known. ``note``: gets a record of each epoch. Raises :class:`UsageError`.
    """

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
        """Let the events before ``iteration`` happen. Return the islands that are there again."""
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
        """Note the end of ``iteration``. Return the epoch of the exchange that begins after it; ``None`` if none does.

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
        """Return the state before ``iteration``: the members, and the events that made them so."""
        past = [list(one) for one in self.schedule.before(iteration)]
        return {"slots": self.presence.state_dict(), "past": past}

    def load_state_dict(self, state: dict[str, Any], iteration: int) -> None:
        """Restore :meth:`state_dict`. Raise :class:`UsageError` if the schedule had other events before."""
        here = [list(one) for one in self.schedule.before(iteration)]
        if state["past"] != here:
            raise refuse(FLAG, self._path, f"has other events before iteration {iteration} than the checkpoint's run")
        self.presence.load_state_dict(state["slots"])
        self.epoch = self.presence.epoch(iteration // self._interval)


class ChurningIslands(VirtualIslands):
    """:class:`VirtualIslands` of which some may be away. Raises :class:`UsageError` for a schedule that does not fit."""

    def __init__(self, config: LossyConfig, workers: int, steps: int, seed: int, gapless: bool = False) -> None:
        super().__init__(config, workers, steps, seed, gapless)
        log = None if config.delivery_log is None else EpochLog(config.delivery_log)
        self.observers += [] if log is None else [log]
        self.churn = Churn(config, steps, None if log is None else log.add)

    def _make_rounds(self, *arguments: Any) -> Rounds[InMemory]:
        return MemberRounds(*arguments, presence=self.churn.presence)

    @property
    def _member_rounds(self) -> list[MemberRounds[InMemory]]:
        return [rounds for rounds in self._rounds if isinstance(rounds, MemberRounds)]

    # --- presence --- -------------------------------------------------------------------------------------------

    @property
    def present(self) -> Sequence[int]:
        return self.churn.presence.training

    @property
    def senders(self) -> Sequence[int]:
        return self.churn.presence.senders or self.churn.presence.members

    def come_and_go(self) -> None:
        for one in self.churn.begin(self.iteration):
            self._bring_back(one)

    def _bring_back(self, one: Return) -> None:
        island, source = one.slot, one.source
        if one.anew:
            for rounds in self._member_rounds:
                rounds.restart(island)
        if one.how == "copy":
            self._take_state(island, self._state_of(source))
            for rounds in self._member_rounds:
                rounds.rule.copy(source, island)
        if one.idle or one.how == "copy":
            self._begin_equal(island)

    # --- an iteration ----------------------------------------------------------------------------------------------

    def _exchange(self, among: tuple[int, int] | None = None) -> None:
        epoch = self.churn.end(self.iteration, self._visits)
        if epoch is not None:
            among = (len(epoch.senders), len(epoch.slots))
            for rounds in self._rounds:
                rounds.crossing.among(epoch.senders, epoch.slots)
        super()._exchange(among)

    def _visits(self, island: int) -> int:
        return min(rounds.visits(island) for rounds in self._member_rounds)

    def _report(self, delivery: Delivery) -> None:
        """Report with all slots as sources: nothing arrives from those that are away."""
        receivers, _, units = delivery.arrived.shape
        arrived = np.zeros((receivers, len(self.clusters), units), dtype=bool)
        arrived[:, list(delivery.sources)] = delivery.arrived
        super()._report(replace(delivery, sources=range(len(self.clusters)), arrived=arrived))

    # --- saving ----------------------------------------------------------------------------------------------------

    def _more_state(self) -> dict[str, Any]:
        return {"churn": self.churn.state_dict(self.iteration)}

    def _load_more(self, state: Mapping[str, Any]) -> None:
        self.churn.load_state_dict(state["churn"], self.iteration)
