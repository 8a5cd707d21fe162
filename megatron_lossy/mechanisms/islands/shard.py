"""A shard of the main weights of the islands of this process, and its exchanges with their peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from ...base import theory
from ...config import LossyConfig
from .correction import make_correction
from .form import form_of
from .mean import Crossing, Mean
from .outer import make_outer
from .rounds import Rounds, Weights
from .rule import Rule
from .subset import Subset

Between = TypeVar("Between", bound=Crossing)


class Shard(Generic[Between]):
    """``vectors``: the weights of each island of this process, which the rule starts from. ``crossing``: makes means.

    ``steps``: length of the run, if known. ``device``, ``used``: see :class:`Rounds`. ``make_rounds``: its class, or
    that of exchanges among changing members.
    """

    def __init__(
        self,
        config: LossyConfig,
        subset: Subset,
        vectors: Sequence[Weights],
        crossing: Between,
        steps: int | None,
        device: torch.device,
        used: Callable[[float, torch.Tensor, Mean], None] | None = None,
        make_rounds: Callable[..., Rounds] = Rounds,
    ) -> None:
        self._config = config
        self.subset, self.vectors, self.crossing = subset, vectors, crossing
        with torch.no_grad():
            rule = make_rule(config, [vector.read(None) for vector in vectors], steps)
        self.rounds = make_rounds(subset, rule, crossing, config.sync_interval, config.sync_delay, device, used)

    def exchange(self, iteration: int, among: tuple[int, int] | None = None) -> float | None:
        """Begin and use the exchanges that are due after ``iteration`` (from 0).

        ``among``: the numbers of senders and receivers; ``None``: all islands are both. Returns the bytes that a sender
        sends in the exchange that begins, or ``None`` if none does.
        """
        with torch.no_grad():
            count = self.rounds.after_iteration(iteration, self.vectors)
        if count is None:
            return None
        senders, receivers = among or (self._config.islands, self._config.islands)
        shard = -(-count // senders)
        return theory.bytes_sent(count, senders, form_of(self._config).bytes_of(shard) / shard, receivers)


def make_rule(config: LossyConfig, weights: Sequence[torch.Tensor], steps: int | None) -> Rule:
    """The rule of ``--sync-method`` for the islands of this process, each with its ``weights`` [size].

    ``steps``: length of the run, if known.
    """
    if config.sync_method == "parameters":
        return make_correction(config, len(weights), len(weights[0]), steps, weights[0].device)
    return make_outer(config, weights)
