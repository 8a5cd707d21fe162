"""Finds a common checkpoint of islands. Each saves its own: a killed island may lack one that the others have."""

from __future__ import annotations

import torch

from ...files import write_text
from ...train.saved import iteration_folder, latest_iteration
from .flags import TRACKER
from .ranks import RankIslands


def rewind(folder: str, islands: RankIslands) -> str | None:
    """Let all islands load the newest checkpoint that each has, if some have a newer one. A collective call of all.

    ``folder``: of this rank's island, from which the run goes on. Returns a line to report. If an island has no
    checkpoint at all, nothing is changed, and the loaded iterations will be refused: it may be the wrong folder.
    """
    latest = _of_all(latest_iteration(folder) or 0, islands)
    common = min(latest)
    if len(set(latest)) == 1 or not common or not all(_of_all(iteration_folder(folder, common).is_dir(), islands)):
        return None
    torch.distributed.barrier()  # now everybody has read
    if torch.distributed.get_rank() == 0 and latest[islands.world.island] != common:
        write_text(iteration_folder(folder, common).with_name(TRACKER), str(common))
    torch.distributed.barrier()
    return f"islands had saved iterations {', '.join(map(str, latest))}: all go on from {common}"


def _of_all(value: int, islands: RankIslands) -> list[int]:
    mine = torch.zeros(islands.world.islands, dtype=torch.int64)
    mine[islands.world.island] = value
    return islands.total(mine).tolist()
