"""All closed forms (docs/theory.md), and those that no run uses."""

from ...base.theory import *  # noqa: F403
from .recovery import (  # noqa: F401
    Weights,
    error_feedback_residual,
    error_feedback_variance,
    mean_error,
    previous_long_run,
    previous_staleness,
    survivors,
    weights,
)
