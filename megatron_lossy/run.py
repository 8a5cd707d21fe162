"""One run, real or virtual."""

from __future__ import annotations

from .config import LossyConfig
from .delivery_log.writer import DeliveryLog
from .monitor import Drift, ExchangeMonitor, Observer


def make_observers(config: LossyConfig) -> list[Observer]:
    """The observers that the flags ask for."""
    observers: list[Observer] = [ExchangeMonitor()]
    if config.drift_interval:
        observers.append(Drift(config))
    if config.delivery_log is not None:
        observers.append(DeliveryLog(config))
    return observers
