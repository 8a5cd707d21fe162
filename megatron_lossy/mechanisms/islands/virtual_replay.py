"""Islands in one process that make a recorded run again: of islands that came and went by themselves (docs/elastic.md).

Each island has exchanges of its own, those of real ranks. What carries them hands on what arrived in the recorded run. After a
death an island goes on from its state when it had saved, and a copy is of the state of the island that was copied.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ...base.errors import refuse
from ...base.exchange import Delivery, Stream
from ...config import LossyConfig
from .between_members import BetweenMembers
from .carrying import Among
from .elastic.standing import Standing
from .epochs import Epoch, Incarnation, Member
from .exchange_log import MEANS, PIECES, digest_of, unpacked
from .form import form_of
from .member_rounds import MemberRounds
from .recorded import Crossed, Recorded, read_recorded
from .rounds import Flight
from .schedule import FLAG
from .shard import Shard
from .subset import Subset
from .virtual import VirtualIslands

logger = logging.getLogger(__name__)


class WasLost(Exception):
    """Nothing of an exchange arrived in the recorded run."""


class Handed:
    """Hands the messages of islands of this process on: each is kept until all have it at which it arrived."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded
        self._kept: dict[tuple[int, int, int, str], tuple[torch.Tensor, int]] = {}
        self._changed = threading.Condition()
        self._closed = False

    def put(self, rank: int, exchange: int, sender: int, what: str, message: torch.Tensor) -> None:
        """Hand on a ``message`` of the island ``sender``, if it arrived anywhere."""
        takers = self.recorded.takers(rank, exchange, sender, what)
        if takers:
            with self._changed:
                self._kept[rank, exchange, sender, what] = message, takers
                self._changed.notify_all()

    def take(self, rank: int, exchange: int, sender: int, what: str) -> torch.Tensor:
        """The message, once it is there. Raises :class:`RuntimeError` if this was closed meanwhile."""
        key = rank, exchange, sender, what
        with self._changed:
            self._changed.wait_for(lambda: key in self._kept or self._closed)
            if self._closed:
                raise RuntimeError("another island of this process has failed, or the run ends")
            message, takers = self._kept.pop(key)
            if takers > 1:
                self._kept[key] = message, takers - 1
            return message

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Replaying:
    """Carries the exchange of one rank of the island ``slot`` as it was: see :class:`.Carrier`."""

    observes = True

    def __init__(self, handed: Handed, slot: int, rank: int, exchange: int, crossed: Crossed, packet: int) -> None:
        assert crossed.senders is not None, exchange
        self._handed, self._slot, self._key = handed, slot, (rank, exchange)
        self._crossed, self._senders, self._packet = crossed, crossed.senders, packet

    def scatter(self, pieces: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        """See :class:`.Carrier`. Raises :class:`WasLost`."""
        if self._slot not in self._senders:
            return torch.zeros_like(pieces), np.zeros(pieces.shape, dtype=bool)
        self._handed.put(*self._key, self._slot, PIECES, pieces)
        place = self._senders.index(self._slot)
        return self._arrived(PIECES, self._crossed.pieces, pieces[0], lambda message: message[place])

    def gather(self, own: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        """See :class:`.Carrier`. Raises :class:`WasLost`."""
        if self._slot in self._senders:
            self._handed.put(*self._key, self._slot, MEANS, own)
        found = self._arrived(MEANS, self._crossed.means, own, lambda message: message)
        if self._crossed.lost:
            raise WasLost
        return found

    def _arrived(self, what: str, rows: Any, like: torch.Tensor, part: Any) -> tuple[torch.Tensor, np.ndarray]:
        if rows is None:
            raise WasLost
        found = torch.zeros(len(self._senders), *like.shape, dtype=like.dtype)
        for place, sender in enumerate(self._senders):
            if self._crossed.came(what, sender):
                found[place] = part(self._handed.take(*self._key, sender, what))
        return found, unpacked(rows, len(like) // self._packet + 2)

    def do_without(self, place: int) -> None:
        """See :class:`.Carrier`."""

    def close(self) -> None:
        """See :class:`.Carrier`."""


class ReplayingExchanges(BetweenMembers):
    """The exchanges of an island of this process. Any error but :class:`WasLost` is one of this process."""

    broken_by = (WasLost,)

    @property
    def _observes(self) -> bool:
        return True


class ReplayedIslands(VirtualIslands):
    """:class:`VirtualIslands` that make a recorded run again. Raises :class:`UsageError` for a record that does not fit."""

    def __init__(self, config: LossyConfig, workers: int, steps: int, seed: int, gapless: bool = False) -> None:
        assert config.island_schedule is not None, config
        self._recorded = read_recorded(config.island_schedule, config)
        if workers != config.islands * self._recorded.ranks:
            why = f"islands of {self._recorded.ranks} rank(s), as in the run of {FLAG}, take {config.islands * self._recorded.ranks}"
            raise refuse("--virtual-workers", workers, why)
        self._recorded.check_trainer(seed=seed, train_iters=steps)
        super().__init__(config, workers, steps, seed, gapless)
        self._handed = Handed(self._recorded)
        self._here = [
            [Standing(island, config.overlap) for _ in range(self._recorded.ranks)] for island in range(config.islands)
        ]
        self._own: list[list[Shard[BetweenMembers]]] = []
        self._among: dict[tuple[int, int], Among | None] = {}
        self._states: dict[tuple[int, int], dict[str, Any]] = {}
        self._present: Sequence[int] = range(config.islands)
        #: Times that the weights of an island were those of the recorded run.
        self._checked = 0

    def _build_shards(self) -> None:
        for island, ranks in enumerate(self._here):
            self._own.append([])
            for rank, here in enumerate(ranks):
                vector, stream = self._vector(island, rank), Stream("islands", expert_rank=rank)
                subset = Subset(self.config, vector.size, self._seed, stream)
                crossing = ReplayingExchanges(
                    self.config,
                    stream,
                    island,
                    self._steps,
                    self._told,
                    shard=rank,
                    among=lambda key=(island, rank): self._among[key],
                    breaks=lambda among, why, waited: None,
                    loses=lambda exchange: None,
                )
                rounds = partial(MemberRounds, presence=here)
                made = Shard(self.config, subset, [vector], crossing, self._steps, self.device, make_rounds=rounds)
                self._own[-1].append(made)

    @staticmethod
    def _told(delivery: Delivery) -> None:
        """Nobody is told."""

    # --- who is there ----------------------------------------------------------------------------------------------

    @property
    def present(self) -> Sequence[int]:
        return self._present

    @property
    def senders(self) -> Sequence[int]:
        return self._present

    def come_and_go(self) -> bool:
        islands = enumerate(self._recorded.islands)
        self._present = [slot for slot, one in islands if one.life(self.iteration) is not None]
        self._happen()
        if not self._present:
            why = f"no island has made iteration {self.iteration}; weights were as recorded {self._checked} times until then"
            raise refuse(FLAG, self._path, f"{why}. --exit-interval {self.iteration} ends there")
        return True

    @torch.no_grad()
    def _happen(self) -> None:
        """Keep what is needed later, and let happen what did before this iteration of the run."""
        for slot, made in self._recorded.needed:
            if made == self.iteration:
                self._states[slot, made] = copy.deepcopy(self._whole_state(slot))
        for slot, record in enumerate(self._recorded.islands):
            first = record.events[0] if record.events else None
            for one in record.at(self.iteration):
                event = one["event"]
                if event == "enters":
                    for here in self._here[slot]:
                        here.members = []  # until its first exchange
                if event == "enters" and one is not first:
                    self._load(slot, self._states[slot, one["at"]])
                elif event == "goes on":
                    self._begin_equal(slot)
                elif event == "gives up":
                    for shard in self._own[slot]:
                        shard.rounds.give_up()
                elif event == "restarts":
                    for shard in self._own[slot]:
                        shard.rounds.restart(0)
                elif event == "copied":
                    self._take_state(slot, self._states[one["source"], one["made"]]["island"])
                    self._begin_equal(slot)
                if "weights" in one:
                    self._check(slot, one)
        last = self._recorded.needed
        self._states = {key: state for key, state in self._states.items() if last[key] > self.iteration}

    def _check(self, slot: int, one: dict[str, Any]) -> None:
        """Raise :class:`UsageError` unless the weights of an island are those of the recorded run."""
        if any(digest_of(self._own[slot][rank].vectors) != there for rank, there in one["weights"].items()):
            why = (
                f"island {slot} has other weights at iteration {self.iteration} than in that run: other flags or data?"
            )
            raise refuse(FLAG, self._path, why)
        self._checked += 1

    def leave(self) -> None:
        """Check what happened at the end of the recorded run, too."""
        super().leave()
        self._happen()
        logger.warning(
            "the run in %s was made again up to iteration %d of %d; weights were as recorded %d times",
            self._path,
            self.iteration,
            self._recorded.end,
            self._checked,
        )

    @property
    def _path(self) -> str:
        return str(self.config.island_schedule)

    # --- states ----------------------------------------------------------------------------------------------------

    def _whole_state(self, slot: int) -> dict[str, Any]:
        """All that an island saves."""
        cluster = self.clusters[slot]
        return {
            "island": self._state_of(slot),
            "rounds": [shard.rounds.state_dict() for shard in self._own[slot]],
            "update": cluster.update,
            "replicas": cluster.replica_state(),
            "random": self._random.get(slot),
        }

    def _load(self, slot: int, state: dict[str, Any]) -> None:
        """Let an island be as it was when it had saved ``state``."""
        self._take_state(slot, state["island"])
        state = copy.deepcopy({name: value for name, value in state.items() if name != "island"})
        for shard, rounds in zip(self._own[slot], state["rounds"], strict=True):
            shard.rounds.load_state_dict(rounds)
        cluster = self.clusters[slot]
        cluster.update = state["update"]
        with self.turn(slot, keep=False):
            cluster.load_replica_state(state["replicas"])
        self._random.pop(slot, None)
        if state["random"] is not None:
            self._random[slot] = state["random"]

    # --- an iteration ----------------------------------------------------------------------------------------------

    def _exchange(self, among: tuple[int, int] | None = None) -> None:
        there = [slot for slot in self.present if self._own]
        begun: dict[tuple[int, int], Flight | None] = {}
        for slot in there:
            for rank, shard in enumerate(self._own[slot]):
                if (self.iteration + 1) % self.config.sync_interval == 0:
                    self._look_up(slot, rank)
                begun[slot, rank] = shard.rounds.begin_due(self.iteration, shard.vectors)
        for slot in there:
            for rank, shard in enumerate(self._own[slot]):
                shard.rounds.use_due(self.iteration, shard.vectors, begun[slot, rank])

    def _look_up(self, slot: int, rank: int) -> None:
        """Find who the exchange that is due was made among."""
        exchange = (self.iteration + 1) // self.config.sync_interval - 1
        crossed = self._recorded.islands[slot].exchange(rank, exchange)
        self._among[slot, rank] = None
        if crossed is None:  # of no elements, for example
            return
        self._here[slot][rank].members = [0] if crossed.member else []
        if crossed.senders is None:
            return
        slots = sorted({*crossed.senders, slot})
        members = [Member(one, Incarnation(0), "send" if one in crossed.senders else "listen") for one in slots]
        carrier = Replaying(self._handed, slot, rank, exchange, crossed, form_of(self.config).packet)
        lanes = [[carrier] * self.config.lanes] * self.clusters[0].workers
        self._among[slot, rank] = Among(Epoch(tuple(members), exchange), slot, lanes)

    def load_replicas(self, folder: str | os.PathLike) -> None:
        """Raise :class:`UsageError`: a run is made again from its beginning."""
        raise refuse(
            "--load", folder, f"the run in {FLAG} {self._path} is made again from its beginning; leave --load out"
        )

    def uninstall(self) -> None:
        self._handed.close()
        super().uninstall()
        for shards in self._own:
            for shard in shards:
                shard.crossing.close()
