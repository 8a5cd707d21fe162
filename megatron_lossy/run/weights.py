"""The weights of a run, and the state of its replicas beside a checkpoint."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..base.errors import UsageError, refuse
from ..base.registry import first
from ..config import LossyConfig
from ..transport import LossyGroup
from .mechanism import Part
from .monitor import Observer, load_states, states_of
from .saved import REPLICAS, flags_of, read, write

#: Megatron's ``model``.
ModelChunks = Sequence[torch.nn.Module] | torch.nn.Module


class RunWeights(ABC):
    """The weights that the workers of this process have, and the saved state of their replicas.

    ``iteration``, ``update``: see :class:`.Run`. ``parts``: of mechanisms.
    """

    observers: list[Observer]

    def __init__(self, config: LossyConfig) -> None:
        self.config = config
        self.iteration = 0
        self.update: int | None = None
        #: The parts that mechanisms have in this run.
        self.parts: list[Part] = []
        # At once, since files may be large, and be gone when something is saved.
        self._flags = flags_of(config) if config.save_replicas and not config.inert else {}

    def part(self, name: str) -> Any:
        """The part of the mechanism of that name; ``None`` if it has none."""
        return next((one for one in self.parts if one.name == name), None)

    # --- differences of real and virtual runs ----------------------------------------------------------------------

    @property
    @abstractmethod
    def groups(self) -> list[LossyGroup]:
        """The lossy groups of every worker of this process."""

    @abstractmethod
    def exchanged_weights(self, model_chunks: ModelChunks) -> contextlib.AbstractContextManager[None]:
        """:meth:`owner_weights` of a run whose exchanges keep them."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """The settings that must be equal for saved replicas to mean the same, by their names in errors."""

    @abstractmethod
    def exchanged_state(self) -> Any:
        """The ``replicas`` of :meth:`replica_state` in a run whose replicas differ only by what exchanges lost."""

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

    # --- weights ---------------------------------------------------------------------------------------------------

    def owner_weights(self, model_chunks: ModelChunks) -> contextlib.AbstractContextManager[None]:
        """A context in which the model holds the owners' weights; afterwards its replica again. A collective call.

        ``model_chunks``: Megatron's ``model``, wrapped in DDP or not.
        """
        return first(one.owner_weights() for one in self.parts) or self.exchanged_weights(model_chunks)

    def consensus_weights(self, model_chunks: ModelChunks) -> contextlib.AbstractContextManager[bool | None]:
        """A context as of :meth:`owner_weights`, with the mean over jobs, if there are several; false if these do not meet."""
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

    # --- their state -----------------------------------------------------------------------------------------------

    def replica_state(self) -> dict[str, Any]:
        """The state that makes the replicas of this process differ from the owners' weights.

        ``parts``: the states of mechanisms, by name. ``replicas``: the state of the exchanges, or the whole state of the
        replicas if a mechanism keeps it, whose name is ``keeper``.
        """
        states = {one.name: one.state_dict() for one in self.parts}
        parts = {name: state for name, state in states.items() if state is not None}
        for one in self.parts:
            if (whole := one.replica_state()) is not None:
                return {"parts": parts, "keeper": one.name, "replicas": whole}
        for one in self.parts:
            one.begin_saving()
        return {"parts": parts, "keeper": None, "replicas": self.exchanged_state()}

    def load_replica_state(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`replica_state`; ``iteration`` and ``update`` are restored already."""
        for name, saved in state["parts"].items():
            self.part(name).load_state_dict(saved)
        if state["keeper"] is None:
            self.load_exchanged_state(state["replicas"])
        else:
            self.part(state["keeper"]).load_replica_state(state["replicas"])

    # --- saved replicas --------------------------------------------------------------------------------------------

    def save_replicas(self, folder: str | os.PathLike) -> None:
        """Write the differences of replicas and the state of rules and observers, with ``--save-replicas``."""
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
        self.load_replica_state(state)
        for group, saved in zip(self.groups, state["recovery"], strict=True):
            group.load_state_dict(saved, self.device)
        load_states(self.observers, state["observers"])

    def _whole_identity(self) -> dict[str, Any]:
        parts = {name: value for one in self.parts for name, value in one.identity().items()}
        return {**self.identity(), **parts, **self._flags}
