"""Islands of real ranks that come and go: each is a launch of its own (docs/elastic.md).

The first rank polls the store of the run, on a thread. At the end of each iteration the ranks of the island agree on its state: the newest
entry of the list of epochs, and whether the run has gone on without this island. So all change at one exchange, without a
wait for an answer.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import signal as signals
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...base import device
from ...base.errors import STOPPED, UsageError, refuse
from ...base.fetch import PendingArray
from ...base.flags import identity, texts_by_flag
from ...config import LossyConfig
from ...recovery.rows import to_device
from ...transport.network import read_key_file
from . import first_rank, unequal
from .between_ranks import RankExchanges
from .carrying import EpochView, Lane
from .connections import Connections
from .copying import Rejoining, held_state, put_state, source_of
from .first_rank import FirstRank, LostSlot
from .membership.messages import Entry, slot_of
from .membership.protocol import Local
from .membership.store import check_url, open_store
from .monitor import Diary
from .ranks import RankIslands
from .rounds import MANY, MemberRounds, Rounds, Standing
from .vector import Subset, Vector
from .world import ElasticWorld

logger = logging.getLogger(__name__)

#: Seconds after which the ranks of an island that waits for others look up: less than any timeout of theirs.
_ROUND = 20.0
#: Sums of whole weights in one iteration, at most.
_SUMS = 4
#: Exchanges that the time from one to the next is taken from.
_RECENT = 20


class ElasticIslands(RankIslands):
    """The exchanges of this rank with the same rank of whichever islands are there. ``world``: open by the first iteration."""

    total = None  # type: ignore[assignment]

    def __init__(self, config: LossyConfig, world: ElasticWorld) -> None:
        super().__init__(config, world)  # type: ignore[arg-type]
        self._slot = world.island
        self._entered = False  # the run
        self._current: EpochView | None = None  # the epoch of the latest exchange, if this island is in one
        self._standing = Standing(config)
        self._connections: Connections | None = None  # none on a rank that exchanges nothing
        self._known: list[tuple[Entry, str]] = []  # entries, by all ranks, and the roles in them
        self._taken_up = 0  # how many of them
        self._served = -1  # the number of the latest one in which copies were sent
        self._jump = 0  # the iteration to go on with; 0: the next one
        self._visits = 0  # how often means have set each element of a listener, on all ranks, at least
        self._begun = 0  # how often this island has begun to listen
        self._rejoining = Rejoining(world.island, world.rank, config.island_patience)
        self._copied = -1  # the number of the epoch whose copy has come to all ranks
        self._logged = self._loss = 0.0  # the training loss, as this rank has it, and as any rank
        self._signal = 0  # that ends this island before the end of the run
        self._replaced = 0  # whether a later start has the slot
        self._sums = (-1, 0)  # an iteration, and the sums of whole weights in it, less one
        folder = None if config.delivery_log is None else config.jobs().folder(config.delivery_log, world.island)
        self._diary = Diary(world.island, None if world.rank else folder)
        self._first_rank: FirstRank | None = None
        self._at: float | None = None  # when the latest exchange began
        self._took: deque[float] = deque([first_rank.TIMES.poll], maxlen=_RECENT)

    def attach(self, run: Any) -> None:
        super().attach(run)
        run.observers.append(self._diary)
        run.events.on(logged=self._log)

    def _log(self, loss: float) -> None:
        self._logged = loss if math.isfinite(loss) else 0.0

    # --- presence ------------------------------------------------------------------------------------------------

    def catch_up(self, iteration: int) -> int:
        """See :meth:`.JobGroup.catch_up`."""
        if not self._entered:
            self._enter(iteration)
        jump, self._jump = self._up_to_the_last(self._jump), 0
        now = max(jump, iteration)
        if self._taken_up < len(self._known):
            now = self._take_up(now)  # one that is ahead of the run waits in there, and is not ready
            self._taken_up = len(self._known)
        if now > iteration:
            self._miss(now)
        self._take_copy(now)
        return now

    def _up_to_the_last(self, iteration: int) -> int:
        """Return ``iteration``, or the last one of the run, which evaluates and saves."""
        return iteration if self._run.steps is None else min(iteration, self._run.steps - 1)

    def begin_iteration(self) -> None:
        """See :meth:`RankIslands.begin_iteration`. Raise :class:`UsageError` in a program that never catches up."""
        if not self._entered:
            why = "needs a loop that can go on at a later iteration: python -m megatron_lossy.train, megatron.training, or one that calls catch_up()"
            raise refuse("--rendezvous", self.config.rendezvous, why)
        super().begin_iteration()

    def _enter(self, iteration: int) -> None:
        """Wait for a first entry. A collective call of the ranks of the island."""
        self._entered = True
        config, world = self.config, self.world
        self._diary.check()
        drawn = [f"{self._slot}/{secrets.token_hex(4)}"]
        dist.broadcast_object_list(drawn)
        [me] = drawn
        url, key = config.rendezvous or "", read_key_file(config.udp_key_file)
        [(towards, _), *_], *_ = check_url(url)
        most, ranks = [rounds.subset.most for rounds in self._rounds], config.sync_ranks or world.size
        if world.rank < ranks:
            every, store = first_rank.TIMES.poll, open_store(url, key)
            self._connections = Connections(config, store, me, world.rank, ranks, most, towards, every)
            self._carriers.append(self._connections)
        self._standing.enter(iteration)
        if world.rank == 0:
            self._first_rank = FirstRank(self, me, open_store(url, key), iteration)
            self._first_rank.begin()
        self._learn(self._wait_for(lambda first: first.begins))
        self._diary.note("enters", at=iteration, run=self._known[-1][0].first * config.sync_interval)

    def _wait_for(self, there: Callable[[FirstRank], Any]) -> Any:
        """Return ``there()`` of the first rank, once it is not ``None``. No call waits for that."""
        said: list[Any] = [None]
        while said[0] is None:
            first, until = self._first_rank, time.monotonic() + _ROUND
            if first is not None:
                try:
                    while (said := [there(first)])[0] is None and time.monotonic() < until:
                        time.sleep(0.05)
                except UsageError as error:
                    said = [error]
            dist.broadcast_object_list(said)
            if isinstance(said[0], UsageError):
                raise said[0]
        return said[0]

    def _learn(self, found: Sequence[tuple[Entry, str]]) -> None:
        """Learn entries and the roles in them, on all ranks."""
        self._known += found
        if self._connections is not None:
            for entry, _ in found:
                self._connections.among(entry)

    def _take_up(self, made: int) -> int:
        """Take part in the newest entry after ``made`` iterations. Return the iteration to go on with. A collective call."""
        number, (entry, role) = len(self._known) - 1, self._known[-1]
        run = self._up_to_the_last(entry.first * self.config.sync_interval)
        if role == "sends":
            self._standing.slot.own, self._standing.slot.listens = True, False
            return made
        now = max(made, run)
        if self._standing.joins(now, self.config.keep):
            self._restart()
            self._diary.note("listens")
            logger.warning(
                "island %d: the run is at iteration %d and this island at %d; it listens until %s",
                *(self._slot, run, made),
                "it has copied another one" if self.config.rejoin == "copy" else "means have set its weights",
            )
        if self.config.rejoin == "copy" and self._connections is not None:
            senders = [slot_of(member) for member in entry.senders]
            source = source_of(self._slot, senders, self.config.islands)
            self._rejoining.receive(self._connections.among(entry)[source], number)
        exchange = now // self.config.sync_interval
        self._wait_for(lambda first: first.near(exchange, entry) or None)
        return now

    def _miss(self, now: int) -> None:
        """Note that the run made ``now`` iterations without this island: drop exchanges under way, begin equal."""
        self._settle()
        self._gather()
        under_way = {flight.number for rounds in self._rounds for flight in rounds.flights}
        self._diary.note("gave up", exchanges=sorted(under_way), now=now)
        for rounds in self._rounds:
            rounds.give_up()

    def _restart(self) -> None:
        self._begun, self._visits = self._begun + 1, 0
        for rounds in self._rounds:
            rounds.restart(0)

    def _take_copy(self, now: int) -> None:
        """Put the copy that has come, after ``now`` iterations of the run. A collective call of the ranks of the island."""
        if self._copied < 0:
            return
        slot, copies = self._standing.slot, self._rejoining.copies
        if self.config.sync_ranks is not None:  # some ranks have no part of it
            found = copies.get(self._copied)
            shared = [found and (found[0]._replace(values={}), found[1])]
            dist.broadcast_object_list(shared)
            copies.setdefault(self._copied, shared[0])
        if copies[self._copied][0].made > now:  # of one that is ahead
            return
        copy, source = self._rejoining.take(self._copied)
        self._copied = -1
        if not slot.listens:
            logger.warning("island %d: its weights were the run's before the copy of island %d", self._slot, source)
            return
        self._settle()
        put_state(self._rounds, self._inner, copy.values)
        self._gather()
        self._restart()
        self._run.begin_equal()
        self._standing.copied(copy.made, now, self.config.keep)
        self._diary.note("copied", island=source, made=copy.made, digest=copy.digest)
        listens = "; it listens until means have set its weights" if slot.listens else ""
        own = f"island {self._slot}: has copied island {source} as of iteration {copy.made}, rank {self.world.rank}"
        logger.warning("%s %s%s", own, copy.digest, listens)

    # --- an iteration ------------------------------------------------------------------------------------------------

    def begin_stopping(self, signal: int) -> Callable[[], int]:
        """See :meth:`.JobGroup.begin_stopping`. Other islands go on."""
        return self.begin_agreeing(signal, self._iteration + 1)

    def begin_agreeing(self, signal: int, made: int) -> Callable[[], int]:
        """Begin to agree on the state of the first rank. ``made``: iterations that are over before what is agreed on holds.

        Return a function that waits for the largest ``signal`` of all ranks. A collective call of the ranks of the island.
        """
        first, begun, came = self._first_rank, self._begun, self._rejoining.came
        least = MANY if self._connections is None else came  # many on a rank that has no part of a copy
        known, jump = (0, 0) if first is None else (len(first.found), first.jump(made // self.config.sync_interval))
        replaced = first is not None and first.ends is not None
        if replaced:
            signal = signal or signals.SIGTERM
        # As bits, of which the largest are those of the largest loss. Only the last pipeline stage may have one.
        loss = int(np.float64(self._logged).view(np.int64))
        built = self._rounds if self._standing.slot.listens else []
        visits = min((rounds.visits(0) for rounds in built), default=MANY)  # of an element here by means
        said = np.array([signal, replaced, known, jump, -visits, came, -least, loss], dtype=np.int64)
        all_said = to_device(said, device.current_device())
        work = dist.all_reduce(all_said, dist.ReduceOp.MAX, async_op=True)

        def finish() -> int:
            work.wait()
            agreed = map(int, PendingArray(all_said).wait().tolist())
            self._signal, self._replaced, known, jump, visits, came, least, loss = agreed
            self._loss = float(np.int64(loss).view(np.float64))
            if begun == self._begun:
                self._visits = -visits
            if known > len(self._known):
                found: list[Any] = [None if first is None else first.found[len(self._known) : known]]
                dist.broadcast_object_list(found)
                self._learn(found[0])
            self._jump = jump * self.config.sync_interval
            self._copied = came if came == -least else -1
            return self._signal

        return finish

    def _among(self, exchange: int) -> EpochView | None:
        """Return the epoch that ``exchange`` is made in: the newest that has begun."""
        begun = [number for number, (entry, _) in enumerate(self._known) if entry.first <= exchange]
        if not begun:
            return None
        entry, _ = self._known[begun[-1]]
        if self._current is not None and self._current.number == begun[-1]:
            return self._current
        if self._connections is not None:
            self._connections.keep([entry for entry, _ in self._known[begun[-1] :]])
        return EpochView(entry, begun[-1], self._slot, self._connections, self._diary)

    def end_iteration(self) -> None:
        """See :meth:`RankIslands.end_iteration`. A copy of this island gets its state as of an exchange."""
        super().end_iteration()
        now, among = self._iteration + 1, self._current
        if now % self.config.sync_interval or among is None or among.place is None:
            return
        if among.number <= self._served or self.config.rejoin != "copy":
            return
        self._served = among.number
        listeners = [slot for slot in among.epoch.slots if slot not in among.senders]
        mine = [slot for slot in listeners if source_of(slot, among.senders, self.config.islands) == self._slot]
        if mine:
            self._settle()
            state = held_state(self._rounds, self._inner)
        for slot in mine if self._connections is not None else ():
            self._rejoining.serve(among.pairs[slot], state, now)

    def _exchange(self, number: int, *arguments: Any) -> None:
        now = self._iteration + 1
        exchange, left = divmod(now, self.config.sync_interval)
        if not number:
            self._standing.slot.made += 1
        if not left and not number:
            if self._standing.may_send(self._visits):
                self._diary.note("may send")
            began, self._at = self._at, time.monotonic()
            if began is not None:
                self._took.append(self._at - began)
            self._current = self._among(exchange - 1)
            epoch = None if self._current is None or self._current.alone else self._current.epoch
            self._diary.begin(exchange - 1, now, epoch, max(self._standing.slot.lag(now), 0))
        among = self._current
        self._standing.members = [] if among is None else [0]
        super()._exchange(number, *arguments)
        if not left and among is not None and not among.alone and among.place is not None:
            self._standing.sent(now)

    def local(self) -> Local:
        """Return the state of this island, for the store. Called on a thread of the first rank."""
        assert self._connections is not None and self._first_rank is not None
        slot, now = self._standing.slot, self._iteration
        attempt, connected = self._connections.connected
        since = time.monotonic() - first_rank.TIMES.silent
        return Local(
            unix=time.time(),
            iteration=max(now, self._first_rank.began),
            exchange=max(now, self._first_rank.began) // self.config.sync_interval,
            interval=self.config.sync_interval,
            seconds=median(list(self._took)),
            ready=0 < self._taken_up == len(self._first_rank.found) and not slot.listens,
            received={pair.other for pair in self._connections.pairs if pair.received > since},
            attempt=attempt,
            connected=connected,
            shown={
                "lag": max(slot.lag(now), 0),
                "loss": self._loss,
                "lost": self._diary.lost,
                "event": self._diary.latest,
            },
        )

    def leave(self) -> None:
        """The others need not wait until a death is noticed.

        Raise :class:`LostSlot` if another island has the slot, and :class:`SystemExit` if a signal came before the end of the run.
        """
        ends = None if self._first_rank is None else self._first_rank.ends
        self._end()
        if self._replaced:
            raise ends or LostSlot(f"--island {self._slot}: a later start has taken this slot")
        if self._signal and self._iteration != self._run.steps:
            raise SystemExit(STOPPED)

    # --- building ----------------------------------------------------------------------------------------------------

    def _crossing(self, number: int, subset: Subset) -> RankExchanges:
        def lane(exchange: int) -> Lane:
            return Lane(self.config, self._current, self._slot, number, exchange, self._diary)

        return RankExchanges(self.config, subset.stream, self._slot, lane, self._run.steps, self._tell)

    def _vector(self, optimizer: Any) -> Vector:
        ranks = self.config.sync_ranks
        if ranks is None:
            return super()._vector(optimizer)
        return unequal.PartVector(optimizer, ranks, optimizer.buffers[0].data_parallel_group, self._run.device)

    def _make_rounds(self, *arguments: Any) -> Rounds:
        return MemberRounds(*arguments, presence=self._standing)

    # --- weights and saved state -------------------------------------------------------------------------------------

    def _means(self, shards: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        """Return the means of ``shards`` over the senders; ``None`` on listeners, and if islands do not meet."""
        # Islands that have left some out have the same numbers.
        made, count = self._sums
        self._sums = made, count = self._iteration, count + 1 if made == self._iteration else 0
        found = None if self._current is None else self._current.means(shards, made * _SUMS + count)
        everywhere = torch.tensor([int(found is not None)], device=device.current_device())
        dist.all_reduce(everywhere, dist.ReduceOp.MIN)
        return found if everywhere.item() else None

    @property
    def _writes_consensus(self) -> bool:
        return self._current is not None and self._current.place == 0

    def rewind(self, folder: str) -> str | None:
        return None

    def restart(self, iteration: int) -> None:
        """Do nothing: islands save by themselves, each at its own iteration."""

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
        if self._first_rank is not None:
            self._first_rank.close()
            self._first_rank = None
        self._rejoining.end()
        if self._connections is not None:
            self._connections.close()

    # --- the flags ---------------------------------------------------------------------------------------------------

    def flags(self) -> dict[str, Any]:
        """Return the flags that all islands must share, by name, and the layout of ranks."""
        # Saving the mean changes no run, but it takes all.
        found = {**identity(self.config), "save_consensus": self.config.save_consensus}
        layout: list[Any] = [self.world.size, [rounds.subset.size for rounds in self._rounds]]
        if self.config.sync_ranks is not None:
            whole = map(unequal.parameters_of, self._exchanging)
            layout = [list(parameter.shape) for parameters in whole for parameter in parameters]
        texts = {"--seed": self.world.seed, **self.world.alike, **texts_by_flag(self.config, found)}
        return {name: str(value) for name, value in texts.items()} | {"layout": json.dumps(layout)}
