"""Closed forms (docs/theory.md): those of runs, and those of the lab."""

from ...base.theory import *  # noqa: F403
from .lag import Lag, mean_lag, stability_limit  # noqa: F401
from .link import gradient_bytes, gradient_seconds, parts, site_bytes  # noqa: F401
