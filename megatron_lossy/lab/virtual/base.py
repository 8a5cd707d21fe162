"""The base of all virtual runs: workers that take turns on one model, in one process and a world of one rank."""

from __future__ import annotations

import contextlib
import os
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ...base.errors import UsageError, refuse
from ...base.ledger import Ledger
from ...base.registry import MECHANISMS
from ...config import LossyConfig
from ...config.facts import Facts
from ...config.refusal import check_refusals
from ...hooks.facts import of_model
from ...hooks.versions import optimizers
from ...run.base import Run
from ..async_pipeline.virtual import Stages


class VirtualRun(Run):
    """``workers`` data-parallel workers in this process. They take the place of installed hooks in a training program.

    ``ranks``: the workers of all islands, if these are the workers of one. Build the model within :meth:`building`,
    then call :meth:`attach`. Raises :class:`UsageError` if the loss flags do not fit.
    """

    kind = "virtual"

    def __init__(
        self,
        config: LossyConfig,
        workers: int,
        steps: int | None = None,
        gapless: bool = False,
        writer: int | None = None,
        ranks: int | None = None,
    ) -> None:
        facts = Facts(workers=ranks or workers, virtual=True)
        check_refusals(config, facts)
        super().__init__(config, steps, gapless, writer)
        self.facts = facts
        self.workers, self.local = workers, range(workers)
        self._worker: int | None = None  # the worker whose turn it is
        #: The rank whose data are used.
        self.rank = 0
        #: Pipeline stages with weights of different ages, of :mod:`.async_pipeline.virtual`, if there are any.
        self.stages: Any = None
        # Parts that mechanisms have in runs of virtual workers alone; none of them names its twin.
        if (config.virtual_stages or 1) > 1:
            self.add_part(Stages(config.virtual_stages))
        MECHANISMS.attach(self)
        self._ledger = Ledger("virtual workers")
        self._ledger.install(self.patches)
        self._tokens: torch.Tensor | None = None

    def attach(self, ddp: Any) -> None:
        """Take over the gradients of ``ddp``, one model chunk of a world of one rank, built in :meth:`building`.

        From here on Megatron neither reduces gradients nor gathers parameters. It calls this run when the gradients of
        a rank are complete.
        """
        self.add_facts(of_model(ddp))
        ddp.ddp_config.overlap_grad_reduce = False  # it has cut the buckets; nothing is sent
        ddp.config.no_sync_func = None
        self._transformer = ddp.config
        self.events.chunk_comes(ddp)
        self.take_gradients()
        self._add(ddp)
        self.events.chunk_added(ddp)

    def take_gradients(self) -> None:
        """Make Megatron call this run when the gradients of a rank are complete."""
        self._transformer.finalize_model_grads_func = self._collect

    @abstractmethod
    def _add(self, ddp: Any) -> None:
        """Register the buckets of ``ddp``."""

    @contextlib.contextmanager
    def worker(self, worker: int, evaluates: bool = False) -> Iterator[None]:
        with self._replica(worker):
            self._worker = worker
            try:
                staged = self.stages is not None and not evaluates
                ages = self.stages.computing(worker, worker == self.workers - 1) if staged else contextlib.nullcontext()
                with self.data_of(worker), ages:
                    yield
            finally:
                self._worker = None

    @abstractmethod
    def _replica(self, worker: int) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the model has the weights of ``worker``."""

    @contextlib.contextmanager
    def data_of(self, worker: int) -> Iterator[None]:
        before, self.rank = self.rank, worker
        try:
            yield
        finally:
            self.rank = before

    def _collect(self, model: Any, num_tokens: torch.Tensor | None = None, **_: Any) -> None:
        """Take the place of Megatron's ``finalize_model_grads``, at the end of a worker's last backward pass."""
        assert self._worker is not None, "gradients were computed outside a worker's turn"
        with torch.no_grad():
            self._collect_of(self._worker)
        if num_tokens is not None:
            self._tokens = num_tokens.clone() if self._tokens is None else self._tokens + num_tokens

    @abstractmethod
    def _collect_of(self, worker: int) -> None:
        """Take the gradient of ``worker`` out of Megatron's buffers, which are zero afterwards."""

    def _per_token(self) -> float | None:
        """Return the factor from the sum of the gradients to that of a token; ``None`` if losses are no sums."""
        if self._tokens is None:
            return None
        tokens, self._tokens = self._tokens.item(), None
        return 1.0 / tokens if tokens else 1.0

    def uninstall(self) -> None:
        self._ledger.uninstall()
        super().uninstall()

    def living_optimizers(self) -> list[Any]:
        # Megatron sets the scale_loss of its optimizer.
        return optimizers(getattr(self._transformer.grad_scale_func, "__self__", None))

    def replica_file(self) -> str:
        return "virtual.pt"

    def error_of_missing(self, folder: str | os.PathLike, path: Path) -> UsageError:
        why = "that checkpoint has no replicas of virtual workers; omit the flag"
        return refuse("--save-replicas", f"with {folder}", why)
