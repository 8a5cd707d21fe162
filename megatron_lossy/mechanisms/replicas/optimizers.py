"""Float32 weights and moments of full replicas, in Megatron's optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

#: A float32 tensor that is updated, and torch's optimizer that updates it.
Main = tuple[torch.Tensor, torch.optim.Optimizer]
#: That of each of the model's parameters.
Mains = dict[torch.nn.Parameter, Main]


def main_parameters(optimizers: Iterable[Any]) -> Mains:
    """The float32 tensors and optimizers of all parameters that are updated."""
    result: Mains = {}
    for one in optimizers:
        if one.optimizer is None:  # a stage without parameters of a kind
            continue
        pairs: list[tuple[Any, Any]] = []
        for model, main in zip(getattr(one, "float16_groups", ()), getattr(one, "fp32_from_float16_groups", ())):
            pairs += zip(model, main, strict=True)
        mains = {id(main) for _, main in pairs}
        for group in one.optimizer.param_groups:
            pairs += [(parameter, parameter) for parameter in group["params"] if id(parameter) not in mains]
        for model, main in pairs:
            result[model] = (main, one.optimizer)
    return result


def moments_of(mains: Sequence[torch.Tensor], states: Sequence[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """Tensors in the optimizer's ``states`` of ``mains``: those with a value for each element, and the others."""
    moments, others = [], []
    for main, state in zip(mains, states, strict=True):
        for name in sorted(state):
            value = state[name]
            if isinstance(value, torch.Tensor):
                (moments if value.numel() == main.numel() and value.is_floating_point() else others).append(value)
    return moments, others
