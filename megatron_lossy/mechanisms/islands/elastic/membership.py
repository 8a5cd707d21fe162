"""Knowledge of the first rank of an island about all islands: it tells the rendezvous of itself, and computes epochs.

It is asked on the thread that trains, and hears answers on the one that asks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from statistics import fmean, median, median_high
from typing import Any

from ....base.errors import UsageError, refuse
from ..copying import Request
from ..epochs import ANSWERED, ROLES, UNKNOWN, Epoch, Heard, Incarnation, Member, next_epoch
from ..rendezvous.lighthouse import Data

logger = logging.getLogger(__name__)

#: The version of what islands tell.
PROTOCOL = 6
#: Exchanges that the time from one to the next is taken from.
_RECENT = 20
#: Messages that are remembered as skipped.
_MOST_UNREADABLE = 100
#: How much shorter it may become, on average over the seconds until all have an answer.
_FASTER = 1.5


@dataclass(frozen=True)
class Placed:
    """An epoch, and where its members meet. ``number``: rises by one; of this island alone."""

    number: int
    epoch: Epoch
    #: By slot of the members: host and port of a store.
    stores: dict[int, tuple[str, int]]
    #: Seconds from one exchange to the next, usually, of the slowest.
    usual: float
    #: Seconds within which all members know of it.
    heard_within: float


class Membership:
    """``slot``: of this island. ``digest``: of all that must be equal. ``what``: the same in words, by flag.

    ``timeout``: see :class:`.Lighthouse`. ``host``, ``store``: the name of this host, and host and port of the store that
    it serves. ``keep``: exchanges that one may be behind without listening.
    """

    def __init__(
        self,
        slot: int,
        islands: int,
        digest: str,
        what: dict[str, Any],
        timeout: float,
        host: str,
        store: tuple[str, int],
        begun: Incarnation,
        keep: int,
    ) -> None:
        self._keep = keep
        self._slot, self._islands, self._digest, self._what = slot, islands, digest, what
        self._timeout, self._host, self._store, self._begun = timeout, host, store, begun
        self._heard_within = timeout + ANSWERED
        self._changed = threading.Condition()
        self._epoch: Epoch | None = None
        self._placed: list[Placed] = []
        self._heard: list[Heard] = []
        # Of others that exchange with each other, by the epoch in which they do, and of all that train (who comes back has yet to take
        # the run's iteration): the latest exchange, and the usual seconds from one to the next; when that was so.
        self._exchanging: dict[tuple[Any, ...], list[tuple[int, float]]] = {}
        self._training: list[tuple[int, float]] = []
        # Of others that train, by slot and start: the latest exchange, and when that was in an answer.
        self._steps: dict[tuple[int, Incarnation], tuple[int, float]] = {}
        self._heard_at = self._told_at = 0.0
        self._pace: float | None = None  # of others that train, the slowest that they have with those they wait for
        self._deadline: float | None = None  # until when others are waited for before the first epoch
        # What is told:
        self._role, self._lag, self._step = "send", 0, -1
        self._exchanges: Epoch | None = None
        self._own_pace: float | None = None
        self._took: deque[float] = deque(maxlen=_RECENT)
        self._broken = self._joins = False
        self._without_since: float | None = None  # a member of the epoch is done without
        self._still = True  # it has not trained yet
        self._differs: dict[str, float] = {}  # by digests that hold and are not this island's: since when
        self._met: Epoch | None = None  # the latest epoch in which this island exchanged with others
        self._holders: dict[Incarnation, float] = {}  # other starts of this slot, and when each was first in an answer
        self._unreadable: set[str] = set()  # messages that were skipped
        self._question: tuple[Member, int] | None = None
        self._requests: list[Request] = []  # of others, for a copy of this island
        self._at: float | None = None
        self._failed: Exception | None = None

    # --- on the thread that asks -----------------------------------------------------------------------------------

    def tell(self) -> tuple[int, Data]:
        """The latest exchange, and all that this island says of itself."""
        with self._changed:
            epoch, self._told_at = self._epoch, time.monotonic()
            # Who is alone is quicker, until others are there.
            pace = 0.0 if self._training or self._own_pace is None else self._own_pace
            return max(self._step, 0), {
                "protocol": PROTOCOL,
                "slot": self._slot,
                "incarnation": list(self._begun),
                "role": self._role,
                "lag": self._lag,
                "digest": self._digest,
                "what": self._what,
                "step": self._step,
                "exchanges": None if self._exchanges is None else list(self._exchanges.key),
                "trains": self._at is not None,
                "seconds": max(fmean(self._took), pace) / _FASTER if self._took else None,
                "usual": max(median(self._took), pace) if self._took else None,
                "pace": self._own_pace,
                "epoch": None if epoch is None else list(epoch.key),
                "members": []
                if epoch is None
                else [[one.slot, list(one.incarnation), one.role] for one in epoch.members],
                "broken": self._broken or self._missed,
                "waits": self._waits,
                "host": self._host,
                "store": list(self._store),
                "asks": _asked(self._question),
            }

    @property
    def _missed(self) -> bool:
        """Whether a member that others count on is done without, although all would know by now that it is dead."""
        since = self._without_since
        return since is not None and time.monotonic() - since > self._heard_within

    @property
    def _waits(self) -> bool:
        """Whether no epoch is known, or it has not begun."""
        return self._deadline is not None and not self._joins

    def hear(self, answer: Sequence[Data]) -> None:
        """An answer of the rendezvous."""
        with self._changed:
            try:
                self._take(answer)
            except UsageError as error:
                self._failed = error
            self._changed.notify_all()

    def _take(self, answer: Sequence[Data]) -> None:
        known = self._equal(self._readable(answer))
        if known is None or self._slot_is_held(known):
            return
        if self._deadline is not None:
            self._check_addresses(known)
        self._heard = heard = [_heard(one) for one in known]
        stores = {(one["slot"], Incarnation(*one["incarnation"])): (one["store"][0], one["store"][1]) for one in known}
        self._note_requests(known)
        others = [one for one in known if one["slot"] != self._slot]
        self._exchanging, self._training = {}, []
        now = time.monotonic()
        self._steps = {life: at for life, at in self._steps.items() if now - at[1] < self._heard_within}
        for one in others:
            at = one["step"], one["usual"] or self.seconds
            if one["trains"]:
                self._training.append(at)
                self._steps[one["slot"], Incarnation(*one["incarnation"])] = one["step"], now
            if one["exchanges"] is not None:
                self._exchanging.setdefault(tuple(one["exchanges"]), []).append(at)
        paces = [one["pace"] for one in others if one["trains"] and one["pace"] is not None]
        self._pace = max(paces, default=None)
        self._heard_at = self._told_at  # an answer may have taken long, and steps are as old as the questions
        epoch = self._counted_on(known) if self._deadline is not None else None
        if epoch is None:
            if self._deadline is not None and not self._begins(known):
                return
            epoch = next_epoch(heard, self._epoch, self._digest, self._timeout, self._keep)
        if epoch is None or epoch == self._epoch or self._slot not in epoch.slots:
            return
        self._epoch, self._broken, self._without_since, self._deadline = epoch, False, None, None
        lives = {one.slot: (one.slot, one.incarnation) for one in epoch.members}
        places = {slot: stores[life] for slot, life in lives.items() if life in stores}
        usual = max((one["usual"] for one in known if one["usual"] is not None), default=UNKNOWN)
        self._placed.append(Placed(len(self._placed), epoch, places, usual, self._heard_within))

    def _readable(self, answer: Sequence[Data]) -> list[Data]:
        """Return the messages of islands of this version. Others are skipped; those that claim to be of islands are logged once."""
        found = [one for one in answer if _is_readable(one)]
        for one in answer:
            if isinstance(one, Mapping) and "protocol" in one and not any(one is other for other in found):
                text = f"protocol {one['protocol']}, slot {one.get('slot')}"[:100]
                if text not in self._unreadable and len(self._unreadable) < _MOST_UNREADABLE:
                    self._unreadable.add(text)
                    logger.warning(
                        "--rendezvous: messages that are not of an island of this version are skipped, the %d. kind: %s",
                        len(self._unreadable),
                        text,
                    )
        return found

    def _slot_is_held(self, known: Sequence[Data]) -> bool:
        """Return whether this island must not begin yet, because another start of its slot may be alive.

        A start that died can be in one more answer. Raises :class:`UsageError` if the other one is alive. An island that has begun
        goes on, unless it was away and a later start has begun meanwhile.
        """
        starts = {Incarnation(*one["incarnation"]): one for one in known if one["slot"] == self._slot}
        starts.pop(self._begun, None)
        if self._epoch is not None:
            for begun, one in starts.items():
                if begun > self._begun and not one["waits"]:
                    raise refuse("--island", self._slot, f"{one['host']} has it, since later than this one")
            return False
        now = time.monotonic()
        # Of two that wait the later one is held, unless the others count on it already.
        earlier = set() if self._joins else {begun for begun in starts if begun < self._begun}
        holders = [begun for begun, one in starts.items() if begun in earlier or not one["waits"]]
        self._holders = {begun: self._holders.get(begun, now) for begun in holders}
        for begun, since in self._holders.items():
            if now - since > self._timeout:
                host = starts[begun]["host"]
                why = f"{host} has it, and is alive; end that one first, or start this island with another number"
                raise refuse("--island", self._slot, why)
        return bool(holders)

    def _check_addresses(self, known: Sequence[Data]) -> None:
        """Refuse addresses that only their own host knows, while this island has not begun."""
        away = [one for one in known if one["host"] != self._host]
        if not away:
            return
        for slot, host, address in [
            (self._slot, self._host, self._store[0]),
            *((one["slot"], one["host"], one["store"][0]) for one in away),
        ]:
            if _is_loopback(address):
                why = f"island {slot} ({host}) reaches it from its loopback, and so others cannot reach that island"
                raise refuse("--rendezvous", address, f"{why}; give an address that all hosts reach, on all islands")

    def _note_requests(self, known: Sequence[Data]) -> None:
        for one in known:
            if one["asks"] and one["asks"][:-1] == [self._slot, *self._begun]:
                request = Request(one["slot"], Incarnation(*one["incarnation"]), one["asks"][-1])
                if request not in self._requests:
                    self._requests.append(request)

    def _equal(self, readable: Sequence[Data]) -> list[Data] | None:
        """Return the messages of islands whose flags are this island's; ``None``: it is not decided yet whether those hold.

        In an epoch they do. Before the first one those of most islands hold that run; while all wait, of most that wait, once all
        are there or no longer waited for. Of two with as many islands those of the lowest slot hold. Raises :class:`UsageError` if
        others hold for longer than a dead island can be in answers.
        """
        mine = [one for one in readable if one["digest"] == self._digest]
        if self._epoch is not None:
            return mine
        others = [one for one in readable if one["slot"] != self._slot or tuple(one["incarnation"]) == self._begun]
        running = [one for one in others if not one["waits"]]
        if not running and not self._all_there(readable):
            return None if len(mine) < len(readable) else mine
        voters = running or others
        count = Counter(one["digest"] for one in voters)
        first = max(voters, key=lambda one: (count[one["digest"]], -one["slot"]), default=None)
        if first is None or first["digest"] == self._digest:
            self._differs.clear()
            return mine
        now = time.monotonic()
        since = self._differs.setdefault(first["digest"], now)
        if not running or now - since > self._timeout:
            raise _difference(self._what, first)
        return None

    def _all_there(self, known: Sequence[Data]) -> bool:
        """Return whether all slots have one start each, or are waited for no longer."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return True
        starts = {(one["slot"], tuple(one["incarnation"])) for one in known}
        return len(starts) == len({slot for slot, _ in starts}) == self._islands

    def _counted_on(self, known: Sequence[Data]) -> Epoch | None:
        """The latest epoch of others that has this island, as it is now."""
        found = [
            Epoch(
                tuple(Member(slot, Incarnation(*begun), role) for slot, begun, role in one["members"]), one["epoch"][1]
            )
            for one in known
            if one["epoch"] is not None
        ]
        mine = [one for one in found if any(m.slot == self._slot and m.incarnation == self._begun for m in one.members)]
        return max(mine, key=lambda one: one.first, default=None)

    def _begins(self, known: Sequence[Data]) -> bool:
        """Whether the first epoch of this island can be computed."""
        assert self._deadline is not None
        others = [one for one in known if one["slot"] != self._slot]
        running = [one for one in others if not one["waits"]]
        if running:  # who is heard not to wait any more is in their next epoch
            behind = max(one["step"] for one in running) - self._step
            if behind > self._keep:
                self._role, self._lag = "listen", behind
            self._joins = True
            return any(one["slot"] == self._slot and not one["waits"] for one in known)
        return self._all_there(known)

    # --- on the thread that trains ---------------------------------------------------------------------------------

    def begin(self, step: int, patience: float, role: str = "send") -> None:
        """The latest exchange was ``step``, that of a checkpoint, made as ``role``; -1 without one.

        All slots are waited for, ``patience`` seconds.
        """
        with self._changed:
            self._step, self._role, self._deadline = step, role, time.monotonic() + patience

    def first(self, check: Callable[[], None], patience: float) -> Placed | None:
        """The first epoch; ``None``: there is none after ``patience`` seconds. ``check``: raises what ended the thread that asks.

        Raises :class:`UsageError`: another island has other flags, or the slot is taken.
        """
        with self._changed:
            until = time.monotonic() + patience
            while not self._placed:
                if time.monotonic() >= until:
                    return None
                self._changed.wait(0.2)
                self._check()
                check()
            return self._placed[-1]

    @property
    def role(self) -> str:
        """The role that is told."""
        return self._role

    def note(
        self,
        step: int,
        role: str,
        lag: int,
        met: Epoch | None = None,
        pace: float | None = None,
        still: bool = False,
    ) -> None:
        """Exchange ``step`` begins, as ``role`` with ``lag``. ``met``: the epoch in which that before was made with others; ``None``: with none.

        ``pace``: see :attr:`.Pace.kept`. ``still``: see :attr:`.Standing.stood_still`.
        """
        now = time.monotonic()
        with self._changed:
            if self._at is not None and step == self._step + 1:  # else others have made those in between
                self._took.append(now - self._at)
            if step != self._step:
                self._at = now
            self._step, self._role, self._lag, self._exchanges, self._own_pace = step, role, lag, met, pace
            self._met, self._still = met or self._met, still
            self._check()

    def breaks(self, epoch: Epoch) -> None:
        """``epoch`` cannot be exchanged in any more."""
        with self._changed:
            self._broken |= epoch == self._epoch

    def does_without(self, epoch: Epoch) -> None:
        """Nothing arrives from a member of ``epoch`` any more. If it lives, the epoch is to begin anew."""
        with self._changed:
            if epoch == self._epoch and self._without_since is None:
                self._without_since = time.monotonic()

    def ask(self, question: tuple[Member, int] | None) -> None:
        """Ask a member for a copy of its state; the number of the question rises."""
        with self._changed:
            self._question = question

    @property
    def requests(self) -> list[Request]:
        """All questions so far for a copy of this island."""
        with self._changed:
            return list(self._requests)

    @property
    def seconds(self) -> float:
        """From one exchange to the next, usually, of this island."""
        with self._changed:
            return median(self._took or [UNKNOWN])

    @property
    def pace(self) -> float | None:
        """Seconds from one exchange to the next that others had with those they waited for, of the slowest; ``None``: none of them has.

        Not the seconds that they take by themselves: in those is how long they wait for the pace of each other.
        """
        with self._changed:
            return self._pace

    @property
    def alone(self) -> bool:
        """Whether it is known that no other island trains."""
        with self._changed:
            return not self._training and self._since_heard <= self._heard_within

    @property
    def latest(self) -> int:
        """The number of the latest epoch that is known."""
        with self._changed:
            return len(self._placed) - 1

    def placed(self, number: int) -> Placed:
        """The epoch of that number."""
        with self._changed:
            return self._placed[number]

    def in_force(self, step: int) -> int:
        """The number of the epoch in which exchange ``step`` is made: the latest that has begun; -1 before the first."""
        with self._changed:
            found = [one.number for one in self._placed if one.epoch.first <= step]
            return found[-1] if found else -1

    @property
    def furthest(self) -> int:
        """Return the latest exchange of other islands of the run; -1: this one is the run.

        The run is where most islands exchange with each other. An island that is alone may be ahead of it, and so may be a few that
        are left behind in an epoch: no other island follows them. While no exchange succeeds, the run is where the median island
        is, of the members of the last epoch in which this island exchanged, or of all; one that an answer lacks counts for a while. An
        island that has stood still follows the furthest.
        """
        with self._changed:
            if self._exchanging:
                return max((step for step, _ in self._most()), default=-1)
            steps = {life: step for life, (step, _) in self._steps.items()}
            if not steps:
                return max((one.step for one in self._heard if one.member.slot != self._slot), default=-1)
            if self._still:
                return max(steps.values())
            lives = steps.keys() if self._met is None else steps.keys() & self._met.lives
            return median_high([self._step, *(steps[life] for life in lives or steps)])

    def ahead(self, step: int) -> float | None:
        """Seconds by which who begins exchange ``step`` is ahead of those that exchange with each other, or else of the slowest that trains.

        Negative: behind. The others go on as they did when they were heard. ``None``: nobody is known to train, for now.
        """
        with self._changed:
            since, most = self._since_heard, self._most()
            those, which = (most, min) if most else (self._training, max)
            if not those or since > self._heard_within:
                return None
            return which((step - one) * usual - since for one, usual in those)

    @property
    def _since_heard(self) -> float:
        return time.monotonic() - self._heard_at

    def _most(self) -> list[tuple[int, float]]:
        """Return the other members of the largest group that exchanges; on a tie, of this island's."""
        where = max(self._exchanging.values(), key=len, default=[])
        if self._exchanges is None:
            return where
        with_me = self._exchanging.get(self._exchanges.key, [])
        return where if len(where) > len(with_me) + 1 else with_me

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:  # a name
        return False


