"""One island of a run whose islands are launches of their own: all launched ranks are its ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch


class ElasticWorld:
    """The place of this rank in island ``island`` of ``islands`` slots.

    ``rank``, ``size``: within the island, which is the launch. ``launched_rank``: its number if all slots were one launch.
    ``seed``: for the exchanges, the same for all.
    """

    def __init__(self, islands: int, island: int, seed: int = 0) -> None:
        self.islands, self.island, self.seed = islands, island, seed
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.launched_rank = island * self.size + self.rank
        self.job = island, islands
        #: By flag, what all islands must have alike.
        self.alike: Mapping[str, str] = {}

    def tell_environment(self) -> None:
        """The environment is that of the island already."""

    def compare(self, settings: Mapping[str, str]) -> None:
        """See :class:`.base.jobs.World`. They are compared once islands meet."""
        self.alike = settings

    def open(self, init_process_group: Callable[..., Any], timeout: timedelta) -> None:
        """Make the launch the default world."""
        if "RANK" in os.environ:
            init_process_group(timeout=timeout)
        else:
            init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1, timeout=timeout)
