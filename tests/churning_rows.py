"""Islands that come and go on vectors in memory, with the real epochs, rules and exchanges (docs/islands.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megatron_lossy.config import LossyConfig
from megatron_lossy.lab.virtual.island_churn import Churn
from megatron_lossy.lab.virtual.island_mean import InMemory
from megatron_lossy.mechanisms.islands.rounds import MemberRounds
from megatron_lossy.mechanisms.islands.vector import Subset
from tests.vectors import STREAM, vectors_of

Act = Callable[[int, torch.Tensor, list[int]], object]


class ChurningRows:
    """Islands with ``weights`` [islands, size], which follow ``--island-schedule`` of ``config``. They have no optimizers."""

    def __init__(self, config: LossyConfig, weights: torch.Tensor, steps: int = 100_000) -> None:
        self.weights, self.step = weights, 0
        self.records: list[dict[str, Any]] = []  # of epochs
        self.churn = Churn(config, steps, self.records.append)
        subset = Subset(config, weights.shape[1], 1, STREAM)
        self.crossing = InMemory(config, STREAM, None)
        self.rounds = MemberRounds(
            config, subset, vectors_of(weights), self.crossing, steps, weights.device, presence=self.churn.presence
        )

    def iterate(self, local: Act) -> None:
        """One iteration; ``local`` makes that of the islands that train: its number, the weights, and their slots."""
        for one in self.churn.begin(self.step):
            if one.anew:
                self.rounds.restart(one.slot)
            if one.how == "copy":
                self.weights[one.slot] = self.weights[one.source]
                for kept in self.rounds.rule.copied().values():
                    kept[one.slot] = kept[one.source]
        local(self.step, self.weights, self.churn.presence.training)
        epoch = self.churn.end(self.step, self.rounds.visits)
        if epoch is not None:
            self.crossing.among(epoch.senders, epoch.slots)
        self.rounds.after_iteration(self.step)
        self.step += 1


def speed_of_mean(config: LossyConfig, steps: int, size: int = 400) -> float:
    """Return the share of a constant drift that the mean over senders keeps: the slope after half of ``steps``."""
    rows = ChurningRows(config, torch.zeros(config.islands, size))
    means: list[float] = []

    def drift(step: int, weights: torch.Tensor, training: list[int]) -> None:
        weights[training] += 1.0

    for _ in range(steps):
        rows.iterate(drift)
        means.append(rows.weights[rows.churn.presence.senders].mean().item())
    late = means[steps // 2 :]
    return float(np.polyfit(range(len(late)), late, 1)[0])  # a line: whoever comes or goes makes the mean jump
