"""Monitors. They measure losses, the ages of stale weights, and the distance between replicas."""

from .drift import Drift
from .exchanges import ExchangeMonitor
from .observer import Look, Observer, Replicas, load_states, metrics_of, states_of
from .window import Window
