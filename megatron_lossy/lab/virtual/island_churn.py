"""Virtual islands that come and go by ``--island-schedule`` (docs/islands.md#islands-that-come-and-go).

A death is known at once, and a copy takes no time: there are no networks here. An island that stops keeps its state, as
if it had saved at its last iteration. Replicas within an island that has stood still begin equal again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from ...base.errors import refuse
from ...base.exchange import Delivery
from ...config import LossyConfig
from ...mechanisms.islands.monitor import EpochLog, line
from ...mechanisms.islands.rounds import Epoch, Member, MemberRounds, Slot, needed_visits
from .island_schedule import FLAG, Schedule, read_schedule
from .islands import VirtualIslands


class Return(NamedTuple):
    """An island that is there again.

    ``how``: "keep" its state, "copy" that of the island ``source``, or "listen". ``idle``: it has not trained. ``anew``:
    its exchanges under way are gone.
    """

    slot: int
    how: str
    source: int
    idle: bool
    anew: bool


@dataclass
class VirtualSlot(Slot):
    """``trains``: makes iterations. ``reached``: by others. ``life``: counts its starts. ``fresh``: it has not been there since it started."""

    trains: bool = True
    reached: bool = True
    life: int = 0
    fresh: bool = False

    @property
    def member(self) -> bool:
        """Whether it takes part in exchanges."""
        return self.trains and self.reached


class Presence:
    """The islands of all slots.

    ``keep``: lag up to which nobody counts as stopped. ``rejoin``: what stopped and new islands do, "copy" or
    "listen". ``overlap``: see :func:`needed_visits`. ``empty``: slots without an island at the beginning. ``copies``:
    whoever missed an exchange copies (an outer optimizer has more state than weights).
    """

    def __init__(
        self, slots: int, keep: int, rejoin: str, overlap: int, empty: Iterable[int] = (), copies: bool = False
    ) -> None:
        self._keep, self._rejoin, self._overlap, self._copies = keep, rejoin, overlap, copies
        self.slots = [VirtualSlot() for _ in range(slots)]
        for slot in empty:
            self.slots[slot] = VirtualSlot(trains=False, reached=False, own=False, fresh=True)

    @property
    def training(self) -> list[int]:
        """The slots that make the next iteration."""
        return [number for number, slot in enumerate(self.slots) if slot.trains]

    @property
    def members(self) -> list[int]:
        """Slots that take part in exchanges, in rising order."""
        return [number for number, slot in enumerate(self.slots) if slot.member]

    @property
    def senders(self) -> list[int]:
        """The members that do not listen."""
        return [number for number in self.members if not self.slots[number].listens]

    def lags(self, now: int) -> list[int]:
        """Return the lag of each member after ``now`` iterations of the run."""
        return [self.slots[number].lag(now) for number in self.members]

    def epoch(self, first: int) -> Epoch:
        """Return the epoch of these members, from exchange ``first`` on."""
        roles = ["listen" if self.slots[number].listens else "send" for number in self.members]
        lives = [self.slots[number].life for number in self.members]
        return Epoch(tuple(map(Member, self.members, lives, roles)), first)

    def leave(self, number: int, event: str) -> None:
        """Let slot ``number`` leave. ``event``: "stop" ends it, "freeze" only stands still, "cut" trains alone."""
        slot = self.slots[number]
        slot.trains = slot.trains and event == "cut"
        slot.reached = False
        if event == "stop":  # what comes back is another process
            slot.life, slot.fresh = slot.life + 1, True

    def come(self, number: int, now: int) -> Return:
        """Let slot ``number`` come after ``now`` iterations of the run. Another member must be there already."""
        self._someone_sends(now)
        slot, sender = self.slots[number], min(self.senders, key=lambda other: (other - number) % len(self.slots))
        idle, how = not slot.trains, "keep"
        if not slot.own or slot.stopped(now, self._keep) or self._copies:
            how = self._rejoin
        anew = slot.fresh or how != "keep"
        slot.trains, slot.reached, slot.fresh = True, True, False
        if how == "copy":
            source = self.slots[sender]
            slot.sent, slot.made, slot.own = source.sent, source.made, True
        slot.listens = how == "listen" or (how == "copy" and slot.stopped(now, self._keep))
        return Return(number, how, sender, idle, anew)

    def _someone_sends(self, now: int) -> None:
        """Let the member with the least lag send if all others have left."""
        if self.members and not self.senders:
            min((self.slots[number] for number in self.members), key=lambda slot: slot.lag(now)).listens = False

    def trained(self) -> None:
        """Note that the run has made an iteration."""
        for number in self.training:
            self.slots[number].made += 1

    def about_to_send(self, now: int, visits: Callable[[int], int]) -> None:
        """Begin an exchange. ``visits``: the least number of times that each element of a listener was set."""
        for number in self.members:
            slot = self.slots[number]
            if slot.listens and visits(number) >= needed_visits(self._overlap, slot.own):
                slot.listens, slot.own = False, True
        self._someone_sends(now)

    def sent(self, now: int) -> None:
        """Note that the senders have sent after ``now`` iterations of the run."""
        for number in self.senders:
            self.slots[number].sent, self.slots[number].made = now, 0

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state of each slot."""
        return [asdict(slot) for slot in self.slots]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        """Restore :meth:`state_dict`."""
        self.slots = [VirtualSlot(**{each.name: saved[each.name] for each in fields(VirtualSlot)}) for saved in state]


