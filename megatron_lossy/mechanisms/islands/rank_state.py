"""The state of a rank that belongs to its weights: main weights, and what the optimizer keeps of each. By name, flat.

Learning rates and weight decay are not among it: they follow the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .copying import Held
from .rounds import Weights

#: Step counts that some optimizers keep in their groups, and others beside the moments.
_STEP = "step"


def held_state(vectors: Sequence[Weights], optimizers: Sequence[Any]) -> dict[str, Held | float]:
    """The state as it is now. ``vectors``: main weights; ``optimizers``: torch's, in the same order."""
    found: dict[str, Held | float] = {}
    for number, (vector, optimizer) in enumerate(zip(vectors, optimizers, strict=True)):
        found[f"{number}/weights"] = _held(vector.read(None))
        state = optimizer.state_dict()
        for index, kept in state["state"].items():
            found |= {
                f"{number}/state/{index}/{name}": _held(value) for name, value in kept.items() if value is not None
            }
        for index, group in enumerate(state["param_groups"]):
            if _STEP in group:
                found[f"{number}/groups/{index}/{_STEP}"] = _held(group[_STEP])
    return found


def put_state(
    vectors: Sequence[Weights], optimizers: Sequence[Any], values: Mapping[str, torch.Tensor | float]
) -> None:
    """Put ``values``, a :func:`held_state`, in the place of the weights and of the optimizers' state."""
    for number, (vector, optimizer) in enumerate(zip(vectors, optimizers, strict=True)):
        weights = values[f"{number}/weights"]
        assert isinstance(weights, torch.Tensor), number
        with torch.no_grad():
            vector.write(None, weights)
        own = optimizer.state_dict()
        state: dict[int, dict[str, Any]] = {}
        for name, value in values.items():
            of, *path = name.split("/")
            if int(of) != number:
                continue
            if path[0] == "state":
                state.setdefault(int(path[1]), {})[path[2]] = value
            elif path[0] == "groups":
                own["param_groups"][int(path[1])][path[2]] = value
        # What is loaded is kept: it must not be what others have.
        optimizer.load_state_dict({**own, "state": state})


def _held(value: Any) -> Held | float:
    return Held(value) if isinstance(value, torch.Tensor) else value
