"""Stale units in Megatron's buckets: :mod:`megatron_lossy.run.stale` saves and restores them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..run import stale
from .seam import slot_of


def stale_state(buckets: Sequence[Any], update: int | None) -> list[Any]:
    """See :func:`megatron_lossy.run.stale.stale_state`."""
    return stale.stale_state(_held(buckets), update)


def load_stale_state(buckets: Sequence[Any], update: int | None, state: Sequence[Any]) -> None:
    """Restore :func:`stale_state` in ``buckets``."""
    stale.load_stale_state(_held(buckets), update, state)


def _held(buckets: Sequence[Any]) -> list[stale.Held]:
    slots = [slot_of(bucket.param_data) for bucket in buckets]
    return [stale.Held(slot.group, slot.bucket, one.param_data) for slot, one in zip(slots, buckets, strict=True)]