class Churn:
    """Presence of islands by a schedule, and the epoch that holds; it has no weights.

    ``iterations``: of the run, if known. ``note``: gets a record of each epoch. Raises :class:`UsageError`.
    """

    def __init__(
        self, config: LossyConfig, iterations: int | None, note: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        assert config.island_schedule is not None, config
        self.schedule: Schedule = read_schedule(config.island_schedule, config.islands, iterations)
        how = config.keep, config.rejoin, config.overlap
        self.presence = Presence(config.islands, *how, self.schedule.empty, copies=config.has_outer_optimizer)
        self.epoch = self.presence.epoch(0)
        self._path, self._interval, self._note = config.island_schedule, config.sync_interval, note

    def begin(self, iteration: int) -> list[Return]:
        """Let the events before ``iteration`` happen. Return the islands that are there again."""
        events, returns = self.schedule.at(iteration), []
        for event in events:
            if event.leaves:
                self.presence.leave(event.slot, event.event)
            else:
                returns.append(self.presence.come(event.slot, iteration))
        if events or not iteration:
            self._enter(iteration, iteration, [event._asdict() for event in events], returns)
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
        if (epoch := self.presence.epoch(iteration // self._interval)).id != self.epoch.id:
            self.epoch = epoch
        elif not events and now:
            return
        if self._note is None:
            return
        returned = [{"slot": arrival.slot, "how": arrival.how, "from": arrival.source} for arrival in returns]
        self._note(line(epoch.first, iteration, epoch, self.presence.lags(now), events, returned=returned))

    def state_dict(self, iteration: int) -> dict[str, Any]:
        """Return the state before ``iteration``: the members, and the events that made them so."""
        return {"slots": self.presence.state_dict(), "past": [list(event) for event in self.schedule.before(iteration)]}

    def load_state_dict(self, state: dict[str, Any], iteration: int) -> None:
        """Restore :meth:`state_dict`. Raise :class:`UsageError` if the schedule had other events before."""
        if state["past"] != [list(event) for event in self.schedule.before(iteration)]:
            raise refuse(FLAG, self._path, f"has other events before iteration {iteration} than the checkpoint's run")
        self.presence.load_state_dict(state["slots"])
        self.epoch = self.presence.epoch(iteration // self._interval)


class ChurningIslands(VirtualIslands):
    """:class:`VirtualIslands` of which some may be away. Raises :class:`UsageError` for a schedule that does not fit."""

    _rounds: list[MemberRounds]

    def __init__(self, config: LossyConfig, workers: int, steps: int, seed: int, gapless: bool = False) -> None:
        super().__init__(config, workers, steps, seed, gapless)
        log = None if config.delivery_log is None else EpochLog(config.delivery_log)
        self.observers += [] if log is None else [log]
        self.churn = Churn(config, steps, None if log is None else log.add)

    def _make_rounds(self, *arguments: Any) -> MemberRounds:
        return MemberRounds(*arguments, presence=self.churn.presence)

    @property
    def present(self) -> Sequence[int]:
        return self.churn.presence.training

    @property
    def senders(self) -> Sequence[int]:
        return self.churn.presence.senders or self.churn.presence.members

    def come_and_go(self) -> None:
        for arrival in self.churn.begin(self.iteration):
            self._bring_back(arrival)

    def _bring_back(self, arrival: Return) -> None:
        island, how, source, idle, anew = arrival
        for rounds in self._rounds if anew else ():
            rounds.restart(island)
        if how == "copy":
            self._take_state(island, self._state_of(source))
            for rounds in self._rounds:
                for kept in rounds.rule.copied().values():
                    kept[island] = kept[source]
        if idle or how == "copy":
            with self.turn(island, keep=False) as cluster:
                cluster.begin_equal()

    def _exchange(self, among: tuple[int, int] | None = None) -> None:
        def visits(island: int) -> int:
            return min(rounds.visits(island) for rounds in self._rounds)

        if (epoch := self.churn.end(self.iteration, visits)) is not None:
            among = (len(epoch.senders), len(epoch.slots))
            for rounds in self._rounds:
                rounds.crossing.among(epoch.senders, epoch.slots)
        super()._exchange(among)

    def _report(self, delivery: Delivery) -> None:
        """Report with all slots as sources: nothing arrives from those that are away."""
        receivers, _, units = delivery.arrived.shape
        arrived = np.zeros((receivers, len(self.clusters), units), dtype=bool)
        arrived[:, list(delivery.sources)] = delivery.arrived
        super()._report(replace(delivery, sources=range(len(self.clusters)), arrived=arrived))

    def _more_state(self) -> dict[str, Any]:
        return {"churn": self.churn.state_dict(self.iteration)}

    def _load_more(self, state: Mapping[str, Any]) -> None:
        self.churn.load_state_dict(state["churn"], self.iteration)
