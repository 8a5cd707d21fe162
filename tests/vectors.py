"""Averages between islands on vectors in memory, with the real subsets, rules and exchanges."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_lossy.base.exchange import Stream
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab.virtual.island_mean import InMemory
from megatron_lossy.mechanisms.islands.rounds import Rounds
from megatron_lossy.mechanisms.islands.vector import Segment, Subset, Vector

STREAM = Stream("islands")
Act = Callable[[int, torch.Tensor], object]


def vectors_of(weights: torch.Tensor) -> list[Vector]:
    """Return each row of ``weights`` [islands, size] as the vector of an island."""
    return [Vector([Segment(0, row, None)], len(row), row.device) for row in weights]


def rounds_of(config: LossyConfig, weights: torch.Tensor, steps: int = 100_000) -> Rounds:
    """Return the exchanges between islands with ``weights`` [islands, size], which they change."""
    subset, crossing = Subset(config, weights.shape[1], 1, STREAM), InMemory(config, STREAM, None)
    return Rounds(config, subset, vectors_of(weights), crossing, steps, weights.device)


def simulate(
    config: LossyConfig, weights: torch.Tensor, steps: int, local: Act | None = None, after: Act | None = None
) -> torch.Tensor:
    """Return ``weights`` [islands, size] after ``steps`` iterations, in place.

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
    """Return the deviations [islands, size] from the mean over islands."""
    return weights - weights.mean(dim=0)


def deviation(config: LossyConfig, steps: int = 1200, size: int = 400) -> float:
    """Return the squared distance of islands to their mean, over the second half of ``steps``, under white local steps.

    It is relative to the distance that one iteration of such steps makes.
    """
    random = torch.Generator().manual_seed(0)
    squares: list[float] = []

    def walk(step: int, weights: torch.Tensor) -> None:
        weights += torch.randn(weights.shape, generator=random)

    def look(step: int, weights: torch.Tensor) -> None:
        squares.append(spread(weights).square().mean().item())

    simulate(config, torch.zeros(config.islands, size), steps, walk, look)
    late = squares[steps // 2 :]
    return sum(late) / len(late) / (1 - 1 / config.islands)
