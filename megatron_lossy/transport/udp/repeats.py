"""The number of times that units are sent: those that must arrive as the network's losses require, those of copies three times."""

from __future__ import annotations

import numpy as np

from ...base.coding import AdaptiveCode


class Repeats:
    """The copies of units that must arrive: ``fixed`` (B, C), or as many as the loss requires.

    ``budget``: the copies are at most this share of a message.
    """

    def __init__(self, fixed: tuple[int, int] | None, budget: float) -> None:
        self._fixed = fixed
        self._budget = budget
        self._adaptive = AdaptiveCode(budget=2.55)

    def of(self, must: np.ndarray) -> tuple[int, int]:
        """Return (B, C): of each B units that must arrive in messages with ``must`` bool[D, count], C are copied."""
        high = int(must.sum(axis=1).max(initial=0))
        if self._fixed is not None or not high:
            return self._fixed or (1, 0)
        block = self._adaptive.block
        most, wanted = int(self._budget * must.shape[1] / high * block), self._adaptive.parity(high)
        # A message of which only a part is copied has to ask for the rest.
        return block, min(max(wanted, block), most) if wanted and most >= block else 0

    def report(self, lost: np.ndarray, must: np.ndarray) -> None:
        """Record the losses ``lost`` bool[D, count] of units outside ``must``: these are the losses of the network."""
        self._adaptive.report(int((lost & ~must).sum()), int((~must).sum()))


#: How often units are sent that hold copies of parameters.
_COPIES = 3


def order_of_copies(mask: np.ndarray, passes: int) -> np.ndarray:
    """Return uint32[entries]: the order of units that are sent ``passes`` times, and those of ``mask`` bool[units] three times.

    In one pass copies are a third of the message apart; a later pass follows the one before.
    """
    units = len(mask)
    (chosen,) = np.nonzero(mask)
    plain = np.arange(units)
    if passes > 1:
        order = np.concatenate([plain] * passes + [chosen] * (_COPIES - passes))
    else:
        places = np.concatenate([plain, (chosen + units // 3) % units, (chosen + 2 * units // 3) % units])
        order = np.concatenate([plain, chosen, chosen])[np.argsort(places, kind="stable")]
    return np.ascontiguousarray(order, np.uint32)
