"""The verbs that the core calls on mechanisms: those of each mechanism, and those of its part in a real run.

The core imports no mechanism and never asks whether one is there; :data:`megatron_lossy.base.registry.MECHANISMS` names them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..base.section import Flags

if TYPE_CHECKING:
    import torch

    from ..base.coding.blocks import BlockCode
    from ..base.jobs import World
    from ..base.ledger import Patch
    from ..config import LossyConfig
    from ..config.refusal import Section
    from ..delivery_log.reader import DeliveryLogFolder
    from ..delivery_log.verdict import Verdict
    from ..recovery import GradRecovery, Stale
    from ..transport import LossyGroup, Wire
    from .monitor import Observer


class Mechanism:
    """A mechanism beside the exchanges of the core: islands, full replicas, boundaries between stages, …

    Its class is its place in :data:`megatron_lossy.base.registry.MECHANISMS`. The core calls its verbs, whatever the flags
    are; each does nothing by default. Only a run in which nothing happens, since :meth:`.Flags.acts` is false of all
    flags, has neither parts nor observers. Flags and refusals are asked for where torch is not installed, so that a module
    of a mechanism imports torch where a verb needs it, and :mod:`megatron_lossy.config` not at all: that imports it.
    """

    #: The name in the registry, and of the section of refusals.
    name: ClassVar[str]
    #: The section of its flags.
    Flags: ClassVar[type[Flags]]
    #: The number of each of its phases in the key of random draws; no other mechanism may have it.
    phases: ClassVar[Mapping[str, int]] = {}
    #: The axis for each metric of its observers in reports: its label, with the unit, and whether it is logarithmic.
    axes: ClassVar[Mapping[str, tuple[str, bool]]] = {}
    #: Flags, and values with which its part has patches, so that these can be checked.
    patched: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def refusals(cls) -> Section:
        """Its rows of the table of refusals; none by default."""
        from ..config.refusal import Section

        return Section(cls.name, cls.name)

    # --- before a run ----------------------------------------------------------------------------------------------

    @classmethod
    def check(cls, config: LossyConfig, train_iters: int | None) -> None:
        """Raise :class:`UsageError` for files named by flags that do not fit its exchanges.

        ``train_iters``: ``None`` if it is not known.
        """

    @classmethod
    def advice(cls, config: LossyConfig, iterations: int | None) -> list[str]:
        """Lines about flags that are allowed but rarely wanted, for a run of ``iterations``, if known."""
        return []

    @classmethod
    def memory(cls, config: LossyConfig, held: Any) -> Sequence[Any]:
        """The components of memory, :class:`.lab.launch.memory.Kept`, that it keeps on a device which has ``held``.

        ``held``: a :class:`.lab.launch.memory.Held`.
        """
        return []

    @classmethod
    def more_saved(cls, config: LossyConfig, weights: int, compute: int, virtual: bool) -> float:
        """Bytes of a checkpoint beside :meth:`memory`, and beside the state of one optimizer for ``weights``.

        ``compute``: bytes of a weight in the model. ``virtual``: all workers are in one process.
        """
        return 0.0

    @classmethod
    def micro_batches_at_once(cls, config: LossyConfig, stage: int, stages: int, micro_batches: int) -> int | None:
        """Micro-batches whose activations a stage keeps at once; ``None``: as many as with Megatron's schedule.

        ``micro_batches``: of an iteration.
        """
        return None

    # --- a run -----------------------------------------------------------------------------------------------------

    @classmethod
    def world(cls, config: LossyConfig, seed: int) -> World | None:
        """The launched ranks divided into jobs; ``None`` if the flags ask for one job. Raises :class:`UsageError`.

        ``seed``: for what jobs do together.
        """
        return None

    @classmethod
    def part(cls, config: LossyConfig, world: World | None) -> Part | None:
        """Its part of a real run; ``None`` if the flags do not ask for it. ``world``: see :func:`hooks.install`."""
        return None

    @classmethod
    def fsdp_part(cls, config: LossyConfig, islands: Sequence[Sequence[int]] | None) -> Part | None:
        """Its part of a run of a model of PyTorch's ``fully_shard``; ``None`` if there is none.

        ``islands``: the ranks of each group that shards a copy of the model, if the copies are islands.
        """
        return None

    @classmethod
    def ddp_part(cls, config: LossyConfig) -> Part | None:
        """Its part of a run of a model in PyTorch's ``DistributedDataParallel``; ``None`` if there is none."""
        return None

    @classmethod
    def virtual_run(cls, config: LossyConfig, workers: int, iterations: int, seed: int, whole_optimizers: bool) -> Any:
        """The :class:`Run` of ``workers`` in one process, ``gapless``, if it is of another kind than the core's.

        ``whole_optimizers``: each worker has all of the optimizer. ``seed``: see :meth:`world`.
        """
        return None

    @classmethod
    def workers(cls, run: Any) -> Any:
        """The class of the trainer's workers in ``run``, a subclass of :class:`.lab.train.workers.Workers`.

        ``None``: that class itself. Asked for once the model is built.
        """
        return None

    @classmethod
    def virtual_part(cls, config: LossyConfig) -> Part | None:
        """Its part of a run whose workers share a process; ``None`` if the flags do not ask for it."""
        return None

    @classmethod
    def observers(cls, run: Any, writer: int | None) -> Sequence[Observer]:
        """Its observers of ``run``, real or virtual. ``writer``: the rank whose number records have."""
        return []

    @classmethod
    def columns(cls) -> list[Any]:
        """Columns (``pyarrow.Field``) of the log of errors, of rows about its own actions."""
        return []

    @classmethod
    def check_row(cls, config: LossyConfig, row: Mapping[str, Any]) -> bool:
        """Whether ``row`` of the log of errors is about an action of its own.

        Raises ``ValueError`` if the mechanism does not act so with the flags of the run.
        """
        return False

    @classmethod
    def codes(cls, config: LossyConfig) -> Mapping[str, BlockCode]:
        """The code of each phase whose values cross in codes."""
        return {}

    @classmethod
    def grad_rules(cls, config: LossyConfig, rules: list[GradRecovery], wire: Wire) -> list[GradRecovery]:
        """The rules for the gradients of the buckets of ``wire``, instead of ``rules`` or around them."""
        return rules

    @classmethod
    def param_rules(cls, config: LossyConfig, rules: list[Stale], wire: Wire) -> list[Stale]:
        """The rules for the parameters of the buckets of ``wire``, instead of ``rules`` or around them."""
        return rules

    @classmethod
    def sending(
        cls, groups: Sequence[LossyGroup], buckets: Sequence[Any], optimizers: Callable[[], list[Any]]
    ) -> Sending | None:
        """The values that the owners of a stream of virtual workers send; ``None`` for their weights.

        ``groups``: one for every worker. ``buckets``: Megatron's. ``optimizers``: returns Megatron's, once they exist.
        """
        return None

    # --- records beside the deliveries -----------------------------------------------------------------------------

    @classmethod
    def log_summary(cls, folder: Path) -> list[str]:
        """The lines about its records in ``folder``, that of a delivery log. Raises :class:`BadLog`."""
        return []

    @classmethod
    def verify_log(cls, folder: DeliveryLogFolder, verdict: Verdict) -> None:
        """Check its records in ``folder``, whose deliveries are checked. Adds the result to ``verdict``."""


