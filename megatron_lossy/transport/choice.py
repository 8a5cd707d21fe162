"""Chooses the wire and the rules that the flags ask for, and cuts buckets into units."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from ..channel.draws import generator
from ..config import PHASES, LossyConfig
from ..exchange import BucketUnits, Exchange, Stream, cut
from ..mechanisms.lead.compensated import Compensated
from ..mechanisms.priority.choosing import Priority, Protection
from ..mechanisms.priority.protected import Prioritised
from ..recovery import GradRecovery, Stale
from ..registry import GRAD_RECOVERIES
from .base import Wire
from .drawn import CollectiveWire, Networks, check_links
from .network import check_owners
from .pieces import Pieces

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BucketSpec:
    """A bucket: elements of one of its N shards, and the dtypes that cross the wire."""

    shard: int
    grad_dtype: torch.dtype = torch.float32
    param_dtype: torch.dtype = torch.float32


def cut_buckets(config: LossyConfig, buckets: Sequence[BucketSpec]) -> dict[str, list[BucketUnits]]:
    """The cut of each bucket into units, by phase. Raises :class:`UsageError` if a packet holds no element."""
    shards = [bucket.shard for bucket in buckets]
    result = {}
    for phase in PHASES:
        itemsizes = [getattr(bucket, f"{phase}_dtype").itemsize for bucket in buckets]
        result[phase], _ = cut(shards, itemsizes, config.loss_unit, config.packet_bytes)
    return result


def protection_of(config: LossyConfig) -> Protection:
    """The :class:`Protection` that the flags ask for."""

    def draw(exchange: Exchange, source: int, number: int) -> np.ndarray:
        return generator(config.loss_seed, exchange, source, number).random(config.grad_priority_sample)

    return Protection(
        config.grad_priority,
        config.grad_priority_fraction,
        config.grad_priority_scope,
        config.grad_priority_sample,
        config.grad_residual_bound,
        config.lossy_self,
        draw,
    )


@functools.cache
def _warn_of_no_priority(config: LossyConfig) -> None:
    logger.warning(
        "--grad-priority none with %s: large gradients that are lost come back at full size in a later step, which may have "
        "been clipped less; consider packet-mean (docs/smart.md)",
        config.grad_recovery,
    )


def grad_rule(config: LossyConfig, units: BucketUnits, wire: Wire) -> GradRecovery:
    """The rule for the gradients of a bucket that is cut into ``units`` and crosses on ``wire``."""
    rule: GradRecovery = GRAD_RECOVERIES.load(config.grad_recovery)(units, wire.rank)
    if not config.at_sender:
        return rule
    if config.grad_priority == "none":
        _warn_of_no_priority(config)
    return wire.protected(rule, Priority(protection_of(config), units, wire.rank))


def param_rule(config: LossyConfig, units: BucketUnits, wire: Wire) -> Stale:
    """The rule for the parameters of a bucket that is cut into ``units`` and crosses on ``wire``."""
    if config.param_priority != "none":
        return Prioritised(units, wire.rank, config.param_priority_fraction)
    return {"plain": Stale, "compensated": Compensated}[config.param_send](units, wire.rank)


def wire_for(
    config: LossyConfig,
    buckets: Sequence[BucketSpec],
    networks: Networks,
    members: Sequence[int],
    rank: int,
    stream: Stream,
    steps: int | None,
    group: dist.ProcessGroup | None,
) -> Wire:
    """The wire of rank ``rank`` for ``buckets``. ``members`` are ranks of the full group of ``networks``.

    ``steps``: length of the run, if known. ``group``: the torch process group of the members. Raises
    :class:`UsageError` if the channel cannot serve the group or a packet holds no element.
    """
    check_owners(config)
    parts = cut_buckets(config, buckets)
    check_links(networks, stream, parts, len(members), steps)
    if config.transport == "pieces":
        return Pieces(networks, stream, members, rank, parts, group=group)
    if config.transport == "udp":
        from .udp.process import open_wire  # which starts a thread

        dtypes = {phase: [getattr(bucket, f"{phase}_dtype") for bucket in buckets] for phase in PHASES}
        return open_wire(config, dtypes, networks, stream, members, rank, parts, group)
    return CollectiveWire(networks, stream, members, rank, parts)
