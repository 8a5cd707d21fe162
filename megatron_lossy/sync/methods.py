"""The rule of ``--sync-method``, and which flags it cannot work with."""

from __future__ import annotations

import torch

from .. import theory
from ..config import LossyConfig
from ..errors import refuse
from ..flags import as_text
from ..transport import check_ranks
from .correction import make_correction
from .outer import make_outer
from .rule import Rule

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


def check_islands(config: LossyConfig, workers: int, train_iters: int | None, virtual: bool) -> None:
    """Raise :class:`UsageError` for islands that cannot be made of ``workers``, or do not fit other flags.

    ``workers``: data-parallel ranks of all islands, ``virtual`` ones or real. ``train_iters``: ``None`` if it is not known.
    """
    islands = config.islands
    if islands == 1:
        return
    if workers % islands:
        more = "" if virtual or workers > islands else "; start more with torchrun, or give --virtual-workers"
        who = "virtual workers" if virtual else f"data-parallel rank{'s'[: workers != 1]}"
        raise refuse("--islands", islands, f"must divide the {workers} {who}{more}")
    if not config.averages:
        return
    if virtual and config.transport == "udp":
        raise refuse("--transport", "udp", "needs real ranks: virtual workers exchange in memory; choose pieces")
    if not virtual:
        _check_real(config)
    if config.transport != "udp":
        check_ranks(config, workers // islands)
    if train_iters is not None and not config.iterations(train_iters):
        raise refuse("--train-iters", train_iters, "leaves the slowest island without an iteration")
    if config.sync_method == "parameters":
        check_averaging(config)


def _check_real(config: LossyConfig) -> None:
    """Raise :class:`UsageError` for what islands of real ranks cannot do."""
    if config.island_speeds is not None:
        raise refuse(
            "--island-speeds", as_text(config.island_speeds), "needs --virtual-workers: real ones have their own"
        )
    if config.transport == "udp":
        if config.sync_subset == "bernoulli":
            raise refuse("--sync-subset", "bernoulli", "cannot go with --transport udp, whose messages have one length")
        if config.delivery_log is not None:
            why = "cannot go with --islands and --transport udp, which knows what arrived iterations later"
            raise refuse("--delivery-log", config.delivery_log, why)


def check_averaging(config: LossyConfig) -> None:
    """Raise :class:`UsageError` for a gain that diverges (:func:`megatron_lossy.theory.stability_bound`)."""
    bound, many = theory.stability_bound(config.overlap), _overlap(config)
    if config.sync_subset != "cyclic":
        bound, many = _IRREGULAR * bound, f"{many} and --sync-subset {config.sync_subset}"
    allowed = f"diverges: must be below {bound:.3g} with {many}"
    if config.delay_correction == "ema" and config.ema_coefficient[0] >= bound:
        raise refuse("--ema-coefficient", as_text(config.ema_coefficient), allowed)
    if config.delay_correction == "mixing" and config.gain is not None and config.gain >= bound:
        raise refuse("--mixing-gain", config.mixing_gain, allowed)


def notes_on_averaging(config: LossyConfig, steps: int) -> list[str]:
    """What is allowed and unlikely to be wanted in a run of ``steps`` iterations, in lines."""
    if not config.averages or config.sync_method != "parameters" or config.delay_correction == "none":
        return []
    notes = []
    if config.overlap:
        smaller = 1 / (config.sync_delay // config.sync_interval + 1)
        notes.append(f"{_overlap(config)}; with --sync-fraction of at most {smaller:.3g} there is none")
    visits = steps // (config.parts * config.sync_interval)
    if config.delay_correction == "ema" and visits < _SETTLES:
        notes.append(
            f"--delay-correction ema: an element is exchanged {visits} times in this run; its average never settles"
        )
    return notes


def _overlap(config: LossyConfig) -> str:
    return f"{config.overlap} later exchanges of an element under way (--sync-delay {config.sync_delay})"
