"""Monitors. They measure what is lost, how old stale weights are, and how far replicas are apart."""

from .drift import Drift
from .exchanges import ExchangeMonitor
from .observer import Observer, load_states, metrics_of, save_records, states_of

__all__ = ["Drift", "ExchangeMonitor", "Observer", "load_states", "metrics_of", "save_records", "states_of"]
