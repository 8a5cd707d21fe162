"""Checks of the arguments of :func:`.make_lossy`, before anything is exchanged. Each error is one line."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..base.errors import ArgumentParser, refuse
from ..base.flags import add_flags, from_namespace
from ..config import LossyConfig
from ..config.loss_flags import PRESET, preset_arguments
from ..config.settings import arguments_of
from .layout import ParameterGroup

#: The first torch whose FSDP2 lets others make its exchanges.
FIRST_TORCH = "2.9"


def config_of(config: Any) -> LossyConfig:
    """Return ``config`` as flags: flags, a mapping, the name of a preset, or a YAML file. Raise :class:`UsageError`."""
    if isinstance(config, LossyConfig):
        return config
    if isinstance(config, Mapping):
        words = arguments_of({key: value for key, value in config.items() if value is not False}, [LossyConfig])
    elif isinstance(config, str | os.PathLike):
        words = preset_arguments([PRESET, os.fspath(config)])
    else:
        kinds = "must be a LossyConfig, a mapping of its flags, the name of a preset, or a YAML file"
        raise refuse("config", type(config).__name__, kinds)
    parser = add_flags(ArgumentParser(add_help=False, allow_abbrev=False), LossyConfig, "loss")
    return from_namespace(LossyConfig, parser.parse_args(words))


def optimizers_of(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that were given: one, several, or one that wraps another. Raise :class:`UsageError`."""
    given = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    found = [_innermost(wrapper) for wrapper in given]
    for inner in found:
        if not isinstance(inner, torch.optim.Optimizer):
            raise refuse("optimizer", type(inner).__name__, "must be a torch.optim.Optimizer, or a list of them")
        if isinstance(inner, torch.optim.LBFGS):
            why = "evaluates weights within a step, which no exchange would send; choose another"
            raise refuse("optimizer", "LBFGS", why)
    if not found:
        raise refuse("optimizer", "[]", "must have at least one optimizer")
    return found


def _innermost(optimizer: Any) -> Any:
    """Return the optimizer that a wrapper such as accelerate's has inside, unless the wrapper has hooks of its own."""
    inner = getattr(optimizer, "optimizer", None)
    wraps = isinstance(inner, torch.optim.Optimizer) and "_optimizer_step_pre_hooks" not in vars(optimizer)
    return _innermost(inner) if wraps else optimizer


def parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, torch.nn.Parameter]:
    """Return all parameters of ``optimizers``, by their id."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return {id(parameter): parameter for group in groups for parameter in group["params"]}


def check_optimizers(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], known: Iterable[torch.nn.Parameter]
) -> None:
    """Raise :class:`UsageError` unless ``optimizers`` update ``known`` parameters, those that ``model`` exchanges.

    The optimizer may also have others of the model that are never exchanged (``ignored_params``).
    """
    of_model = set(map(id, model.parameters()))
    exchanged = {id(parameter): parameter for parameter in known}
    held = parameters_of(optimizers)
    foreign = held.keys() - exchanged.keys() - of_model
    if foreign:
        raise refuse(
            "optimizer",
            type(optimizers[0]).__name__,
            f"has {len(foreign)} of {len(held)} parameters that are not the model's: make it from model.parameters(), after "
            "fully_shard or DistributedDataParallel",
        )
    if not any(parameter.requires_grad and key in held for key, parameter in exchanged.items()):
        raise refuse("optimizer", type(optimizers[0]).__name__, "has none of the parameters that the model exchanges")


def check_still_alike(optimizers: Sequence[torch.optim.Optimizer], known: Mapping[int, torch.nn.Parameter]) -> None:
    """Raise :class:`UsageError` if ``optimizers`` got more parameters than those ``known`` to :func:`.make_lossy`."""
    number = sum(len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups)
    if number == len(known):
        return
    why = f"has {number} parameters, and had {len(known)} when make_lossy was called: add them before"
    raise refuse("optimizer", type(optimizers[0]).__name__, why)


def check_torch() -> None:
    """Raise :class:`UsageError` if this torch has no place for exchanges of others."""
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:
        FSDPModule = None
    if not all(hasattr(FSDPModule, verb) for verb in ("set_custom_all_gather", "set_custom_reduce_scatter")):
        why = f"has no FSDPModule.set_custom_all_gather; needs {FIRST_TORCH} or later"
        raise refuse("torch", torch.__version__, why)


def check_groups(groups: Sequence[ParameterGroup], config: LossyConfig) -> None:
    """Raise :class:`UsageError` for a parameter group that cannot lose anything, or only wrongly."""
    for group in groups:
        if not group.sharded:
            why = "is of replicate(), which shards nothing, so that no parameters cross; use DistributedDataParallel"
            raise refuse("model", group.name, why)
        own = [type(exchange) for exchange in group.exchanges]
        if any(kind.__module__.startswith(__package__) for kind in own):
            raise refuse("model", group.name, "is lossy already: call make_lossy once, for the whole model")
        foreign = [kind.__name__ for kind in own if kind.__name__ not in ("DefaultAllGather", "DefaultReduceScatter")]
        if foreign:
            calls = "set_symm_mem_for_comm, set_allocate_memory_from_process_group_for_comm and set_custom_all_gather"
            raise refuse("model", group.name, f"has exchanges of its own ({', '.join(foreign)}): omit {calls}")
        if group.gathers_elsewhere is not None:
            why = "gathers from fewer ranks in the backward pass; give True or False"
            raise refuse("reshard_after_forward", group.gathers_elsewhere, why)
        if group.quantizes and not config.untouched("param"):
            raise refuse("model", group.name, "gathers quantized parameters: stale bytes would be read at new scales")
        _ = group.spec
