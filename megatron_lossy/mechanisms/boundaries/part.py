"""The boundaries between pipeline stages, of real ranks and of workers that share a process."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ...hooks.versions import data_parallel_rank, pipeline_ranks
from ...run.mechanism import Part
from . import hooks

logger = logging.getLogger(__name__)


class StageBoundaries(Part):
    """Boundaries between pipeline stages that lose messages (``--p-act``, ``--p-act-grad``)."""

    name = "boundaries"

    def attach(self, run: Any) -> None:
        self._run = run
        self.boundaries = hooks.Boundaries(run, run.exchanges.on_one_node)
        run.events.on(chunk_comes=self.find_nodes, chunk_added=self.add_model_chunk)
        run.patches += hooks.patches(self.boundaries)

    def find_nodes(self, ddp: Any) -> None:
        """Find the nodes of all ranks. A collective call."""
        # Over all ranks, so before anything that only some of them have.
        if self._run.exchanges.find_nodes():
            _warn_if_reliable(self._run.exchanges.nodes)

    def add_model_chunk(self, ddp: Any) -> None:
        """Lose messages after layers of ``ddp``, if the boundaries are virtual."""
        if self._run.config.virtual_boundaries is not None:
            self.boundaries.attach(ddp, functools.partial(data_parallel_rank, ddp))


def attach_virtual(run: Any) -> None:
    """Let ``run``, whose workers share a process, lose messages at its ``--virtual-boundaries``."""
    boundaries = hooks.Boundaries(run)
    run.patches += hooks.patches(boundaries)
    run.events.on(chunk_added=lambda ddp: boundaries.attach(ddp, lambda: run.rank))


def _warn_if_reliable(nodes: Sequence[int]) -> None:
    """Say, on the first rank of each pipeline, that none of its boundaries leaves a node. ``nodes``: of all ranks."""
    ranks = pipeline_ranks()
    if len(ranks) > 1 and len({nodes[rank] for rank in ranks}) == 1 and ranks[0] == dist.get_rank():
        logger.warning(
            "nothing is lost between the stages on ranks %s: they are on one node (--lossy-links inter-node)", ranks
        )
