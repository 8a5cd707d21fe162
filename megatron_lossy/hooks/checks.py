"""Checks of a run: of refusals and files before it starts, and that lossy exchanges are made: loss that never happens must not go unnoticed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ..base.errors import UsageError
from ..channel.corruption import warn_of_one_rank
from ..config import PHASES, LossyConfig
from ..config.facts import Facts
from ..config.refusal import check_refusals
from ..transport import LossyGroup, check_channels, read_key_file
from .seam import slot_of
from .versions import optimizers

logger = logging.getLogger(__name__)


def warn_of_instances(config: LossyConfig, instances: int) -> None:
    """Warn that what crosses between several optimizer ``instances`` is not lost, if exchanges inside them lose data."""
    if instances > 1 and not all(config.untouched(phase) for phase in PHASES):
        logger.warning(
            "--num-distributed-optimizer-instances %d: the exchange between instances stays reliable; --sites M makes the one "
            "between sites lossy",
            instances,
        )


def check_run(config: LossyConfig, facts: Facts) -> None:
    """Raise :class:`UsageError` for loss flags that a run with ``facts`` cannot have. Needs no process group.

    ``facts`` must know the number of workers. Files come after the table, since they may be large or on other machines.
    """
    assert facts.workers is not None, "how many ranks there are is known where a run starts"
    check_refusals(config, facts)
    warn_of_one_rank(config, facts.workers)
    warn_of_instances(config, facts.optimizer_instances or 1)
    if config.sites is not None and facts.timing_level:
        logger.warning(
            "--timing-log-level %d: its barriers cross between sites several times an iteration; 0 has none",
            facts.timing_level,
        )
    read_key_file(config.udp_key_file)
    config.jobs().check(facts.train_iters)
    check_channels(config, facts.workers, facts.train_iters)


def check_registered(optimizer: Any, chunks: Sequence[Any]) -> None:
    """Raise :class:`UsageError` if ``optimizer`` updates unknown buckets. ``chunks``: the models the hooks know."""
    if not chunks and any(group["params"] for group in getattr(optimizer, "param_groups", ())):
        raise UsageError(
            "no model was wrapped in Megatron's DistributedDataParallel since the hooks were installed, so that nothing "
            "can be lost: call hooks.install() before the model is wrapped"
        )
    for buffer in (buffer for one in optimizers(optimizer) for buffer in getattr(one, "buffers", ())):
        for number, bucket in enumerate(buffer.buckets):
            if slot_of(bucket.grad_data) is None or slot_of(bucket.param_data) is None:
                raise UsageError(
                    f"bucket {number} ({bucket.grad_data.numel()} elements) of the optimizer is not known to the hooks, so "
                    "that it would lose nothing: call hooks.install() before any part of the model is wrapped in DDP"
                )


def warn_of_lossless(config: LossyConfig, groups: Sequence[LossyGroup]) -> None:
    """Say, on the first rank of each group, which streams can lose nothing although their rate is not 0."""
    for phase in PHASES:
        if config.untouched(phase):
            continue
        for group in groups:
            if group.lossless(phase) and group.rank == 0 and group.wire.members[0] == 0:
                near = "all ranks of its group are on one node (--lossy-links inter-node)"
                why = "its group has one rank" if group.size == 1 else near
                logger.warning("nothing of %s is lost in phase %s: %s", group.stream.name, phase, why)


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
