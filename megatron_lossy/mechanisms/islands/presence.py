"""Presence of islands: members, those that stopped, and those that may send (docs/islands.md#islands-that-come-and-go).

Times are iterations of the run, whoever makes them. The lag of an island is what the run has made since the island last
sent, less its own updates since. An island whose lag is large and mostly idleness has stopped: its weights are old, and
would hold the mean back. It copies an island that is there, or it listens for a while. Who was only alone, slow or
briefly away keeps everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from .epochs import Epoch, Incarnation, Member, least_lag


def needed_visits(overlap: int, own: bool) -> int:
    """The number of times that means must have set each element of a listener before it may send.

    ``overlap``: later exchanges of an element under way when one comes back. ``own``: whether it began with weights of
    the run. A cycle of means is the model; who began with others corrects the elements that were set first once more.
    """
    return 3 * (overlap + 1) if overlap else 1 if own else 2


@dataclass
class Slot:
    """The island of a slot.

    ``trains``: makes iterations. ``reached``: by others. ``listens``: until it may send. ``own``: has weights of the
    run. ``life``: counts its starts. ``fresh``: it has not been there since it started. ``sent``: iterations of the run
    when it last sent; ``made``: its own since.
    """

    trains: bool = True
    reached: bool = True
    listens: bool = False
    own: bool = True
    life: int = 0
    fresh: bool = False
    sent: int = 0
    made: int = 0

    def lag(self, now: int) -> int:
        """After ``now`` iterations of the run."""
        return now - self.sent - self.made

    def stopped(self, now: int, keep: int) -> bool:
        """Whether weights are too old to send. ``keep``: the largest lag that is none, in iterations."""
        return self.lag(now) > keep and 2 * self.lag(now) > now - self.sent

    @property
    def member(self) -> bool:
        """Whether it takes part in exchanges."""
        return self.trains and self.reached


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
        self.slots = [Slot() for _ in range(slots)]
        for slot in empty:
            self.slots[slot] = Slot(trains=False, reached=False, own=False, fresh=True)

    # --- who is there ----------------------------------------------------------------------------------------------

    @property
    def training(self) -> list[int]:
        """The slots that make the next iteration."""
        return [number for number, one in enumerate(self.slots) if one.trains]

    @property
    def members(self) -> list[int]:
        """The slots that take part in exchanges."""
        return [number for number, one in enumerate(self.slots) if one.member]

    @property
    def senders(self) -> list[int]:
        """The members that do not listen."""
        return [number for number in self.members if not self.slots[number].listens]

    def lags(self, now: int) -> list[int]:
        """The lag of each member after ``now`` iterations of the run."""
        return [self.slots[number].lag(now) for number in self.members]

    def epoch(self, first: int) -> Epoch:
        """The epoch of these members, from exchange ``first`` on."""
        roles = ["listen" if self.slots[number].listens else "send" for number in self.members]
        lives = [Incarnation(self.slots[number].life) for number in self.members]
        return Epoch(tuple(map(Member, self.members, lives, roles)), first)

    # --- who comes and goes ----------------------------------------------------------------------------------------

    def leave(self, number: int, event: str) -> None:
        """``event``: "stop" ends the process, "freeze" only stands still, "cut" trains alone."""
        one = self.slots[number]
        one.trains = one.trains and event == "cut"
        one.reached = False
        if event == "stop":  # what comes back is another process
            one.life, one.fresh = one.life + 1, True

    def come(self, number: int, now: int) -> Return:
        """Slot ``number`` is there after ``now`` iterations of the run. Another member must be there already."""
        self._someone_sends(now)
        one, sender = self.slots[number], self._next_sender(number)
        idle, how = not one.trains, "keep"
        if not one.own or one.stopped(now, self._keep) or self._copies:
            how = self._rejoin
        anew = one.fresh or how != "keep"
        one.trains, one.reached, one.fresh = True, True, False
        if how == "copy":
            source = self.slots[sender]
            one.sent, one.made, one.own = source.sent, source.made, True
        one.listens = how == "listen" or (how == "copy" and one.stopped(now, self._keep))
        return Return(number, how, sender, idle, anew)

    def _next_sender(self, number: int) -> int:
        """The sender in the next slot after ``number``."""
        return min(self.senders, key=lambda other: (other - number) % len(self.slots))

    def _someone_sends(self, now: int) -> None:
        """Let the member with the least lag send if all others have left."""
        if self.members and not self.senders:
            self.slots[self.members[least_lag(self.lags(now))]].listens = False

    # --- an iteration ----------------------------------------------------------------------------------------------

    def trained(self) -> None:
        """The run has made an iteration."""
        for number in self.training:
            self.slots[number].made += 1

    def about_to_send(self, now: int, visits: Callable[[int], int]) -> None:
        """An exchange begins. ``visits``: how often each element of a listener was set, at least."""
        for number in self.members:
            one = self.slots[number]
            if one.listens and visits(number) >= needed_visits(self._overlap, one.own):
                one.listens, one.own = False, True
        self._someone_sends(now)

    def sent(self, now: int) -> None:
        """The senders have sent after ``now`` iterations of the run."""
        for number in self.senders:
            self.slots[number].sent, self.slots[number].made = now, 0

    def state_dict(self) -> list[dict[str, Any]]:
        """The state of each slot."""
        return [asdict(one) for one in self.slots]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        """Restore :meth:`state_dict`."""
        self.slots = [Slot(**{each.name: one[each.name] for each in fields(Slot)}) for one in state]
