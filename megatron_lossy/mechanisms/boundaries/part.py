"""The boundaries between pipeline stages of real ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from ...hooks.complete import warn_of_reliable_boundaries
from ...hooks.versions import data_parallel_rank
from ...ledger import Patch
from ...mechanism import Part
from . import hooks


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
            warn_of_reliable_boundaries(self._run.exchanges.nodes)
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
