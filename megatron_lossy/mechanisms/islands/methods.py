"""The rule of ``--sync-method``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...config import LossyConfig
from .correction import make_correction
from .outer import make_outer
from .rule import Rule


def make_rule(config: LossyConfig, weights: Sequence[torch.Tensor], steps: int | None) -> Rule:
    """The rule for the islands of this process, each with its ``weights`` [size]. ``steps``: length of the run, if known."""
    if config.sync_method == "parameters":
        return make_correction(config, len(weights), len(weights[0]), steps, weights[0].device)
    return make_outer(config, weights)
