"""The virtual cluster: N workers take turns on one model.

An iteration: for each worker, its replica is swapped in and its micro-batches leave a gradient in Megatron's buffer;
what will not arrive is removed from it and the rest added to a sum. Then each owner's rule corrects its shard of the
sum, and the optimizer, which holds all shards, makes one update.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..config import LossyConfig
from ..errors import UsageError, refuse
from ..hooks import boundaries
from ..hooks.boundaries import Boundaries
from ..hooks.buckets import bucket_sizes, buckets_by_stream
from ..hooks.checks import check_boundaries, check_loss_per_token
from ..hooks.versions import optimizers
from ..ledger import Ledger, Patch
from ..run import Run
from ..transport import LossyGroup
from ..transport.network import consecutive_nodes
from .grad_norm import get_grad_norm_fp32
from .layout import buffers_for
from .leads import Leads
from .sampling import VirtualSampler
from .stream import StreamBuckets


class VirtualCluster(Run):
    """``workers`` data-parallel workers in this process; takes the place of installed hooks in a training program.

    Build the model within :meth:`building`, then call :meth:`attach`. ``members``: the workers' ranks among ``ranks``, of
    which others are elsewhere. ``writer``: the rank that the delivery log has as its writer; default this process's.
    Raises :class:`UsageError` where the loss flags do not fit.
    """

    def __init__(
        self,
        config: LossyConfig,
        workers: int,
        steps: int | None = None,
        gapless: bool = False,
        members: range | None = None,
        ranks: int | None = None,
        writer: int | None = None,
    ) -> None:
        self.check(config, workers)
        super().__init__(config, steps, gapless, writer)
        self.workers = workers
        self._members, self._ranks = members, ranks
        self._streams: list[StreamBuckets] = []
        self._worker: int | None = None
        self._rank = 0  # whose data are computed with
        self._boundaries = Boundaries(self) if config.loses_at_boundaries else None
        self._ledger = Ledger("virtual boundaries")
        if self._boundaries is not None:
            self._ledger.install(boundaries.patches(self._boundaries))
        self._tokens: torch.Tensor | None = None
        self._peak = 1.0

    @staticmethod
    def check(config: LossyConfig, workers: int) -> None:
        """Raise :class:`UsageError` for loss flags that mean nothing with so many virtual workers."""
        if config.loses_at_boundaries and config.virtual_boundaries is None:
            rate = config.p_act or config.p_act_grad
            raise refuse(
                "--p-act" if config.p_act else "--p-act-grad", rate, "needs --virtual-boundaries in one process"
            )
        if config.transport == "udp":
            raise refuse("--transport", "udp", "needs real ranks: virtual workers exchange in memory; choose pieces")
        if config.lossy_links == "inter-node" and not config.ranks_per_node:
            raise refuse("--lossy-links", "inter-node", "needs --ranks-per-node with --virtual-workers")
        if config.lossy_links == "inter-node":
            consecutive_nodes(range(workers), config.ranks_per_node)

    # --- building ------------------------------------------------------------------------------------------------

    def building(self) -> contextlib.AbstractContextManager[None]:
        """Within this context DistributedDataParallel lays its buffers out as N ranks would."""
        return buffers_for(self.workers)

    def attach(self, ddp: Any) -> None:
        """Take over the gradients of ``ddp``, one model chunk of a world of one rank, built in :meth:`building`.

        From here on Megatron neither reduces gradients nor gathers parameters: it calls this cluster where it would
        finish the gradients of a rank.
        """
        check_loss_per_token(ddp.config, self.config)
        check_boundaries(ddp.config, self.config)
        ddp.ddp_config.overlap_grad_reduce = False  # it has cut the buckets; nothing is sent
        ddp.config.no_sync_func = None
        self._transformer = ddp.config
        self.take_gradients()
        for name, _, pairs in buckets_by_stream(ddp):
            stream = StreamBuckets(
                self.config, pairs, name, self.workers, self.steps, self._optimizers, self._members, self._ranks
            )
            self._streams.append(stream)
        if self._boundaries is not None:
            self._boundaries.attach(ddp, lambda: self._rank)

    def take_gradients(self) -> None:
        """Be the one whom Megatron calls when the gradients of a rank are complete."""
        self._transformer.finalize_model_grads_func = self._collect

    @contextlib.contextmanager
    def _norm_by_shards(self) -> Iterator[None]:
        buffers = [bucket.grad_data for stream in self._streams for bucket in stream.buckets]
        ledger = Ledger("virtual cluster")
        ledger.install(
            [
                Patch(
                    target="megatron.core.optimizer.optimizer:get_grad_norm_fp32",
                    around=partial(get_grad_norm_fp32, buffers, self.workers),
                    why="adds up the gradient norm shard by shard, as the ranks do, so that clipping rounds alike",
                    versions="all",
                    until="never: Megatron has one rank here",
                )
            ]
        )
        try:
            yield
        finally:
            ledger.uninstall()

    # --- an iteration --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def worker(self, worker: int) -> Iterator[None]:
        """Within this context the model has the replica of ``worker``, and gradients are its own."""
        with contextlib.ExitStack() as turns:
            with torch.no_grad():
                for stream in self._streams:
                    turns.enter_context(stream.turn(worker))
                self._note_peak()
            self._worker = worker
            try:
                with self.data_of(worker):
                    yield
            finally:
                self._worker = None

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
            for stream in self._streams:
                stream.collect(self._worker, self.iteration, self.loss_scale(), self.following)
        if num_tokens is not None:
            self._tokens = num_tokens.clone() if self._tokens is None else self._tokens + num_tokens

    def step(self, optimizer: Any) -> Any:
        """Reduce the gradients of all workers and make the update; returns what ``optimizer.step()`` does."""
        result = self.make_update(optimizer)
        self.finish_iteration(bool(result[0]))
        return result

    def make_update(self, optimizer: Any) -> Any:
        """As :meth:`step`, but the iteration is not over."""
        scale = 1.0 / self.workers
        if self._tokens is not None:
            tokens, self._tokens = self._tokens.item(), None
            scale = 1.0 / tokens if tokens else 1.0
        with torch.no_grad():
            for stream in self._streams:
                stream.reduce(scale)
                stream.versions.before_update(self.iteration, stream.lost(self.iteration))
            self._note_peak()
            self._withdraw()
            self.begin_update()
            with self._norm_by_shards():
                result = optimizer.step()
            successful = bool(result[0])
            for stream in self._streams:
                stream.versions.after_update(successful)
            if successful:
                self.update = self.iteration
            self._send()
            if successful:
                for stream in self._streams:
                    stream.count(self.iteration)
        return result

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

    def begin_update(self) -> None:
        super().begin_update()
        for leads in self._leads:
            leads.before_update()
        for stream in self._streams:
            stream.add_up()

    @property
    def _leads(self) -> list[Leads]:
        return [stream.leads for stream in self._streams if stream.leads is not None]

    def _withdraw(self) -> None:
        for leads in self._leads:
            leads.withdraw()

    def _send(self) -> None:
        """Let receivers have the last update with its lead."""
        for leads in self._leads if self.update is not None else ():
            leads.send(self.update)

    @property
    def groups(self) -> list[LossyGroup]:
        return [group for stream in self._streams for group in stream.groups]

    @property
    def device(self) -> torch.device:
        return self._streams[0].buckets[0].param_data.device

    @property
    def streams(self) -> list[StreamBuckets]:
        return self._streams

    def replicas(self) -> list[VirtualSampler]:
        return [VirtualSampler(stream.stream, stream.pairs, stream.versions, stream.leads) for stream in self._streams]

    def settle(self) -> None:
        """Nothing is under way between iterations."""

    @contextlib.contextmanager
    def owner_weights(self, model_chunks: Any) -> Iterator[None]:
        """Within this context the model has the owners' weights: always, outside of a worker's turn, without leads."""
        assert self._worker is None
        with torch.no_grad():
            self._withdraw()
        try:
            yield
        finally:
            with torch.no_grad():
                self._send()

    def set_iteration(self, iteration: int) -> None:
        super().set_iteration(iteration)
        for stream in self._streams:
            stream.versions.restart()
        for leads in self._leads:
            leads.restart()

    def load_replicas(self, folder: str | os.PathLike) -> None:
        super().load_replicas(folder)
        with torch.no_grad():
            self._send()

    def identity(self) -> dict[str, Any]:
        return {"workers": self.workers, **bucket_sizes([(stream.stream, stream.pairs) for stream in self._streams])}

    def replica_file(self) -> str:
        return "virtual.pt"

    def error_of_missing(self, folder: str | os.PathLike, path: Path) -> UsageError:
        why = "that checkpoint has no replicas of virtual workers; omit the flag"
        return refuse("--save-replicas", f"with {folder}", why)

    def replica_state(self) -> list[dict[str, Any]]:
        return [stream.versions.state_dict() for stream in self._streams]

    def load_replica_state(self, state: list[dict[str, Any]]) -> None:
        for stream, versions in zip(self._streams, state, strict=True):
            stream.versions.load_state_dict(versions)

    # --- memory ----------------------------------------------------------------------------------------------------

    @property
    def weight_copies(self) -> float:
        """The most memory that weights have taken so far, in copies of the model, the working one included."""
        return self._peak

    def _note_peak(self) -> None:
        own = sum(bucket.param_data.numel() for stream in self._streams for bucket in stream.buckets)
        kept = sum(stream.kept for stream in self._streams)
        self._peak = max(self._peak, (own + kept) / own)
