"""What a run tells about itself, and where to."""

from __future__ import annotations

from ..config import LossyConfig
from .delivery_log import DeliveryLog, claim_delivery_log
from .drift import Drift
from .exchanges import ExchangeMonitor
from .observation import Observation, Observer, load_states, metrics_of, save_records, states_of

__all__ = [
    "DeliveryLog",
    "Drift",
    "Observation",
    "Observer",
    "claim_delivery_log",
    "load_states",
    "make_observers",
    "metrics_of",
    "save_records",
    "states_of",
]


def make_observers(config: LossyConfig) -> list[Observer]:
    """The observers that the flags ask for."""
    observers: list[Observer] = [ExchangeMonitor()]
    if config.drift_interval:
        observers.append(Drift(config))
    if config.delivery_log is not None:
        observers.append(DeliveryLog(config))
    return observers
