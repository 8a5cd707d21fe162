"""All closed forms (docs/theory.md), and those that no run uses."""

from ...base.theory import *  # noqa: F403
from .averaging import (  # noqa: F401
    deviation_predicted,
    gradient_bytes,
    gradient_seconds,
    growth,
    parts,
    removed,
    site_bytes,
    speed_uncorrected,
)
from .lag import Lag, delayed_step_bound, mean_lag, stability_limit  # noqa: F401
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
