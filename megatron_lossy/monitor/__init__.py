"""Monitors. They measure losses, the ages of stale weights, and the distance between replicas."""

from .boundaries import BoundaryMonitor
from .drift import Drift
from .exchanges import ExchangeMonitor
from .observer import Look, Observer, Replicas, load_states, metrics_of, states_of
from .priority import PriorityMonitor

__all__ = [
    "BoundaryMonitor",
    "Drift",
    "ExchangeMonitor",
    "Look",
    "Observer",
    "PriorityMonitor",
    "Replicas",
    "load_states",
    "metrics_of",
    "states_of",
]
