"""Runs, read from folders: from the ``metrics.jsonl`` that training writes, or from Megatron-LM's logs."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from ...base.errors import UsageError, cannot, refuse
from ...base.jobs import folder_of
from ...config import LossyConfig
from ..train.config import TrainConfig
from ..train.metrics import METRICS_FILE
from .runs import LOSS, Run, RunRecorder

LOG_SUFFIXES = (".log", ".out", ".txt")

# A launcher may have put the rank before each line.
_ARGUMENT = re.compile(r"\s(\w+) \.{2,} (.*)$")
_TIME = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_TRAIN = re.compile(r"iteration +(\d+)/ *\d+ \|(.*)")
_TRAIN_LOSS = re.compile(rf"\| {LOSS}: (\S+)")
_SKIPPED = re.compile(r"number of skipped iterations: +(\d+)")
# Losses on the test set come after training and are of other data.
_VALID = re.compile(r"validation loss at iteration (\d+)(?: on validation set)? \|(.*)")
_VALID_LOSSES = {
    "replica": re.compile(r"\blm loss value: (\S+)"),
    "owner": re.compile(r"\blm loss \(owner weights\) value: (\S+)"),
}
_SETTINGS = {field.name for cls in (TrainConfig, LossyConfig) for field in dataclasses.fields(cls)} | {"world_size"}


def read_runs(folder: str | Path) -> list[Run]:
    """Return the runs in the folders of ``folder``, least loss first, or that in it. Raise :class:`UsageError`.

    Each folder gives its ``metrics.jsonl``, or those of the jobs of one run, or else Megatron-LM's logs.
    """
    folder = Path(folder)
    single = (folder / METRICS_FILE).is_file() or _jobs(folder)
    inside = [] if single else sorted(path for path in folder.glob("*") if path.is_dir())
    runs = [run for path in inside if (run := _read_folder(path)) is not None]
    if not runs and (run := _read_folder(folder)) is not None:
        runs = [run]
    if not runs:
        why = f"holds no run: there must be a folder per run, with {METRICS_FILE} or Megatron's log"
        raise refuse("RUNS_DIR", folder, why)
    return sorted(runs, key=lambda run: (run.p_grad, run.p_param, run.condition, run.name))


def _read_folder(path: Path) -> Run | None:
    if (metrics := path / METRICS_FILE).is_file():
        return read_run(metrics)
    jobs = [found for job in _jobs(path) if (found := read_run(job / METRICS_FILE)) is not None]
    if not jobs:
        return read_megatron_run(path)
    # The mean of their training losses; all else comes from the first one.
    common = set(jobs[0].train).intersection(*(job.train for job in jobs))
    train = {iteration: fmean(job.train[iteration] for job in jobs) for iteration in sorted(common)}
    return replace(jobs[0], name=path.name, train=train)


def _jobs(path: Path) -> list[Path]:
    """Return the folders of the jobs of one run of real ranks, the first one first."""
    inside = path.glob(folder_of("", LossyConfig.job_name, "*"))
    found = [folder for folder in inside if (folder / METRICS_FILE).is_file()]
    return sorted(found, key=lambda folder: (len(folder.name), folder.name))


def read_run(path: Path) -> Run | None:
    """Return the run in ``path``; None if it was killed before its first line was written."""
    recorder = None
    for number, record in _records(path):
        where = f"{path} line {number}"
        kind = record.get("kind") if isinstance(record, dict) else None
        try:
            if kind == "run":
                # The number of ranks decides the losses, as the flags do.
                config = {**(record.get("config") or {}), "world_size": record.get("world_size")}
                described = _described(str(record.get("name", path.parent.name)), record, config)
                if recorder is None:
                    recorder = RunRecorder(described)
                recorder.check_same(described, where)
            elif recorder is None:
                raise refuse("RUNS_DIR", where, 'the first line must describe the run ("kind": "run")')
            elif kind in ("train", "valid"):
                recorder.add(kind, record)
            # Other kinds are for other readers.
            elif not isinstance(kind, str):
                raise refuse("RUNS_DIR", where, 'must be a record with a "kind"')
        except KeyError as error:
            raise refuse("RUNS_DIR", where, f"holds no {error}") from None
        except (TypeError, AttributeError) as error:
            raise refuse("RUNS_DIR", where, f"holds a wrong value: {error}") from None
    return recorder.run if recorder else None


def _records(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise cannot("RUNS_DIR", path, "read", error) from None
    *lines, unfinished = text.split("\n")
    for number, line in enumerate(lines, 1):
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            raise refuse("RUNS_DIR", f"{path} line {number}", f"is not JSON: {error}") from None
    with contextlib.suppress(json.JSONDecodeError):
        yield len(lines) + 1, json.loads(unfinished)


def _described(name: str, record: Mapping[str, Any], config: dict[str, Any]) -> Run:
    """Return a run without losses yet."""
    origin = {key: record[key] for key in ("date", "hardware", "versions") if key in record}
    rates = record["p_grad"] + 0.0, record["p_param"] + 0.0
    return Run(name, *rates, record.get("loss_seed"), record.get("seed"), config, origin=origin)


# --- Megatron-LM's own output: rank 0 prints all arguments at the start, the last rank a line per log interval and evaluation ---


@dataclasses.dataclass
class _Log:
    """The content of one file: arguments as printed, records in order, and the time of its first iteration."""

    path: Path
    arguments: dict[str, str] = dataclasses.field(default_factory=dict)
    records: list[tuple[str, dict[str, Any]]] = dataclasses.field(default_factory=list)
    started: str = ""


def read_megatron_run(folder: Path) -> Run | None:
    """Return the run that Megatron-LM logged in ``folder`` or below it, or None if it logged none.

    Raise :class:`UsageError` if the log does not show its arguments, or if there are several runs.
    """
    files = sorted(path for path in folder.rglob("*") if path.suffix in LOG_SUFFIXES and path.is_file())
    logs = [log for log in map(_read_log, files) if log.arguments or log.records]
    if not any(log.records for log in logs):
        return None
    if not (described := [log for log in logs if log.arguments]):
        why = "no log there has Megatron's arguments, which rank 0 prints at the start of a run"
        raise refuse("RUNS_DIR", folder, why)
    recorder = RunRecorder(_described_log(folder, described[0].arguments))
    for log in described[1:]:
        recorder.check_same(_described_log(folder, log.arguments), str(log.path))
    # A requeued run goes on in another file.
    for log in sorted(logs, key=lambda log: log.started):
        for kind, record in log.records:
            recorder.add(kind, record)
    return recorder.run


def _read_log(path: Path) -> _Log:
    log = _Log(path)
    for line in _whole_lines(path):
        if match := _TRAIN.search(line):
            log.started = log.started or (time[1] if (time := _TIME.search(line)) else "")
            loss, skipped = _TRAIN_LOSS.search(match[2]), _SKIPPED.search(match[2])
            record = {LOSS: loss and _float(loss[1]), "skipped": int(skipped[1]) if skipped else 0}
            log.records.append(("train", {**record, "iteration": int(match[1])}))
        elif match := _VALID.search(line):
            for weights, pattern in _VALID_LOSSES.items():
                if loss := pattern.search(match[2]):
                    record = {"iteration": int(match[1]), "lm loss": _float(loss[1]), "weights": weights}
                    log.records.append(("valid", record))
        elif match := _ARGUMENT.search(line):
            log.arguments[match[1]] = match[2].strip()
    return log


def _whole_lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.endswith("\n"):  # a killed run may leave half a line
                    yield line.rstrip()
    except OSError as error:
        raise cannot("RUNS_DIR", path, "read", error) from None


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _described_log(folder: Path, arguments: Mapping[str, str]) -> Run:
    """Return a run without losses yet. A run without our flags lost nothing."""
    settings = {name: _literal(text) for name, text in arguments.items() if name in _SETTINGS}
    try:
        return _described(folder.name, {"p_grad": 0.0, "p_param": 0.0, **settings}, settings)
    except TypeError:
        raise UsageError(f"RUNS_DIR {folder}: --p-grad and --p-param there are no numbers") from None


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
