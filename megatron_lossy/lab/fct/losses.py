"""The lost packets of one message. All schemes have the same losses, as far as they send the same packets."""

from __future__ import annotations

import numpy as np


class Losses:
    """The draws of one message.

    ``p``: loss rate. ``burst``: mean number of packets lost in a row (Gilbert-Elliott; everything is lost in the bad
    state), or ``None`` for independent losses. Packets that are sent again are lost independently.
    """

    def __init__(self, p: float, seed: int, flow: int, burst: float | None = None) -> None:
        self.p = p
        self.burst = burst
        self._key = (seed, flow)

    def _generator(self, purpose: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=self._key[0], counter=[0, 0, self._key[1], purpose]))

    def first(self, data: int, parities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """bool[data] and bool[parities]: the packets that are lost when first sent.

        ``parities`` int[P]: the number of data packets before each parity.
        """
        if self.burst is None:
            lost = self._generator(0).random(data) < self.p
            return lost, self._generator(1).random(len(parities)) < self.p
        chain = self._chain(data + len(parities))
        places = parities + np.arange(len(parities))
        is_parity = np.zeros(len(chain), dtype=bool)
        is_parity[places] = True
        return chain[~is_parity], chain[is_parity]

    def _chain(self, length: int) -> np.ndarray:
        """bool[length]: a stationary two-state chain, in runs of geometric length."""
        assert self.burst is not None
        if not self.p:
            return np.zeros(length, dtype=bool)
        random = self._generator(0)
        good, bad = self.p / ((1 - self.p) * self.burst), 1 / self.burst  # probabilities of leaving that state
        state = bool(random.random() < self.p)
        runs: list[int] = []
        while sum(runs) < length:
            runs.append(int(random.geometric(bad if state ^ (len(runs) % 2 == 1) else good)))
        states = np.arange(len(runs)) % 2 == (0 if state else 1)
        return np.repeat(states, runs)[:length]

    def again(self, data: int) -> np.ndarray:
        """int[data]: the number of repetitions that each packet needs to arrive, if it is sent again."""
        return self._generator(2).geometric(1 - self.p, data)

    def important(self, data: int, count: int) -> np.ndarray:
        """int[count], rising: the packets of data that have high priority."""
        return np.sort(self._generator(3).permutation(data)[:count])
