"""The base of all runs, real and virtual."""

from __future__ import annotations

import contextlib
import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch

from ..base.exchange import Delivery
from ..base.ledger import Patch
from ..channel.corruption import Corruption, make_corruption
from ..config import PHASES, LossyConfig
from ..config.facts import Facts
from ..config.refusal import check_refusals
from .monitor import Replicas, metrics_of
from .observers import make_observers
from .weights import RunWeights


class Observed(Protocol):
    """Exchanges that are observed together."""

    def delivery(self, phase: str, step: int) -> Delivery | None:
        """The delivery of ``step`` at all ranks of this process; ``None`` in a phase without loss."""


class Run(RunWeights):
    """The common part of real and virtual runs.

    ``iteration`` counts attempted iterations; gradient exchanges of the next one are keyed by it. ``update`` is the
    iteration of the last successful update, which keys parameter exchanges; ``None`` while all replicas are equal.
    ``after_update``: functions of the run, for work of replicas beside the gradient exchange. They are called in order
    after every successful update, before the iteration counts as over. The gather of the update may still be under
    way; :meth:`settle` ends it. ``steps``: length of the run, if known, to refuse a trace that is too short. ``gapless``: promises that every iteration exchanges its
    gradients or all-reduces them, and that only a loss scale can make the optimizer reject one (and no
    ``grad_norm_skip_threshold`` of Megatron's optimizer). Without the promise ``--grad-recovery previous`` keeps all
    gradients, twice. ``workers``, ``local``: the number of data-parallel workers of all jobs, and the numbers of those in
    this process: one on a real rank, or all. ``job``, ``jobs``: the number of this process's job, and how many jobs of
    real ranks there are.
    """

    workers: int
    local: Sequence[int]
    job, jobs = 0, 1
    #: The facts of the run that are known by now.
    facts = Facts()

    #: Its data parallelism: Megatron, FSDP2, DDP, or virtual.
    kind: str

    def __init__(
        self, config: LossyConfig, steps: int | None = None, gapless: bool = False, writer: int | None = None
    ) -> None:
        super().__init__(config)
        #: Patches of mechanisms in megatron-core, and in megatron.training.
        self.patches: list[Patch] = []
        self.training_patches: list[Patch] = []
        #: Functions that return events of an iteration besides its exchanges; see :meth:`Observer.happened`.
        self.sources: list[Callable[[int], list[Any]]] = []
        self.steps = steps
        self.gapless = gapless
        self.observers = make_observers(self, writer)
        self.after_update: list[Callable[[Run], None]] = []
        #: The iteration that is over, but not yet told to the observers: its last exchanges may still be under way.
        self._untold: tuple[int, bool, bool] | None = None

    @cached_property
    def corruption(self) -> Corruption:
        """Draws the errors that hit gradients."""
        return make_corruption(self.config)

    def add_facts(self, facts: Facts) -> None:
        """Add ``facts`` to those of the run. Raise :class:`UsageError` if the loss flags do not go with them all."""
        self.facts |= facts
        check_refusals(self.config, self.facts)

    @property
    def speaks(self) -> bool:
        """Whether the first rank of this job prints: one job does for all of a launch."""
        return self.job == 0 or self.config.jobs().apart

    # --- differences of real and virtual runs ----------------------------------------------------------------------

    @property
    def carriers(self) -> list[Any]:
        """Senders of datagrams, if there are any: the transports of the groups, and those of mechanisms."""
        return [*(group.wire for group in self.groups), *(carrier for one in self.parts for carrier in one.carriers)]

    @property
    @abstractmethod
    def streams(self) -> Sequence[Observed]:
        """Exchanges with deliveries of their own: the groups of a real rank, the streams of a virtual cluster."""

    @property
    def known_later(self) -> bool:
        """Whether deliveries of an iteration are known only when the next one is under way."""
        return any(group.wire.observed for group in self.groups)

    @abstractmethod
    def replicas(self) -> Sequence[Replicas]:
        """Each stream's replicas, as they are."""

    @abstractmethod
    def settle(self) -> None:
        """Let every replica receive its part of the last update. A collective call."""

    def living_optimizers(self) -> list[Any]:
        """Megatron's optimizers that this process has, if they exist by now."""
        return []

    def loss_scale(self) -> torch.Tensor | None:
        """The factor of the loss, or ``None`` without a gradient scaler."""
        scalers = (getattr(optimizer, "grad_scaler", None) for optimizer in self.living_optimizers())
        return next((scaler.scale for scaler in scalers if scaler is not None), None)

    def happened(self) -> list[Any]:
        """Events of this iteration beside its exchanges; see :meth:`Observer.happened`."""
        errors = [group.errors for group in self.groups if group.errors is not None]
        beside = [event for source in self.sources for event in source(self.iteration)]
        return [*(reduction for one in errors for reduction in one.take(self.iteration)), *beside]

    # --- a training program ----------------------------------------------------------------------------------------

    def building(self) -> contextlib.AbstractContextManager[None]:
        """A context in which a model is built so that this run can :meth:`attach` it."""
        return contextlib.nullcontext()

    def attach(self, ddp: Any) -> None:
        """Take over the exchanges of ``ddp``, a model chunk. Hooks have done so already."""

    def worker(self, worker: int, evaluates: bool = False) -> contextlib.AbstractContextManager[None]:
        """A context in which the model has the replica of ``worker`` (from 0, in this process), and gradients are its own.

        ``evaluates``: there are no gradients. Without it: a batch of an iteration, once.
        """
        return contextlib.nullcontext()

    def data_of(self, worker: int) -> contextlib.AbstractContextManager[None]:
        """A context in which the data is that of ``worker``, with any weights."""
        return contextlib.nullcontext()

    def step(self, optimizer: Any) -> Any:
        """Make the update with the gradients of all workers. Returns the result of ``optimizer.step()``."""
        return optimizer.step()

    def leave(self) -> None:
        """Wait, at the end of a run that ends well, until it is over everywhere. A collective call of all jobs."""
        self.events.leave()

    # --- an iteration ----------------------------------------------------------------------------------------------

    def begin_update(self) -> None:
        """The owners' shards are about to be updated."""
        self.tell_observers()
        for observer in self.observers:
            observer.before_update(self.iteration, self.replicas)
        self.events.update_begins()

    def finish_iteration(self, successful: bool, all_reduced: bool = False, used: bool | None = None) -> None:
        """End the iteration. ``successful``: it updated the weights. ``all_reduced``: its gradients lost nothing.

        ``used``: whether its gradients were used, or will be; if not given, those of successful iterations are.
        """
        for group in self.groups:
            group.finish_step(self.iteration, successful if used is None else used)
        if successful:
            for act in self.after_update:
                act(self)
        self.tell_observers()
        happened = self.happened()
        for observer in self.observers if happened else ():
            observer.happened(self.iteration, happened)
        self._untold = (self.iteration, successful, all_reduced)
        if not self.known_later:
            self.tell_observers(self._settled_replicas)
        self.iteration += 1
        for group in self.groups:
            group.prepare(self.iteration, self.gapless)

    def tell_observers(self, look: Callable[[], Sequence[Replicas]] | None = None) -> None:
        """Tell the observers of the last iteration, if they have not been.

        Drawn losses are known at its end. Losses of a network in its gather are known after the next forward pass, or
        never without one; the next gather must come after that. ``look``: finds the replicas.
        """
        if self._untold is None:
            return
        (iteration, successful, all_reduced), self._untold = self._untold, None
        if not self.observers:
            return
        happened = {"grad": not all_reduced, "param": successful}
        for stream in self.streams:
            for phase in PHASES:
                delivery = stream.delivery(phase, iteration) if happened[phase] else None
                for observer in self.observers if delivery is not None else ():
                    observer.observe(delivery)
        for observer in self.observers:
            observer.finish_iteration(iteration, successful, look or self._replicas)

    def _replicas(self) -> Sequence[Replicas]:
        return [] if self.update is None else self.replicas()

    def _settled_replicas(self) -> Sequence[Replicas]:
        if self.update is not None:
            self.settle()
        return self._replicas()

    def skip_iteration(self) -> None:
        """Count an iteration that passed without a step of the optimizer, with gradients or without."""
        for group in self.groups:
            group.finish_step(self.iteration, False)
        self.iteration += 1

    def set_iteration(self, iteration: int) -> None:
        """A checkpoint of ``iteration`` attempted iterations was loaded: all replicas are equal."""
        self._untold = None
        self.iteration = iteration
        self.begin_equal()
        for observer in self.observers:
            observer.restart(iteration)

    def begin_equal(self) -> None:
        """All replicas equal the owners' weights, which are in the model, and nothing of before counts."""
        self.update = None
        for group in self.groups:
            group.restart()
        for observer in self.observers:
            observer.begin_equal()
        self.events.restart(self.iteration)

    def metrics(self) -> dict[str, float]:
        """Measurements of the observers since the last call (docs/monitors.md). A collective call."""
        return metrics_of(self.observers)

    def close_observers(self) -> None:
        """Close the observers. Their records include the last iteration, which a transport may know only now."""
        self.tell_observers(list)  # nobody may be there any more to look at replicas together
        for observer in self.observers:
            observer.close()

    def uninstall(self) -> None:
        """End the run: close the observers, the groups and the parts of mechanisms."""
        self.close_observers()
        for group in self.groups:
            group.close()
        self.events.close()

    def save_replicas(self, folder: str | os.PathLike) -> None:
        """See :meth:`.RunWeights.save_replicas`. With and without the flag observers save too, to files of their own."""
        if self._untold is not None:
            self.settle()
            self.tell_observers()
        for observer in self.observers:
            observer.save()
        super().save_replicas(folder)
