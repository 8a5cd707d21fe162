"""Islands of real ranks that come and go: each is a launch of its own (docs/elastic.md).

The first rank asks the rendezvous, on a thread. At the end of each iteration the ranks of the island agree on what it knows: the epoch
of the next exchange, the latest that is to be opened, and whether the run has gone on without this island. So all change at one
exchange, and nobody waits for an answer.
"""

from __future__ import annotations

import functools
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
import torch
import torch.distributed as dist

from ....base import device
from ....base.errors import UsageError, first_line, refuse
from ....base.fetch import Fetched
from ....base.flags import identity, texts_by_flag
from ....config import LossyConfig
from ....hooks.versions import tensor_group
from ....recovery.rows import to_device
from ..between_members import BetweenMembers
from ..between_ranks import BetweenRanks
from ..carrying import Among
from ..copying import Copy, Request, held_state, put_state
from ..epochs import Incarnation, Member
from ..megatron_training import TrainingIslands
from ..member_rounds import MemberRounds
from ..rendezvous.lighthouse import LEAST_WAIT, Lighthouse, addresses_of
from ..rendezvous.watch import Watch
from ..rounds import Rounds
from ..stopping import Stopping
from ..vector import Subset
from ..world import ElasticWorld
from .diary import Diary
from .membership import Membership, Placed
from .opening import Opener, Opening
from .rejoining import Rejoining
from .standing import Pace, Standing

logger = logging.getLogger(__name__)

#: Seconds after which the ranks of an island that waits for others look up: less than any timeout of theirs.
_ROUND = 20.0
#: Visits of an island that does not listen.
_ENOUGH = 2**31


