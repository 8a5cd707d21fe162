"""Finds a common checkpoint of islands. Each saves its own: a killed island may lack one that the others have."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...base.checkpoints import TRACKER, iteration_folder, latest_iteration
from ...base.files import write_text
from .world import IslandWorld

_Total = Callable[[torch.Tensor], torch.Tensor]


def rewind(folder: str, world: IslandWorld, total: _Total) -> str | None:
    """Let all islands load the newest checkpoint that each has, if some have a newer one. A collective call of all.

    ``folder``: of this rank's island, from which the run goes on. ``total``: adds up over islands. Returns a line to
    report. If an island has no checkpoint at all, nothing is changed, and the loaded iterations will be refused: it may
    be the wrong folder.
    """
    latest = _of_all(latest_iteration(folder) or 0, world, total)
    common = min(latest)
    if len(set(latest)) == 1 or not common or not all(_of_all(iteration_folder(folder, common).is_dir(), world, total)):
        return None
    torch.distributed.barrier()  # now everybody has read
    if torch.distributed.get_rank() == 0 and latest[world.island] != common:
        write_text(iteration_folder(folder, common).with_name(TRACKER), str(common))
    torch.distributed.barrier()
    return f"islands had saved iterations {', '.join(map(str, latest))}: all go on from {common}"


def _of_all(value: int, world: IslandWorld, total: _Total) -> list[int]:
    mine = torch.zeros(world.islands, dtype=torch.int64)
    mine[world.island] = value
    return total(mine).tolist()
