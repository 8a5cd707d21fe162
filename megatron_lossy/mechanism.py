"""The verbs that the core calls on mechanisms: those of each mechanism, and those of its part in a real run.

The core imports no mechanism and never asks whether one is there; :data:`megatron_lossy.registry.MECHANISMS` names them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from .section import Flags

if TYPE_CHECKING:
    from .config import LossyConfig
    from .config.refusal import Section
    from .ledger import Patch
    from .monitor import Observer
    from .recovery import GradRecovery, Stale
    from .transport import LossyGroup, Wire


class Mechanism:
    """A mechanism beside the exchanges of the core: islands, full replicas, boundaries between stages, …

    Its class is its place in :data:`megatron_lossy.registry.MECHANISMS`. The core calls its verbs, whatever the flags
    are; each does nothing by default. Flags and refusals are asked for where torch is not installed, so that a module
    of a mechanism imports torch where a verb needs it, and :mod:`megatron_lossy.config` not at all: that imports it.
    """

    #: The name in the registry, and of the section of refusals.
    name: ClassVar[str]
    #: The section of its flags.
    Flags: ClassVar[type[Flags]]
    #: The number of each of its phases in the key of random draws; no other mechanism may have it.
    phases: ClassVar[Mapping[str, int]] = {}

    @classmethod
    def refusals(cls) -> Section:
        """Its rows of the table of refusals."""
        raise NotImplementedError

    @classmethod
    def part(cls, config: LossyConfig, world: Any) -> Part | None:
        """Its part of a real run; ``None`` if the flags do not ask for it. ``world``: see :func:`hooks.install`."""
        return None

    @classmethod
    def observers(cls, run: Any, writer: int | None) -> Sequence[Observer]:
        """Its observers of ``run``, real or virtual. ``writer``: the rank whose number records have."""
        return []

    @classmethod
    def grad_rule(cls, config: LossyConfig, rule: GradRecovery, wire: Wire) -> GradRecovery:
        """The rule for the gradients of a bucket on ``wire``, instead of ``rule`` or around it."""
        return rule

    @classmethod
    def param_rule(cls, config: LossyConfig, rule: Stale, wire: Wire) -> Stale:
        """The rule for the parameters of a bucket on ``wire``, instead of ``rule`` or around it."""
        return rule


class Part:
    """The part of a mechanism in a real run: an island, a full replica, …

    Its verbs are called at fixed moments. Each does nothing by default.
    """

    #: The name of the mechanism, in saved states too.
    name: ClassVar[str]
    #: This job among equal ones whose losses are drawn apart: its number, and how many there are.
    job: tuple[int, int] = (0, 1)
    #: The launched rank whose number this process writes into records; ``None`` for its own rank.
    writer: int | None = None
    #: Makes a context for the start of the reduction of a bucket group; ``None`` if none is needed.
    reducing: Callable[[Any], contextlib.AbstractContextManager[None]] | None = None

    def attach(self, run: Any) -> None:
        """Attach to ``run``, a real run that has just been made."""

    def patches(self) -> list[Patch]:
        """Patches that it needs in megatron-core."""
        return []

    @property
    def observers(self) -> Sequence[Observer]:
        """Observers of its own."""
        return []

    # --- building --------------------------------------------------------------------------------------------------

    def meet(self, ddp: Any) -> None:
        """The model chunk ``ddp`` is about to be added. A collective call."""

    def take_over(self, ddp: Any) -> list[LossyGroup] | None:
        """The groups that exchange ``ddp``, if the mechanism exchanges it by itself. A collective call."""
        return None

    def add_model_chunk(self, ddp: Any) -> None:
        """The exchanges of ``ddp`` are lossy now."""

    def add_optimizer(self, optimizer: Any) -> None:
        """An optimizer has been made. Raises :class:`UsageError` if it cannot go with the mechanism."""

    # --- an iteration ----------------------------------------------------------------------------------------------

    def begin_iteration(self) -> None:
        """The optimizer is about to check gradients and to make its update."""

    def begin_update(self) -> None:
        """The weights are about to be updated."""

    def end_iteration(self) -> None:
        """The optimizer is done; also after an iteration without an update."""

    def happened(self, iteration: int) -> list[Any]:
        """Events of ``iteration`` beside its exchanges; see :meth:`Observer.happened`."""
        return []

    # --- programs of megatron.training -----------------------------------------------------------------------------

    def training_patches(self) -> list[Patch]:
        """Patches that it needs in megatron.training."""
        return []

    def before_arguments(self, args: Any) -> None:
        """Megatron is about to check its arguments ``args``."""

    def after_arguments(self, args: Any) -> None:
        """Megatron and the hooks have checked ``args``; no process group exists."""

    def save_beside(self, args: Any) -> contextlib.AbstractContextManager[bool] | None:
        """A context for another checkpoint, of :meth:`consensus_weights`; ``None`` without one.

        Its value: whether this rank writes.
        """
        return None

    def leave(self) -> None:
        """A run that ends well is over. A collective call of all jobs."""

    # --- weights and saved state -----------------------------------------------------------------------------------

    def owner_weights(self) -> contextlib.AbstractContextManager[None] | None:
        """A context with the owners' weights in the model; ``None`` if the exchanges provide it."""
        return None

    def consensus_weights(self) -> contextlib.AbstractContextManager[None] | None:
        """A context with the mean weights of all jobs in the model; ``None`` with one job."""
        return None

    @property
    def total(self) -> Callable[[Any], Any] | None:
        """A function that adds up a tensor over all jobs, a collective call of them; ``None`` with one job."""
        return None

    def identity(self) -> dict[str, Any]:
        """See :meth:`Run.identity`."""
        return {}

    def replica_state(self) -> Any:
        """The whole state of this rank's replica, if the mechanism keeps it; else ``None``."""
        return None

    def load_replica_state(self, state: Any) -> bool:
        """Restore :meth:`replica_state`. Returns whether the state was the mechanism's."""
        return False

    def state_dict(self) -> Any:
        """State beside that of the replica; ``None`` if there is none."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Restore :meth:`state_dict`."""

    def restart(self, iteration: int) -> None:
        """A checkpoint of ``iteration`` was loaded."""

    # --- what carries it -------------------------------------------------------------------------------------------

    @property
    def carriers(self) -> Sequence[Any]:
        """Senders of datagrams of its own."""
        return []

    def close(self) -> None:
        """The run is over."""
