"""Runs, read from folders: from the ``metrics.jsonl`` that training writes, or from Megatron-LM's logs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from ...base.errors import cannot, refuse
from ...base.jobs import folder_of
from ...config import LossyConfig
from ..train.metrics import METRICS_FILE
from .megatron_logs import read_megatron_run
from .runs import Run, RunRecorder


def read_runs(folder: str | Path) -> list[Run]:
    """The runs in the folders of ``folder``, least loss first, or that in it. Raises :class:`UsageError`.

    Each folder gives its ``metrics.jsonl``, or those of the jobs of one run, or else Megatron-LM's logs.
    """
    folder = Path(folder)
    one = (folder / METRICS_FILE).is_file() or _jobs(folder)
    inside = [] if one else sorted(path for path in folder.glob("*") if path.is_dir())
    runs = [run for path in inside if (run := _read_folder(path)) is not None]
    if not runs and (run := _read_folder(folder)) is not None:
        runs = [run]
    if not runs:
        raise refuse(
            "RUNS_DIR",
            folder,
            f"holds no run: there must be a folder per run, with {METRICS_FILE} or Megatron's log",
        )
    return sorted(runs, key=lambda run: (run.p_grad, run.p_param, run.condition, run.name))


def _read_folder(path: Path) -> Run | None:
    metrics = path / METRICS_FILE
    if metrics.is_file():
        return read_run(metrics)
    jobs = [found for job in _jobs(path) if (found := read_run(job / METRICS_FILE)) is not None]
    return _together(jobs, path.name) if jobs else read_megatron_run(path)


def _jobs(path: Path) -> list[Path]:
    """The folders of the jobs of one run of real ranks, the first one first."""
    inside = path.glob(folder_of("", LossyConfig.job_name, "*"))
    found = [folder for folder in inside if (folder / METRICS_FILE).is_file()]
    return sorted(found, key=lambda folder: (len(folder.name), folder.name))


def _together(jobs: list[Run], name: str) -> Run:
    """The run of ``jobs``: the mean of their training losses; all else comes from the first one."""
    common = set(jobs[0].train).intersection(*(job.train for job in jobs))
    train = {iteration: fmean(job.train[iteration] for job in jobs) for iteration in sorted(common)}
    return replace(jobs[0], name=name, train=train)


def read_run(path: Path) -> Run | None:
    """The run in ``path``; None if it was killed before its first line was written."""
    recorder = None
    for number, record in _records(path):
        where = f"{path} line {number}"
        kind = record.get("kind") if isinstance(record, dict) else None
        try:
            if kind == "run":
                described = _described(record, path.parent.name)
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


def _described(record: dict[str, Any], folder: str) -> Run:
    return Run(
        name=str(record.get("name", folder)),
        p_grad=record["p_grad"] + 0.0,
        p_param=record["p_param"] + 0.0,
        loss_seed=record.get("loss_seed"),
        seed=record.get("seed"),
        # The number of ranks decides the losses, as the flags do.
        config={**(record.get("config") or {}), "world_size": record.get("world_size")},
        origin={key: record[key] for key in ("date", "hardware", "versions") if key in record},
    )
