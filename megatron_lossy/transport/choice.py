"""Chooses the wire and the rules that the flags ask for, and cuts buckets into units."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..base.errors import refuse
from ..base.exchange import BucketUnits, Stream, cut
from ..base.registry import GRAD_RECOVERIES, MECHANISMS
from ..config import PHASES, LossyConfig
from ..config.facts import Facts
from ..config.refusal import check_refusals
from ..config.transport import OBSERVED
from ..recovery import Stale
from .base import CollectiveWire, Networks, Wire, check_links
from .coded import coded_of, codes_of
from .pieces import Pieces


@dataclass(frozen=True)
class BucketSpec:
    """A bucket: elements of one of its N shards, and the dtypes that cross the wire.

    ``param_shard``: elements of a shard of parameters, if some of them have no gradient.
    """

    shard: int
    grad_dtype: torch.dtype = torch.float32
    param_dtype: torch.dtype = torch.float32
    param_shard: int | None = None

    def shard_of(self, phase: str) -> int:
        return self.shard if phase == "grad" or self.param_shard is None else self.param_shard


def settled(config: LossyConfig) -> LossyConfig:
    """Return ``config`` with the number that ranks agree on for ``--packet-bytes auto``. A collective call of all."""
    if config.packet_bytes != "auto":
        return config
    from .udp.packet_size import agreed

    return dataclasses.replace(config, packet_bytes=agreed(config))


def cut_buckets(config: LossyConfig, buckets: Sequence[BucketSpec]) -> dict[str, list[BucketUnits]]:
    """Return the cut of each bucket into units, by phase. Raise :class:`UsageError` if a packet holds no element."""
    result, codes = {}, codes_of(config)
    for phase in PHASES:
        shards = [bucket.shard_of(phase) for bucket in buckets]
        itemsizes = [getattr(bucket, f"{phase}_dtype").itemsize for bucket in buckets]
        packet = codes[phase].elements(config.packet_bytes) if phase in codes else None
        result[phase], _ = cut(shards, itemsizes, config.loss_unit, config.packet_bytes, [packet] * len(buckets))
    return result


def shard_bytes(
    config: LossyConfig, buckets: Sequence[BucketSpec], cut: Mapping[str, Sequence[BucketUnits]]
) -> dict[str, int]:
    """Return the bytes of a shard of all ``buckets`` as they cross, with all copies, by phase."""
    codes, found = codes_of(config), {}
    for phase, parts in cut.items():
        if phase in codes:
            sizes = [codes[phase].payloads(units).shard for units in parts]
        else:
            sizes = [
                n.shard * getattr(bucket, f"{phase}_dtype").itemsize for bucket, n in zip(buckets, parts, strict=True)
            ]
        found[phase] = config.copies(phase) * sum(sizes)
    return found


def rules_for(config: LossyConfig, phase: str, wire: Wire) -> list[Any]:
    """Return the rule for each bucket of ``wire`` in ``phase``: a :class:`.GradRecovery`, or for parameters :class:`.Stale`."""
    recovery = GRAD_RECOVERIES.load(config.grad_recovery) if phase == "grad" else Stale
    rules = [recovery(units, wire.rank) for units in wire.cut[phase]]
    for mechanism in MECHANISMS.all():
        rules = mechanism.rules(config, phase, rules, wire)
    return rules


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
    """Return the wire of rank ``rank`` for ``buckets``. ``members`` are ranks of the full group of ``networks``.

    ``steps``: length of the run, if known. ``group``: the torch process group of the members. Raise
    :class:`UsageError` if the channel cannot serve the group or a packet holds no element.
    """
    check_refusals(config, Facts(virtual=False))
    if config.packet_bytes == "auto":
        why = "ranks have to agree on a number first: config = megatron_lossy.transport.settled(config), on all of them"
        raise refuse("--packet-bytes", "auto", why)
    parts = cut_buckets(config, buckets)
    check_links(networks, stream, parts, len(members), steps)
    coded = coded_of(config, parts, members, rank)
    wire: Wire
    if config.within == "pieces":
        wire = Pieces(networks, stream, members, rank, parts, coded, group=group)
    elif config.within in OBSERVED:
        from .deadline import DeadlineWire  # which starts a thread

        dtypes = {phase: [getattr(bucket, f"{phase}_dtype") for bucket in buckets] for phase in PHASES}
        wire = DeadlineWire(config, networks, stream, members, rank, parts, dtypes, group, coded)
    else:
        wire = CollectiveWire(networks, stream, members, rank, parts, coded)
    wire.shard_bytes = shard_bytes(config, buckets, parts)
    return wire
