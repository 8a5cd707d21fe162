"""A run whose model is sharded by ``fully_shard`` (FSDP2): each parameter group loses units in both of its exchanges."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..base.registry import MECHANISMS
from ..config import PHASES, LossyConfig
from ..run.replicas import BucketReplica, RankReplicas, gathered_reliably, load_stale_state, stale_state
from ..transport import LossyGroup, Network
from ..transport.group import inside
from ..transport.sites import Scalars, Sites, make_group
from .base import LossyRun
from .exchanges import Gather
from .layout import ParameterGroup, streams_of

#: Of all models of this process.
_scalars = Scalars()


class LossyFSDP(LossyRun):
    """The run of a model whose ``groups`` :func:`.make_lossy` has checked.

    ``islands``: the ranks of each group that shards a copy of the model, if the copies are islands.
    """

    kind = "FSDP2"

    def __init__(
        self,
        config: LossyConfig,
        optimizers: Sequence[torch.optim.Optimizer],
        groups: Sequence[ParameterGroup],
        islands: Sequence[Sequence[int]] | None = None,
        **how: Any,
    ) -> None:
        super().__init__(config, optimizers, **how)
        #: Times that weights were loaded.
        self.restarts = 0
        self._loading: list[Any] = []  # hooks
        self.islands = islands
        self._sites = Sites(config.sites)
        self._event: torch.Event | None = None
        self._gathers: list[Gather] = []
        self._lossy: list[LossyGroup] = []
        MECHANISMS.attach(self)
        self._streams = streams_of([group for group in groups if group.trained])
        ranks = [stream[0].ranks for stream in self._streams]
        self._sites.open(ranks)
        self._of_scalars = Sites(config.sites)
        self._of_scalars.open([dist.group.WORLD, *ranks])
        for number, stream in enumerate(self._streams):
            self._add(number, stream)
        for gather in self._gathers:
            gather.group.exchange_by(gather, gather.reduce)
        self.events.built()
        if config.sites is not None:
            _scalars.add(self._of_scalars)

    def _add(self, chunk: int, groups: Sequence[ParameterGroup]) -> None:
        ranks, sharing = groups[0].all_ranks, groups[0].ranks
        nodes = self.nodes_of([rank for island in self.islands or [ranks] for rank in island])
        size = self.config.members(self.jobs * len(ranks))
        if nodes is not None and self.config.rendezvous is not None:
            nodes *= self.jobs  # of the other launches as of this one
        networks = {phase: Network(self.config, phase, size, nodes) for phase in PHASES}
        first = self.job * len(ranks)  # no two islands lose the same
        members = [first + ranks.index(rank) for rank in dist.get_process_group_ranks(sharing)]
        stream = replace(self.stream, chunk=chunk)
        specs, site = [group.spec for group in groups], self._sites.of(sharing)
        lossy = make_group(self.config, specs, networks, members, stream, self.steps, sharing, site)
        self._lossy.append(lossy)
        if self.config.errs and len(ranks) > 1:
            ranges = [inside(group.used(gradients=True), lossy.own, group.spec.shard) for group in groups]
            owner = lossy.wire.members[lossy.rank] if lossy.members is None else lossy.own
            lossy.errors = self.errors_of([group.spec.grad_dtype for group in groups], ranges, owner)
        for number, group in enumerate(groups):
            self._gathers.append(Gather(self, group, lossy, number))
            rule = lossy.params[number]
            if not rule.exact and group.spec.param_dtype != torch.float32:
                rule.weights = group.weights  # type: ignore[attr-defined]  # 16 bits are sent, 32 are updated

    # --- an update -------------------------------------------------------------------------------------------------

    def begin_update(self) -> None:
        super().begin_update()
        for gather in self._gathers:
            if gather.made:
                gather.lossy.params[gather.number].before_update(gather.own)

    def note_update(self) -> None:
        if self.device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def note_weights(self) -> None:
        for gather in self._gathers:
            gather.note_weights()

    def check_weights(self) -> None:
        for gather in self._gathers:
            gather.check_weights()

    def updated(self) -> None:
        """Let the current stream wait for the last update; gathered weights left the replica before it."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def check_exchanges(self) -> None:
        if max(lossy.size for lossy in self._lossy) > 1:  # torch exchanges nothing with a lone rank
            super().check_exchanges()
        for gather in self._gathers:
            if gather.group.exchanges != (gather, gather.reduce):
                raise RuntimeError(
                    f"the exchanges of {gather.group.name} were replaced after make_lossy, so that they would lose nothing"
                )

    # --- what every run answers ------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self._gathers[0].group.device

    @property
    def groups(self) -> list[LossyGroup]:
        return self._lossy

    def replicas(self) -> list[RankReplicas]:
        return [
            RankReplicas(
                lossy,
                lossy.members or stream[0].ranks,
                [lossy.view(gather.replica) for gather in self._gathers if gather.lossy is lossy],
                partial(_used, stream, lossy),
            )
            for stream, lossy in zip(self._streams, self._lossy, strict=True)
        ]

    def settle(self) -> None:
        for gather in self._gathers:
            if not gather.fresh:
                [module, *_] = gather.group.modules
                module.reshard()  # else torch takes its memory for gathered
                module.unshard()
                module.reshard()

    def reshard(self) -> None:
        """Let torch take all weights from the replicas the next time."""
        for gather in self._gathers:
            gather.group.modules[0].reshard()

    def own_weights(self) -> list[torch.Tensor]:
        """Return this rank's shard of each parameter, flat and with padding, as the optimizer has it; not copies."""
        return [piece for gather in self._gathers for piece in gather.group.pieces()]

    def layout(self) -> list[tuple[str, list[list[int]]]]:
        """Return the name of each parameter group, and the shapes of its parameters, in the order of :meth:`own_weights`."""
        groups = [gather.group for gather in self._gathers]
        return [(group.name, [list(parameter.shape) for parameter in group.parameters]) for group in groups]

    def gathered(self) -> list[tuple[dist.ProcessGroup, torch.Tensor, torch.Tensor]]:
        """Return each parameter group's ranks, this rank's replica, and float32 [shard], the part that it owns."""
        return [(gather.group.ranks, gather.replica, gather.group.weights()) for gather in self._gathers]

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Return a context in which the replicas hold other weights than the run's: no update may be made."""
        self.reshard()
        self.holds = True
        try:
            yield
        finally:
            self.holds = False
            self.reshard()

    @contextlib.contextmanager
    def exchanged_weights(self, model_chunks: Any = None) -> Iterator[None]:
        held = []
        if self.update is not None and not self.config.untouched("param"):
            self.settle()
            held = self._held()
        with gathered_reliably(held, self.update), self.opened():
            yield

    # --- saved state -----------------------------------------------------------------------------------------------

    def weights_changed(self) -> None:
        """Note a write of weights that is no optimizer's: the next gather is reliable. Call it on all ranks."""
        self.restarts += 1

    def follow_loading(self, model: torch.nn.Module) -> None:
        """Let the next gather be reliable after weights of ``model``, or of a part of it, are loaded."""
        me = weakref.ref(self)  # the model may outlive the run

        def loaded(_: torch.nn.Module, __: Any) -> None:
            if (run := me()) is not None:
                run.weights_changed()

        self._loading = [module.register_load_state_dict_post_hook(loaded) for module in model.modules()]

    def set_iteration(self, iteration: int) -> None:
        self.weights_changed()
        super().set_iteration(iteration)

    def identity(self) -> dict[str, Any]:
        found: dict[str, Any] = {"world size": dist.get_world_size()}
        for group in (gather.group for gather in self._gathers):
            found[f"group {group.name}"] = f"{group.spec.shard_of('param')} elements of {group.spec.param_dtype}"
        return found

    def _held(self) -> list[BucketReplica]:
        gathers = self._gathers
        return [BucketReplica(own.lossy, own.number, own.replica, own.group.ranks) for own in gathers]

    def exchanged_state(self) -> Any:
        if self.update is not None:
            self.settle()
        return stale_state(self._held(), self.update)

    def load_exchanged_state(self, state: Any) -> None:
        self.settle()  # reliably: the owners' weights, of which each rank missed some
        load_stale_state(self._held(), self.update, state)

    # --- the end ---------------------------------------------------------------------------------------------------

    def restore_exchanges(self) -> None:
        for hook in self._loading:
            hook.remove()
        for gather in self._gathers:
            if gather.group.exchanges == (gather, gather.reduce):
                gather.group.exchange_by(*gather.before)
        if self.config.sites is not None:
            _scalars.remove(self._of_scalars)

    @property
    def sent_bytes(self) -> dict[str, int]:
        """Bytes that this rank has sent to others in both phases, by counting what it gave to collectives."""
        return {
            "param": sum(gather.sent_bytes for gather in self._gathers),
            "grad": sum(gather.reduce.sent_bytes for gather in self._gathers),
        }


def _used(groups: Sequence[ParameterGroup], lossy: LossyGroup) -> list[np.ndarray]:
    return [lossy.seen(group.used(), group.spec.shard_of("param")) for group in groups]
