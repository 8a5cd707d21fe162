"""The rule of ``--sync-method``, and which flags it cannot work with."""

from __future__ import annotations

import logging

import torch

from .. import theory
from ..config import LossyConfig
from ..errors import refuse
from ..flags import as_text
from .correction import make_correction
from .outer import make_outer
from .rule import Rule

logger = logging.getLogger(__name__)

# Of the bound where an element's gaps vary: with independent draws at 5 % and a delay of 50, a gain of 0.5 diverges
# though the bound of equal gaps is 0.618.
_IRREGULAR = 0.7
#: Exchanges of an element below which a moving average has not settled.
_SETTLES = 10


def make_rule(config: LossyConfig, weights: torch.Tensor, steps: int) -> Rule:
    """The rule for islands of this process with ``weights`` [islands, size], in a run of ``steps`` iterations."""
    if config.sync_method == "parameters":
        return make_correction(config, *weights.shape, steps, weights.device)
    return make_outer(config, weights)


def check_averaging(config: LossyConfig, steps: int) -> None:
    """Raise :class:`UsageError` for a gain that diverges; warn of delays that are longer than they need be.

    ``steps``: length of the run.
    """
    if not config.averages or config.sync_method != "parameters" or config.delay_correction == "none":
        return
    bound = theory.stability_bound(config.overlap)
    many = f"{config.overlap} later exchanges of an element under way (--sync-delay {config.sync_delay})"
    if config.sync_subset != "cyclic":
        bound, many = _IRREGULAR * bound, f"{many} and --sync-subset {config.sync_subset}"
    allowed = f"diverges: must be below {bound:.3g} with {many}"
    if config.delay_correction == "ema" and config.ema_coefficient[0] >= bound:
        raise refuse("--ema-coefficient", as_text(config.ema_coefficient), allowed)
    if config.delay_correction == "mixing" and config.gain is not None and config.gain >= bound:
        raise refuse("--mixing-gain", config.mixing_gain, allowed)
    if config.overlap:
        smaller = 1 / (config.sync_delay // config.sync_interval + 1)
        logger.warning(
            "--sync-delay %s: %s; without overlap, with --sync-fraction of at most %.3g, averaging is faster",
            config.sync_delay, many, smaller,
        )  # fmt: skip
    visits = steps // (config.parts * config.sync_interval)
    if config.delay_correction == "ema" and visits < _SETTLES:
        logger.warning(
            "--delay-correction ema: an element is exchanged %s times in this run, too few for its average to settle",
            visits,
        )
