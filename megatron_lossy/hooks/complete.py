"""Checks that lossy exchanges are made at all: loss that never happens must not go unnoticed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from ..base.errors import UsageError
from ..config import PHASES, LossyConfig
from ..transport import LossyGroup
from .seam import slot_of
from .versions import optimizers

logger = logging.getLogger(__name__)


def check_registered(optimizer: Any, chunks: Sequence[Any]) -> None:
    """Raise :class:`UsageError` if ``optimizer`` updates unknown buckets. ``chunks``: the models the hooks know."""
    if not chunks and any(group["params"] for group in getattr(optimizer, "param_groups", ())):
        raise UsageError(
            "no model was wrapped in Megatron's DistributedDataParallel since the hooks were installed, so that nothing "
            "can be lost: call hooks.install() before the model is wrapped"
        )
    for buffer in _buffers(optimizer):
        for number, bucket in enumerate(buffer.buckets):
            if slot_of(bucket.grad_data) is None or slot_of(bucket.param_data) is None:
                raise UsageError(
                    f"bucket {number} ({bucket.grad_data.numel()} elements) of the optimizer is not known to the hooks, so "
                    "that it would lose nothing: call hooks.install() before any part of the model is wrapped in DDP"
                )


def _buffers(optimizer: Any) -> Iterator[Any]:
    for one in optimizers(optimizer):
        yield from getattr(one, "buffers", ())  # of a DistributedOptimizer


def warn_of_lossless(config: LossyConfig, groups: Sequence[LossyGroup]) -> None:
    """Say, on the first rank of each group, which streams can lose nothing although their rate is not 0."""
    for phase in PHASES:
        if config.untouched(phase):
            continue
        for group in groups:
            if group.lossless(phase) and group.rank == 0 and group.wire.members[0] == 0:
                logger.warning("nothing of %s is lost in phase %s: %s", group.stream.name, phase, _why(group))


def _why(group: LossyGroup) -> str:
    return (
        "its group has one rank"
        if group.size == 1
        else "all ranks of its group are on one node (--lossy-links inter-node)"
    )


def check_exchanged(groups: Sequence[LossyGroup], phase: str, step: int) -> None:
    """Raise ``RuntimeError`` unless every bucket that can lose something was exchanged in ``step``."""
    for group in groups:
        buckets = group.not_made(phase, step)
        if buckets:
            what = {"grad": "gradients", "param": "parameters"}[phase]
            raise RuntimeError(
                f"the {what} of bucket {buckets[0]} of {group.stream.name} were not exchanged in iteration {step + 1}, or not "
                f"through the hooks, and {len(buckets) - 1} more. They would lose nothing."
            )