def _asked(question: tuple[Member, int] | None) -> list[int] | None:
    if question is None:
        return None
    member, number = question
    return [member.slot, *member.incarnation, number]


def _whole(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < 2**63


def _life(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_whole, value))


def _seconds(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and 0 <= value < 1e9)


def _key(value: Any) -> bool:
    return value is None or (
        isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and _whole(value[1])
    )


def _member(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and _whole(value[0]) and _life(value[1]) and value[2] in ROLES


#: What each item of a message must be, by its name.
_ITEMS: dict[str, Callable[[Any], bool]] = {
    "slot": _whole,
    "incarnation": _life,
    "role": lambda value: value in ROLES,
    "lag": _whole,
    "digest": lambda value: isinstance(value, str),
    "what": lambda value: isinstance(value, Mapping) and all(isinstance(flag, str) for flag in value),
    "step": lambda value: _whole(value, -1),
    "exchanges": _key,
    "trains": lambda value: isinstance(value, bool),
    "seconds": _seconds,
    "usual": _seconds,
    "pace": _seconds,
    "epoch": _key,
    "members": lambda value: isinstance(value, list) and all(map(_member, value)),
    "broken": lambda value: isinstance(value, bool),
    "waits": lambda value: isinstance(value, bool),
    "host": lambda value: isinstance(value, str),
    "store": lambda value: (
        isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and _whole(value[1])
    ),
    "asks": lambda value: value is None or (isinstance(value, list) and len(value) == 4 and all(map(_whole, value))),
}


def _is_readable(one: Any) -> bool:
    """Return whether ``one`` is a message of an island of this version. Other programs may use the same lighthouse."""
    if not isinstance(one, Mapping) or one.get("protocol") != PROTOCOL:
        return False
    return all(name in one and fits(one[name]) for name, fits in _ITEMS.items())


def _heard(one: Data) -> Heard:
    member = Member(one["slot"], Incarnation(*one["incarnation"]), one["role"])
    epoch = None if one["epoch"] is None else (one["epoch"][0], one["epoch"][1])
    return Heard(member, one["lag"], one["digest"], one["step"], one["seconds"], epoch, one["broken"], one["waits"])


def _difference(mine: dict[str, Any], other: Data) -> UsageError:
    """The first flag that differs from that of ``other``, in words."""
    theirs = other["what"]
    for flag in sorted(mine.keys() | theirs.keys()):
        if mine.get(flag) != theirs.get(flag):
            return refuse(
                flag,
                mine.get(flag),
                f"island {other['slot']} ({other['host']}) has {theirs.get(flag)}; all must be alike",
            )
    return UsageError(f"--rendezvous: island {other['slot']} ({other['host']}) has another model or layout of ranks")
