"""Independent losses: every unit is lost with the scheduled probability (paper, section 3)."""

from __future__ import annotations

import numpy as np

from ..base import theory
from ..base.exchange import Exchange
from ..config import PhaseLoss
from .draws import DrawnChannel


class Bernoulli(DrawnChannel):
    """Loses each unit independently with the rate that ``loss.schedule`` gives for the step."""

    name = "bernoulli"

    def draw_links(self, exchange: Exchange, sources: np.ndarray, destinations: np.ndarray, units: int) -> np.ndarray:
        rate = self.loss.schedule.rate(exchange.step)
        if rate == 0:
            return np.ones((len(sources), units), dtype=bool)
        return ~self.uniforms(0, exchange, sources, destinations, units).below(rate)

    def lag(self, step: int, source: int, destinations: np.ndarray, units: int) -> tuple[float, float]:
        rate = self.loss.schedule.rate(step)
        return rate, float(theory.age_mean(rate))

    @classmethod
    def drift(cls, loss: PhaseLoss, step: int, units: int) -> tuple[float, float]:
        rate = loss.schedule.rate(step)
        return float(theory.drift_to_owner(rate)), float(theory.drift_between(rate))
