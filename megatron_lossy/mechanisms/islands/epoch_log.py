"""The log of epochs: ``_epochs.jsonl`` in the folder of ``--delivery-log``, a line for each epoch and each event.

A line has the first ``exchange`` of the epoch, its ``id``, ``t``: the iteration of the run, ``members``: slot and start of
each, their ``roles`` and ``lag``, ``events`` of a schedule, and ``returned``: what islands did that are there again. Readers of Parquet folders skip names that begin with an underscore.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...base.errors import refuse
from ...base.files import write_text, writing
from ...run.monitor.observer import Observer
from .epochs import Epoch

#: The name of the file.
EPOCHS = "_epochs.jsonl"
_FLAG = "--delivery-log"


def line(
    exchange: int, made: int, epoch: Epoch | None, lag: Any, events: list[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    """A line about ``epoch``, or about none, in which ``exchange`` is made after ``made`` iterations of the run."""
    members = () if epoch is None else epoch.members
    return {
        "exchange": exchange,
        "id": None if epoch is None else epoch.id,
        "t": made,
        "members": [[one.slot, one.incarnation.begun] for one in members],
        "roles": [one.role for one in members],
        "lag": lag,
        "events": events,
        **more,
    }


class EpochLog(Observer):
    """``folder``: of the delivery log. ``keeps``: all lines, if the run goes on from a checkpoint: others have gone on meanwhile."""

    def __init__(self, folder: str, keeps: bool = False) -> None:
        self._path, self._keeps = Path(folder, EPOCHS), keeps
        self._ours = False

    def check(self) -> None:
        """Raise :class:`UsageError` if the file is of another run."""
        if not self._ours and self._path.exists():
            raise refuse(_FLAG, self._path.parent, "holds the log of a run; choose another folder")

    def add(self, record: dict[str, Any]) -> None:
        """Write a line. Raises :class:`UsageError` if the file is of another run."""
        self.check()
        self._ours = True
        with writing(_FLAG, self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def restart(self, iteration: int) -> None:
        """Keep the lines before ``iteration``, or all. One that a killed run has left unfinished is the last, and later."""
        self._ours = True
        if not self._path.exists():
            return
        kept = []
        for line in self._path.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                if json.loads(line)["t"] >= iteration and not self._keeps:
                    break
            except ValueError:
                break
            kept.append(line)
        write_text(self._path, "".join(kept))