class Part:
    """The part of a mechanism in a run, real or virtual: an island, a full replica, …

    Its verbs are called at fixed moments. Each does nothing by default. Those under a heading that names some runs are
    called in these alone.
    """

    #: Its name in the run, and in saved states.
    name: ClassVar[str]
    #: This job among equal ones whose losses are drawn apart: its number, and how many there are.
    job: tuple[int, int] = (0, 1)
    #: The launched rank whose number this process writes into records; ``None`` for its own rank.
    writer: int | None = None

    def attach(self, run: Any) -> None:
        """Attach to ``run``, which has just been made."""

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

    def add_model_chunk(self, ddp: Any) -> None:
        """The exchanges of ``ddp`` are lossy now."""

    def ready(self) -> None:
        """Model and optimizer are there. Raises :class:`UsageError` if they cannot go with the mechanism."""

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

    # --- ranks of Megatron -----------------------------------------------------------------------------------------

    #: Makes a context for the start of the reduction of a bucket group; ``None`` if none is needed.
    reducing: Callable[[Any], contextlib.AbstractContextManager[None]] | None = None

    def take_over(self, ddp: Any) -> list[LossyGroup] | None:
        """The groups that exchange ``ddp``, if the mechanism exchanges it by itself. A collective call."""
        return None

    def add_optimizer(self, optimizer: Any) -> None:
        """An optimizer has been made. Raises :class:`UsageError` if it cannot go with the mechanism."""

    # --- models of PyTorch's DDP -----------------------------------------------------------------------------------

    def know_buckets(self, ddp: Any) -> None:
        """The final buckets of ``ddp``, a run of DDP, are known."""

    def before_reduction(self, bucket: int, gradient: Any) -> None:
        """This rank's ``gradient`` [n] of a bucket, divided by the number of ranks, is about to be all-reduced."""

    def after_reduction(self, bucket: int, gradient: Any) -> None:
        """``gradient`` [n] is what this rank received of a bucket."""

    # --- workers that share a process ------------------------------------------------------------------------------

    def computing(self, worker: int, last: bool) -> contextlib.AbstractContextManager[None]:
        """A context for the passes of ``worker`` in an iteration. ``last``: no worker comes after it."""
        return contextlib.nullcontext()

    def updating(self) -> contextlib.AbstractContextManager[None] | None:
        """A context for the optimizer's update, with the norms that clip gradients; ``None`` for that of ranks."""
        return None

    @property
    def kept_elements(self) -> int:
        """Elements of weights that it holds beside the model."""
        return 0

    # --- training programs: our own and Megatron's -----------------------------------------------------------------

    def begin_stopping(self, signal: int) -> Callable[[], int] | None:
        """Begin to agree, at the start of an iteration, whether to stop after it, if all ranks of a job cannot by themselves.

        ``signal``: told this rank to stop, or 0. Returns a function that waits for the signal to stop, or 0, the same
        at all ranks. A collective call.
        """
        return None

    def catch_up(self, iteration: int) -> int:
        """See :meth:`Run.catch_up`. Replicas are equal if it is a later one."""
        return iteration

    def training_patches(self) -> list[Patch]:
        """Patches that it needs in megatron.training."""
        return []

    def before_arguments(self, args: Any) -> None:
        """Megatron is about to check its arguments ``args``."""

    def after_arguments(self, args: Any) -> None:
        """Megatron and the hooks have checked ``args``; no process group exists."""

    def leave(self) -> None:
        """A run that ends well is over. A collective call of all jobs."""

    # --- weights and saved state -----------------------------------------------------------------------------------

    def begin_saving(self) -> None:
        """The stale units of replicas are about to be saved, and no part keeps the whole state. A collective call."""

    def owner_weights(self) -> contextlib.AbstractContextManager[None] | None:
        """A context with the owners' weights in the model; ``None`` if the exchanges provide it."""
        return None

    def consensus_weights(self) -> contextlib.AbstractContextManager[bool | None] | None:
        """A context with the mean weights of all jobs in the model; ``None`` with one job.

        It yields false if it has the owners' weights in the model, since the jobs do not meet.
        """
        return None

    def saved_beside(self, folder: str) -> tuple[str, bool] | None:
        """See :meth:`Run.saved_beside`."""
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

    def load_replica_state(self, state: Any) -> None:
        """Restore :meth:`replica_state`."""

    def state_dict(self) -> Any:
        """State beside that of the replica; ``None`` if there is none."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Restore :meth:`state_dict`."""

    def rewind(self, folder: str) -> str | None:
        """The run is about to go on from the latest checkpoint in ``folder``, which may become an older one.

        Returns a line to report, if it did. A collective call of all jobs.
        """
        return None

    def restart(self, iteration: int) -> None:
        """A checkpoint of ``iteration`` was loaded."""

    # --- what carries it -------------------------------------------------------------------------------------------

    @property
    def carriers(self) -> Sequence[Any]:
        """Senders of datagrams of its own."""
        return []

    def close(self) -> None:
        """The run is over."""


