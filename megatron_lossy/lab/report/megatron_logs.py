"""Runs, read from Megatron-LM's own output: the log of its ranks.

Rank 0 prints all arguments at the start. The last rank prints a line per log interval and per evaluation
(``megatron/training/training.py``). So the log of a run has the content of ``metrics.jsonl``.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...base.errors import UsageError, cannot, refuse
from ...config import LossyConfig
from ..train.config import TrainConfig
from .runs import LOSS, Run, RunRecorder

LOG_SUFFIXES = (".log", ".out", ".txt")

# A launcher may have put the rank before each line.
_ARGUMENT = re.compile(r"\s(\w+) \.{2,} (.*)$")
_TIME = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_TRAIN = re.compile(r"iteration +(\d+)/ *\d+ \|(.*)")
# The line that the hooks of this package print below it (hooks/megatron_training.py).
_EXCHANGES = re.compile(r"exchanges up to iteration +(\d+) \|(.*)")
# By Megatron-LM's name: our name, and the factor to our unit.
_IN_LOGS = {"number of skipped iterations": ("skipped", 1), "elapsed time per iteration (ms)": ("seconds", 1e-3)}
# Losses on the test set come after training and are of other data.
_VALID = re.compile(r"validation loss at iteration (\d+)(?: on validation set)? \|(.*)")
_VALID_LOSSES = {
    "replica": re.compile(r"\blm loss value: (\S+)"),
    "owner": re.compile(r"\blm loss \(owner weights\) value: (\S+)"),
}
_SETTINGS = {field.name for cls in (TrainConfig, LossyConfig) for field in dataclasses.fields(cls)} | {"world_size"}


@dataclasses.dataclass
class _Log:
    """The content of one file: arguments as printed, records in order, and the time of its first iteration."""

    path: Path
    arguments: dict[str, str] = dataclasses.field(default_factory=dict)
    records: list[tuple[str, dict[str, Any]]] = dataclasses.field(default_factory=list)
    started: str = ""


def read_megatron_run(folder: Path) -> Run | None:
    """Return the run that Megatron-LM logged in ``folder`` or below it, or None if it logged none.

    Raises :class:`UsageError` if the log does not show its arguments, or if there are several runs.
    """
    files = sorted(path for path in folder.rglob("*") if path.suffix in LOG_SUFFIXES and path.is_file())
    logs = [log for log in map(_read_log, files) if log.arguments or log.records]
    if not any(log.records for log in logs):
        return None
    described = [log for log in logs if log.arguments]
    if not described:
        raise refuse(
            "RUNS_DIR", folder, "no log there has Megatron's arguments, which rank 0 prints at the start of a run"
        )
    recorder = RunRecorder(_described(folder, described[0].arguments))
    for log in described[1:]:
        recorder.check_same(_described(folder, log.arguments), str(log.path))
    # A requeued run goes on in another file.
    for log in sorted(logs, key=lambda log: log.started):
        for kind, record in log.records:
            recorder.add(kind, record)
    return recorder.run


def _read_log(path: Path) -> _Log:
    log = _Log(path)
    for line in _lines(path):
        if match := _TRAIN.search(line):
            log.started = log.started or (time[1] if (time := _TIME.search(line)) else "")
            record = {LOSS: None, "skipped": 0, **_scalars(match[2]), "iteration": int(match[1])}
            log.records.append(("train", record))
        elif match := _EXCHANGES.search(line):
            log.records.append(("scalars", {**_scalars(match[2]), "iteration": int(match[1])}))
        elif match := _VALID.search(line):
            for weights, pattern in _VALID_LOSSES.items():
                if loss := pattern.search(match[2]):
                    record = {"iteration": int(match[1]), "lm loss": _number(loss[1]), "weights": weights}
                    log.records.append(("valid", record))
        elif match := _ARGUMENT.search(line):
            log.arguments[match[1]] = match[2].strip()
    return log


def _scalars(text: str) -> dict[str, float]:
    """``name: value | name: value |`` as numbers by our names."""
    result = {}
    for part in text.split("|"):
        name, _, value = part.rpartition(":")
        if (number := _number(value)) is not None:
            name, factor = _IN_LOGS.get(name.strip(), (name.strip(), 1))
            result[name] = factor * number
    return result


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.endswith("\n"):  # a killed run may leave half a line
                    yield line.rstrip()
    except OSError as error:
        raise cannot("RUNS_DIR", path, "read", error) from None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _described(folder: Path, arguments: Mapping[str, str]) -> Run:
    """A run without losses yet. A run without our flags lost nothing."""
    settings = {name: _value(text) for name, text in arguments.items() if name in _SETTINGS}
    try:
        return Run(
            name=folder.name,
            p_grad=settings.get("p_grad", 0.0) + 0.0,
            p_param=settings.get("p_param", 0.0) + 0.0,
            loss_seed=settings.get("loss_seed"),
            seed=settings.get("seed"),
            config=settings,
        )
    except TypeError:
        raise UsageError(f"RUNS_DIR {folder}: --p-grad and --p-param there are no numbers") from None


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
