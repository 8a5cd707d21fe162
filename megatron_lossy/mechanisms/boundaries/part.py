"""The boundaries between pipeline stages, of real ranks and of workers that share a process."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ...base.ledger import Patch
from ...hooks.versions import data_parallel_rank, pipeline_ranks
from ...run.mechanism import Part
from . import hooks

logger = logging.getLogger(__name__)


class StageBoundaries(Part):
    """Boundaries between pipeline stages that lose messages (``--p-act``, ``--p-act-grad``, ``--act-transport``)."""

    name = "boundaries"

    def attach(self, run: Any) -> None:
        self._run = run
        self.boundaries = hooks.Boundaries(run, run.exchanges.on_one_node)

    def patches(self) -> list[Patch]:
        if self._run.config.act_transport == "torch":
            return hooks.patches(self.boundaries)
        from . import datagrams

        return hooks.patches(self.boundaries, datagrams.p2p_ops)

    def meet(self, ddp: Any) -> None:
        # Over all ranks, so before anything that only some of them have.
        if self._run.exchanges.find_nodes():
            _warn_if_reliable(self._run.exchanges.nodes)
        if self._run.config.act_transport == "udp" and self.boundaries.links is None:
            from .links import StageLinks

            self.boundaries.links = StageLinks(self._run.config)

    def add_model_chunk(self, ddp: Any) -> None:
        if self._run.config.virtual_boundaries is not None:
            self.boundaries.attach(ddp, functools.partial(data_parallel_rank, ddp))

    @property
    def carriers(self) -> Sequence[Any]:
        return [] if self.boundaries.links is None else self.boundaries.links.all

    def close(self) -> None:
        if self.boundaries.links is not None:
            self.boundaries.links.close()


class VirtualBoundaries(Part):
    """The ``--virtual-boundaries`` of workers that share a process."""

    name = "boundaries"

    def attach(self, run: Any) -> None:
        self._run = run
        self.boundaries = hooks.Boundaries(run)

    def patches(self) -> list[Patch]:
        return hooks.patches(self.boundaries)

    def add_model_chunk(self, ddp: Any) -> None:
        self.boundaries.attach(ddp, lambda: self._run.rank)


def _warn_if_reliable(nodes: Sequence[int]) -> None:
    """Say, on the first rank of each pipeline, that none of its boundaries leaves a node. ``nodes``: of all ranks."""
    ranks = pipeline_ranks()
    if len(ranks) > 1 and len({nodes[rank] for rank in ranks}) == 1 and ranks[0] == dist.get_rank():
        logger.warning(
            "nothing is lost between the stages on ranks %s: they are on one node (--lossy-links inter-node)", ranks
        )
