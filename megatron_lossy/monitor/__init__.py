"""Monitors. They measure what is lost, how old stale weights are, and how far replicas are apart."""

from .drift import Drift
from .exchanges import ExchangeMonitor
from .observer import Observer, Replicas, load_states, metrics_of, states_of

__all__ = ["Drift", "ExchangeMonitor", "Observer", "Replicas", "load_states", "metrics_of", "states_of"]
