"""Independent losses: every unit is lost with the scheduled probability (paper, section 3)."""

from __future__ import annotations

import numpy as np

from ..base.exchange import Exchange
from ..config import PhaseLoss
from .draws import DrawnChannel


class Bernoulli(DrawnChannel):
    """Loses each unit independently with the rate that ``loss.schedule`` gives for the step."""

    name = "bernoulli"

    def draw_links(self, exchange: Exchange, sources: np.ndarray, destinations: np.ndarray, units: int) -> np.ndarray:
        rate = self.rate(exchange.step)
        if rate == 0:
            return np.ones((len(sources), units), dtype=bool)
        return ~self.uniforms(0, exchange, sources, destinations, units).below(rate)

    def lag(self, step: int, source: int, destinations: np.ndarray, units: int) -> tuple[float, float]:
        rate = self.rate(step)
        return rate, rate / (1 - rate)

    @classmethod
    def drift(cls, loss: PhaseLoss, step: int, units: int) -> tuple[float, float]:
        rate = cls(loss, seed=0).rate(step)
        return rate / (1 - rate), 2 * rate * (1 - rate / (1 + rate)) / (1 - rate)
