"""The printed lines of a run, in Megatron-LM's formats, so that readers of its logs can read ours.

Only rank 0 prints. The same records go to the metric writers (:mod:`megatron_lossy.lab.train.metrics`).
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

#: The text for weights that are not the replicas'.
WHOSE = {"owner": " with the owners' weights", "consensus": " with the mean weights"}


def train_line(record: dict[str, Any], train_iters: int, global_batch_size: int) -> str:
    """The line of a "train" record."""
    return (
        f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] iteration {record['iteration']:8d}/{train_iters:8d} |"
        f" consumed samples: {record['consumed samples']:12d} |"
        f" elapsed time per iteration (ms): {1e3 * record['seconds']:.1f} |"
        f" learning rate: {record['learning rate']:.6E} |"
        f" global batch size: {global_batch_size:5d} |"
        f" lm loss: {record['lm loss']:.6E} |"
        f" loss scale: {record['loss scale']:.1f} |"
        f" grad norm: {record['grad norm']:.3f} |"
        f" number of skipped iterations: {record['skipped']:3d} |"
        f" number of nan iterations: {0:3d} |"  # the first one ends the run
    )


def valid_lines(record: dict[str, Any]) -> str:
    """The three lines of a "valid" record."""
    whose = WHOSE.get(record["weights"], "")
    text = (
        f" validation loss at iteration {record['iteration']}{whose} |"
        f" lm loss value: {record['lm loss']:.6E} | lm loss PPL: {record['lm loss PPL']:.6E} | "
    )
    dashes = "-" * (len(text) + 1)
    return f"{dashes}\n{text}\n{dashes}"


class Console:
    """Prints a run. Used on rank 0 only."""

    def note(self, text: str) -> None:
        """Print an event that happened once."""
        print(text, flush=True)

    def train(self, record: dict[str, Any], train_iters: int, global_batch_size: int) -> None:
        """Print the average of the iterations since the last call."""
        self.note(train_line(record, train_iters, global_batch_size))

    def valid(self, record: dict[str, Any]) -> None:
        """Print an evaluation."""
        self.note(valid_lines(record))


class Silent(Console):
    """The console of ranks other than 0. It prints nothing."""

    def note(self, text: str) -> None:
        pass


def clock(seconds: float) -> str:
    """``seconds`` as minutes:seconds, with hours if there are any."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
