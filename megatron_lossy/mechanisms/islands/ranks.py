"""Islands of real ranks: a rank averages its optimizer shard with the same rank of other islands (docs/islands.md).

A hook of torch's optimizer, inside of Megatron's, begins exchanges and uses their means. It runs after the update of
the float32 weights, before these are rounded into the model and gathered. If Megatron skips an update, the exchange
follows at the end of the iteration.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...base import device
from ...base.checkpoints import TRACKER, iteration_folder, latest_iteration
from ...base.device import all_gather_single
from ...base.errors import UsageError, refuse
from ...base.exchange import Delivery, Stream
from ...base.fetch import PendingArray
from ...base.files import write_text
from ...base.jobs import JobGroup
from ...config import LossyConfig
from ...hooks.buckets import buckets_by_stream, own_shard
from ...hooks.versions import data_parallel_rank, pipeline_stage, tensor_group
from ...recovery.rows import to_device
from ...run.mechanism import Part
from ...transport.peers import RankPeers
from .between_ranks import RankExchanges
from .carrying import Carrier, Collectives, IslandLink
from .flags import CONSENSUS_FOLDER
from .mean import Mean, bytes_sent
from .monitor import IslandMonitor
from .rounds import Rounds
from .vector import Places, Subset, Vector, shard_vector
from .world import IslandWorld, Stopping

#: Elements of an exchange at most, about, from which the deviation is known.
_SAMPLE = 2**16


class ExchangingRank(Part, JobGroup):
    """The exchanges of this rank with its peers in other islands. ``world``: its place among them, which makes stores and meetings."""

    name = "islands"

    def __init__(self, config: LossyConfig, world: Any) -> None:
        self.config, self.world = config, world
        self.monitor = IslandMonitor()
        self._carriers: list[Carrier] = []

    def attach(self, run: Any) -> None:
        self._run = run
        run.job_group = self
        if self.config.sync_method != "none":
            run.observers.append(self.monitor)
        run.events.on(close=self.close)

    @functools.cached_property
    def _rounds(self) -> list[Rounds]:
        """The exchanges of each vector. The first look is a collective call of all islands."""
        return [self._build(number, optimizer) for number, optimizer in enumerate(self._exchanging)]

    @property
    def _exchanging(self) -> list[Any]:
        """The optimizers of the vectors; none if islands exchange nothing."""
        raise NotImplementedError

    @property
    def _iteration(self) -> int:
        """The iterations that are over, by which exchanges are keyed."""
        return int(self._run.iteration)

    def _make_rounds(self, *arguments: Any) -> Rounds:
        """Return the exchanges of the weights of one optimizer."""
        return Rounds(*arguments)

    def _build(self, number: int, optimizer: Any) -> Rounds:
        raise NotImplementedError

    def _crossing(self, number: int, subset: Subset) -> RankExchanges:
        """Return the maker of the means of the vector ``number``. A collective call of the ranks with this place."""
        config, world = self.config, self.world
        carriers: list[Carrier] = []
        for name in (f"{number}/{lane}" for lane in range(config.lanes)):
            link = IslandLink(config, world, name, subset.most) if config.observed else Collectives(world, name)
            carriers.append(link)
        self._carriers += carriers

        def of(exchange: int) -> Carrier:
            return carriers[exchange % config.lanes]

        return RankExchanges(config, subset.stream, world.island, of, self._run.steps, self._tell)

    def _after(self, rounds: Rounds, iteration: int) -> None:
        """Make the exchanges of ``rounds`` that are due after ``iteration``."""
        count = rounds.after_iteration(iteration)
        if count is not None:
            self.monitor.exchanged(bytes_sent(self.config, count))

    @contextlib.contextmanager
    def _in_model(self, replicas: Sequence[tuple[Any, torch.Tensor]], shards: Sequence[torch.Tensor]) -> Iterator[None]:
        """Return a context with ``shards``, gathered, in the place of ``replicas``, each with the group that shards it."""
        with torch.no_grad():
            kept = [replica.clone() for _, replica in replicas]
            for (group, replica), shard in zip(replicas, shards, strict=True):
                all_gather_single(replica, shard.to(replica.device, replica.dtype), group=group)
        try:
            yield
        finally:
            with torch.no_grad():
                for (_, replica), values in zip(replicas, kept, strict=True):
                    replica.copy_(values)

    def _tell(self, delivery: Delivery) -> None:
        for observer in self._run.observers:
            observer.observe(delivery)

    @property
    def carriers(self) -> Sequence[Any]:
        return self._carriers if self.config.observed else []

    @functools.cached_property
    def _control(self) -> Collectives:
        """The carrier of exchanges that no thread makes."""
        return Collectives(self.world, "control")

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.monitor.waited(time.perf_counter() - began)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``values`` over islands. A collective call of the ranks with this place in each island."""
        with self._waiting():
            return self._control.total(values)

    def _means(self, shards: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        """Return the means of ``shards`` over islands; ``None`` if these do not meet. A collective call of all."""
        return [self.total(shard) / self.config.islands for shard in shards]

    def identity(self) -> dict[str, Any]:
        return {"islands": self.world.islands, "island": self.world.island}

    def state_dict(self) -> Any:
        """Return the state of the rules, and of the exchanges under way. Waits for these."""
        with self._waiting():
            return [rounds.state_dict() for rounds in self._rounds]

    def load_state_dict(self, state: Any) -> None:
        """Restore :meth:`state_dict`, once there is an optimizer."""
        if len(state) != len(self._rounds):
            raise UsageError(f"--sync-method {self.config.sync_method}: the checkpoint has other exchanges")
        for rounds, saved in zip(self._rounds, state, strict=True):
            rounds.load_state_dict(saved)

    def close(self) -> None:
        """End the exchanges."""
        for rounds in vars(self).get("_rounds", ()):
            rounds.crossing.close()
        for carrier in self._carriers:
            carrier.close()


class RankIslands(ExchangingRank):
    """Islands of Megatron's ranks. ``world``: open by the first iteration."""

    def __init__(self, config: LossyConfig, world: IslandWorld) -> None:
        super().__init__(config, world)
        self._hooks: list[Any] = []
        self._copies: list[Places | None] = []  # by optimizer, see :meth:`_places_of_copies`
        self._used = False  # whether a mean has changed weights
        self._made: set[int] = set()  # optimizers whose exchanges of this iteration are made
        self._iterations = 0  # that were begun, as far as stopping is concerned

    def attach(self, run: Any) -> None:
        super().attach(run)
        run.events.on(
            built=self.ready,
            iteration_begins=self.begin_iteration,
            iteration_ends=self.end_iteration,
            restart=self.restart,
            leave=self.leave,
        )

    # --- an iteration ----------------------------------------------------------------------------------------------

    def begin_iteration(self) -> None:
        """Note that the optimizer is about to make its update."""
        _ = self._rounds

    def end_iteration(self) -> None:
        """Make the exchanges that a skipped update left out; the iteration is over."""
        left = [number for number in range(len(self._rounds)) if number not in self._made]
        for number in left:
            self._exchange(number)
        if left and self._run.config.untouched("param"):
            self._gather()
        if self.config.delivery_log is not None:  # a record must be complete before its iteration is over
            for rounds in self._rounds:
                rounds.crossing.tell()
        self._made.clear()

    def _exchange(self, number: int, *_: Any) -> None:
        rounds = self._rounds[number]
        self._after(rounds, self._iteration)
        if self._used:
            self._used = False
            self._equalise(rounds.vectors[0], self._copies[number])
        self._made.add(number)

    def begin_stopping(self, signal: int) -> Callable[[], int]:
        """See :meth:`.JobGroup.begin_stopping`. The function that it returns waits for the ranks of this island.

        Its result is the largest signal of any rank of any island if all of them stop after this iteration, else 0.
        Other islands are waited for only to agree on that iteration.
        """
        self._stopping.stop(signal)
        self._iterations += 1
        with self._waiting():
            known = to_device(np.array(self._stopping.begin(), dtype=np.int32), device.current_device())
        iteration, work = self._iterations, dist.all_reduce(known, dist.ReduceOp.MAX, async_op=True)

        def finish() -> int:
            work.wait()
            number, last = PendingArray(known).wait().tolist()
            self._stopping.stop(number)
            return number if 0 < last <= iteration else 0

        return finish

    def agree(self, value: int) -> int:
        """Call :meth:`begin_stopping`, and return its result."""
        return self.begin_stopping(value)()

    def leave(self) -> None:
        """Wait until the last iteration is over everywhere. A collective call of all ranks of all islands."""
        if "_stopping" not in vars(self) or not dist.is_initialized():  # nothing was exchanged, or that is over
            return
        with self._waiting():
            self._stopping.leave()
            dist.barrier()

    # --- building --------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _stopping(self) -> Stopping:
        return Stopping(self.world)

    def ready(self) -> None:
        """Raise :class:`UsageError` if there are too few weights to exchange."""
        for number, optimizer in enumerate(self._exchanging):
            self._subset(self._vector(optimizer), number)

    @property
    def _exchanging(self) -> list[Any]:
        """The optimizers that have weights; none if islands exchange nothing."""
        own = [optimizer for optimizer in self._run.living_optimizers() if optimizer.optimizer is not None]
        return own if self.config.sync_method != "none" else []

    def _vector(self, optimizer: Any) -> Vector:
        buckets = [bucket for buffer in optimizer.buffers for bucket in buffer.buckets]
        group = optimizer.buffers[0].data_parallel_group
        weights = [bucket.param_data for bucket in buckets]
        return shard_vector([optimizer], buckets, weights, group.rank(), group.size())

    def _subset(self, vector: Vector, number: int) -> Subset:
        # Tensor-parallel ranks choose and lose alike, for the sake of the parameters of which all have a copy.
        chunk = self._run.chunks[0]
        stream = Stream("islands", data_parallel_rank(chunk), pipeline_stage(chunk), number)
        return Subset(self.config, vector.size, self.world.seed, stream)

    def _build(self, number: int, optimizer: Any) -> Rounds:
        run, vector = self._run, self._vector(optimizer)
        subset = self._subset(vector, number)
        crossing = self._crossing(number, subset)
        self._copies.append(self._places_of_copies(optimizer))
        self._hooks.append(optimizer.optimizer.register_step_post_hook(partial(self._exchange, number)))
        return self._make_rounds(self.config, subset, [vector], crossing, run.steps, run.device, self._note)

    def _places_of_copies(self, optimizer: Any) -> Places | None:
        """Return the places, in the vector of ``optimizer``, of parameters that all tensor-parallel ranks have, or ``None``."""
        config, group = self.config, optimizer.buffers[0].data_parallel_group
        if tensor_group(expert=False) is None or not (config.rendezvous or config.observed or config.sync_bits):
            return None
        found, base = [np.arange(0)], 0
        for buffer in optimizer.buffers:
            for bucket in buffer.buckets:
                shard = bucket.param_data.numel() // group.size()
                first = bucket.offset + group.rank() * shard
                for parameter in bucket.params_list:
                    start, end = (place - first for place in buffer.param_index_map[parameter][:2])
                    if not getattr(parameter, "tensor_model_parallel", False):
                        found.append(base + np.arange(max(start, 0), min(end, shard)))
                base += shard
        places = np.sort(np.concatenate(found))
        return Places(places, 1, base, self._run.device) if len(places) else None

    def _equalise(self, vector: Vector, copies: Places | None) -> None:
        """Give all tensor-parallel ranks the elements at ``copies`` of the first one: each has lost, or rounded, others.

        A collective call of these ranks.
        """
        if copies is not None:
            with torch.no_grad():
                values = vector.read(copies)
                RankPeers(tensor_group(expert=False), values.device).broadcast_([values], 0).wait()
                vector.write(copies, values)

    @property
    def _inner(self) -> list[Any]:
        """Torch's optimizers, in the order of the exchanges."""
        return [optimizer.optimizer for optimizer in self._exchanging]

    def _note(self, seconds: float, sent: torch.Tensor, mean: Mean) -> None:
        self._used = True
        stride = mean.values.numel() // _SAMPLE | 1  # odd, so that it does not follow blocks
        self.monitor.used(seconds, sent, mean, stride)

    # --- weights ---------------------------------------------------------------------------------------------------

    @property
    def _buckets(self) -> list[tuple[Any, Any]]:
        """Each bucket with the group that shards it."""
        streams = [stream for chunk in self._run.chunks for stream in buckets_by_stream(chunk)]
        return [(bucket, buffer.data_parallel_group) for _, _, pairs in streams for buffer, bucket in pairs]

    def _settle(self) -> None:
        """Let every replica receive its part of the last update, if there was one. A collective call of the island."""
        if self._run.update is not None:
            self._run.settle()

    def _gather(self) -> None:
        """Gather the current shards to all ranks of the island, without loss."""
        with torch.no_grad():
            for bucket, group in self._buckets:
                all_gather_single(bucket.param_data, own_shard(bucket, group.rank(), group.size()).clone(), group=group)

    @contextlib.contextmanager
    def consensus_weights(self) -> Iterator[bool]:
        """See :meth:`.JobGroup.consensus_weights`. A collective call of all islands."""
        self._settle()
        with torch.no_grad():
            own = [own_shard(bucket, group.rank(), group.size()).float() for bucket, group in self._buckets]
            means = self._means(own)
        if means is None:
            with self._run.owner_weights(self._run.chunks):
                yield False
            return
        with self._in_model([(group, bucket.param_data) for bucket, group in self._buckets], means):
            yield True

    def saved_beside(self, folder: str) -> tuple[str, bool] | None:
        if not self.config.save_consensus:
            return None
        return os.path.join(os.path.dirname(folder), CONSENSUS_FOLDER), self._writes_consensus

    @property
    def _writes_consensus(self) -> bool:
        return self.world.island == 0

    # --- saving ----------------------------------------------------------------------------------------------------

    def rewind(self, folder: str) -> str | None:
        """See :meth:`.JobGroup.rewind`.

        If an island has no checkpoint at all, nothing is changed, and the loaded iterations will be refused: it may be the wrong folder.
        """
        latest = self._of_all(latest_iteration(folder) or 0)
        common = min(latest)
        if len(set(latest)) == 1 or not common or not all(self._of_all(iteration_folder(folder, common).is_dir())):
            return None
        dist.barrier()  # now all have read
        if dist.get_rank() == 0 and latest[self.world.island] != common:
            write_text(iteration_folder(folder, common).with_name(TRACKER), str(common))
        dist.barrier()
        return f"islands had saved iterations {', '.join(map(str, latest))}: all go on from {common}"

    def _of_all(self, value: int) -> list[int]:
        """Return the ``value`` of each island. A collective call of the ranks with this place in each."""
        return self._control.gather(torch.tensor([value]))[0].view(-1).tolist()

    def restart(self, iteration: int) -> None:
        """Raise :class:`UsageError` unless all islands were loaded at the same ``iteration``. A collective call."""
        found = self._of_all(iteration)
        if len(set(found)) > 1:
            them = ", ".join(f"island {number} has {loaded}" for number, loaded in enumerate(found))
            raise refuse("--load", f"iteration {iteration}", f"{them}; write one that all have into their trackers")

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        super().close()
