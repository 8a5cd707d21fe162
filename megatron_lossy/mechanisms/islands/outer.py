"""An outer optimizer over the islands' progress: DiLoCo, and its variant with a late mean.

``diloco`` (Douillard et al., arXiv:2311.08105): all islands start from the outer weights. Every K iterations these take
a step of SGD with Nesterov momentum along their distance to the mean of the islands, and islands go on from there.

``eager-diloco`` (Kale, Douillard and Donchev, arXiv:2502.12996): the mean is used K iterations later. An island takes
the mean distance of the round before, with its own part in it replaced by its own distance of now,

    mean(before) + (own - own before) / M.

In the first round there is no earlier mean, and an island takes own / M alone. So the progress of each island counts
once in the end. With all of its own progress in the first round, an island would stay (1 - 1/M) of it away from the
others, and many times as much with momentum. Nothing pulls outer weights together again once they differ: a mean must
not be lost. The abstract and summaries say as much as the formula; the algorithm printed in the paper could not be
compared. The special case that *AsyncMesh* names is another rule, and slower (docs/islands.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from ...config import LossyConfig
from .rule import Back, Rule


class DiLoCo(Rule):
    """b <- mu b + D, w <- v - lr (D + mu b), with the outer weights v and D = v - mean.

    ``start``: the weights [size] of each island of this process. Elements without a mean keep w, v and b.
    """

    def __init__(self, start: Sequence[torch.Tensor], lr: float, momentum: float) -> None:
        self._lr, self._momentum = lr, momentum
        self.outer = torch.stack(list(start))
        self.buffer = torch.zeros_like(self.outer)

    def apply(self, island: int, now: torch.Tensor, back: Back) -> torch.Tensor:
        return back.where_arrived(self._step(island, back), now)

    def _step(self, island: int, back: Back) -> torch.Tensor:
        outer, buffer = self.outer[island], self.buffer[island]
        distance = outer - back.mean
        moved = self._momentum * buffer + distance
        # v - lr (D + mu b), written in terms of the mean: with lr = 1 and mu = 0 it is the mean, to the bit.
        step = back.mean + (1 - self._lr) * distance - self._lr * self._momentum * moved
        buffer.copy_(back.where_arrived(moved, buffer))
        outer.copy_(back.where_arrived(step, outer))
        return outer.clone()

    def copy(self, source: int, island: int) -> None:
        self.outer[island], self.buffer[island] = self.outer[source], self.buffer[source]

    def state_dict(self) -> dict[str, Any]:
        return {"outer": self.outer, "buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.outer.copy_(state["outer"])
        self.buffer.copy_(state["buffer"])


class EagerDiLoCo(DiLoCo):
    """The same with D = mean(before) + (own - own before) / M. Islands send their distance to v."""

    always: ClassVar[bool] = True

    def __init__(self, start: Sequence[torch.Tensor], lr: float, momentum: float, islands: int) -> None:
        super().__init__(start, lr, momentum)
        self._islands = islands

    def payload(self, island: int, now: torch.Tensor) -> torch.Tensor:
        return self.outer[island] - now

    def apply(self, island: int, now: torch.Tensor, back: Back) -> torch.Tensor:
        own = self.payload(island, now) / self._islands
        distance = back.where_arrived(back.mean + own - back.sent / self._islands, own)
        return self._step(island, replace(back, mean=self.outer[island] - distance, arrived=None))


def make_outer(config: LossyConfig, start: Sequence[torch.Tensor]) -> Rule:
    """The rule of ``--sync-method`` for islands of this process that start from ``start`` [size] each."""
    if config.sync_method == "diloco":
        return DiLoCo(start, *config.outer_optimizer)
    return EagerDiLoCo(start, *config.outer_optimizer, config.islands)