class ElasticIslands(TrainingIslands):
    """The exchanges of this rank with the same rank of whichever islands are there. ``world``: open by the first iteration."""

    total = None  # type: ignore[assignment]

    def __init__(self, config: LossyConfig, world: ElasticWorld) -> None:
        super().__init__(config, world)  # type: ignore[arg-type]
        self._slot = world.island
        self._entered = False  # the run
        self._current: Among | None = None  # the epoch of the latest exchange, if this island is in one
        self._standing = Standing(world.island, config.overlap)
        self._membership: Membership | None = None  # of the first rank
        self._watch: Watch | None = None
        self._pace = Pace()
        self._store: Any = None  # a store for ranks of other islands
        self._openings: list[Opening] = []
        self._in_force = -1  # the number of the epoch of the next exchange
        self._jump = 0  # the iteration to go on with; 0: the next one
        self._broken = -1  # the number of the newest epoch that this rank cannot exchange in any more
        self._silent = (
            self._abandoned
        ) = -1  # the newest one in which a member was silent, or gone; until which that is dealt with
        self._maimed = -1  # the newest one in which this rank does without a member
        self._visits = 0  # how often means have set each element of a listener, on all ranks, at least
        self._begun = 0  # how often this island has begun to listen
        # To ask for a copy and get one takes a few answers of the rendezvous, and an exchange of who is asked.
        self._rejoining = Rejoining(world.island, world.rank, config.island_patience + 4 * config.island_poll)
        self._copied: tuple[Copy, Member] | None = None  # to be put before the next iteration
        self._requests: list[Request] = []  # for copies of this island
        self._served = 0  # that were made
        folder = None if config.delivery_log is None else config.jobs().folder(config.delivery_log, world.island)
        self._diary = Diary(world.island, None if world.rank else folder)

    def attach(self, run: Any) -> None:
        super().attach(run)
        run.observers.append(self._diary)

    # --- who is there ----------------------------------------------------------------------------------------------

    def catch_up(self, iteration: int) -> int:
        """See :meth:`.JobGroup.catch_up`."""
        if not self._entered:
            return self._enter(iteration)
        jump, self._jump = self._up_to_the_last(self._jump), 0
        if jump > iteration:
            self._miss(jump)
        self._take_copy(max(jump, iteration))
        return max(jump, iteration)

    def _up_to_the_last(self, iteration: int) -> int:
        """``iteration``, or the last one of the run, which evaluates and saves."""
        return iteration if self._run.steps is None else min(iteration, self._run.steps - 1)

    def begin_iteration(self) -> None:
        """See :meth:`RankIslands.begin_iteration`. Raises :class:`UsageError` in a program that never catches up."""
        if not self._entered:
            why = "needs a training loop that can go on at a later iteration: python -m megatron_lossy.train, or megatron.training"
            raise refuse("--rendezvous", self.config.rendezvous, why)
        self._standing.begins(time.monotonic(), self.config.island_patience)
        super().begin_iteration()

    def _enter(self, iteration: int) -> int:
        """Take part in a first epoch. Returns the iteration of the run. A collective call of the ranks of the island."""
        self._entered = True
        placed, furthest = self._first(iteration)
        self._open(placed)
        began = self._up_to_the_last(self._iteration_of(furthest))
        epoch = placed.epoch
        loaded = self._standing.slot.listens
        self._standing.enter(epoch, own=iteration > 0 or began <= iteration)
        self._standing.slot.sent = iteration
        if self._standing.slot.listens:
            self._begin_to_listen(keep=loaded)
        if epoch.first <= self._exchange_of(max(iteration, began)) + 1:
            self._in_force = placed.number
            self._openings[-1].among(placed.heard_within + 3 * self.config.island_patience)  # all begin with it
        if self._standing.slot.listens:
            logger.warning(
                "island %d: the run is at iteration %d and this island at %d; it listens until %s",
                self._slot,
                max(began, iteration),
                iteration,
                "it has copied another one" if self._rejoining.question else "means have set its weights",
            )
        self._diary.note("enters", at=iteration, run=max(began, iteration))
        if began > iteration:
            self._miss(began)
            return began
        return iteration

    def _first(self, iteration: int) -> tuple[Placed, int]:
        """A first epoch, and the latest exchange of the run. Others may be long in coming: no call waits for that."""
        said: list[Any] = [None]
        while said[0] is None:
            if self.world.rank == 0:
                try:
                    said = [self._ask(iteration)]
                except UsageError as error:
                    said = [str(error)]
            dist.broadcast_object_list(said)
        if isinstance(said[0], str):
            raise UsageError(said[0])
        return said[0]

    def _ask(self, iteration: int) -> tuple[Placed, int] | None:
        """The same on the first rank; ``None``: not yet."""
        if self._membership is None:
            self._begin_to_ask(iteration)
        assert self._membership is not None and self._watch is not None
        patience = max(self.config.island_join, LEAST_WAIT)
        placed = self._membership.first(self._watch.check, min(_ROUND, max(patience - self._watch.silent_for, 1.0)))
        if placed is None:
            if self._watch.why and self._watch.silent_for >= patience:
                why = f"no answer for {self._watch.silent_for:.0f} s (--island-join {self.config.island_join:g}): {self._watch.why}"
                raise refuse("--rendezvous", self.config.rendezvous, why)
            return None
        return placed, max(self._membership.furthest, self._exchange_of(iteration))

    def _begin_to_ask(self, iteration: int) -> None:
        config = self.config
        self._diary.check()
        host = _address_towards(addresses_of(config.rendezvous or ""))
        self._store = dist.TCPStore(host, 0, None, True, timedelta(seconds=60), wait_for_workers=False)
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
            (host, self._store.port),
            begun,
            keep,
        )
        membership.begin(self._exchange_of(iteration), config.island_join, self._standing.role)
        self._watch = Watch(rendezvous, config.island_poll, membership.tell, membership.hear)

    def _what(self) -> dict[str, Any]:
        """The flags that all islands must share, by name."""
        # Saving the mean changes no run, but it takes all.
        found = {**identity(self.config), "save_consensus": self.config.save_consensus}
        return {"--seed": self.world.seed, **self.world.alike} | texts_by_flag(self.config, found)

    def _layout(self) -> list[Any]:
        return [self.world.size, [vector.size for vector in self._vectors]]

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
        self._openings.append(Opening(placed, self._slot, self._opener))

    @functools.cached_property
    def _opener(self) -> Opener:
        engine = None
        if self.config.observed:
            from ....transport.ends import end_for

            engine = end_for(self.config, _address_towards(addresses_of(self.config.rendezvous or "")))
        most = [rounds.subset.most for rounds in self._built()]
        return Opener(self.config, self._slot, self.world.rank, most, engine, self._does_without)

    def _carried(self, exchange: int) -> Among | None:
        """The epoch that ``exchange`` is made in: that in force, or, as long as that is not open, the one before.

        One that is not ready, or of which an exchange was left out, is given up.
        """
        if self._in_force < 0:
            return None
        opening, before = self._openings[self._in_force], self._current
        among = opening.among()
        if among is not None and not among.broken and among.reach(exchange):
            return among
        opening.abandon()
        self._broken = max(self._broken, self._in_force)
        if before is None or before is among or before.broken or not before.reach(exchange):
            return None
        return before

    def _broke(self, among: Among, why: str, waited: float) -> None:
        if not among.broken:
            self._diary.note("lost contact", epoch=list(among.epoch.key), seconds=round(waited, 3), why=why)
            logger.warning(
                "island %d: lost contact (%s); until others meet again its messages count as lost", self._slot, why
            )
            among.close()
        numbers = [number for number, one in enumerate(list(self._openings)) if one.among() is among]
        self._broken = max(self._broken, *numbers)
        # A connection that is closed costs nothing, and the next epoch may be fine.
        if waited >= self.config.island_patience:
            self._silent = max(self._silent, *numbers)

    def _does_without(self, placed: Placed, slot: int, why: str, waited: float, left: bool) -> None:
        """On a thread: nothing of ``slot`` arrives any more in the epoch ``placed``. ``waited``: seconds until that was known.

        ``left``: it has left the epoch by itself, and may be in a later one.
        """
        among = self._openings[placed.number].among()
        if among is None or among.over or not among.do_without(slot):  # another lane has said it
            return
        life = next(one for one in placed.epoch.lives if one[0] == slot)
        numbers = [placed.number]
        for later in self._openings[placed.number + 1 :]:  # which count on it: nobody is waited for twice
            if not left and life in later.placed.epoch.lives:
                later.do_without(slot)
                numbers.append(later.placed.number)
        epoch = list(placed.epoch.key)
        self._diary.note("lost contact", epoch=epoch, with_island=slot, seconds=round(waited, 3), why=why)
        logger.warning(
            "island %d: lost contact with island %d (%s); until they meet again its messages count as lost",
            self._slot,
            slot,
            why,
        )
        self._maimed = max(self._maimed, *numbers)

    def _miss(self, now: int) -> None:
        """The run has made ``now`` iterations without this island: exchanges under way are lost, and replicas begin equal."""
        self._settle()
        self._gather()
        under_way = {flight.number for rounds in self._built() for flight in rounds.flights}
        self._diary.note("gave up", exchanges=sorted(under_way), now=now)
        for rounds in self._built():
            rounds.give_up()
        was = self._standing.slot.listens
        self._standing.begins(
            time.monotonic(), self.config.island_patience
        )  # the last iteration may have been the long one
        still = [self._standing.stood_still]
        dist.broadcast_object_list(still)  # of the first rank: clocks of ranks differ
        self._standing.stood_still = still[0]
        if self._standing.behind(now, self.config.keep):
            self._begin_to_listen(keep=was)

    def _begin_to_listen(self, keep: bool = False) -> None:
        """Be in no mean for a while, and ask for a copy. ``keep``: it has listened before, and goes on with it."""
        if not keep:
            self._restart()
            self._diary.note("listens")
        if self.config.rejoin == "copy" and self._rejoining.question is None:
            self._rejoining.begin(self._openings[-1].placed)
            self._tell_question()

    def _restart(self) -> None:
        self._begun, self._visits = self._begun + 1, 0
        for rounds in self._built():
            rounds.restart(0)

    def _tell_question(self) -> None:
        if self._membership is not None:
            self._membership.ask(self._rejoining.question)

    def _take_copy(self, now: int) -> None:
        """Put the copy that has come, after ``now`` iterations of the run. A collective call of the ranks of the island."""
        if self._copied is None or self._copied[0].made > now:  # of one that is ahead
            return
        (copy, source), self._copied = self._copied, None
        slot = self._standing.slot
        if not slot.listens:
            logger.warning("island %d: means were quicker than the copy of island %d", self._slot, source.slot)
            return
        self._settle()
        put_state(self._vectors, self._inner, copy.values)
        self._gather()
        self._restart()
        self._run.begin_equal()
        self._standing.copied(copy.made, now, self.config.keep)
        self._diary.note("copied", island=source.slot, made=copy.made, digest=copy.digest)
        logger.warning(
            "island %d: has copied island %d as of iteration %d, rank %d %s%s",
            self._slot,
            source.slot,
            copy.made,
            self.world.rank,
            copy.digest,
            "; it listens until means have set its weights" if slot.listens else "",
        )

    # --- an iteration ----------------------------------------------------------------------------------------------

    def begin_stopping(self, signal: int) -> Callable[[], int]:
        """See :meth:`.JobGroup.begin_stopping`. Other islands go on."""
        return self.begin_agreeing(signal, self._run.iteration + 1)

    def begin_agreeing(self, signal: int, made: int) -> Callable[[], int]:
        """Begin to agree on what the first rank knows. ``made``: iterations that are over before what is agreed on holds.

        Returns a function that waits for the largest ``signal`` of all ranks. A collective call of the ranks of the island.
        """
        # What may have come meanwhile is asked for last: an epoch in force is known.
        ahead, following = self._ahead(made), self._next(made)
        begun, requests = self._begun, [] if self._membership is None else self._membership.requests
        coming = range(self._in_force + 1, len(self._openings))
        unmet = max((number for number in coming if self._openings[number].failed), default=-1)
        epochs = [self._last_known(), following, self._broken, unmet, self._silent, self._maimed]
        said = np.array(
            [signal, *epochs, ahead, -self._visits_here(), len(requests), *self._rejoining.said], dtype=np.int64
        )
        known = to_device(said, device.current_device())
        work = dist.all_reduce(known, dist.ReduceOp.MAX, async_op=True)

        def finish() -> int:
            work.wait()
            told = map(int, Fetched(known).wait().tolist())
            number, latest, in_force, broken, unmet, silent, maimed, jump, visits, requests, failed, came = told
            if begun == self._begun:
                self._visits = -visits
            self._learn(latest)
            self._learn_requests(requests)
            self._copied = self._rejoining.agreed(failed, came) or self._copied
            self._tell_question()
            # On some rank: the others would never hear of it. Who waited until an epoch that nobody can open begins would wait in vain.
            self._give_up([self._openings[one] for one in (broken, unmet) if one >= 0])
            if silent > self._abandoned:  # nobody is waited for twice
                there = set(self._openings[silent].placed.epoch.lives)
                later = self._openings[silent + 1 :]
                self._give_up([one for one in later if there <= set(one.placed.epoch.lives)])
                self._abandoned = silent
            if maimed >= 0 and self._membership is not None:
                self._membership.does_without(self._openings[maimed].placed.epoch)
            self._in_force, self._jump = in_force, jump
            return number

        return finish

    def _give_up(self, openings: Sequence[Opening]) -> None:
        """Exchange in none of ``openings``."""
        for one in openings:
            one.abandon()
            if self._membership is not None:
                self._membership.breaks(one.placed.epoch)

    def _last_known(self) -> int:
        if self._watch is not None:
            self._watch.check()
        return -1 if self._membership is None else self._membership.latest

    def _next(self, made: int) -> int:
        """The number of the epoch of the first exchange after ``made`` iterations."""
        return -1 if self._membership is None else self._membership.in_force(self._exchange_of(made) + 1)

    def _ahead(self, now: int) -> int:
        """The iteration of the run, if it has gone on without this island, which has made ``now``; else 0.

        Who is no more behind than others wait for it leaves no iteration out.
        """
        if self._membership is None:
            return 0
        config = self.config
        run = self._iteration_of(self._membership.furthest)
        late = (run - now) / config.sync_interval * self._membership.seconds > config.island_patience
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
            if among is not None and among is not self._current and opening not in self._openings[used:]:
                among.retire()

    def _learn_requests(self, count: int) -> None:
        """Learn the first ``count`` requests for copies. A collective call of the ranks of the island, if there are new ones."""
        if count > len(self._requests):
            said: list[Any] = [None]
            if self._membership is not None:
                said = [self._membership.requests[:count]]
            dist.broadcast_object_list(said)
            self._requests = said[0]

    def end_iteration(self) -> None:
        """See :meth:`RankIslands.end_iteration`. Who asked for a copy gets that of an exchange."""
        super().end_iteration()
        now = self._run.iteration + 1
        if now % self.config.sync_interval or self._served == len(self._requests):
            return
        self._settle()
        for request in self._requests[self._served :]:
            values = held_state(self._vectors, self._inner)
            self._rejoining.serve(request, self._openings[-1].placed, values, now)
        self._served = len(self._requests)

    def _exchange(self, number: int, *arguments: Any) -> None:
        now = self._run.iteration + 1
        if not number:
            self._standing.slot.made += 1
        begins = now % self.config.sync_interval == 0
        if begins and not number:
            if self._standing.may_send(self._visits):
                self._diary.note("may send")
            lag = max(self._standing.slot.lag(now), 0)
            if self._membership is not None:
                before = self._current
                met = before.epoch if before is not None and before.together else None
                self._standing.exchanges(met is not None)
                self._membership.note(
                    self._exchange_of(now), self._standing.role, lag, met, self._pace.kept, self._standing.stood_still
                )
            self._current = self._carried(self._exchange_of(now))
            others = self._current is not None and not self._current.alone
            if self._membership is not None:
                waits = self._current is not None and self._current.waits
                if not (waits or self._membership.alone):  # others are elsewhere, do without it, or only listen
                    ahead, little = self._membership.ahead(self._exchange_of(now)), self.config.island_patience / 4
                    time.sleep(self._pace.wait(time.monotonic(), ahead, self._membership.pace, little))
                self._pace.begins(time.monotonic(), waits)
            epoch = self._current.epoch if others else None
            self._diary.begin(self._exchange_of(now), now, epoch, lag)
        among = self._current
        self._standing.members = [] if among is None else [0]
        super()._exchange(number, *arguments)
        if begins and among is not None and not among.broken and not among.alone and among.place is not None:
            self._standing.sent(now)

    @property
    def _stopping(self) -> Stopping:  # type: ignore[override]
        return Stopping()

    def leave(self) -> None:
        """The others need not wait until a death is noticed."""
        self._end()

    # --- building --------------------------------------------------------------------------------------------------

    def _crossing(self, number: int, subset: Subset) -> BetweenRanks:
        group = tensor_group(expert=False)
        return BetweenMembers(
            self.config,
            subset.stream,
            self._slot,
            self._run.steps,
            self._tell,
            shard=number,
            among=lambda: self._current,
            breaks=self._broke,
            loses=self._diary.lost,
            agrees=None if group is None else partial(_same_everywhere, group),
        )

    def _make_rounds(self, *arguments: Any) -> Rounds[BetweenRanks]:
        return MemberRounds(*arguments, presence=self._standing)

    def _visits_here(self) -> int:
        """The least number of times that means have set an element of this rank since the island began to listen."""
        if not self._standing.slot.listens:
            return _ENOUGH
        return min((rounds.visits(0) for rounds in self._built()), default=_ENOUGH)

    @property
    def carriers(self) -> Sequence[Any]:
        return [self._opener.links] if self.config.observed and self._entered else []

    # --- weights and saved state -----------------------------------------------------------------------------------

    def _means(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """The means of ``shards`` over the islands that send; ``None`` for who listens, and if they do not meet."""
        among = self._current
        total = None if among is None else among.total
        found: list[torch.Tensor] | None = None
        if among is not None and total is not None:
            try:
                found = [total(shard) / len(among.senders) for shard in shards]
            except (RuntimeError, dist.DistError) as error:
                logger.warning(
                    "island %d: no mean of all islands' weights (%s); its own are in its place",
                    self._slot,
                    first_line(error),
                )
        everywhere = torch.tensor([int(found is not None)], device=device.current_device())
        dist.all_reduce(everywhere, dist.ReduceOp.MIN)
        if everywhere.item():
            return found
        if among is not None:
            among.total = None  # others, which are out of step now, see that
        return None

    @property
    def _writes_consensus(self) -> bool:
        return self._current is not None and self._current.place == 0

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
        self._diary.finish()

    def _end(self) -> None:
        """Wait for the threads of islands: one that is in a library when the interpreter ends can end the process with an error."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self._rejoining.end()
        for opening in self._openings:  # all at once, and then one after another
            opening.abandon()
        for opening in self._openings:
            opening.end()


def _same_everywhere(group: dist.ProcessGroup, number: int) -> bool:
    """Whether all ranks of ``group`` have the same ``number``, of at least 0. A collective call."""
    known = torch.tensor([number, -number], device=device.current_device())
    dist.all_reduce(known, dist.ReduceOp.MAX, group=group)
    most, least = known.tolist()
    return bool(most == -least >= 0)


def _address_towards(urls: Sequence[str]) -> str:
    """The address of this host from which one of ``urls`` is reached, the first that can be."""
    name, whys = os.environ.get("GLOO_SOCKET_IFNAME"), []
    if name:
        from ....transport.address import find_address

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
