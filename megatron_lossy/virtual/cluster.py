"""The virtual cluster: N workers take turns on one model.

An iteration: for each worker, its replica is swapped in and its micro-batches leave a gradient in Megatron's buffer;
what will not arrive is removed from it and the rest added to a sum. Then each owner's rule corrects its shard of the
sum, and the optimizer, which holds all shards, makes one update.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..config import PHASES, LossyConfig
from ..errors import refuse
from ..hooks.replicas import write_state
from ..hooks.runtime import buckets_by_stream
from ..ledger import Ledger, Patch
from ..monitor import Drift, Observer, load_states, metrics_of, save_records, states_of
from ..run import make_observers
from .grad_norm import by_shards
from .group import Group
from .layout import buffers_for
from .versions import FIRST
from .worker_replicas import WorkerReplicas

REPLICAS = Path("lossy_replicas") / "virtual.pt"


class VirtualCluster:
    """``workers`` data-parallel workers in this process; takes the place of installed hooks in a training program.

    Build the model within :meth:`building`, then call :meth:`attach`. ``steps``: length of the run, if known, to
    refuse a trace that is too short. Raises :class:`UsageError` where the loss flags do not fit.
    """

    def __init__(self, config: LossyConfig, workers: int, steps: int | None = None) -> None:
        self.check(config)
        self.config = config
        self.workers = workers
        self.steps = steps
        self.iteration = 0
        self.observers: list[Observer] = [] if config.lossless else make_observers(config)
        self._drift = next((observer for observer in self.observers if isinstance(observer, Drift)), None)
        self._groups: list[Group] = []
        self._worker: int | None = None
        self._tokens: torch.Tensor | None = None
        self._peak = 1.0

    @staticmethod
    def check(config: LossyConfig) -> None:
        """Raise :class:`UsageError` for loss flags that mean nothing without real ranks."""
        if config.lossy_links == "inter-node" and not config.ranks_per_node:
            raise refuse("--lossy-links", "inter-node", "needs --ranks-per-node with --virtual-workers")

    # --- building ------------------------------------------------------------------------------------------------

    def building(self) -> contextlib.AbstractContextManager[None]:
        """Within this context DistributedDataParallel lays its buffers out as N ranks would."""
        return buffers_for(self.workers)

    def attach(self, ddp: Any) -> None:
        """Take over the gradients of ``ddp``, one model chunk of a world of one rank, built in :meth:`building`.

        From here on Megatron neither reduces gradients nor gathers parameters: it calls this cluster where it would
        finish the gradients of a rank.
        """
        ddp.ddp_config.overlap_grad_reduce = False  # it has cut the buckets; nothing is sent
        ddp.config.no_sync_func = None
        ddp.config.finalize_model_grads_func = self._collect
        for stream, _, pairs in buckets_by_stream(ddp):
            self._groups.append(Group(self.config, pairs, stream, self.workers, self.steps))

    @contextlib.contextmanager
    def _norm_by_shards(self) -> Iterator[None]:
        buffers = [bucket.grad_data for group in self._groups for bucket in group.buckets]
        ledger = Ledger("virtual cluster")
        ledger.install(
            [
                Patch(
                    "megatron.core.optimizer.optimizer:get_grad_norm_fp32",
                    lambda original: by_shards(original, buffers, self.workers),
                    "adds up the gradient norm shard by shard, as the ranks do, so that clipping rounds alike",
                    "all",
                    "never: Megatron has one rank here",
                )
            ]
        )
        try:
            yield
        finally:
            ledger.uninstall()

    def uninstall(self) -> None:
        """Close the observers. Nothing stays patched outside of :meth:`building` and :meth:`step`."""
        for observer in self.observers:
            observer.close()

    # --- an iteration --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def worker(self, worker: int) -> Iterator[None]:
        """Within this context the model has the replica of ``worker``, and gradients are its own."""
        with torch.no_grad():
            for group in self._groups:
                group.versions.swap_in(worker)
            self._note_peak()
        self._worker = worker
        try:
            yield
        finally:
            self._worker = None
            with torch.no_grad():
                for group in self._groups:
                    group.versions.swap_out()

    def _collect(self, model: Any, num_tokens: torch.Tensor | None = None, **_: Any) -> None:
        """In the place of Megatron's ``finalize_model_grads``, at the end of a worker's last backward pass."""
        assert self._worker is not None, "gradients were computed outside a worker's turn"
        with torch.no_grad():
            for group in self._groups:
                group.collect(self._worker, self.iteration)
        if num_tokens is not None:
            self._tokens = num_tokens.clone() if self._tokens is None else self._tokens + num_tokens

    def step(self, optimizer: Any) -> Any:
        """Reduce the gradients of all workers and make the update; returns what ``optimizer.step()`` does."""
        scale = 1.0 / self.workers
        if self._tokens is not None:
            tokens, self._tokens = self._tokens.item(), None
            scale = 1.0 / tokens if tokens else 1.0
        with torch.no_grad():
            for group in self._groups:
                group.reduce(scale)
                group.versions.before_update(self.iteration, group.lost(self.iteration))
            self._note_peak()
            if self._drift is not None:
                self._drift.before_update(self.iteration, self._replicas)
            with self._norm_by_shards():
                result = optimizer.step()
            successful = bool(result[0])
            for group in self._groups:
                group.versions.after_update(successful)
                for worker in group.workers:
                    worker.finish_step(self.iteration, successful)
        self._tell_observers(successful)
        self._measure_drift(successful)
        self.iteration += 1
        return result

    def _tell_observers(self, successful: bool) -> None:
        if not self.observers:
            return
        for group in self._groups:
            for phase in PHASES if successful else PHASES[:1]:
                observation = group.observation(phase, self.iteration)
                if observation is not None:
                    for observer in self.observers:
                        observer.observe(observation)
        for observer in self.observers:
            observer.finish_iteration(self.iteration, successful)

    def _replicas(self) -> list[WorkerReplicas]:
        return [WorkerReplicas(group.stream, group.pairs, group.versions) for group in self._groups]

    def _measure_drift(self, successful: bool) -> None:
        if self._drift is None or not self._drift.due(self.iteration):
            return
        if any(group.versions.current != FIRST for group in self._groups):
            self._drift.measure(self.iteration, successful, self._replicas())

    # --- what a training program asks ------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """What the observers have measured since the last call (docs/monitors.md)."""
        return metrics_of(self.observers)

    @contextlib.contextmanager
    def owner_weights(self, model_chunks: Any) -> Iterator[None]:
        """Within this context the model has the owners' weights: always, outside of a worker's turn."""
        assert self._worker is None
        yield

    @property
    def weight_copies(self) -> float:
        """The most memory that weights have taken so far, in copies of the model, the working one included."""
        return self._peak

    def _note_peak(self) -> None:
        own = sum(bucket.param_data.numel() for group in self._groups for bucket in group.buckets)
        kept = sum(group.versions.kept for group in self._groups)
        self._peak = max(self._peak, (own + kept) / own)

    def set_iteration(self, iteration: int) -> None:
        """A checkpoint of ``iteration`` attempted iterations was loaded: all replicas are equal."""
        self.iteration = iteration
        for group in self._groups:
            group.versions.restart()
        for observer in self.observers:
            observer.restart(iteration)

    def save_replicas(self, folder: str | os.PathLike) -> None:
        """With ``--save-replicas``: write what makes the replicas differ, and the state of the rules."""
        save_records(self.observers)
        if not self.config.save_replicas or self.config.lossless:
            return
        state = {
            "workers": self.workers,
            "--loss-unit": self.config.loss_unit,
            "--packet-bytes": self.config.packet_bytes if self.config.loss_unit == "packet" else None,
            "--grad-recovery": self.config.grad_recovery,
            "versions": [group.versions.state_dict() for group in self._groups],
            "recovery": [
                [[rule.state_dict() for rule in worker.recoveries] for worker in group.workers]
                for group in self._groups
            ],
            "observers": states_of(self.observers),
        }
        write_state(state, Path(folder) / REPLICAS)

    def load_replicas(self, folder: str | os.PathLike) -> None:
        """With ``--save-replicas``: restore :meth:`save_replicas`. Raises :class:`UsageError` if it does not fit."""
        if not self.config.save_replicas or self.config.lossless:
            return
        path = Path(folder) / REPLICAS
        if not path.is_file():
            raise refuse(
                "--save-replicas", f"with {folder}", "that checkpoint has no replicas of virtual workers; omit the flag"
            )
        device = self._groups[0].buckets[0].param_data.device
        state = torch.load(path, map_location=device, weights_only=True)
        for name, value in (
            ("workers", self.workers),
            ("--loss-unit", self.config.loss_unit),
            ("--packet-bytes", self.config.packet_bytes if self.config.loss_unit == "packet" else None),
            ("--grad-recovery", self.config.grad_recovery),
        ):
            if state[name] != value:
                raise refuse("--save-replicas", f"with {folder}", f"{name} was {state[name]} there and is {value} here")
        for group, versions, recovery in zip(self._groups, state["versions"], state["recovery"], strict=True):
            group.versions.load_state_dict(versions)
            for worker, rules in zip(group.workers, recovery, strict=True):
                for rule, saved in zip(worker.recoveries, rules, strict=True):
                    rule.load_state_dict(saved, device)
        load_states(self.observers, state["observers"])
