"""Interleaved XOR parity (SMART, section 3.3): blocks of packets, and for each block a few packets of parity.

A block is B packets in the order of the message, with c parities. Packet i of a block belongs to group i mod c. The
parity of a group is the XOR of its packets' bytes. So a group is whole again if at most one of its packets, parity
included, is lost. A short last block of b packets has only max(1, ceil(c b / B)) parities.

Up to c lost packets of data in a row come back wherever they begin, also across two blocks. Two conditions hold: none
of their parities is lost, and a short last block loses at most as many packets as it has parities.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..flags import check_code


@dataclass(frozen=True)
class Layout:
    """The protection of a message's packets.

    ``packets``: packets of data in the message. ``block``: B, at most 65,535. ``parity``: c, at least 1, at most B and 255.
    """

    packets: int
    block: int
    parity: int

    def __post_init__(self) -> None:
        check_code("block and parity", self.block, self.parity)

    @cached_property
    def group(self) -> np.ndarray:
        """int[packets]: the parity that protects each packet, numbered over the message."""
        block, place = np.divmod(np.arange(self.packets), self.block)
        whole = self.packets // self.block
        return block * self.parity + place % np.where(block < whole, self.parity, self._last)

    @property
    def _last(self) -> int:
        """Parities of a short last block."""
        return max(1, -(-self.parity * (self.packets % self.block) // self.block))

    @property
    def parities(self) -> int:
        """Packets of parity of the message."""
        whole, rest = divmod(self.packets, self.block)
        return whole * self.parity + (self._last if rest else 0)

    @cached_property
    def _by_group(self) -> tuple[np.ndarray, np.ndarray]:
        """The packets ordered by their group, and the place where each group begins."""
        order = np.argsort(self.group, kind="stable")
        return order, np.searchsorted(self.group[order], np.arange(self.parities))

    def residual(self, lost: np.ndarray, lost_parity: np.ndarray) -> np.ndarray:
        """Return bool[..., packets]: the packets that stay lost.

        ``lost`` bool[..., packets] and ``lost_parity`` bool[..., parities] are the packets and parities that did not
        arrive.
        """
        if not self.packets:
            return lost.copy()
        order, starts = self._by_group
        count = np.add.reduceat(lost[..., order], starts, axis=-1, dtype=np.int64)
        return lost & (count + lost_parity > 1)[..., self.group]


# --- the choice of the code ------------------------------------------------------------------------------------------
# The least parity for the loss that receivers report, within a budget of bytes. SMART (section 3.2) fixes the code beforehand, and
# pays for it where nothing is lost. Here a message gets the fewest parities that keep its final loss within the bound, for all but
# a small share of messages.

#: The latest messages that count, and the share of messages that may lose more than the bound.
_MESSAGES, _FAILURES = 32, 1e-3


class AdaptiveCode:
    """The number of parities per block of packets. It follows the loss of the latest messages.

    Args:
        block: B, packets of data in a block.
        bound: share of a message's packets that may stay lost; 0: none.
        budget: parities are at most this share of a block, and at most 255; above 1 some are copies.
    """

    def __init__(self, block: int = 100, bound: float = 0.0, budget: float = 0.5) -> None:
        self.block = block
        self.bound = bound
        self.most = min(int(budget * block), 255)
        self._reports: deque[tuple[int, int]] = deque(maxlen=_MESSAGES)

    def report(self, lost: int, packets: int) -> None:
        """Record that ``lost`` of ``packets`` sent packets, parities included, did not arrive."""
        self._reports.append((lost, packets))

    @property
    def loss(self) -> float:
        """An upper estimate of the loss rate: two standard errors above the reported rate (Wilson, 1927)."""
        lost, packets = (sum(column) for column in zip(*self._reports, strict=True)) if self._reports else (0, 0)
        if not lost:
            return 0.0
        z, share = 2.0, lost / packets
        middle = share + z * z / (2 * packets)
        spread = z * math.sqrt(share * (1 - share) / packets + (z / (2 * packets)) ** 2)
        return min((middle + spread) / (1 + z * z / packets), 1.0)

    def parity(self, packets: int) -> int:
        """Return c, in [0, budget x block], for a message of ``packets`` packets; 0: none."""
        p = self.loss
        # More parity never fails more often.
        low, high = 0, self.most
        while low < high:
            middle = (low + high) // 2
            if failure(p, packets, self.block, middle, self.bound) <= _FAILURES:
                high = middle
            else:
                low = middle + 1
        return low


def failure(p: float, packets: int, block: int, parity: int, bound: float) -> float:
    """Return the probability that more than ``bound`` packets of a message stay lost, with losses of rate ``p``.

    A group of g packets and its parity loses X of its packets. R = X of them stay lost, but none if X = 1 and the
    parity arrived. E R = g p (1 - q^g), E R^2 = g p q + (g p)^2 - g p q^g, P(R > 0) = 1 - q^g - g p q^g. The sum over
    groups is taken for normal. With ``bound`` 0 the probability is exact, except for groups of unequal size. With more
    parities than packets, a packet stays lost if all its copies are lost.
    """
    if not p or not packets:
        return 0.0
    q, allowed = 1 - p, math.floor(bound * packets)
    g = max(block / parity, 1.0) if parity else packets
    groups = packets / g
    if parity > block:
        copies, rest = divmod(parity, block)
        once, again = p ** (1 + copies), p ** (2 + copies)
        nothing = (1 - once) ** (1 - rest / block) * (1 - again) ** (rest / block)
        mean = square = once + (again - once) * rest / block
    elif parity:
        nothing = q**g * (1 + g * p)
        mean = g * p * (1 - q**g)
        square = g * p * q + (g * p) ** 2 - g * p * q**g
    else:
        nothing, mean = q**g, g * p
        square = g * p * q + mean**2
    if not allowed:
        return max(0.0, 1 - nothing**groups)  # rounding
    spread = math.sqrt(groups * (square - mean**2))
    return 0.5 * math.erfc((allowed + 0.5 - groups * mean) / (math.sqrt(2) * spread)) if spread else 0.0
