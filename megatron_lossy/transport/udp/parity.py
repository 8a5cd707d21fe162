"""Parity of messages with units that must arrive, as far as it depends on what the network has lost."""

from __future__ import annotations

import numpy as np

from ...base.coding import AdaptiveCode, Layout


class Code:
    """The parity of units that must arrive: ``fixed`` (B, C), or as much as the loss requires.

    ``budget``: the parity is at most this share of a message.
    """

    def __init__(self, fixed: tuple[int, int] | None, budget: float) -> None:
        self._fixed = fixed
        self._budget = budget
        self._adaptive = AdaptiveCode(budget=2.55)

    def of(self, must: np.ndarray) -> tuple[int, int]:
        """Return (B, C) for messages with ``must`` bool[D, count]."""
        high = int(must.sum(axis=1).max(initial=0))
        if self._fixed is not None or not high:
            return self._fixed or (1, 0)
        block = self._adaptive.block
        most = self._budget * must.shape[1]
        parity = min(self._adaptive.parity(high), int(most / high * block))
        while parity and Layout(high, block, parity).parities > most:
            parity -= 1
        return block, parity

    def report(self, lost: np.ndarray, must: np.ndarray) -> None:
        """Record the losses ``lost`` bool[D, count] of units outside ``must``: these are the losses of the network."""
        self._adaptive.report(int((lost & ~must).sum()), int((~must).sum()))
