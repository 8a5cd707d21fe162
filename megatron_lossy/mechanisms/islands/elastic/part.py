"""Islands of real ranks that come and go: each is a launch of its own (docs/elastic.md).

The first rank asks the rendezvous, on a thread. At the end of each iteration the ranks of the island agree on what it knows: the epoch
of the next exchange, the latest that is to be opened, and whether the run has gone on without this island. So all change at one
exchange, and nobody waits for an answer.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist

from .... import device
from ....config import LossyConfig
from ....errors import UsageError
from ....fetch import Fetched
from ....flags import as_text, identity
from ....recovery import copies
from ....rendezvous import Watch
from ....rendezvous.lighthouse import Lighthouse, addresses_of
from ..between_ranks import BetweenRanks
from ..epochs import Incarnation
from ..flags import SYNC_LANES
from ..megatron_training import TrainingIslands
from ..member_rounds import MemberRounds
from ..shard import Shard
from ..stopping import Stopping
from .between import BetweenMembers
from .carrying import Among, Opening
from .membership import Membership, Placed
from .standing import Standing
from .world import ElasticWorld

logger = logging.getLogger(__name__)

#: Visits of who does not listen.
_ENOUGH = 2**31


class ElasticIslands(TrainingIslands):
    """The exchanges of this rank with the same rank of whichever islands are there. ``world``: open by the first iteration."""

    total = None  # type: ignore[assignment]

    def __init__(self, config: LossyConfig, world: ElasticWorld) -> None:
        super().__init__(config, world)  # type: ignore[arg-type]
        self._slot = world.island
        self._standing = Standing(world.island, config.overlap)
        self._membership: Membership | None = None  # of the first rank
        self._watch: Watch | None = None
        self._served: Any = None  # a store for ranks of other islands
        self._openings: list[Opening] = []
        self._in_force = -1  # the number of the epoch of the next exchange
        self._jump = 0  # the iteration to go on with; 0: the next one
        self._entered = False
        self._current: Among | None = None  # the epoch of the latest exchange
        self._broken = -1  # the number of the newest epoch that this rank cannot exchange in any more
        self._visits = 0  # how often means have set each element of a listener, on all ranks, at least

    # --- who is there ----------------------------------------------------------------------------------------------

    def catch_up(self, iteration: int) -> int:
        """See :meth:`Part.catch_up`."""
        if not self._entered:
            return self._enter(iteration)
        jump, self._jump = self._jump, 0
        if jump <= iteration:
            return iteration
        self._miss(jump)
        return jump

    def _enter(self, iteration: int) -> int:
        """Take part in a first epoch. Returns the iteration of the run. A collective call of the ranks of the island."""
        self._entered = True
        said: list[Any] = [None]
        if self.world.rank == 0:
            try:
                said = [self._ask(iteration)]
            except UsageError as error:
                said = [str(error)]
        dist.broadcast_object_list(said)
        if isinstance(said[0], str):
            raise UsageError(said[0])
        placed, furthest = said[0]
        self._open(placed)
        began = self._iteration_of(furthest)
        epoch = placed.epoch
        loaded = self._standing.slot.listens
        self._standing.enter(epoch, own=iteration > 0 or began <= iteration)
        self._standing.slot.sent = iteration
        if self._standing.slot.listens and not loaded:
            for shard in self._built():
                shard.rounds.restart(0)
        if epoch.first <= self._exchange_of(max(iteration, began)) + 1:
            self._in_force = placed.number
            self._openings[-1].among(wait=True)  # all begin with it
        if self._standing.slot.listens:
            logger.warning(
                "island %d: the run is at iteration %d and this island at %d; it listens until means have set its weights",
                self._slot,
                max(began, iteration),
                iteration,
            )
        if began > iteration:
            self._miss(began)
            return began
        return iteration

    def _ask(self, iteration: int) -> tuple[Placed, int]:
        config = self.config
        host = _address_towards(addresses_of(config.rendezvous or ""))
        self._served = dist.TCPStore(host, 0, None, True, timedelta(seconds=60), wait_for_workers=False)
        begun = Incarnation(time.time_ns(), secrets.randbits(32))
        rendezvous = Lighthouse(
            addresses_of(config.rendezvous or ""), f"island {self._slot} {begun.begun} {begun.drawn}"
        )
        keep = config.keep // config.sync_interval
        what = self._what()
        digest = json.dumps([what, self._layout()], sort_keys=True)
        self._membership = membership = Membership(
            self._slot,
            config.islands,
            digest,
            what,
            rendezvous.timeout,
            socket.gethostname(),
            (host, self._served.port),
            begun,
            keep,
        )
        membership.begin(self._exchange_of(iteration), config.island_join, self._standing.role)
        self._watch = Watch(rendezvous, config.island_poll, membership.tell, membership.hear)
        placed = membership.first(self._watch.check)
        return placed, max(membership.furthest, self._exchange_of(iteration))

    def _what(self) -> dict[str, Any]:
        """The flags that all islands must share, by name."""
        found = identity(self.config).items()
        return {"--seed": self.world.seed} | {"--" + name.replace("_", "-"): as_text(value) for name, value in found}

    def _layout(self) -> list[Any]:
        return [self.world.size, [shard.vectors[0].size for shard in self._built()]]

    def _exchange_of(self, iteration: int) -> int:
        """The latest exchange after ``iteration`` iterations; -1: none."""
        return iteration // self.config.sync_interval - 1

    def _iteration_of(self, exchange: int) -> int:
        """The iterations before the next one after ``exchange``."""
        return (exchange + 1) * self.config.sync_interval

    def _open(self, placed: Placed) -> None:
        """Begin to open ``placed``, unless it is open already: others may have thought for a while that somebody was gone."""
        same = [one for one in self._openings if one.placed.epoch == placed.epoch and one.usable]
        if same:
            self._openings.append(same[-1])
            return
        config = self.config
        lanes = min(SYNC_LANES, max(1, config.rounds_under_way))
        # Nobody waits for a message before it is used.
        patience = config.island_patience + config.rounds_under_way * placed.usual
        self._openings.append(Opening(placed, self._slot, self.world.rank, lanes, "sync", patience))

    def _carried(self, exchange: int) -> Among | None:
        """The epoch that ``exchange`` is made in. One that is not ready, or of which an exchange was left out, is given up."""
        if self._in_force < 0:
            return None
        opening = self._openings[self._in_force]
        among = opening.among()
        if among is not None and not among.broken and among.reach(exchange):
            return among
        opening.abandon()
        self._broken = max(self._broken, self._in_force)
        return None

    def _broke(self, among: Among, why: str) -> None:
        """On a thread: nothing can be exchanged in the epoch of ``among`` any more."""
        if not among.broken:
            logger.warning(
                "island %d: lost contact (%s); until others meet again its messages count as lost", self._slot, why
            )
            among.close()
        numbers = [number for number, one in enumerate(list(self._openings)) if one.among() is among]
        self._broken = max(self._broken, *numbers)

    def _miss(self, now: int) -> None:
        """The run has made ``now`` iterations without this island: exchanges under way are lost, and replicas begin equal."""
        if self._run.update is not None:
            self._run.settle()
        self._gather()
        for shard in self._built():
            shard.rounds.give_up()
        was = self._standing.slot.listens
        if self._standing.behind(now, self.config.keep) and not was:
            for shard in self._built():
                shard.rounds.restart(0)

    # --- an iteration ----------------------------------------------------------------------------------------------

    def begin_stopping(self, signal: int) -> Callable[[], int]:
        """See :meth:`Part.begin_stopping`. Other islands go on."""
        # What may have come meanwhile is asked for last: an epoch in force is known.
        ahead, following = self._ahead(), self._next()
        visits = _ENOUGH
        if self._standing.slot.listens:
            visits = min((shard.rounds.visits(0) for shard in self._built()), default=_ENOUGH)
        said = np.array([signal, self._last_known(), following, ahead, self._broken, -visits], dtype=np.int64)
        known = copies.to_device(said, device.current_device())
        work = dist.all_reduce(known, dist.ReduceOp.MAX, async_op=True)

        def finish() -> int:
            work.wait()
            number, latest, in_force, jump, broken, visits = map(int, Fetched(known).wait().tolist())
            self._visits = -visits
            self._learn(latest)
            if broken >= 0:  # on some rank: the others would never hear of it
                self._openings[broken].abandon()
                if self._membership is not None:
                    self._membership.breaks(self._openings[broken].placed.epoch)
            self._in_force, self._jump = in_force, jump
            return number

        return finish

    def _last_known(self) -> int:
        if self._watch is not None:
            self._watch.check()
        return -1 if self._membership is None else self._membership.latest

    def _next(self) -> int:
        """The number of the epoch of the exchange after the one of this iteration."""
        return (
            -1
            if self._membership is None
            else self._membership.in_force(self._exchange_of(self._run.iteration + 1) + 1)
        )

    def _ahead(self) -> int:
        """The iteration of the run, if it has gone on without this island; else 0.

        Who is little behind is waited for in the next epoch, and leaves no iteration out.
        """
        if self._membership is None:
            return 0
        config, now = self.config, self._run.iteration + 1
        run = self._iteration_of(self._membership.furthest)
        late = (run - now) / config.sync_interval * self._membership.seconds > config.island_patience / 2
        return run if late and run > now + config.sync_delay + config.sync_interval else 0

    def _learn(self, latest: int) -> None:
        """Begin to open epochs up to number ``latest``. A collective call of the ranks of the island, if there are new ones."""
        while len(self._openings) <= latest:
            said: list[Any] = [None]
            if self._membership is not None:
                said = [self._membership.placed(len(self._openings))]
            dist.broadcast_object_list(said)
            self._open(said[0])
        used = max(self._in_force, 0)
        for opening in self._openings[:used]:
            among = opening.among()
            if among is not None and opening not in self._openings[used:]:
                among.retire()

    def _exchange(self, number: int, *arguments: Any) -> None:
        now = self._run.iteration + 1
        if not number:
            self._standing.slot.made += 1
        begins = now % self.config.sync_interval == 0
        if begins and not number:
            self._standing.may_send(self._visits)
            if self._membership is not None:
                slot = self._standing.slot
                self._membership.note(self._exchange_of(now), self._standing.role, max(slot.lag(now), 0))
            self._current = self._carried(self._exchange_of(now))
        among = self._current
        self._standing.members = [] if among is None else [0]
        super()._exchange(number, *arguments)
        if begins and among is not None and not among.broken and among.place is not None:
            self._standing.sent(now)

    @property
    def _stopping(self) -> Stopping:  # type: ignore[override]
        return Stopping()

    def leave(self) -> None:
        """The others need not wait until a death is noticed."""
        self._end()

    # --- building --------------------------------------------------------------------------------------------------

    def _build(self, number: int, one: Any) -> Shard[BetweenRanks]:
        config, vector = self.config, self._vector(one)
        subset = self._subset(vector, number)
        lanes = min(SYNC_LANES, max(1, config.rounds_under_way))
        crossing = BetweenMembers(
            config,
            subset.stream,
            self._slot,
            self._run.steps,
            self._tell,
            lanes=lanes,
            among=lambda: self._current,
            breaks=self._broke,
        )
        self._hooks.append(one.optimizer.register_step_post_hook(partial(self._exchange, number)))
        rounds = partial(MemberRounds, presence=self._standing)
        return Shard(
            config, subset, [vector], crossing, self._run.steps, self._run.device, self._note, make_rounds=rounds
        )

    # --- weights and saved state -----------------------------------------------------------------------------------

    def consensus_weights(self) -> Any:
        return None

    def saved_beside(self, folder: str) -> tuple[str, bool] | None:
        return None

    def rewind(self, folder: str) -> str | None:
        return None

    def restart(self, iteration: int) -> None:
        """Islands save by themselves, each at its own iteration."""

    def state_dict(self) -> Any:
        return {"rounds": super().state_dict(), "slot": vars(self._standing.slot).copy()}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state["rounds"])
        for name, value in state["slot"].items():
            setattr(self._standing.slot, name, value)

    def close(self) -> None:
        self._end()
        super().close()

    def _end(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        for opening in self._openings:
            among = opening.among()
            if among is not None and not among.broken:
                among.close()


def _address_towards(urls: Sequence[str]) -> str:
    """The address of this host from which one of ``urls`` is reached, the first that can be."""
    name, whys = os.environ.get("GLOO_SOCKET_IFNAME"), []
    if name:
        from ....transport.udp.address import find_address

        return find_address(name.split(",")[0], "localhost")
    for url in urls:
        host, _, port = url.removeprefix("http://").rpartition(":")
        try:
            for family, kind, _, _, place in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM):
                with socket.socket(family, kind) as probe:
                    probe.connect(place)
                    return str(probe.getsockname()[0])
        except OSError as error:
            whys.append(f"{host}: {error.strerror or error}")
    raise UsageError(f"--rendezvous: no way to it ({'; '.join(whys)})")
