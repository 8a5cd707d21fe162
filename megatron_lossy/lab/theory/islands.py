"""Averaging between islands on vectors in memory, with the real subsets, rules and exchanges (docs/islands.md)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...base.exchange import Stream
from ...config import LossyConfig
from ...mechanisms.islands.mean import InMemory
from ...mechanisms.islands.rounds import Rounds
from ...mechanisms.islands.vector import Segment, Subset, Vector

STREAM = Stream("islands")
Act = Callable[[int, torch.Tensor], object]


def vectors_of(weights: torch.Tensor) -> list[Vector]:
    """Return each row of ``weights`` [islands, size] as the vector of an island."""
    return [Vector([Segment(0, row, None)], len(row), row.device) for row in weights]


def rounds_of(config: LossyConfig, weights: torch.Tensor, steps: int = 100_000) -> Rounds[InMemory]:
    """Return the exchanges between islands with ``weights`` [islands, size], which they change."""
    subset, crossing = Subset(config, weights.shape[1], 1, STREAM), InMemory(config, STREAM, None)
    return Rounds(config, subset, vectors_of(weights), crossing, steps, weights.device)


def simulate(
    config: LossyConfig, weights: torch.Tensor, steps: int, local: Act | None = None, after: Act | None = None
) -> torch.Tensor:
    """``weights`` [islands, size] after ``steps`` iterations, in place.

    ``local`` makes an iteration of all islands, and ``after`` is called when they have exchanged. Both get the number
    of the iteration and the weights.
    """
    rounds = rounds_of(config, weights)
    for step in range(steps):
        if local is not None:
            local(step, weights)
        rounds.after_iteration(step)
        if after is not None:
            after(step, weights)
    return weights


def spread(weights: torch.Tensor) -> torch.Tensor:
    """The deviations [islands, size] from the mean over islands."""
    return weights - weights.mean(dim=0)
