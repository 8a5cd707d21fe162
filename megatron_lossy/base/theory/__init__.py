"""Closed forms for ages, drift, lag, averaging and rounding, each with its derivation in a line or two (docs/theory.md).

They need NumPy only. :mod:`megatron_lossy.lab.theory` has those that no run uses, and counts all of them with the real
channels and recovery rules, and in a training run.
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
    gradient_bytes,
    gradient_seconds,
    growth,
    least_delay,
    parts,
    removed,
    site_bytes,
    speed_held_back,
    speed_uncorrected,
    stability_bound,
    stability_bound_drawn,
)
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
from .lag import Lag, Lead, delayed_step_bound, lead, mean_lag, stability_limit
from .rounding import as_loss, rounding_error

__all__ = [
    "UNCORRELATED",
    "Lag",
    "Lead",
    "age_exceeds",
    "age_max",
    "age_mean",
    "age_variance",
    "ar1",
    "as_loss",
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
    "gradient_bytes",
    "gradient_seconds",
    "growth",
    "lead",
    "least_delay",
    "mean_lag",
    "parts",
    "removed",
    "rounding_error",
    "second_moments",
    "settling_steps",
    "site_bytes",
    "speed_held_back",
    "speed_uncorrected",
    "stability_bound",
    "stability_bound_drawn",
    "stability_limit",
]
