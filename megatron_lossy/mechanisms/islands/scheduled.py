"""Islands of real ranks that come and go by ``--island-schedule`` (docs/islands.md#islands-that-come-and-go).

All processes run all the time. Each computes from the file who is there, and one whose island is away sits iterations out. What only
one island knows, all get to know in each iteration: so all are in lockstep, and come to the weights of islands in one process, which are
its twin (:mod:`.virtual_churn`), bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from ...base import device
from ...base.errors import refuse
from ...base.exchange import Delivery
from ...base.fetch import Fetched
from ...config import LossyConfig
from ...recovery import copies
from ...run.monitor import Observer
from .carrying import Among, Lanes
from .churn import Churn, of_all_slots
from .copying import ASKER, SOURCE, GlooPair, Held, receive_copy, send_copy
from .epoch_log import EpochLog
from .epochs import Epoch
from .member_islands import ENOUGH, MemberIslands
from .presence import Presence, Return, Slot
from .rank_state import held_state, put_state
from .schedule import FLAG
from .world import IslandWorld


class Own:
    """``presence`` as it concerns the island ``slot`` alone, which is number 0 here."""

    def __init__(self, presence: Presence, slot: int) -> None:
        self._presence, self._slot = presence, slot

    @property
    def slots(self) -> list[Slot]:
        """Those of this process."""
        return [self._presence.slots[self._slot]]

    @property
    def members(self) -> list[int]:
        """Those of this process that take part in exchanges."""
        return [number for number, one in enumerate(self.slots) if one.member]


class ScheduledIslands(MemberIslands):
    """:class:`RankIslands` of which some may be away. Raises :class:`UsageError` for a schedule that does not fit."""

    def __init__(self, config: LossyConfig, world: IslandWorld) -> None:
        super().__init__(config, world)
        self._slot = world.island
        logs = config.delivery_log is not None and not world.launched_rank
        self._log = EpochLog(str(config.delivery_log)) if logs else None
        self._ended = -1  # the iteration that presence has been told the end of
        self._visits = [ENOUGH] * config.islands  # by island, how often means have set each element, at least
        self._opened: list[Among] = []

    def attach(self, run: Any) -> None:
        super().attach(run)
        self.churn = Churn(self.config, run.steps, None if self._log is None else self._log.add)

    @property
    def observers(self) -> Sequence[Observer]:
        return [*super().observers, *([] if self._log is None else [self._log])]

    @property
    def _presence(self) -> Presence:
        return self.churn.presence

    @property
    def _member(self) -> bool:
        return self._presence.slots[self._slot].member

    # --- who is there ----------------------------------------------------------------------------------------------

    def come_and_go(self) -> bool:
        """See :meth:`Part.come_and_go`."""
        self._entered = True
        for one in self.churn.begin(self._run.iteration):
            self._bring_back(one)
        return self._presence.slots[self._slot].trains

    def begin_iteration(self) -> None:
        """See :meth:`RankIslands.begin_iteration`. Raises :class:`UsageError` in a program where nobody comes and goes."""
        if not self._entered:
            raise self._needs_loop()
        super().begin_iteration()

    def after_arguments(self, args: Any) -> None:
        """Raise :class:`UsageError`: Megatron's own loop makes every iteration."""
        raise self._needs_loop()

    def _needs_loop(self) -> Exception:
        why = "needs a training loop that can sit iterations out: python -m megatron_lossy.train"
        return refuse(FLAG, self.config.island_schedule, why)

    def _bring_back(self, one: Return) -> None:
        """Let the island of ``one`` be there again. A collective call of it and of the island that it copies."""
        copied = one.how == "copy"
        if copied and one.source == self._slot:
            self._settle()
            send_copy(self._pair(one, SOURCE), self._state(), self._run.iteration)
        if one.slot != self._slot:
            return
        if one.anew:
            for shard in self._built():
                shard.rounds.wait()
                shard.rounds.restart(0)
        if not (copied or one.idle):
            return
        self._settle()
        if copied:
            self._take(receive_copy(self._pair(one, ASKER)).values)
        self._gather()
        self._run.begin_equal()

    def _pair(self, one: Return, place: int) -> GlooPair:
        store = self.world.store(f"copy/{self._run.iteration}/{one.slot}")
        return GlooPair(store, place, timedelta(seconds=self.world.patience))

    def _state(self) -> dict[str, Held | float]:
        """The state of this rank that a copy is of: its weights, and what belongs to them."""
        beside = {
            f"{number}/rule/{name}": Held(value)
            for number, shard in enumerate(self._built())
            for name, value in shard.rounds.rule.beside(0).items()
        }
        return held_state(self._vectors, self._inner) | beside

    def _take(self, values: dict[str, torch.Tensor | float]) -> None:
        """Put ``values``, a :meth:`_state`, in the place of this rank's own."""
        put_state(self._vectors, self._inner, values)
        for number, shard in enumerate(self._built()):
            begin = f"{number}/rule/"
            beside = {
                name.removeprefix(begin): value
                for name, value in values.items()
                if name.startswith(begin) and isinstance(value, torch.Tensor)
            }
            shard.rounds.rule.take(0, beside)

    # --- an iteration ----------------------------------------------------------------------------------------------

    def begin_stopping(self, signal: int) -> Callable[[], int]:
        """See :meth:`Part.begin_stopping`. Waits for all islands, and learns whose weights means have set how often."""
        own = np.array([signal, -self._visits_here()], dtype=np.int64)
        known = copies.to_device(own, device.current_device())
        dist.all_reduce(known, dist.ReduceOp.MAX)  # of this island's ranks
        with self._waiting():
            everyone = self._control.all_gather(torch.from_numpy(Fetched(known).wait()))
        self._visits = (-everyone[:, 1]).tolist()
        number = int(everyone[:, 0].max())
        return lambda: number

    def end_iteration(self) -> None:
        """See :meth:`RankIslands.end_iteration`."""
        self._end()  # of a rank that has no weights, too
        super().end_iteration()

    def _exchange(self, number: int, *arguments: Any) -> None:
        self._end()
        if self._member:
            super()._exchange(number, *arguments)
            return
        self._built()[number].rounds.miss(self._run.iteration)
        self._made.add(number)

    def _end(self) -> None:
        """Tell presence, once, that all have trained, and take part in the epoch of the exchange that begins."""
        iteration = self._run.iteration
        if self._ended == iteration:
            return
        self._ended = iteration
        epoch = self.churn.end(iteration, self._visits.__getitem__)
        if epoch is not None and (self._current is None or self._current.epoch.id != epoch.id):
            self._enter(epoch)

    def _enter(self, epoch: Epoch) -> None:
        """Leave the epoch before, and open ``epoch`` if this island is in it. A collective call of its members."""
        if self._current is not None:
            self._current.retire()
            self._current = None
        if self._slot not in epoch.slots:
            return
        if len(epoch.slots) == 1:
            lanes = self._lanes.alone()
        else:
            store = self.world.store(f"{epoch.id}/{self._run.iteration}")
            lanes = self._lanes.open(epoch, store, self.world.patience)
        self._current = Among(epoch, self._slot, lanes)
        self._opened.append(self._current)

    @functools.cached_property
    def _lanes(self) -> Lanes:
        return Lanes(self.config, self._slot, [shard.subset.most for shard in self._built()])

    @property
    def _numbers(self) -> tuple[int, int]:
        epoch = self.churn.epoch
        return len(epoch.senders), len(epoch.slots)

    def leave(self) -> None:
        """See :meth:`RankIslands.leave`."""
        if not self._entered or not dist.is_initialized():
            return
        with self._waiting():
            for shard in self._built():
                shard.rounds.wait()
            self._control.all_gather(torch.zeros(1))
            dist.barrier()

    # --- building --------------------------------------------------------------------------------------------------

    @property
    def _own(self) -> Own:
        return Own(self._presence, self._slot)

    def _broke(self, among: Among, why: str, waited: float) -> NoReturn:
        """Raise :class:`RuntimeError`: nobody leaves for real."""
        raise RuntimeError(f"islands {among.epoch.slots}: {why}")

    def _tell(self, delivery: Delivery) -> None:
        for observer in self._run.observers:
            own = observer is self.monitor
            observer.observe(delivery if own else of_all_slots(delivery, self.config.islands))

    # --- weights and saved state -----------------------------------------------------------------------------------

    def _means(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The means of ``shards`` over the islands that send. A collective call of all islands, also of those that are away."""
        senders = self._presence.senders or self._presence.members
        with self._waiting():
            return [self._control.total(shard, senders) / len(senders) for shard in shards]

    def restart(self, iteration: int) -> None:
        """See :meth:`RankIslands.restart`. Raises :class:`UsageError` if the checkpoint has not who is there."""
        if self._entered:  # an island is back, and its replicas begin equal
            return
        super().restart(iteration)
        if iteration and not self.config.save_replicas:
            why = "who is there is in a checkpoint with --save-replicas only; give it too"
            raise refuse("--load", f"iteration {iteration}", why)

    def state_dict(self) -> Any:
        return {"rounds": super().state_dict(), "churn": self.churn.state_dict(self._run.iteration)}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state["rounds"])
        self.churn.load_state_dict(state["churn"], self._run.iteration)

    def close(self) -> None:
        super().close()
        for among in self._opened:
            among.close()
        for among in self._opened:
            among.wait_closed()
