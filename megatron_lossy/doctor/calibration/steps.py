"""Runs a row on the ranks of this process's world, and says when the iterations begin and end that are counted."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Callable
from typing import Any

from .rows import FIRST, LAST, Row

#: The text that is trained on. It never changes, so that losses can be compared.
_TEXT = " ".join(str(7 * number * number % 1009) for number in range(3000)).encode()


def write_data(folder: str) -> str:
    """The prefix of indexed data in ``folder``, written now."""
    from ...data import build_tokenizer, write_indexed

    prefix = os.path.join(folder, "numbers")
    write_indexed([("numbers", _TEXT)], prefix, build_tokenizer("byte"))
    return prefix


def run_row(row: Row, data: str, begin: Callable[[], None], end: Callable[[], None]) -> float:
    """Train as ``row`` says on the data of the prefix ``data``; returns the last training loss. A collective call.

    ``begin()`` is called before iteration :data:`FIRST`, ``end()`` after :data:`LAST`: between two updates of the
    optimizer lies everything that an iteration does, although not from its beginning to its end.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from ...config import LossyConfig
    from ...train.config import TrainConfig
    from ...train.loop import train

    updates: list[Any] = []

    def updated(optimizer: Any, *_: Any) -> None:
        if optimizer is not (updates or [optimizer])[0]:
            return  # one of several
        updates.append(optimizer)
        if len(updates) == FIRST - 1:
            begin()
        elif len(updates) == LAST:
            end()

    hook = register_optimizer_step_post_hook(updated)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            config = TrainConfig(**row.settings, data_path=(data,))
            return train(config, LossyConfig(**row.lossy))["lm loss"]
    finally:
        hook.remove()
