"""Mechanisms, and their parts of runs.

The core imports no mechanism and never asks whether one is there; :data:`megatron_lossy.base.registry.MECHANISMS` names them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ..base.section import Flags

if TYPE_CHECKING:
    import pyarrow

    from ..config import LossyConfig
    from ..config.refusal import Section
    from ..transport import Wire
    from .monitor import Observer


class Mechanism:
    """A mechanism besides the exchanges of the core: islands, full replicas, boundaries between stages, …

    Its class is its place in :data:`megatron_lossy.base.registry.MECHANISMS`. The core calls its verbs, whatever the flags
    are; each does nothing by default. Only a run in which nothing happens, since :meth:`.Flags.acts` is false of all
    flags, has neither parts nor observers. Flags and refusals are asked for where torch is not installed, so that a module
    of a mechanism imports torch where a verb needs it, and :mod:`megatron_lossy.config` not at all: that imports it.
    """

    #: The name in the registry, and of the section of refusals.
    name: ClassVar[str]
    #: The section of its flags.
    Flags: ClassVar[type[Flags]]
    #: ``module:NAME`` of its section of refusals, if it has one; that module may import the configuration.
    table: ClassVar[str] = ""
    #: The number of each of its phases in the key of random draws; no other mechanism may have it.
    phases: ClassVar[Mapping[str, int]] = {}
    #: The axis for each metric of its observers in reports: its label, with the unit, and whether it is logarithmic.
    axes: ClassVar[Mapping[str, tuple[str, bool]]] = {}

    @classmethod
    def refusals(cls) -> Section:
        """Return its rows of the table of refusals: those at :attr:`table`."""
        from ..config.refusal import Section

        module, _, name = cls.table.partition(":")
        return getattr(importlib.import_module(module), name) if module else Section(cls.name, cls.name)

    @classmethod
    def attach(cls, run: Any) -> None:
        """Subscribe to events of ``run``, which has just been made, or add a part to it, if the flags ask for one.

        ``run.kind`` is Megatron, FSDP2, DDP or virtual. Our own parts in virtual runs stand in :mod:`.lab.virtual.base`.
        """

    @classmethod
    def observers(cls, run: Any, writer: int | None) -> Sequence[Observer]:
        """Return its observers of ``run``, real or virtual. ``writer``: the rank whose number records have."""
        return []

    @classmethod
    def rules(cls, config: LossyConfig, phase: str, rules: list[Any], wire: Wire) -> list[Any]:
        """Return the rules for the buckets of ``wire`` in ``phase``, instead of ``rules`` or around them.

        They are :class:`.GradRecovery` in the phase ``grad``, and :class:`.Stale` in ``param``.
        """
        return rules

    @classmethod
    def has_events(cls, config: LossyConfig) -> bool:
        """Return whether the flags can lead to events of its own in the log."""
        return False

    @classmethod
    def event_columns(cls) -> Sequence[pyarrow.Field]:
        """Return the columns that its events add to the log."""
        return []


class Event(list[Callable[..., None]]):
    """One kind of moment of a run: the functions that are called then, in the order in which they subscribed."""

    def __call__(self, *arguments: Any) -> None:
        for act in self:
            act(*arguments)


class Events:
    """The events of a run. All ranks of a job come to them in the same order. Runs of all kinds have those without a kind below."""

    def __init__(self) -> None:
        #: The model chunk ``ddp`` is about to be added. (Megatron, virtual)
        self.chunk_comes = Event()
        #: The exchanges of the model chunk ``ddp`` are lossy now. (Megatron, virtual; DDP, with its run as the argument)
        self.chunk_added = Event()
        #: Megatron has made ``optimizer``. Functions may raise :class:`UsageError`. (Megatron)
        self.optimizer_added = Event()
        #: Model and optimizer exist. Functions may raise :class:`UsageError`. (our trainer, FSDP2)
        self.built = Event()
        #: The optimizer is about to check gradients and to make its update.
        self.iteration_begins = Event()
        #: The weights are about to be updated.
        self.update_begins = Event()
        #: The optimizer is done; but for FSDP2 and DDP also after an iteration without an update.
        self.iteration_ends = Event()
        #: The stale units of replicas are about to be saved, after the states of parts. It does not come if a keeper has the whole state.
        self.save_begins = Event()
        #: All replicas are equal, after ``iteration`` iterations: a checkpoint was loaded.
        self.restart = Event()
        #: Megatron is about to check its arguments ``args``. (megatron.training)
        self.arguments_come = Event()
        #: Megatron and the hooks have checked ``args``; no process group exists. (megatron.training)
        self.arguments_checked = Event()
        #: The program has logged the training loss, its argument, on a rank that has it. (our trainer, megatron.training)
        self.logged = Event()
        #: The run has come to a good end. All jobs call it.
        self.leave = Event()
        #: End with the run.
        self.close = Event()

    def on(self, **functions: Callable[..., Any]) -> None:
        """Subscribe each of ``functions`` to the event of its name."""
        for name, act in functions.items():
            getattr(self, name).append(act)


class Part:
    """The part of a mechanism in a run: an island, a full replica, …

    It subscribes to :class:`Events`, and adds patches and observers to the run, in :meth:`attach`.
    """

    #: Its name in the run, and in saved states.
    name: ClassVar[str]

    def attach(self, run: Any) -> None:
        """Attach to ``run``, which has just been made."""

    @property
    def carriers(self) -> Sequence[Any]:
        """Senders of datagrams of its own."""
        return []

    def identity(self) -> dict[str, Any]:
        """See :meth:`Run.identity`."""
        return {}

    def state_dict(self) -> Any:
        """Return the state besides that of the replica; ``None`` if there is none."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Restore :meth:`state_dict`."""
