"""One row in this process, which is a rank of it: our trainer for a few iterations."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...base.ledger import Patch, patched
from .rows import FIRST, LAST, Row

#: Words of the text that rows train on. They come in the order of a linear congruential generator, so that there is something
#: to learn, and no file is needed that an installation may lack.
_WORDS = "the loss of a packet is what gradient and weights share late mean net. As \n"


class Values(NamedTuple):
    """Results of a row. ``loss``: mean of all iterations, on the last stage; ``weights``: float32[...], of this rank."""

    loss: float | None
    weights: np.ndarray


def write_data(folder: str | os.PathLike) -> dict[str, tuple[str, ...]]:
    """Write the text of all rows into ``folder``; returns the trainer's settings that name it."""
    from ..data import build_tokenizer, write_indexed

    number, words = 1, []
    for _ in range(3000):
        number = number * 1103515245 + 12345 & 0x7FFFFFFF
        words.append(_WORDS.split(" ")[number >> 16 & 15])
    text = " ".join(words).encode()
    paths = {}
    for name, part in (("data_path", text[:8000]), ("valid_data_path", text[8000:12000])):
        path = os.path.join(folder, name)
        write_indexed([("text", part)], path, build_tokenizer("byte"))
        paths[name] = (path,)
    return paths


def _post_init(original: Callable[..., None], config: Any) -> None:
    config.use_cpu_initialization = True
    original(config)


_WEIGHTS_OF_THE_CPU = Patch(
    target="megatron.core.transformer:TransformerConfig.__post_init__",
    around=_post_init,
    why="draws initial weights from the CPU's generator, which gives the same weights on every device",
)


def run(row: Row, data: dict[str, tuple[str, ...]], begin: Callable[[], None], end: Callable[[], None]) -> Values:
    """Train. ``begin`` and ``end`` are called around the iterations that count, each from the end of an optimizer's step.

    The environment says which rank this is, as torchrun does. Raise what the trainer raises.
    """
    from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

    from ...config import LossyConfig
    from ..train.config import TrainConfig
    from ..train.loop import train

    optimizers: list[Optimizer] = []
    steps = 0

    def stepped(optimizer: Optimizer, *_: object) -> None:
        nonlocal steps
        if not optimizers:
            optimizers.append(optimizer)
        if optimizer is not optimizers[0]:
            return
        steps += 1
        if steps == FIRST - 1:
            begin()
        if steps == LAST:
            end()

    hook = register_optimizer_step_post_hook(stepped)
    try:
        with contextlib.redirect_stdout(io.StringIO()), patched("calibration", _WEIGHTS_OF_THE_CPU):
            summary = train(TrainConfig(**row.settings, **data), LossyConfig(**row.lossy))
    finally:
        hook.remove()
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    parts = [weight.detach().float().cpu().numpy().reshape(-1) for group in groups for weight in group["params"]]
    return Values(summary.get("lm loss"), np.concatenate(parts) if parts else np.zeros(0, np.float32))
