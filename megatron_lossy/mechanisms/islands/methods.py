"""The rule of ``--sync-method``."""

from __future__ import annotations

import torch

from ...config import LossyConfig
from .correction import make_correction
from .outer import make_outer
from .rule import Rule


def make_rule(config: LossyConfig, weights: torch.Tensor, steps: int | None) -> Rule:
    """The rule for islands of this process with ``weights`` [islands, size]. ``steps``: length of the run, if known."""
    if config.sync_method == "parameters":
        return make_correction(config, *weights.shape, steps, weights.device)
    return make_outer(config, weights)
