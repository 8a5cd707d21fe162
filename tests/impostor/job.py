"""One row on one rank: our trainer for a few iterations on the pretended device."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings


def run_row(rank: int, trainer: dict, lossy: dict, devices: bool = True) -> dict:
    """The counts of the tracker by phase: ``steady`` are iterations 3 to 6."""
    warnings.simplefilter("ignore")
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    os.environ["LOCAL_RANK"] = "0"
    from . import pretend

    tracker = pretend.T
    if devices:
        pretend.install()
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from megatron_lossy.config import LossyConfig
    from megatron_lossy.train.config import TrainConfig
    from megatron_lossy.train.loop import train

    first = []

    def stepped(optimizer, *_):
        first.append(optimizer)
        if optimizer is not first[0]:
            return
        n = sum(one is optimizer for one in first)
        tracker.phase = "steady" if 2 <= n < 6 else "first" if n < 2 else "last"

    register_optimizer_step_post_hook(stepped)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        summary = train(TrainConfig(**trainer), LossyConfig(**lossy))
    tracker.phase = "after"
    return {
        "summary": summary,
        "counts": dict(tracker.counts),
        "bytes": dict(tracker.bytes),
        "races": dict(tracker.races),
        "life": dict(tracker.lifetimes),
        "host": dict(tracker.host_races),
        "fail": tracker.fail,
    }
