"""A rank's replica of buckets: its values for monitors, and its differences from the owners, saved and restored."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..base.device import all_gather_single
from ..base.exchange import Lost
from ..recovery import rows_for
from ..transport import LossyGroup
from .monitor import Replicas


class RankReplicas(Replicas):
    """The parameter buckets of ``group``, whose shards the ranks of ``process_group`` own.

    ``replicas``: this rank's, [N * shard] of each bucket.
    """

    def __init__(
        self,
        group: LossyGroup,
        process_group: dist.ProcessGroup,
        replicas: Sequence[torch.Tensor],
        used: Callable[[], list[np.ndarray]],
    ) -> None:
        owned, units = range(group.rank, group.rank + 1), group.wire.count["param"]
        shards = [replica.numel() // group.size for replica in replicas]
        super().__init__(group.stream, group.size, owned, units, shards, replicas, used)
        self._process_group = process_group

    def everyone(self, places: Sequence[np.ndarray]) -> np.ndarray:
        mine = self._values(places)
        values = mine.new_empty(self.workers * mine.numel())
        all_gather_single(values, mine, group=self._process_group)
        return values.double().cpu().numpy().reshape(self.workers, -1)


@dataclass(frozen=True)
class BucketReplica:
    """This rank's ``replica`` [N * shard] of a bucket: that of number ``bucket`` in ``group``. ``ranks``: its owners."""

    group: LossyGroup
    bucket: int
    replica: torch.Tensor
    ranks: dist.ProcessGroup

    @property
    def view(self) -> torch.Tensor:
        """The part of the replica that the group exchanges."""
        return self.group.view(self.replica)


@contextlib.contextmanager
def gathered_reliably(held: Sequence[BucketReplica], update: int | None) -> Iterator[None]:
    """Return a context in which the replicas ``held`` have their owners' weights of ``update``. A collective call."""
    restore = []
    with torch.no_grad():
        for part in held:
            put_back = part.group.put_stale_aside(part.bucket, part.replica, update)
            if put_back is not None:
                own = part.replica.chunk(part.group.shards)[part.group.own]
                all_gather_single(part.replica, own, group=part.ranks)
                restore.append(put_back)
    try:
        yield
    finally:
        with torch.no_grad():
            for put_back in restore:
                put_back()


def stale_state(held: Sequence[BucketReplica], update: int | None) -> list[Any]:
    """Return the stale units of each bucket after ``update``, bool[N, count], and their values; ``None`` without any.

    If units that arrived do not hold the owners' weights either, also all values of the bucket.
    """
    stale = []
    for part in held:
        delivery = part.group.delivery("param", update) if update is not None else None
        rule = part.group.params[part.bucket]
        lost = delivery.lost_here(rule.units) if delivery is not None else None
        whole = (part.view.clone(),) if lost is not None and not rule.exact else ()
        if lost is None or not (lost.mask.any() or whole):
            stale.append(None)
        else:
            values = rows_for(part.replica.device).take(part.view, rule.units, lost)
            stale.append((torch.from_numpy(lost.mask), values, *whole))
    return stale


def load_stale_state(held: Sequence[BucketReplica], update: int | None, state: Sequence[Any]) -> None:
    """Restore :func:`stale_state` in the replicas ``held``, all those of their groups. With sites a collective call."""
    lost: dict[LossyGroup, dict[int, np.ndarray]] = {part.group: {} for part in held}
    for part, saved in zip(held, state, strict=True):
        with torch.no_grad():
            view = part.view
            if saved is not None:
                missed, values, *whole = saved
                mask = lost[part.group][part.bucket] = missed.cpu().numpy()
                for replica in whole:
                    view.copy_(replica)
                rows_for(view.device).put_(view, part.group.params[part.bucket].units, Lost(mask), values)
            part.group.put_view(part.replica, view)
    for group, by_bucket in lost.items():
        if update is not None and not group.lossless("param"):
            group.restore(update, by_bucket)
