"""One row on one rank: our trainer for a few iterations on the pretended device."""

from __future__ import annotations

import contextlib
import io
import os
import warnings


def run_row(rank: int, trainer: dict, lossy: dict, devices: bool = True):
    """The findings of a row; iterations 3 to 6 are the phase "steady"."""
    warnings.simplefilter("ignore")
    os.environ["LOCAL_RANK"] = "0"
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    from . import device
    from .tracker import Tracker

    tracker = Tracker()
    if devices:
        device.install(tracker)
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
        train(TrainConfig(**trainer), LossyConfig(**lossy))
    tracker.phase = "after"
    return tracker.findings()
