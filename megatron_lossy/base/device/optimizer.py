"""The patches with which Megatron's distributed optimizer loads checkpoints of torch's Adam.

Megatron takes that where neither Transformer Engine nor Apex is installed, on CUDA too. Without them a load ends at an
assertion: before its first step torch's Adam has no step count, of which Megatron wants one.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import torch

from ..ledger import Patch

_MODULE = "megatron.core.optimizer.distrib_optimizer"


def _state_dict(original: Callable, self: Any) -> Any:
    """Wrap ``DistributedOptimizer.state_dict`` before the first step, when torch's optimizers have no state yet."""
    if not self.optimizer.state and self.init_state_fn is not None:
        self.init_state_fn(self.optimizer, self.config)
        for state in self.optimizer.state.values():
            state["step"] = torch.tensor(0.0)
    return original(self)


def _load_state_dict(original: Callable, self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``DistributedOptimizer.load_state_dict``: give every parameter the step count of its group.

    Megatron hands all of them one tensor. torch's optimizers would count it up once per parameter, and a distributed
    checkpoint resets it to zero. Autograd is off: the main parameters of fp32 models are the model's own.
    """
    with torch.no_grad():
        result = original(self, state_dict, *args, **kwargs)
    for group in self.optimizer.param_groups:
        for parameter in group["params"]:
            if "step" in self.optimizer.state[parameter]:
                self.optimizer.state[parameter]["step"] = torch.tensor(float(group["step"]))
    return result


def _set_states(original: Callable, self: Any, model_param: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Wrap ``DistributedOptimizer._set_main_param_and_optimizer_states``, for files that hold no step count."""
    group, order = self.model_param_group_index_map[model_param]
    known = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
    if "step" in known and "step" not in tensors:
        tensors = {**tensors, "step": known["step"]}
    with torch.no_grad():
        original(self, model_param, tensors)


def patches() -> list[Patch]:
    """Return the methods of Megatron's distributed optimizer that are replaced where Megatron takes torch's Adam."""
    with contextlib.suppress(ImportError):  # the ledger says so
        if getattr(importlib.import_module(_MODULE), "HAVE_APEX_OR_TE", False):
            return []
    return [
        Patch(
            target=f"{_MODULE}:DistributedOptimizer.{name}",
            around=around,
            why=why,
        )
        for name, around, why in (
            ("state_dict", _state_dict, "a checkpoint is loaded before torch's Adam has state"),
            ("load_state_dict", _load_state_dict, "torch's Adam would lose its step count"),
            (
                "_set_main_param_and_optimizer_states",
                _set_states,
                "checkpoints of the format torch hold no step count of torch's Adam",
            ),
        )
    ]
