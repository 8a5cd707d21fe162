"""What a run measures about itself."""

from .drift import Drift
from .exchanges import ExchangeMonitor
from .observer import Observer, Replicas, load_states, metrics_of, states_of

__all__ = ["Drift", "ExchangeMonitor", "Observer", "Replicas", "load_states", "metrics_of", "states_of"]
