"""Writers of a run's records: a JSON-lines file, TensorBoard, and printed lines in Megatron-LM's formats, which readers of its logs can read.

A record is a flat dictionary with a ``kind``: "run" (the description of the run, once, first), "train" and "valid"
(values at an ``iteration``). Every writer has ``write(record)`` and ``close()``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from ...base.files import naming, write_text

#: The file of a run's records, in the run's folder.
METRICS_FILE = "metrics.jsonl"

# Megatron-LM's names of the same values in TensorBoard.
_MEGATRON_NAMES = {"learning rate": "learning-rate", "grad norm": "grad-norm", "loss scale": "loss-scale"}


class JsonLinesWriter:
    """``metrics.jsonl`` in ``folder``, a record per line, each complete on disk when :meth:`write` returns.

    A run that resumes at ``iteration`` keeps the records of iterations up to it; ``None`` starts a new file.
    """

    def __init__(self, folder: str | os.PathLike, iteration: int | None) -> None:
        path = Path(folder) / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [] if iteration is None else _records_until(path, iteration)
        self.empty = not kept
        write_text(path, "".join(map(_line, kept)))
        self._file = open(path, "a")

    def write(self, record: dict[str, Any]) -> None:
        if record["kind"] == "run" and not self.empty:
            return  # the file has the record of the resumed run
        with naming(self._file.name):
            self._file.write(_line(record))
            self._file.flush()

    def close(self) -> None:
        with naming(self._file.name):
            self._file.close()


def _line(record: dict[str, Any]) -> str:
    """Return ``record`` as a line of JSON. JSON has only null for infinite or undefined numbers."""
    undefined = {key for key, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
    return json.dumps(record | dict.fromkeys(undefined)) + "\n"


def _records_until(path: Path, iteration: int) -> list[dict[str, Any]]:
    records = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            break  # the unfinished line of a killed run
        if record.get("iteration", 0) <= iteration:
            records.append(record)
    return records


class TensorBoardWriter:
    """TensorBoard events, under the names that Megatron-LM gives them."""

    def __init__(self, folder: str, iteration: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(folder, purge_step=iteration + 1)

    def write(self, record: dict[str, Any]) -> None:
        for name, value in _scalars(record):
            self._writer.add_scalar(name, value, record["iteration"])

    def close(self) -> None:
        self._writer.close()


#: Receives the records of a run.
Writer = JsonLinesWriter | TensorBoardWriter


def perplexity(loss: float | None) -> float | None:
    """Return exp of a loss in nats, which is cut at 20 as in Megatron's printed perplexities; None for None."""
    return None if loss is None else math.exp(min(20.0, loss)) if not math.isnan(loss) else math.nan


def _scalars(record: dict[str, Any]) -> Iterable[tuple[str, float]]:
    """Return the values of a record with the names under which Megatron-LM plots them."""
    if record["kind"] == "train":
        for name, value in record.items():
            if name not in ("kind", "iteration"):
                yield _MEGATRON_NAMES.get(name, name), value
    elif record["kind"] == "valid":
        whose = "" if record["weights"] == "replica" else f" ({record['weights']})"
        yield "lm loss validation" + whose, record["lm loss"]
        yield "lm loss validation ppl" + whose, record["lm loss PPL"]


#: The text for weights that are not the replicas'.
WHOSE = {"owner": " with the owners' weights", "consensus": " with the mean weights"}


class Console:
    """Prints a run. Used on rank 0 only."""

    def note(self, text: str) -> None:
        """Print an event that happened once."""
        print(text, flush=True)

    def train(self, record: dict[str, Any], train_iters: int, global_batch_size: int) -> None:
        """Print the average of the iterations since the last call."""
        self.note(
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

    def valid(self, record: dict[str, Any]) -> None:
        """Print an evaluation, in three lines."""
        text = (
            f" validation loss at iteration {record['iteration']}{WHOSE.get(record['weights'], '')} |"
            f" lm loss value: {record['lm loss']:.6E} | lm loss PPL: {record['lm loss PPL']:.6E} | "
        )
        dashes = "-" * (len(text) + 1)
        self.note(f"{dashes}\n{text}\n{dashes}")


class SilentConsole(Console):
    """The console of ranks other than 0. It prints nothing."""

    def note(self, text: str) -> None:
        pass