class Sending:
    """The values that the owners of a stream of virtual workers send: their weights, unless a mechanism sends others.

    Between updates the parameter ``buffers``, [N * shard] for every bucket, hold the values that were sent. If these are
    not the owners' weights (:attr:`changes`), the weights are kept beside them.
    """

    #: Whether :meth:`change` does anything.
    changes: bool = False

    def __init__(self, buffers: Sequence[torch.Tensor], workers: int) -> None:
        self.buffers = buffers
        self._workers = workers
        self._kept: list[torch.Tensor] | None = None

    @property
    def weights(self) -> Sequence[torch.Tensor]:
        """The owners' weights of every bucket."""
        return self.buffers if self._kept is None else self._kept

    @property
    def kept(self) -> int:
        """Elements held beside the buffers."""
        return 0 if self._kept is None else sum(weights.numel() for weights in self._kept)

    @contextlib.contextmanager
    def owner(self, worker: int) -> Iterator[None]:
        """A context in which the shards of ``worker`` hold its weights."""
        if self._kept is None:
            yield
            return
        shards = [buffer.chunk(self._workers)[worker] for buffer in self.buffers]
        sent = [shard.clone() for shard in shards]
        for shard, weights in zip(shards, self._kept, strict=True):
            shard.copy_(weights.chunk(self._workers)[worker])
        try:
            yield
        finally:
            for shard, value in zip(shards, sent, strict=True):
                shard.copy_(value)

    def withdraw(self) -> None:
        """Put the owners' weights into the buffers."""
        if self._kept is not None:
            for buffer, weights in zip(self.buffers, self._kept, strict=True):
                buffer.copy_(weights)
            self._kept = None

    def before_update(self) -> None:
        """The owners' weights, which are in the buffers, are about to be updated."""

    def after_update(self) -> None:
        """The owners' weights have been updated."""

    def send(self, step: int) -> None:
        """Put what owners send after the update of ``step`` into the buffers. It may be called again for ``step``."""
        if self.changes:
            self._kept = [buffer.clone() for buffer in self.buffers]
            self.change(step)

    def change(self, step: int) -> None:
        """Turn the owners' weights in the buffers, those of the update of ``step``, into what they send."""

    def restart(self) -> None:
        """Begin again with the owners' weights of a checkpoint in the buffers."""
        self._kept = None
