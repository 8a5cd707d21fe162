"""The state of islands in a checkpoint: weights, optimizer and scheduler of each, and the exchanges under way.

Real islands need no such file: each has a checkpoint of its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...base.errors import refuse
from ...base.files import replace_file

#: The file of the islands in a checkpoint.
ISLANDS = "lossy_islands.pt"
#: The random states that training draws from, among those of the process in a checkpoint.
RANDOM = ("torch", "tracker", "device")
_FORMAT = 1


def island_state(optimizers: Sequence[Any], scheduler: Any, kept: Sequence[torch.Tensor]) -> dict[str, Any]:
    """The state of one island. ``kept``: the parameters of each bucket."""
    return {
        "weights": list(kept),
        "main": [weights.detach() for weights in _main(optimizers)],
        "optimizers": [one.optimizer.state_dict() for one in optimizers],
        "scheduler": scheduler.state_dict(),
    }


def load_island_state(
    optimizers: Sequence[Any], scheduler: Any, kept: Sequence[torch.Tensor], state: dict[str, Any]
) -> None:
    """Restore :func:`island_state`."""
    with torch.no_grad():
        for weights, saved in zip(kept, state["weights"], strict=True):
            weights.copy_(saved)
        for weights, saved in zip(_main(optimizers), state["main"], strict=True):
            weights.copy_(saved)
    for one, saved in zip(optimizers, state["optimizers"], strict=True):
        one.optimizer.load_state_dict(saved)
    scheduler.num_steps = 0  # Megatron adds the loaded number to it
    scheduler.load_state_dict(state["scheduler"])


def _main(optimizers: Sequence[Any]) -> list[torch.Tensor]:
    """The float32 weights that are not the model's own."""
    return [
        main for one in optimizers for group in one.shard_fp32_from_float16_groups for main in group if main is not None
    ]


def save_islands(folder: str | os.PathLike, state: dict[str, Any]) -> None:
    """Write ``state`` into the checkpoint in ``folder``."""

    def write(aside: Path) -> None:
        with open(aside, "wb") as file:  # given a path, torch would write its name into the file
            torch.save({"format": _FORMAT, **state}, file)

    replace_file(Path(folder, ISLANDS), write)


def load_islands(folder: str | os.PathLike, islands: int, device: torch.device) -> dict[str, Any]:
    """The state that :func:`save_islands` wrote. Raises :class:`UsageError` without one, or for a later version."""
    path = Path(folder, ISLANDS)
    if not path.is_file():
        raise refuse("--islands", islands, f"the checkpoint {Path(folder)} is of no islands")
    state = torch.load(path, map_location=device, weights_only=True)
    if state["format"] > _FORMAT:
        raise refuse("--islands", islands, f"{path} has format {state['format']}; this version reads up to {_FORMAT}")
    return state
