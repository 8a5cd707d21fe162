"""Metrics of islands: losses between them, the bytes of exchanges, and their distance (docs/islands.md); and the diary of an island.

A line of the diary is of :func:`line`, in the folder of the island. ``exchange``: the next one; ``t``: iterations of the run before it.
``members``, ``roles`` and ``id`` are of the epoch that it is made in, and empty and null if this island is in none. ``lag`` is that of this
``island`` alone. ``lost``: exchanges of which nothing arrived here since the last line.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...base.errors import refuse
from ...base.exchange import Delivery
from ...base.fetch import PendingArray
from ...base.files import write_text, writing
from ...run.monitor.observer import Observer
from ...run.monitor.window import Window
from .flags import SYNC_PHASES
from .mean import Mean
from .rounds import Epoch

#: The most measurements that stay on the device, if a run never asks for them.
_UNREAD = 1000


class IslandMonitor(Observer):
    """Metrics since the last record, of all islands or of this process's island.

    ``spread``: measures the present distances of islands, by name. Without it distances come from the exchanged
    vectors, as they were sent.
    """

    def __init__(self, spread: Callable[[], dict[str, float]] | None = None) -> None:
        lost_and_sent = [f"{phase} {column}" for phase in SYNC_PHASES for column in ("lost", "sent")]
        self._window = Window([*lost_and_sent, "exchanges", "bytes", "used", "seconds", "squares", "elements"])
        self._spread = spread
        self._measured: list[tuple[torch.Tensor, torch.Tensor | int]] = []  # still on the device

    def observe(self, delivery: Delivery) -> None:
        arrived, phase = delivery.arrived[delivery.crossing], delivery.exchange.phase
        if phase not in SYNC_PHASES:
            return
        self._window.add(**{f"{phase} lost": arrived.size - int(arrived.sum()), f"{phase} sent": arrived.size})

    def exchanged(self, sent: float) -> None:
        """Count an exchange that begins; an island sends ``sent`` bytes in it."""
        self._window.add(exchanges=1, bytes=sent)

    def used(self, seconds: float, sent: torch.Tensor, mean: Mean, stride: int = 1) -> None:
        """Count ``mean``, which was used after ``seconds`` of waiting, and its distance to the values ``sent`` [1, k].

        ``stride``: between the elements that are looked at. The sum of squared distances over those that arrived stays on the device
        until it is asked for: nothing waits for the device, and no shape depends on losses.
        """
        self._window.add(used=1, seconds=seconds)
        distance = mean.values[::stride] - sent[0, ::stride]
        elements: torch.Tensor | int = distance.numel()
        if mean.arrived is not None:
            arrived = mean.arrived[0, ::stride]
            distance, elements = distance.where(arrived, 0.0), arrived.sum()
        self._measured.append((distance.dot(distance), elements))
        if len(self._measured) == _UNREAD:
            self._read()

    def waited(self, seconds: float) -> None:
        """Count ``seconds`` of waiting for other islands, for another reason than a mean."""
        self._window.add(seconds=seconds)

    def _read(self) -> None:
        measured, self._measured = self._measured, []
        if not measured:
            return
        counted = [count for _, count in measured if isinstance(count, torch.Tensor)]
        fetched = [
            PendingArray(torch.stack(values)) for values in ([square for square, _ in measured], counted) if values
        ]
        squares, counts = fetched[0].wait().tolist(), iter(fetched[1].wait().tolist() if counted else ())
        for square, (_, count) in zip(squares, measured, strict=True):
            self._window.add(squares=square, elements=next(counts) if isinstance(count, torch.Tensor) else count)

    def restart(self, iteration: int) -> None:
        self._measured.clear()
        super().restart(iteration)

    def metrics(self) -> dict[str, float]:
        self._read()
        total = self._window.close()
        sent = [phase for phase in SYNC_PHASES if total[f"{phase} sent"]]
        result = {f"loss rate {phase}": total[f"{phase} lost"] / total[f"{phase} sent"] for phase in sent}
        if total["exchanges"]:
            result["sync bytes"] = total["bytes"] / total["exchanges"]
        if self._spread is not None:
            return result | self._spread()
        if total["seconds"]:
            result["sync wait"] = total["seconds"] / max(total["used"], 1)
        if total["used"]:
            result["sync deviation"] = total["squares"] / max(total["elements"], 1)
        return result

    def state_dict(self) -> dict[str, Any]:
        self._read()
        return super().state_dict()


#: The name of the file of the log, in the folder of ``--delivery-log``.
EPOCHS = "_epochs.jsonl"
_FLAG = "--delivery-log"
#: Exchanges whose messages make the share of lost ones.
_RECENT = 20


class Diary(Observer):
    """The diary of the island ``slot``. ``folder``: of the delivery log, of the rank that writes it; ``None``: only metrics are kept."""

    def __init__(self, slot: int, folder: str | None = None) -> None:
        self._slot = slot
        self._log = None if folder is None else EpochLog(folder, keeps=True)
        self._window = Window(["exchanges", "members", "senders", "lost"])
        self._changed = threading.Lock()
        self._events: list[dict[str, Any]] = []
        #: The latest event.
        self.latest = ""
        self._messages: deque[tuple[int, float]] = deque(maxlen=_RECENT)
        self._lost: set[int] = set()  # since the last line
        self._counted: set[int] = set()  # of the lost ones, in the window
        self._written: tuple[str | None, int] | None = None
        self._now: tuple[int, int, Epoch | None, int] = 0, 0, None, 0  # see :meth:`begin`

    def check(self) -> None:
        """Raise :class:`UsageError` if the folder has the lines of another run."""
        if self._log is not None:
            self._log.check()

    # --- what happens, also on threads -----------------------------------------------------------------------------

    def note(self, event: str, **more: Any) -> None:
        """Record ``event``, and ``more`` about it, for JSON."""
        with self._changed:
            self._events.append({"event": event, **more})
            self.latest = event

    def ended(self, exchange: int, expected: int, came: float) -> None:
        """Count the messages of others in ``exchange`` of a shard: ``came`` of ``expected``, in parts of messages."""
        with self._changed:
            if expected:
                self._messages.append((expected, came))
            if came or not expected:
                return
            self._lost.add(exchange)
            if exchange not in self._counted:  # of another shard
                self._counted.add(exchange)
                self._window.add(lost=1)

    @property
    def lost(self) -> float:
        """The share of the messages of others that did not come lately."""
        with self._changed:
            expected = sum(number for number, _ in self._messages)
            return 1 - sum(came for _, came in self._messages) / expected if expected else 0.0

    # --- in the order of iterations --------------------------------------------------------------------------------

    def begin(self, exchange: int, made: int, epoch: Epoch | None, lag: int) -> None:
        """Record that ``exchange`` begins after ``made`` iterations, in ``epoch`` or none. ``lag``: of this island."""
        with self._changed:
            there = ([], []) if epoch is None else (epoch.slots, epoch.senders)
            self._window.add(exchanges=1, members=len(there[0]), senders=len(there[1]))
            self._counted = {number for number in self._counted if number > exchange - 1000}
        self._now = exchange, made, epoch, lag
        key = (None, -1) if epoch is None else epoch.key
        if key != self._written or self._events:
            self._written = key
            self._write()

    def _write(self) -> None:
        with self._changed:
            events, self._events = self._events, []
            lost, self._lost = sorted(self._lost), set()
        if self._log is not None:
            self._log.add(line(*self._now, events, island=self._slot, lost=lost))

    def restart(self, iteration: int) -> None:
        if self._log is not None:
            self._log.restart(iteration)

    def metrics(self) -> dict[str, float]:
        with self._changed:
            total = self._window.close()
        if not total["exchanges"]:
            return {}
        names = {"members": "island members", "senders": "island senders", "lost": "exchanges lost"}
        return {name: total[column] / total["exchanges"] for column, name in names.items()}

    def finish(self) -> None:
        """Record that this island leaves, once nothing is under way any more."""
        if self._written is not None:
            self.note("leaves")
            self._write()
            self._written = None


def line(
    exchange: int, made: int, epoch: Epoch | None, lag: Any, events: list[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    """Return a line about ``epoch``, or about none, in which ``exchange`` is made after ``made`` iterations of the run.

    ``exchange``: the first of the epoch. ``lag``: of each member. ``events``: of a schedule. ``more``: for example ``returned``, what
    islands did that are there again.
    """
    members = () if epoch is None else epoch.members
    return {
        "exchange": exchange,
        "id": None if epoch is None else epoch.id,
        "t": made,
        "members": [[member.slot, member.life] for member in members],
        "roles": [member.role for member in members],
        "lag": lag,
        "events": events,
        **more,
    }


class EpochLog(Observer):
    """The log of epochs: a line of JSON for each epoch and each event. Readers of Parquet skip names that begin with an underscore.

    ``folder``: of the delivery log. ``keeps``: all lines, if the run goes on from a checkpoint: others have gone on meanwhile.
    """

    def __init__(self, folder: str, keeps: bool = False) -> None:
        self._path, self._keeps = Path(folder, EPOCHS), keeps
        self._ours = False

    def check(self) -> None:
        """Raise :class:`UsageError` if the file is of another run."""
        if not self._ours and self._path.exists():
            raise refuse(_FLAG, self._path.parent, "holds the log of a run; choose another folder")

    def add(self, record: dict[str, Any]) -> None:
        """Write a line. Raise :class:`UsageError` if the file is of another run."""
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
