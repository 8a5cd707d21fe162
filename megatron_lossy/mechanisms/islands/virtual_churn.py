"""Virtual islands that come and go by ``--island-schedule`` (docs/islands.md#islands-that-come-and-go).

A death is known at once, and a copy takes no time: there are no networks here. An island that stops keeps what it had,
as if it had saved at its last iteration. Replicas within an island that has stood still begin equal again. Its twin of real
ranks is :mod:`.scheduled`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...base.exchange import Delivery
from ...config import LossyConfig
from .churn import Churn, of_all_slots
from .epoch_log import EpochLog
from .member_rounds import MemberRounds
from .presence import Return
from .rounds import Rounds
from .virtual import VirtualIslands


class ChurningIslands(VirtualIslands):
    """:class:`VirtualIslands` of which some may be away. Raises :class:`UsageError` for a schedule that does not fit."""

    def __init__(self, config: LossyConfig, workers: int, steps: int, seed: int, gapless: bool = False) -> None:
        super().__init__(config, workers, steps, seed, gapless)
        log = None if config.delivery_log is None else EpochLog(config.delivery_log)
        self.observers += [] if log is None else [log]
        self.churn = Churn(config, steps, None if log is None else log.add)

    def _make_rounds(self, *arguments: Any) -> Rounds:
        return MemberRounds(*arguments, presence=self.churn.presence)

    @property
    def _rounds(self) -> list[MemberRounds]:
        return [shard.rounds for shard in self._shards if isinstance(shard.rounds, MemberRounds)]

    # --- who is there ----------------------------------------------------------------------------------------------

    @property
    def present(self) -> Sequence[int]:
        return self.churn.presence.training

    @property
    def senders(self) -> Sequence[int]:
        return self.churn.presence.senders or self.churn.presence.members

    def come_and_go(self) -> bool:
        for one in self.churn.begin(self.iteration):
            self._bring_back(one)
        return True

    def _bring_back(self, one: Return) -> None:
        island, source = one.slot, one.source
        if one.anew:
            for rounds in self._rounds:
                rounds.restart(island)
        if one.how == "copy":
            self._take_state(island, self._state_of(source))
            for rounds in self._rounds:
                rounds.rule.copy(source, island)
        if one.idle or one.how == "copy":
            self._begin_equal(island)

    # --- an iteration ----------------------------------------------------------------------------------------------

    def _exchange(self, among: tuple[int, int] | None = None) -> None:
        epoch = self.churn.end(self.iteration, self._visits)
        if epoch is not None:
            among = (len(epoch.senders), len(epoch.slots))
            for shard in self._shards:
                shard.crossing.among(epoch.senders, epoch.slots)
        super()._exchange(among)

    def _visits(self, island: int) -> int:
        return min(rounds.visits(island) for rounds in self._rounds)

    def _tell(self, delivery: Delivery) -> None:
        super()._tell(of_all_slots(delivery, len(self.clusters)))

    # --- saving ----------------------------------------------------------------------------------------------------

    def _more_state(self) -> dict[str, Any]:
        return {"churn": self.churn.state_dict(self.iteration)}

    def _load_more(self, state: Mapping[str, Any]) -> None:
        self.churn.load_state_dict(state["churn"], self.iteration)
