"""Independent losses: every unit is lost with the scheduled probability (paper, section 3)."""

from __future__ import annotations

import numpy as np

from .base import Channel
from .exchange import Exchange


class Bernoulli(Channel):
    """Loses each unit independently with the rate that ``loss.schedule`` gives for the step."""

    def delivered(self, exchange: Exchange, source: int, destination: int, units: int) -> np.ndarray:
        rate = self.loss.schedule.rate(exchange.step)
        if rate == 0:
            return np.ones(units, dtype=bool)
        return ~self.draw(0, exchange, source, destination, units).below(rate)
