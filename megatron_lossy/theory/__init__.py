"""Closed forms for ages, drift and recovery rules, each with its derivation in a line or two (docs/theory.md).

They need NumPy only. :mod:`megatron_lossy.lab.theory` counts the same quantities with the real channels and recovery
rules, and in a training run. :mod:`.divergence` is about full replicas with errors in their gradients.
"""

from .ages import age_exceeds, age_max, age_mean, age_variance, burst_tail
from .averaging import (
    bytes_sent,
    contraction,
    contraction_drawn,
    critical_gain,
    critical_gain_drawn,
    deviation,
    deviation_predicted,
    growth,
    removed,
    speed_uncorrected,
    stability_bound,
    stability_bound_drawn,
)
from .delay import delayed_step_bound
from .drift import (
    UNCORRELATED,
    ar1,
    drift_between,
    drift_of_ages,
    drift_over_pairs,
    drift_paper,
    drift_to_owner,
    second_moments,
    settling_steps,
)
from .lag import Lag, Lead, lead, mean_lag, stability_limit
from .link import gradient_bytes, gradient_seconds, least_delay, parts
from .recovery import (
    Weights,
    error_feedback_residual,
    error_feedback_variance,
    no_survivor,
    previous_long_run,
    previous_staleness,
    survivors,
    weights,
)

__all__ = [
    "UNCORRELATED",
    "Lag",
    "Lead",
    "Weights",
    "age_exceeds",
    "age_max",
    "age_mean",
    "age_variance",
    "ar1",
    "burst_tail",
    "bytes_sent",
    "contraction",
    "contraction_drawn",
    "critical_gain",
    "critical_gain_drawn",
    "delayed_step_bound",
    "deviation",
    "deviation_predicted",
    "drift_between",
    "drift_of_ages",
    "drift_over_pairs",
    "drift_paper",
    "drift_to_owner",
    "error_feedback_residual",
    "error_feedback_variance",
    "gradient_bytes",
    "gradient_seconds",
    "growth",
    "lead",
    "least_delay",
    "mean_lag",
    "no_survivor",
    "parts",
    "previous_long_run",
    "previous_staleness",
    "removed",
    "second_moments",
    "settling_steps",
    "speed_uncorrected",
    "stability_bound",
    "stability_bound_drawn",
    "stability_limit",
    "survivors",
    "weights",
]
