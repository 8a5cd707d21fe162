"""The elements of an exchange: a function of seed, stream and round, so that no index is sent.

*AsyncMesh*, section 2.3, after SPARTA, whose public code draws a partition per tensor and broadcasts a mask of bytes.
"""

from __future__ import annotations

import numpy as np
import torch

from ...base.errors import refuse
from ...base.exchange import Exchange, Stream
from ...channel.draws import choosing_numbers
from ...config import LossyConfig
from .places import Places


class Subset:
    """The elements of each round of one vector of ``size`` elements. Raises :class:`UsageError` if they are too few.

    ``cyclic``: blocks of elements are permuted once and cut into n parts; round r takes part r mod n. ``partition``:
    the same, permuted anew every n rounds. ``bernoulli``: every block with the probability of the fraction.
    """

    def __init__(self, config: LossyConfig, size: int, seed: int, stream: Stream) -> None:
        self._kind, self._fraction, self._parts = config.sync_subset, config.sync_fraction, config.parts
        self._block, self._seed, self.stream = config.sync_block, seed, stream
        self.size = size
        self._blocks = -(-size // config.sync_block)
        if self._fraction * size < config.islands:
            least = f"must be at least {config.islands / size:.3g}"
            why = f"of {size} elements is less than one for each of {config.islands} islands to average; {least}"
            raise refuse("--sync-fraction", self._fraction, why)
        if self._kind != "bernoulli" and self._blocks < self._parts:
            most = (size - 1) // (self._parts - 1)
            why = f"makes {self._blocks} blocks of {size} elements, fewer than {self._parts} parts; must be at most {most}"
            raise refuse("--sync-block", self._block, why)
        self._partition: tuple[int, list[np.ndarray]] | None = None

    def places(self, number: int, device: torch.device) -> Places | None:
        """The elements of round ``number`` (from 0), for a vector on ``device``; ``None``: all of them."""
        if self._fraction == 1:
            return None
        return Places(self._chosen(number), self._block, self.size, device)

    @property
    def most(self) -> int:
        """The most elements that a round can have."""
        if self._fraction == 1 or self._kind == "bernoulli":
            return self.size
        return min(self.size, -(-self._blocks // self._parts) * self._block)

    def _chosen(self, number: int) -> np.ndarray:
        """int64[n], rising: the blocks of a round."""
        if self._kind == "bernoulli":
            threshold = np.uint64(min(int(self._fraction * 2.0**64), 2**64 - 1))
            return np.flatnonzero(self._numbers(number) < threshold)
        cycle, part = divmod(number, self._parts)
        return self._parts_of(0 if self._kind == "cyclic" else cycle)[part]

    def _parts_of(self, cycle: int) -> list[np.ndarray]:
        """The blocks of each part."""
        if self._partition is None or self._partition[0] != cycle:
            order = np.argsort(self._numbers(cycle), kind="stable")
            parts = [np.sort(part) for part in np.array_split(order, self._parts)]
            self._partition = (cycle, parts)
        return self._partition[1]

    def _numbers(self, number: int) -> np.ndarray:
        return choosing_numbers(self._seed, Exchange("sync-reduce", self.stream, number), self._blocks)
