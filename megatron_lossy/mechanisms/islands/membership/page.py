"""The coordinator's page and its metrics in Prometheus' text format: the state of each island, from its beats."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .messages import Beat, Entry, Slot, read

_COLUMNS = ("run", "slot", "host", "role", "iteration", "lag", "loss", "lost", "silent", "last event")
#: A metric of each island: its name, its help, and its value.
_METRICS: tuple[tuple[str, str, Callable[[_Island, float], float]], ...] = (
    ("iteration", "iterations that it has made", lambda one, now: one.beat.iteration),
    ("lag", "iterations between an exchange and its use", lambda one, now: one.beat.lag),
    ("loss", "training loss", lambda one, now: one.beat.loss),
    ("lost_ratio", "share of the messages of members that did not arrive", lambda one, now: one.beat.lost),
    ("sends", "1 if the others average its weights", lambda one, now: one.beat.role == "sends"),
    ("silent_seconds", "seconds since its last beat", lambda one, now: max(0.0, now - one.at)),
)
_COUNTERS = {
    "accepted": "connections of anybody",
    "authenticated": "connections with the key file",
    "broken": "connections that ended within a request",
    "malformed": "requests that had no answer",
}


@dataclass
class _Island:
    beat: Beat
    at: float


class Watcher:
    """Notes what is written, and answers for the page. ``clock``: seconds. ``counters``: numbers of the server, by name."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._islands: dict[tuple[str, int], _Island] = {}
        self._hosts: dict[tuple[str, int], str] = {}
        self._entries: dict[str, Entry] = {}
        self.counters: Callable[[], Mapping[str, int]] = dict

    def note(self, key: bytes, value: bytes) -> None:
        """Note a write. Other keys, and values that are no messages, are skipped."""
        run, _, rest = key.decode(errors="replace").partition("/now/")
        kind, _, slot = rest.partition("/")
        text = value.decode(errors="replace")
        if kind == "beat" and slot.isdecimal() and (beat := read(Beat, text)):
            self._islands[run, int(slot)] = _Island(beat, self._clock())
        elif kind == "slot" and slot.isdecimal() and (holder := read(Slot, text)):
            self._hosts[run, int(slot)] = holder.host
        elif kind == "epoch" and (entry := read(Entry, text)):
            self._entries[run] = entry

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, str, bytes]:
        """The route of the page's server: ``/`` and ``/metrics``."""
        if method != "GET" or path not in ("/", "/metrics"):
            return 404, "text/plain", b"there is / and /metrics\n"
        if path == "/":
            return 200, "text/html; charset=utf-8", self._page().encode()
        return 200, "text/plain; version=0.0.4; charset=utf-8", self._metrics().encode()

    def _page(self) -> str:
        now = self._clock()
        rows = []
        for (run, slot), one in sorted(self._islands.items()):
            beat, silent = one.beat, f"{max(0.0, now - one.at):.0f} s"
            cells = (run, slot, self._hosts.get((run, slot), ""), beat.role, beat.iteration, beat.lag)
            rows.append((*cells, f"{beat.loss:.4g}", f"{beat.lost:.1%}", silent, beat.event))
        epochs = [
            f"<p>{html.escape(run)}: epoch {entry.number} from exchange {entry.first}, "
            f"members {', '.join(entry.members)}, of which {', '.join(entry.senders)} send</p>"
            for run, entry in sorted(self._entries.items())
        ]
        counts = ", ".join(f"{name} {number}" for name, number in self.counters().items())
        lines = [_row("th", _COLUMNS), *(_row("td", row) for row in rows)]
        return (
            '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="2"><title>islands</title>'
            f"<table border=1>{''.join(lines)}</table>{''.join(epochs)}<p>{html.escape(counts)}</p>\n"
        )

    def _metrics(self) -> str:
        now, lines = self._clock(), list[str]()
        for name, what, value in _METRICS:
            _declare(lines, f"island_{name}", "gauge", what)
            for (run, slot), one in sorted(self._islands.items()):
                labels = f'run="{_label(run)}",slot="{slot}",host="{_label(self._hosts.get((run, slot), ""))}"'
                lines.append(f"megatron_lossy_island_{name}{{{labels}}} {float(value(one, now))!r}")
        for name, what, field in (("epoch", "number of the last epoch", None), ("members", "its members", "members")):
            _declare(lines, name, "gauge", what)
            for run, entry in sorted(self._entries.items()):
                number = len(entry.members) if field else entry.number
                lines.append(f'megatron_lossy_{name}{{run="{_label(run)}"}} {number}')
        for name, number in self.counters().items():
            kind = "counter" if name in _COUNTERS else "gauge"
            suffix = "_total" if kind == "counter" else ""
            _declare(lines, f"coordinator_{name}{suffix}", kind, _COUNTERS.get(name, f"{name} now"))
            lines.append(f"megatron_lossy_coordinator_{name}{suffix} {number}")
        return "\n".join(lines) + "\n"


def _row(tag: str, cells: tuple[object, ...]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(str(cell))}</{tag}>' for cell in cells)}</tr>"


def _declare(lines: list[str], name: str, kind: str, what: str) -> None:
    lines += [f"# HELP megatron_lossy_{name} {what}", f"# TYPE megatron_lossy_{name} {kind}"]


def _label(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
