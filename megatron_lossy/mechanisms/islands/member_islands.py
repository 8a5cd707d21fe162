"""Islands of real ranks whose members change: what those of a schedule and those that are launches of their own have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .between_members import BetweenMembers
from .between_ranks import BetweenRanks
from .carrying import Among, Lanes
from .exchange_log import ExchangeLog
from .member_rounds import MemberRounds
from .ranks import RankIslands
from .rounds import Rounds
from .subset import Subset

#: Visits of who does not listen.
ENOUGH = 2**31


class MemberIslands(RankIslands):
    """:class:`RankIslands` that exchange among whoever is there. ``_entered``: whether this island is in the run."""

    _entered = False
    #: The epoch of the latest exchange, if this island is in one.
    _current: Among | None = None
    #: Gets what is needed to make the run again.
    _exchange_log: ExchangeLog | None = None

    @property
    def _own(self) -> Any:
        """The presence of this island alone, as :class:`MemberRounds` asks for it; its slot is number 0."""
        raise NotImplementedError

    @property
    def _lanes(self) -> Lanes:
        """The carriers of the exchanges of one epoch after another."""
        raise NotImplementedError

    def _broke(self, among: Among, why: str, waited: float) -> None:
        """On a thread: nothing can be exchanged in the epoch of ``among`` any more. ``waited``: seconds until that was known."""
        raise NotImplementedError

    def _loses(self, exchange: int) -> None:
        """On a thread: nothing of ``exchange`` arrives from others."""

    @property
    def _agrees(self) -> Callable[[int], bool] | None:
        """See :class:`BetweenMembers`; ``None``: nothing is lost whole, or no parameter has copies."""
        return None

    def _visits_here(self) -> int:
        """The least number of times that means have set an element of this rank since it began to listen; :data:`ENOUGH` if it does not."""
        if not self._own.slots[0].listens:
            return ENOUGH
        return min((shard.rounds.visits(0) for shard in self._built()), default=ENOUGH)

    def _crossing(self, number: int, subset: Subset) -> BetweenRanks:
        return BetweenMembers(
            self.config,
            subset.stream,
            self.world.island,
            self._run.steps,
            self._tell,
            shard=number,
            among=lambda: self._current,
            breaks=self._broke,
            loses=self._loses,
            log=self._exchange_log,
            agrees=self._agrees,
        )

    def _make_rounds(self, *arguments: Any) -> Rounds:
        return MemberRounds(*arguments, presence=self._own)

    @property
    def carriers(self) -> Sequence[Any]:
        return [self._lanes.links] if self.config.transport == "udp" and self._entered else []
