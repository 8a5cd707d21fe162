"""Differences of a rank's parameters from their owners': saved beside a checkpoint, and restored after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..base.exchange import Lost
from ..recovery import rows_for
from ..transport import LossyGroup


@dataclass(frozen=True)
class Held:
    """This rank's ``replica`` [N * shard] of a bucket: that of number ``bucket`` in ``group``."""

    group: LossyGroup
    bucket: int
    replica: torch.Tensor


def stale_state(held: Sequence[Held], update: int | None) -> list[Any]:
    """The stale units of each bucket after ``update``, bool[N, count], and their values; ``None`` without any.

    If units that arrived do not hold the owners' weights either, also all values of the bucket.
    """
    stale = []
    for one in held:
        delivery = one.group.delivery("param", update) if update is not None else None
        rule = one.group.params[one.bucket]
        lost = rule.lost(delivery) if delivery is not None else None
        whole = (one.replica.clone(),) if lost is not None and not rule.exact else ()
        if lost is None or not (lost.mask.any() or whole):
            stale.append(None)
        else:
            values = rows_for(one.replica.device).take(one.replica, rule.units, lost)
            stale.append((torch.from_numpy(lost.mask), values, *whole))
    return stale


def load_stale_state(held: Sequence[Held], update: int | None, state: Sequence[Any]) -> None:
    """Restore :func:`stale_state` in the replicas ``held``, all those of their groups."""
    lost: dict[LossyGroup, dict[int, np.ndarray]] = {one.group: {} for one in held}
    for one, saved in zip(held, state, strict=True):
        if saved is None:
            continue
        missed, values, *whole = saved
        mask = lost[one.group][one.bucket] = missed.cpu().numpy()
        with torch.no_grad():
            for replica in whole:
                one.replica.copy_(replica)
            rows = rows_for(one.replica.device)
            rows.put_(one.replica, one.group.params[one.bucket].units, Lost(mask), values)
    for group, by_bucket in lost.items():
        if update is not None and not group.lossless("param"):
            group.restore(update, by_bucket)
