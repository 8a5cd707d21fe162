"""The rule of ``--sync-method``, and its checks of other flags."""

from __future__ import annotations

import torch

from ..config import LossyConfig
from ..errors import refuse
from ..exchange import Stream
from ..flags import as_text
from ..transport import check_ranks
from .correction import check_known_end, make_correction, stability_bound
from .mean import networks_between
from .outer import make_outer
from .rule import Rule

#: A moving average of an element settles in this many exchanges.
_SETTLES = 10


def make_rule(config: LossyConfig, weights: torch.Tensor, steps: int | None) -> Rule:
    """The rule for islands of this process with ``weights`` [islands, size]. ``steps``: length of the run, if known."""
    if config.sync_method == "parameters":
        return make_correction(config, *weights.shape, steps, weights.device)
    return make_outer(config, weights)


def check_islands(config: LossyConfig, workers: int, train_iters: int | None, virtual: bool) -> None:
    """Raise :class:`UsageError` for islands that ``workers`` cannot form, or that do not fit other flags.

    ``workers``: data-parallel ranks of all islands, ``virtual`` ones or real. ``train_iters``: ``None`` if it is not
    known.
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
    if config.sync_method == "eager-diloco":
        _check_reliable(config)
    if config.sync_method != "none":
        networks_between(config, Stream("islands"), train_iters)
    if config.transport != "udp":
        check_ranks(config, workers // islands)
    if train_iters is not None:
        _check_length(config, train_iters)
    if config.sync_method == "parameters":
        check_known_end(config, train_iters)
        check_averaging(config)


def _check_length(config: LossyConfig, train_iters: int) -> None:
    """Raise :class:`UsageError` for a run that ends before a mean is used."""
    steps = config.iterations(train_iters)
    if not steps:
        raise refuse("--train-iters", train_iters, "leaves the slowest island without an iteration")
    if config.sync_method == "none":
        return
    if config.sync_interval > steps:
        raise refuse("--sync-interval", config.sync_interval, f"must be at most {steps}, the iterations of the run")
    latest = steps - config.sync_interval
    if config.sync_delay > latest:
        why = f"must be at most {latest}, for the first mean to be used in a run of {steps} iterations"
        raise refuse("--sync-delay", config.sync_delay, why)


def _check_reliable(config: LossyConfig) -> None:
    """Raise :class:`UsageError` if means may be lost: outer weights that differ stay so for the rest of the run."""
    if not config.sync_lossless:
        why = "cannot lose exchanges (--p-sync, traces, --transport udp): nothing would pull islands together again"
        raise refuse("--sync-method", "eager-diloco", f"{why}; choose diloco")


def _check_real(config: LossyConfig) -> None:
    """Raise :class:`UsageError` for flags that islands of real ranks do not support."""
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
    """Raise :class:`UsageError` for a gain that makes islands drift apart."""
    bound = stability_bound(config)
    allowed = f"diverges: must be below {bound:.3g} with {_under_way(config)}"
    if config.delay_correction == "ema" and config.ema_coefficient[0] >= bound:
        raise refuse("--ema-coefficient", as_text(config.ema_coefficient), allowed)
    if config.delay_correction == "mixing" and config.gain is not None and config.gain >= bound:
        raise refuse("--mixing-gain", config.mixing_gain, allowed)


def notes_on_averaging(config: LossyConfig, steps: int | None) -> list[str]:
    """Lines about flags that are allowed but rarely wanted, for a run of ``steps`` iterations, if known."""
    if not config.averages or config.sync_method != "parameters":
        return []
    notes = []
    if config.overlap and config.delay_correction != "smith":
        smaller = 1 / (config.rounds_under_way + 1)
        notes.append(
            f"{_under_way(config)}; with --sync-fraction of at most {smaller:.3g} there is none, and --delay-correction smith "
            "knows of them"
        )
    visits = None if steps is None else steps // (config.parts * config.sync_interval)
    if config.delay_correction == "ema" and visits is not None and visits < _SETTLES:
        notes.append(
            f"--delay-correction ema: an element is exchanged {visits} times in this run; its average never settles"
        )
    return notes


def _under_way(config: LossyConfig) -> str:
    if config.sync_subset == "bernoulli":
        many, subset = (
            f"{config.mean_overlap:.3g} later exchanges of an element on average",
            " and --sync-subset bernoulli",
        )
    else:
        many = f"{config.overlap} later exchanges of an element"
        subset = " and --sync-subset partition" if config.sync_subset == "partition" else ""
    return f"{many} under way (--sync-delay {config.sync_delay}){subset}"
