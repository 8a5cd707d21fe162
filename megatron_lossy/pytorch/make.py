"""``make_lossy``: the one call that lets a model of ``fully_shard`` or DDP lose data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..base.errors import refuse
from ..config import LossyConfig
from ..config.facts import Facts
from ..config.refusal import check_refusals
from ..transport import settled
from .arguments import check_groups, check_optimizers, check_torch, config_of, optimizers_of
from .layout import ParameterGroup, parameter_groups

if TYPE_CHECKING:
    from os import PathLike

    from .base import LossyRun


def make_lossy(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    config: LossyConfig | Mapping[str, Any] | str | PathLike[str],
    *,
    scaler: Any = None,
    steps: int | None = None,
    gapless: bool = False,
) -> LossyRun:
    """Let the data-parallel exchanges of ``model`` lose data as ``config`` says. A collective call.

    Call it once, after ``fully_shard`` or ``DistributedDataParallel`` and after the optimizer was made; before or after
    the first step.

    Args:
        model: the whole model, with ``fully_shard`` on parts of it or on all, or in ``DistributedDataParallel``.
        optimizer: those that update its parameters; each step of all of them is an update.
        config: loss flags; or a mapping of them, the name of a preset, or a YAML file. With ``islands`` each group of ranks
            that shards a copy of the model over the inner dimension of a mesh trains by itself, and weights are averaged.
        scaler: a ``GradScaler`` in use, for rules that keep gradients over steps.
        steps: the length of the run, if known, to refuse a trace that is too short.
        gapless: promises that each round of gradients exchanges all buckets, and that only ``scaler`` rejects a step, so
            that ``--grad-recovery previous`` needs less memory.

    Return the run: ``owner_weights()``, ``metrics()``, ``state_dict()``, ``close()``. Raise :class:`UsageError` for
    arguments that are not allowed, before any exchange.
    """
    flags, optimizers = config_of(config), optimizers_of(optimizer)
    how = {"steps": steps, "gapless": gapless, "scaler": scaler}
    if not isinstance(model, torch.nn.Module):
        raise refuse("model", type(model).__name__, "must be a torch.nn.Module")
    if not dist.is_available() or not dist.is_initialized():
        raise refuse("model", "without a process group", "call torch.distributed.init_process_group first")
    flags = settled(flags)
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        run: LossyRun = _in_ddp(model, optimizers, flags, how)
    else:
        check_torch()
        groups = parameter_groups(model)
        if not groups:
            why = "has no module of fully_shard, and is no DistributedDataParallel: call make_lossy after them"
            if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
                why = "is of FSDP1, which has no place for exchanges of others; use fully_shard"
            raise refuse("model", type(model).__name__, why)
        run = _sharded(model, groups, optimizers, flags, how)
    run.begin()
    return run


def _sharded(
    model: torch.nn.Module,
    groups: list[ParameterGroup],
    optimizers: list[torch.optim.Optimizer],
    config: LossyConfig,
    how: dict[str, Any],
) -> LossyRun:
    from .fsdp import LossyFSDP

    check_groups(groups, config)
    if not any(group.trained for group in groups):
        raise refuse("model", type(model).__name__, "has no parameter with a gradient in fully_shard")
    check_optimizers(model, optimizers, [parameter for group in groups for parameter in group.parameters])
    if config.sites is not None and any(group.replicated for group in groups):
        why = "FSDP2 would reduce gradients between sites"
        raise refuse("--sites", config.sites, f"needs fully_shard over all ranks, with a mesh of one dimension: {why}")
    islands = _islands(groups, config) if config.jobs().several else None
    specs = [group.spec for group in groups]
    facts = Facts(
        data_parallel="FSDP2",
        virtual=False,
        flushes=True,
        workers=config.jobs().number * max(len(group.all_ranks) for group in groups),
        largest_group=max(group.ranks.size() for group in groups),
        train_iters=how["steps"],
        distributed_optimizer=True,
        gradient_bytes=max(spec.grad_dtype.itemsize for spec in specs),
        weight_bytes=max(spec.param_dtype.itemsize for spec in specs),
        tensor=2 if any(group.tensor_parallel for group in groups) else 1,
    )
    check_refusals(config, facts)
    if config.rendezvous is not None and len(optimizers) > 1:
        raise refuse(
            "optimizer", f"{len(optimizers)} optimizers", "must be one, which an island that comes back can copy"
        )
    run = LossyFSDP(config, optimizers, groups, islands, **how)
    run.follow_loading(model)
    return run


def _islands(groups: list[ParameterGroup], config: LossyConfig) -> list[list[int]]:
    """Return the ranks of each group that shards a copy of the model: of all islands, or of this launch. A collective call of all ranks."""
    number = config.islands
    if config.rendezvous is not None:
        if any(group.replicated or group.ranks.size() != dist.get_world_size() for group in groups):
            why = "needs fully_shard over all ranks of the launch, with a mesh of one dimension"
            raise refuse("--rendezvous", config.rendezvous, why)
        return [list(range(dist.get_world_size()))]
    if any(group.replicated for group in groups):
        why = 'needs a mesh of one dimension, fully_shard(…, mesh=mesh["shard"]): FSDP2 would reduce gradients between islands'
        raise refuse("--islands", number, why)
    mine = sorted({tuple(dist.get_process_group_ranks(group.ranks)) for group in groups})
    if len(mine) > 1:
        raise refuse("--islands", number, f"needs one mesh for all of the model, which has {len(mine)}")
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine[0])
    found = sorted(set(everywhere))
    together = sorted(rank for ranks in found for rank in ranks)
    if len({len(ranks) for ranks in found}) > 1 or together != list(range(dist.get_world_size())):
        raise refuse("--islands", number, f"needs equal groups of all ranks, and the mesh has {found}")
    return [list(ranks) for ranks in found]


def _in_ddp(
    model: torch.nn.parallel.DistributedDataParallel,
    optimizers: list[torch.optim.Optimizer],
    config: LossyConfig,
    how: dict[str, Any],
) -> LossyRun:
    from .ddp import LossyDDP

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    check_optimizers(model, optimizers, trained)
    largest = max(parameter.element_size() for parameter in trained)
    ranks, scaler = model.process_group.size(), how["scaler"]
    facts = Facts(
        data_parallel="DDP",
        virtual=False,
        flushes=True,
        workers=ranks,
        largest_group=ranks,
        train_iters=how["steps"],
        distributed_optimizer=False,
        fp16=scaler is not None,
        loss_scale=scaler.get_scale() if scaler is not None and scaler.is_enabled() else None,
        gradient_bytes=largest,
        weight_bytes=largest,
    )
    check_refusals(config, facts)
    return LossyDDP(config, model, optimizers, **how)
