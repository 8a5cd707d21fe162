"""The base of all runs, real and virtual."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from ..channel.corruption import Corruption, make_corruption
from ..config import PHASES, LossyConfig
from ..delivery_log.errors import recorded_events
from ..errors import UsageError, refuse
from ..exchange import Delivery
from ..mechanism import Part
from ..monitor import Replicas, load_states, metrics_of, states_of
from ..transport import LossyGroup
from .observers import make_observers
from .saved import REPLICAS, flags_of, read, write

#: Megatron's ``model``.
ModelChunks = Sequence[torch.nn.Module] | torch.nn.Module


class Observed(Protocol):
    """Exchanges that are observed together."""

    def delivery(self, phase: str, step: int) -> Delivery | None:
        """The delivery of ``step`` at all ranks of this process; ``None`` in a phase without loss."""


class Pipeline(Protocol):
    """The work of an asynchronous pipeline that is under way between two iterations."""

    def state_dict(self) -> dict[str, Any]:
        """The state to save, of tensors, numbers, texts and ``None``."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""


class Run(ABC):
    """The common part of real and virtual runs.

    ``iteration`` counts attempted iterations; gradient exchanges of the next one are keyed by it. ``update`` is the
    iteration of the last successful update, which keys parameter exchanges; ``None`` while all replicas are equal.
    ``after_update``: functions of the run, for work of replicas beside the gradient exchange. They are called in order
    after every successful update, before the iteration counts as over. The gather of the update may still be under
    way; :meth:`settle` ends it. ``pipeline``: that of this rank, if stages are asynchronous. ``steps``: length of the
    run, if known, to refuse a trace that is too short. ``gapless``: promises that every iteration exchanges its
    gradients or all-reduces them, and that only a loss scale can make the optimizer reject one (and no
    ``grad_norm_skip_threshold`` of Megatron's optimizer). Without the promise ``--grad-recovery previous`` keeps all
    gradients, twice. ``job``, ``jobs``: the number of this process's job, and how many jobs of real ranks there are.
    """

    job, jobs = 0, 1

    def __init__(
        self, config: LossyConfig, steps: int | None = None, gapless: bool = False, writer: int | None = None
    ) -> None:
        self.config = config
        self.steps = steps
        self.gapless = gapless
        self.iteration = 0
        self.update: int | None = None
        #: The parts that mechanisms have in this run.
        self.parts: list[Part] = []
        self.observers = make_observers(self, writer)
        # At once, since files may be large, and be gone when something is saved.
        self._flags = flags_of(config) if config.save_replicas and not config.inert else {}
        self.after_update: list[Callable[[Run], None]] = []
        self.pipeline: Pipeline | None = None
        #: The iteration that is over, but not yet told to the observers: its last exchanges may still be under way.
        self._untold: tuple[int, bool, bool] | None = None

    @cached_property
    def corruption(self) -> Corruption:
        """Draws or replays the errors that hit gradients."""
        return make_corruption(self.config, recorded_events(self.config))

    def add_part(self, part: Part) -> None:
        """Let a mechanism take part in the run, with its observers."""
        self.parts.append(part)
        part.attach(self)
        self.observers += part.observers

    def part(self, name: str) -> Any:
        """The part of the mechanism of that name; ``None`` if it has none."""
        return next((one for one in self.parts if one.name == name), None)

    # --- differences of real and virtual runs ----------------------------------------------------------------------

    @property
    @abstractmethod
    def groups(self) -> list[LossyGroup]:
        """The lossy groups of every worker of this process."""

    @property
    def carriers(self) -> list[Any]:
        """Senders of datagrams, if there are any: the transports of the groups, and those of mechanisms."""
        return [*(group.wire for group in self.groups), *(carrier for one in self.parts for carrier in one.carriers)]

    @property
    @abstractmethod
    def streams(self) -> Sequence[Observed]:
        """Exchanges with deliveries of their own: the groups of a real rank, the streams of a virtual cluster."""

    @abstractmethod
    def replicas(self) -> Sequence[Replicas]:
        """Each stream's replicas, as they are."""

    @abstractmethod
    def settle(self) -> None:
        """Let every replica receive its part of the last update. A collective call."""

    @abstractmethod
    def exchanged_weights(self, model_chunks: ModelChunks) -> contextlib.AbstractContextManager[None]:
        """:meth:`owner_weights` of a run whose exchanges keep them."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """The settings that must be equal for saved replicas to mean the same, by their names in errors."""

    #: The name that :meth:`exchanged_state` has in a saved state, if mechanisms have states beside it.
    state_name = ""

    @abstractmethod
    def exchanged_state(self) -> Any:
        """:meth:`replica_state` of a run whose replicas differ only by what exchanges lost."""

    @abstractmethod
    def load_exchanged_state(self, state: Any) -> None:
        """Restore :meth:`exchanged_state`."""

    @abstractmethod
    def replica_file(self) -> str:
        """The name of this process's file of saved replicas."""

    def error_of_missing(self, folder: str | os.PathLike, path: Path) -> UsageError:
        """The error that the checkpoint in ``folder`` lacks the saved replicas at ``path``."""
        if path.parent.is_dir():
            return refuse("--save-replicas", path, f"is missing; the run must have the world size of {folder}")
        return refuse("--save-replicas", f"with {folder}", "that checkpoint was saved without replicas; omit the flag")

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the replicas."""

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
        beside = [event for one in self.parts for event in one.happened(self.iteration)]
        return [*(reduction for one in errors for reduction in one.take(self.iteration)), *beside]

    # --- weights and their state -----------------------------------------------------------------------------------

    def owner_weights(self, model_chunks: ModelChunks) -> contextlib.AbstractContextManager[None]:
        """A context in which the model holds the owners' weights; afterwards its replica again. A collective call.

        ``model_chunks``: Megatron's ``model``, wrapped in DDP or not.
        """
        return first(one.owner_weights() for one in self.parts) or self.exchanged_weights(model_chunks)

    def consensus_weights(self, model_chunks: ModelChunks) -> contextlib.AbstractContextManager[None]:
        """A context as of :meth:`owner_weights`, with the mean over jobs, if there are several."""
        return first(one.consensus_weights() for one in self.parts) or self.owner_weights(model_chunks)

    def saved_beside(self, folder: str) -> tuple[str, bool] | None:
        """The folder of another checkpoint, of :meth:`consensus_weights` alone, beside one in ``folder``, if any.

        With it, whether this rank writes there.
        """
        return first(one.saved_beside(folder) for one in self.parts)

    @property
    def total(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """A function that adds up a tensor over all jobs, a collective call of them; ``None`` with one job."""
        return first(one.total for one in self.parts)

    def replica_state(self) -> Any:
        """The state that makes the replicas of this process differ from the owners' weights.

        It is the whole state of a mechanism that keeps it, else that of the exchanges with the states of mechanisms.
        """
        if (whole := first(one.replica_state() for one in self.parts)) is not None:
            return whole
        states = {one.name: one.state_dict() for one in self.parts}
        beside = {name: state for name, state in states.items() if state is not None}
        for one in self.parts:
            one.begin_saving()
        exchanged = self.exchanged_state()
        return {self.state_name: exchanged, **beside} if beside else exchanged

    def load_replica_state(self, state: Any) -> None:
        """Restore :meth:`replica_state`; ``iteration`` and ``update`` are restored already."""
        if any(one.load_replica_state(state) for one in self.parts):
            return
        if isinstance(state, dict):
            for one in self.parts:
                if one.name in state:
                    one.load_state_dict(state[one.name])
            state = state[self.state_name]
        self.load_exchanged_state(state)

    # --- a training program ----------------------------------------------------------------------------------------

    def building(self) -> contextlib.AbstractContextManager[None]:
        """A context in which a model is built so that this run can :meth:`attach` it."""
        return contextlib.nullcontext()

    def attach(self, ddp: Any) -> None:
        """Take over the exchanges of ``ddp``, a model chunk. Hooks have done so already."""

    def leave(self) -> None:
        """Wait, at the end of a run that ends well, until it is over everywhere. A collective call of all jobs."""
        for one in self.parts:
            one.leave()

    # --- an iteration ----------------------------------------------------------------------------------------------

    def begin_update(self) -> None:
        """The owners' shards are about to be updated."""
        self.tell_observers()
        for observer in self.observers:
            observer.before_update(self.iteration, self.replicas)
        for one in self.parts:
            one.begin_update()

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
        if not any(group.wire.observed for group in self.groups):
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
        self.update = None
        for group in self.groups:
            group.restart()
        for observer in self.observers:
            observer.restart(iteration)
        for one in self.parts:
            one.restart(iteration)

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
        for one in self.parts:
            one.close()

    # --- saved replicas --------------------------------------------------------------------------------------------

    def save_replicas(self, folder: str | os.PathLike) -> None:
        """Write the differences of replicas and the state of rules and observers, with ``--save-replicas``.

        Without the flag only the observers save, to files of their own.
        """
        if self._untold is not None:
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
            "replicas": self.replica_state(),
            "recovery": [group.state_dict() for group in self.groups],
            "observers": states_of(self.observers),
            **({} if self.pipeline is None else {"pipeline": self.pipeline.state_dict()}),
        }

    def load_replicas(self, folder: str | os.PathLike) -> None:
        """Restore :meth:`save_replicas` after the checkpoint was loaded, with ``--save-replicas``.

        Raises :class:`UsageError` if it was written by another number of workers or with other loss flags.
        """
        if not self.config.save_replicas or self.config.inert:
            return
        path = Path(folder, REPLICAS, self.replica_file())
        if not path.is_file():
            raise self.error_of_missing(folder, path)
        self._load_state(read(path, self.device, self._whole_identity(), folder))

    def _load_state(self, state: Mapping[str, Any]) -> None:
        self.iteration, self.update = state["iteration"], state["update"]
        self.load_replica_state(state["replicas"])
        for group, saved in zip(self.groups, state["recovery"], strict=True):
            group.load_state_dict(saved, self.device)
        load_states(self.observers, state["observers"])
        if self.pipeline is not None:
            self.pipeline.load_state_dict(state["pipeline"])

    def _whole_identity(self) -> dict[str, Any]:
        return {**self.identity(), **self._flags}


def first(answers: Iterable[Any]) -> Any:
    """The first of ``answers`` that is not ``None``; the later ones are not asked for."""
    return next((one for one in answers if one is not None), None)
