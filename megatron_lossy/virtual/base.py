"""What all virtual runs share: workers that take turns on one model, in one process and a world of one rank."""

from __future__ import annotations

import contextlib
import os
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..config import LossyConfig
from ..config.facts import Facts
from ..config.refusal import check_refusals
from ..errors import UsageError, refuse
from ..hooks import boundaries
from ..hooks.boundaries import Boundaries
from ..hooks.facts import of_model
from ..hooks.versions import optimizers
from ..ledger import Ledger
from ..run import Run


class VirtualRun(Run):
    """``workers`` data-parallel workers in this process; takes the place of installed hooks in a training program.

    ``ranks``: workers of all islands, where these are those of one. Build the model within :meth:`building`, then call
    :meth:`attach`. Raises :class:`UsageError` where the loss flags do not fit.
    """

    def __init__(
        self,
        config: LossyConfig,
        workers: int,
        steps: int | None = None,
        gapless: bool = False,
        writer: int | None = None,
        ranks: int | None = None,
    ) -> None:
        check_refusals(config, Facts(workers=ranks or workers, virtual=True))
        super().__init__(config, steps, gapless, writer)
        self.workers = workers
        self._all_workers = ranks or workers
        self._worker: int | None = None  # whose turn it is
        self._rank = 0  # whose data are computed with
        self._boundaries = Boundaries(self) if config.loses_at_boundaries else None
        self._ledger = Ledger("virtual boundaries")
        if self._boundaries is not None:
            self._ledger.install(boundaries.patches(self._boundaries))
        self._tokens: torch.Tensor | None = None

    # --- building ------------------------------------------------------------------------------------------------

    @abstractmethod
    def building(self) -> contextlib.AbstractContextManager[None]:
        """Within this context DistributedDataParallel lays its buffers out as N ranks would."""

    def attach(self, ddp: Any) -> None:
        """Take over the gradients of ``ddp``, one model chunk of a world of one rank, built in :meth:`building`.

        From here on Megatron neither reduces gradients nor gathers parameters: it calls this run where it would
        finish the gradients of a rank.
        """
        check_refusals(self.config, of_model(ddp, self._all_workers, virtual=True))
        ddp.ddp_config.overlap_grad_reduce = False  # it has cut the buckets; nothing is sent
        ddp.config.no_sync_func = None
        self._transformer = ddp.config
        self.take_gradients()
        self._add(ddp)
        if self._boundaries is not None:
            self._boundaries.attach(ddp, lambda: self._rank)

    def take_gradients(self) -> None:
        """Be the one whom Megatron calls when the gradients of a rank are complete."""
        self._transformer.finalize_model_grads_func = self._collect

    @abstractmethod
    def _add(self, ddp: Any) -> None:
        """Know the buckets of ``ddp``."""

    # --- an iteration --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def worker(self, worker: int, evaluates: bool = False) -> Iterator[None]:
        """Within this context the model has the replica of ``worker``, and gradients are its own.

        ``evaluates``: there are none; virtual stages have their newest weights. Without it: a batch of an iteration, once.
        """
        with self._replica(worker):
            self._worker = worker
            try:
                with self.data_of(worker):
                    yield
            finally:
                self._worker = None

    @abstractmethod
    def _replica(self, worker: int) -> contextlib.AbstractContextManager[Any]:
        """Within this context the model has the weights of ``worker``."""

    @contextlib.contextmanager
    def data_of(self, worker: int) -> Iterator[None]:
        """Within this context what is computed is that of ``worker``, with whatever weights."""
        before, self._rank = self._rank, worker
        try:
            yield
        finally:
            self._rank = before

    def _collect(self, model: Any, num_tokens: torch.Tensor | None = None, **_: Any) -> None:
        """In the place of Megatron's ``finalize_model_grads``, at the end of a worker's last backward pass."""
        assert self._worker is not None, "gradients were computed outside a worker's turn"
        with torch.no_grad():
            self._collect_of(self._worker)
        if num_tokens is not None:
            self._tokens = num_tokens.clone() if self._tokens is None else self._tokens + num_tokens

    @abstractmethod
    def _collect_of(self, worker: int) -> None:
        """Take the gradient of ``worker`` out of Megatron's buffers, which are zero afterwards."""

    def _per_token(self) -> float | None:
        """What the sum of the gradients is multiplied with to be that of a token; ``None`` where losses are not sums."""
        if self._tokens is None:
            return None
        tokens, self._tokens = self._tokens.item(), None
        return 1.0 / tokens if tokens else 1.0

    @abstractmethod
    def step(self, optimizer: Any) -> Any:
        """Reduce the gradients of all workers and make the update; returns what ``optimizer.step()`` does."""

    def uninstall(self) -> None:
        super().uninstall()
        self._ledger.uninstall()

    # --- what every run answers ------------------------------------------------------------------------------------

    def loss_scale(self) -> torch.Tensor | None:
        scalers = [getattr(optimizer, "grad_scaler", None) for optimizer in self._optimizers()]
        return next((scaler.scale for scaler in scalers if scaler is not None), None)

    def _optimizers(self) -> list[Any]:
        # Megatron sets the scale_loss of its optimizer.
        return optimizers(getattr(self._transformer.grad_scale_func, "__self__", None))

    def settle(self) -> None:
        """Nothing is under way between iterations."""

    def replica_file(self) -> str:
        return "virtual.pt"

    def error_of_missing(self, folder: str | os.PathLike, path: Path) -> UsageError:
        why = "that checkpoint has no replicas of virtual workers; omit the flag"
        return refuse("--save-replicas", f"with {folder}", why)
