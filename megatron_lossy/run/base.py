"""The base of all runs, real and virtual."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from ..base.errors import UsageError, refuse
from ..base.exchange import Delivery
from ..base.jobs import JobGroup
from ..base.ledger import Patch
from ..base.registry import MECHANISMS
from ..channel.corruption import Corruption, make_corruption
from ..config import PHASES, LossyConfig
from ..config.facts import Facts
from ..config.refusal import check_refusals
from ..delivery_log.events import EventLog, all_kinds
from ..delivery_log.writer import DeliveryLog
from ..transport import LossyGroup
from .mechanism import Events, Part
from .monitor import Drift, ExchangeMonitor, Observer, Replicas, load_states, metrics_of, states_of
from .saved import REPLICAS, flags_of, read, write

#: Megatron's ``model``.
ModelChunks = Sequence[torch.nn.Module] | torch.nn.Module


class ObservedExchanges(Protocol):
    """Exchanges that are observed together."""

    def delivery(self, phase: str, step: int) -> Delivery | None:
        """Return the delivery of ``step`` at all ranks of this process; ``None`` in a phase without loss."""


class Run(ABC):
    """The common part of real and virtual runs.

    ``iteration`` counts attempted iterations; gradient exchanges of the next one are keyed by it. ``update`` is the
    iteration of the last successful update, which keys parameter exchanges; ``None`` while all replicas are equal.
    ``after_update``: functions of the run, for work of replicas besides the gradient exchange. They are called in order
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
        self.config = config
        self.iteration = 0
        self.update: int | None = None
        #: The parts that mechanisms have in this run, and the events that they subscribe to.
        self.parts: list[Part] = []
        self.events = Events()
        self.job_group = JobGroup()
        #: The part that keeps the whole state of replicas, with the methods of :class:`.HeldReplicas` for weights and saved
        #: state; ``None`` if the exchanges keep it.
        self.keeper: Any = None
        # At once, since files may be large, and be gone when something is saved.
        self._flags = flags_of(config) if config.save_replicas and not config.inert else {}
        #: Patches of mechanisms in megatron-core, and in megatron.training.
        self.patches: list[Patch] = []
        self.training_patches: list[Patch] = []
        #: Functions that return events of an iteration besides its exchanges; see :meth:`Observer.happened`.
        self.sources: list[Callable[[int], list[Any]]] = []
        self.steps = steps
        self.gapless = gapless
        self.observers = make_observers(self, writer)
        self.after_update: list[Callable[[Run], None]] = []
        #: The ended iteration that observers have not received: its last exchanges may still be under way.
        self._unreported: tuple[int, bool, bool] | None = None

    @cached_property
    def corruption(self) -> Corruption:
        """Draws the errors that hit gradients."""
        return make_corruption(self.config)

    def add_facts(self, facts: Facts) -> None:
        """Add ``facts`` to those of the run. Raise :class:`UsageError` if the loss flags do not go with them all."""
        self.facts |= facts
        check_refusals(self.config, self.facts)

    def add_part(self, part: Part) -> None:
        """Let a mechanism take part in the run."""
        self.parts.append(part)
        part.attach(self)

    def part(self, name: str) -> Any:
        """Return the part of the mechanism of that name; ``None`` if it has none."""
        return next((part for part in self.parts if part.name == name), None)

    @property
    def speaks(self) -> bool:
        """Whether the first rank of this job prints: one job does for all of a launch."""
        return self.job == 0 or self.config.jobs().apart

    # --- differences of real and virtual runs ----------------------------------------------------------------------

    @property
    @abstractmethod
    def groups(self) -> list[LossyGroup]:
        """The lossy groups of every worker of this process."""

    @abstractmethod
    def exchanged_weights(self, model_chunks: Any) -> contextlib.AbstractContextManager[None]:
        """Return :meth:`owner_weights` of a run whose exchanges keep them."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return the settings that must be equal for saved replicas to mean the same, by their names in errors."""

    @abstractmethod
    def exchanged_state(self) -> Any:
        """Return the ``replicas`` of :meth:`replica_state` in a run whose replicas differ only by lost exchanges."""

    @abstractmethod
    def load_exchanged_state(self, state: Any) -> None:
        """Restore :meth:`exchanged_state`."""

    @abstractmethod
    def replica_file(self) -> str:
        """Return the name of this process's file of saved replicas."""

    def error_of_missing(self, folder: str | os.PathLike, path: Path) -> UsageError:
        """Return the error that the checkpoint in ``folder`` lacks the saved replicas at ``path``."""
        if path.parent.is_dir():
            return refuse("--save-replicas", path, f"is missing; the run must have the world size of {folder}")
        return refuse("--save-replicas", f"with {folder}", "that checkpoint was saved without replicas; omit the flag")

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the replicas."""

    @property
    def carriers(self) -> list[Any]:
        """Senders of datagrams, if there are any: the transports of the groups, and those of mechanisms."""
        wires = [group.wire for group in self.groups if group.wire.observed]
        return [*wires, *(carrier for part in self.parts for carrier in part.carriers)]

    @property
    @abstractmethod
    def streams(self) -> Sequence[ObservedExchanges]:
        """Exchanges with deliveries of their own: the groups of a real rank, the streams of a virtual cluster."""

    @property
    def known_later(self) -> bool:
        """Whether deliveries of an iteration are known only when the next one is under way."""
        return any(group.wire.observed for group in self.groups)

    @abstractmethod
    def replicas(self) -> Sequence[Replicas]:
        """Return each stream's replicas, as they are."""

    @abstractmethod
    def settle(self) -> None:
        """Let every replica receive its part of the last update. A collective call."""

    def living_optimizers(self) -> list[Any]:
        """Return Megatron's optimizers that this process has, if they exist by now."""
        return []

    def loss_scale(self) -> torch.Tensor | None:
        """Return the factor of the loss, or ``None`` without a gradient scaler."""
        scalers = (getattr(optimizer, "grad_scaler", None) for optimizer in self.living_optimizers())
        return next((scaler.scale for scaler in scalers if scaler is not None), None)

    def happened(self) -> list[Any]:
        """Return the events of this iteration besides its exchanges; see :meth:`Observer.happened`."""
        errors = [group.errors for group in self.groups if group.errors is not None]
        beside = [event for source in self.sources for event in source(self.iteration)]
        return [*(reduction for own in errors for reduction in own.take(self.iteration)), *beside]

    # --- a training program ----------------------------------------------------------------------------------------

    def building(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a model is built so that this run can :meth:`attach` it."""
        return contextlib.nullcontext()

    def attach(self, ddp: Any) -> None:
        """Take over the exchanges of ``ddp``, a model chunk. Hooks have done so already."""

    def worker(self, worker: int, evaluates: bool = False) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model has the replica of ``worker`` (of this process), and its gradients.

        ``evaluates``: there are no gradients. Without it: a batch of an iteration, once.
        """
        return contextlib.nullcontext()

    def data_of(self, worker: int) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the data is that of ``worker``, with any weights."""
        return contextlib.nullcontext()

    def step(self, optimizer: Any) -> Any:
        """Make the update with the gradients of all workers. Return the result of ``optimizer.step()``."""
        return optimizer.step()

    def leave(self) -> None:
        """Wait, at the end of a run that ends well, until it has ended everywhere. A collective call of all jobs."""
        self.events.leave()

    # --- an iteration ----------------------------------------------------------------------------------------------

    def begin_update(self) -> None:
        """Note that the owners' shards are about to be updated."""
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
        self._unreported = (self.iteration, successful, all_reduced)
        if not self.known_later:
            self.tell_observers(self._settled_replicas)
        self.iteration += 1
        for group in self.groups:
            group.prepare(self.iteration, self.gapless)

    def tell_observers(self, look: Callable[[], Sequence[Replicas]] | None = None) -> None:
        """Call the observers for the last iteration, unless they have been called.

        Drawn losses are known at its end. Losses of a network in its gather are known after the next forward pass, or
        never without one; the next gather must come after that. ``look``: finds the replicas.
        """
        if self._unreported is None:
            return
        (iteration, successful, all_reduced), self._unreported = self._unreported, None
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
        """Go on after a checkpoint of ``iteration`` attempted iterations was loaded: all replicas are equal."""
        self._unreported = None
        self.iteration = iteration
        self.begin_equal()
        for observer in self.observers:
            observer.restart(iteration)

    def begin_equal(self) -> None:
        """Begin with all replicas equal to the owners' weights, which are in the model; nothing of before counts."""
        self.update = None
        for group in self.groups:
            group.restart()
        for observer in self.observers:
            observer.begin_equal()
        self.events.restart(self.iteration)

    def metrics(self) -> dict[str, float]:
        """Return measurements of the observers since the last call (docs/monitors.md). A collective call."""
        return metrics_of(self.observers)

    def close_observers(self) -> None:
        """Close the observers. Their records include the last iteration, whose result a transport may have only now."""
        self.tell_observers(list)  # other ranks may have ended, so that replicas cannot be compared
        for observer in self.observers:
            observer.close()

    def uninstall(self) -> None:
        """End the run: close the observers, the groups and the parts of mechanisms."""
        self.close_observers()
        for group in self.groups:
            group.close()
        self.events.close()

    # --- weights ---------------------------------------------------------------------------------------------------

    def owner_weights(self, model_chunks: ModelChunks | None = None) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model holds the owners' weights, then its replica again. A collective call.

        Full replicas have the mean of those that are finite. ``model_chunks``: Megatron's ``model``, wrapped in DDP or not.
        """
        kept = None if self.keeper is None else self.keeper.owner_weights()
        return kept or self.exchanged_weights(model_chunks)

    def consensus_weights(
        self, model_chunks: ModelChunks | None = None
    ) -> contextlib.AbstractContextManager[bool | None]:
        """Return a context as of :meth:`owner_weights`, with the mean over jobs, if any; false if jobs do not meet."""
        return self.job_group.consensus_weights() or self.owner_weights(model_chunks)

    # --- their state -----------------------------------------------------------------------------------------------

    def replica_state(self) -> dict[str, Any]:
        """Return the state that makes the replicas of this process differ from the owners' weights.

        ``parts``: the states of mechanisms, by name. ``replicas``: the state of the exchanges, or the whole state of the
        replicas if a mechanism keeps it, whose name is ``keeper``.
        """
        states = {part.name: part.state_dict() for part in self.parts}
        parts = {name: state for name, state in states.items() if state is not None}
        if self.keeper is not None and (whole := self.keeper.replica_state()) is not None:
            return {"parts": parts, "keeper": self.keeper.name, "replicas": whole}
        self.events.save_begins()
        return {"parts": parts, "keeper": None, "replicas": self.exchanged_state()}

    def load_replica_state(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`replica_state`; ``iteration`` and ``update`` are restored already."""
        for name, saved in state["parts"].items():
            self.part(name).load_state_dict(saved)
        if state["keeper"] is None:
            self.load_exchanged_state(state["replicas"])
        else:
            assert self.keeper is not None and self.keeper.name == state["keeper"], state["keeper"]
            self.keeper.load_replica_state(state["replicas"])

    # --- saved replicas --------------------------------------------------------------------------------------------

    def save_replicas(self, folder: str | os.PathLike) -> None:
        """Write the differences of replicas and the state of rules and observers, with ``--save-replicas``.

        Observers save to files of their own in any case.
        """
        if self._unreported is not None:
            self.settle()
            self.tell_observers()
        for observer in self.observers:
            observer.save()
        if not self.config.save_replicas or self.config.inert:
            return
        write(Path(folder, REPLICAS, self.replica_file()), self._state())

    def _state(self) -> dict[str, Any]:
        return {
            "identity": self._whole_identity(),
            "iteration": self.iteration,
            "update": self.update,
            **self.replica_state(),
            "recovery": [group.state_dict() for group in self.groups],
            "observers": states_of(self.observers),
        }

    def load_replicas(self, folder: str | os.PathLike) -> None:
        """Restore :meth:`save_replicas` after the checkpoint was loaded, with ``--save-replicas``.

        Raise :class:`UsageError` if it was written by another number of workers or with other loss flags.
        """
        if not self.config.save_replicas or self.config.inert:
            return
        path = Path(folder, REPLICAS, self.replica_file())
        if not path.is_file():
            raise self.error_of_missing(folder, path)
        self._load_state(read(path, self.device, self._whole_identity(), folder))

    def _load_state(self, state: Mapping[str, Any]) -> None:
        self.iteration, self.update = state["iteration"], state["update"]
        self.load_replica_state(state)
        for group, saved in zip(self.groups, state["recovery"], strict=True):
            group.load_state_dict(saved, self.device)
        load_states(self.observers, state["observers"])

    def _whole_identity(self) -> dict[str, Any]:
        parts = {name: value for part in self.parts for name, value in part.identity().items()}
        return {**self.identity(), **parts, **self._flags}


def make_observers(run: Any, writer: int | None = None) -> list[Observer]:
    """Return the observers that the flags of ``run`` ask for; none if they are inert. ``writer``: see :class:`Run`."""
    config = run.config
    if config.inert:
        return []
    observers: list[Observer] = [] if config.lossless else [ExchangeMonitor(config)]
    if config.observed:
        from ..transport.monitor import DatagramMonitor, StreamMonitor

        kind = DatagramMonitor if config.transport == "udp" else StreamMonitor
        observers.append(kind(lambda: run.carriers, writer))
    if config.drift_interval and not (config.lossless or config.needs_whole_optimizers()):
        observers.append(Drift(config))
    logs = config.delivery_log is not None and not config.jobs().apart  # else jobs have no exchanges in common
    if logs and not config.lossless:
        observers.append(DeliveryLog(config, writer))
    if logs and any(kinds.happen(config) for kinds in all_kinds()):
        observers.append(EventLog(config, writer))
    return observers + [observer for mechanism in MECHANISMS.all() for observer in mechanism.observers(run, writer)]
