"""Differences of a rank's parameters from their owners': saved beside a checkpoint, and restored after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..exchange import Lost
from ..recovery import rows_for
from ..transport import LossyGroup
from .seam import slot_of

if TYPE_CHECKING:
    import numpy as np


def stale_state(buckets: Sequence[Any], update: int | None) -> list[Any]:
    """The stale units of each bucket after ``update``, bool[N, count], and their values; ``None`` without any.

    If units that arrived do not hold the owners' weights either, also all values of the bucket.
    """
    stale = []
    for bucket in buckets:
        slot = slot_of(bucket.param_data)
        delivery = slot.group.delivery("param", update) if update is not None else None
        rule = slot.group.params[slot.bucket]
        lost = rule.lost(delivery) if delivery is not None else None
        whole = (bucket.param_data.clone(),) if lost is not None and not rule.exact else ()
        if lost is None or not (lost.mask.any() or whole):
            stale.append(None)
        else:
            values = rows_for(bucket.param_data.device).take(bucket.param_data, rule.units, lost)
            stale.append((torch.from_numpy(lost.mask), values, *whole))
    return stale


def load_stale_state(
    buckets: Sequence[Any], groups: Sequence[LossyGroup], update: int | None, state: Sequence[Any]
) -> None:
    """Restore :func:`stale_state` in ``buckets``, the buckets of ``groups``."""
    lost: dict[LossyGroup, dict[int, np.ndarray]] = {group: {} for group in groups}
    for bucket, saved in zip(buckets, state, strict=True):
        if saved is None:
            continue
        slot, (missed, values, *whole) = slot_of(bucket.param_data), saved
        lost[slot.group][slot.bucket] = missed.cpu().numpy()
        units = slot.group.params[slot.bucket].units
        with torch.no_grad():
            for replica in whole:
                bucket.param_data.copy_(replica)
            rows = rows_for(bucket.param_data.device)
            rows.put_(bucket.param_data, units, Lost(lost[slot.group][slot.bucket]), values)
    for group, by_bucket in lost.items():
        if update is not None and not group.lossless("param"):
            group.restore(update, by_bucket)
