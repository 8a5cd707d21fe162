"""``python -m megatron_lossy coordinator``: serve the store where islands agree on who is there (docs/elastic.md).

It answers the three requests of etcd's JSON gateway that :mod:`.store` makes, to holders of the key file. A journal keeps all but
beats. A page and ``/metrics`` are at an address of their own.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import html
import json
import signal
import sqlite3
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ....base.errors import ArgumentParser, host_port, refuse
from ....base.files import read_key
from .messages import Beat, Entry, Slot, read
from .store import PORT, split_address, tls_of

#: Bytes of the head of a request, of its body, of a key, of a value, of all keys and values; keys; connections.
HEAD, BODY, KEY, VALUE, ALL, KEYS, CONNECTIONS = 1 << 14, 1 << 18, 256, 1 << 16, 64 << 20, 20_000, 512
#: Seconds for a handshake, for the next request of a connection, and for the rest of a request or its answer.
HANDSHAKE, IDLE, REST = 5.0, 120.0, 10.0
#: Opens a journal. A write to it is on disk before it is answered.
_OPEN = """
    PRAGMA locking_mode = EXCLUSIVE;
    PRAGMA synchronous = FULL;
    BEGIN EXCLUSIVE;
    CREATE TABLE IF NOT EXISTS texts (key BLOB PRIMARY KEY, value BLOB);
    COMMIT;
"""
#: Part of the keys that the journal leaves out: they are written each second, and islands write them again.
_BEAT = b"/beat/"

#: Answers a request: method, path and body to status, type and content.
Route = Callable[[str, str, bytes], "tuple[int, str, bytes]"]


def open_journal(path: Path) -> sqlite3.Connection:
    """Return the file of SQLite that keeps a coordinator's values, for one process at a time. Raise :class:`UsageError`."""
    try:
        journal = sqlite3.connect(path, timeout=0, isolation_level=None)
        journal.executescript(_OPEN)
    except sqlite3.Error as error:
        why = "belongs to a coordinator that runs" if "locked" in str(error) else f"cannot be used: {error}"
        raise refuse("--journal", path, why) from None
    return journal


class Dictionary:
    """The values of the coordinator, and its answers. No input or output, but for the journal.

    ``noted(key, value)`` is called with each write. ``malformed``: requests without an answer.
    """

    def __init__(
        self, journal: sqlite3.Connection | None, noted: Callable[[bytes, bytes], None] = lambda *_: None
    ) -> None:
        self._journal, self._noted = journal, noted
        self._values: dict[bytes, bytes] = dict(journal.execute("SELECT * FROM texts")) if journal else {}
        self._size = sum(len(key) + len(value) for key, value in self._values.items())
        self.malformed = 0
        for key, value in self._values.items():
            noted(key, value)

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, str, bytes]:
        """Return a :data:`Route`."""
        try:
            handle = {"/v3/kv/range": self._range, "/v3/kv/put": self._put, "/v3/kv/txn": self._swap}[path]
            if method != "POST":
                raise ValueError("only POST")
            status, found = 200, handle(json.loads(body))
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
            self.malformed += 1
            status, found = 400, {"error": f"{type(error).__name__}: {error}"}
        except sqlite3.Error as error:  # the disk is full
            status, found = 503, {"error": str(error)}
        return status, "application/json", json.dumps(found).encode()

    def _range(self, request: Any) -> dict[str, Any]:
        first = _bytes(request["key"])
        if "range_end" not in request:
            found = [first] if first in self._values else []
        else:
            end = _bytes(request["range_end"])
            found = sorted(key for key in self._values if first <= key < end)
        return {"kvs": [{"key": _text(key), "value": _text(self._values[key])} for key in found]}

    def _put(self, request: Any) -> dict[str, Any]:
        key, value = _bytes(request["key"]), _bytes(request["value"])
        size = self._size + len(value) - len(self._values.get(key, b"")) + (0 if key in self._values else len(key))
        if len(key) > KEY or len(value) > VALUE:
            raise ValueError(f"a key of {len(key)} bytes and a value of {len(value)}: at most {KEY} and {VALUE}")
        if size > ALL or (key not in self._values and len(self._values) >= KEYS):
            raise ValueError(f"the store is full: {len(self._values)} keys, {self._size} bytes")
        if self._journal and _BEAT not in key:
            self._journal.execute("REPLACE INTO texts VALUES (?, ?)", (key, value))
        self._values[key], self._size = value, size
        self._noted(key, value)
        return {}

    def _swap(self, request: Any) -> dict[str, Any]:
        (compare,), (success,) = request["compare"], request["success"]
        found = self._values.get(_bytes(compare["key"]))
        if compare["result"] != "EQUAL" or (compare["target"] == "CREATE" and compare["create_revision"] != "0"):
            raise ValueError("only equality with a value, and with none")
        old = None if compare["target"] == "CREATE" else _bytes(compare["value"])
        if found == old:
            self._put(success["request_put"])
        return {"succeeded": found == old}


def _bytes(code: str) -> bytes:
    return base64.b64decode(code, validate=True)


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


class Server:
    """Serves a route by HTTP/1.1. ``accepted``: connections of anybody; ``greeted``: those that could be talked to."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._open: set[asyncio.Task[None]] = set()
        self.accepted = self.greeted = self.broken = 0

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None) -> asyncio.Server:
        """Listen. Strangers end at the handshake. At ``::`` IPv4 is listened to as well."""
        loop, timeout = asyncio.get_running_loop(), HANDSHAKE if tls else None
        where = None if host == "::" else host
        return await loop.create_server(self._protocol, where, port, ssl=tls, ssl_handshake_timeout=timeout)

    @property
    def connections(self) -> int:
        return len(self._open)

    def _protocol(self) -> asyncio.Protocol:
        self.accepted += 1
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(limit=HEAD), self._begin)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.greeted += 1
        if len(self._open) >= CONNECTIONS:
            writer.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), IDLE)
                method, path, length = _parse(head)
                body = await asyncio.wait_for(reader.readexactly(length), REST)
                status, kind, content = self._route(method, path, body)
                writer.write(
                    f"HTTP/1.1 {status} {'OK' if status == 200 else 'Error'}\r\nContent-Type: {kind}\r\n"
                    f"Content-Length: {len(content)}\r\n\r\n".encode()
                    + content
                )
                await asyncio.wait_for(writer.drain(), REST)
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError, asyncio.TimeoutError) as error:
            if not (isinstance(error, asyncio.IncompleteReadError) and not error.partial):  # it has closed
                self.broken += 1
        finally:
            writer.close()


def _parse(head: bytes) -> tuple[str, str, int]:
    """Return method, path and bytes of the body. Raise :class:`ValueError`."""
    first, *lines = head.decode("ascii").split("\r\n")
    method, path, version = first.split(" ")
    fields = dict(line.lower().split(":", 1) for line in lines if line)
    length = fields.get("content-length", "0").strip()
    if version != "HTTP/1.1" or "transfer-encoding" in fields or not length.isdecimal() or not int(length) <= BODY:
        raise ValueError(first)
    return method, path, int(length)


async def serve(
    bind: tuple[str, int], key: bytes, journal: Path, page: tuple[str, int] | None, say: Callable[[str], None]
) -> None:
    """Serve until SIGINT or SIGTERM. ``say`` gets the addresses. Raise :class:`UsageError`."""
    watcher = Watcher(time.time)
    store = Dictionary(open_journal(journal), watcher.note)
    server = Server(store.answer)
    watcher.counters = lambda: {
        "accepted": server.accepted,
        "authenticated": server.greeted,
        "broken": server.broken,
        "malformed": store.malformed,
        "connections": server.connections,
    }
    end = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, end.set)
    with contextlib.ExitStack() as stack:
        doors = [("--bind", "coordinator: tcp://", server, bind, tls_of(key, server=True))]
        if page is not None:
            doors.append(("--page", "page: http://", Server(watcher.answer), page, None))
        for flag, name, door, (host, port), tls in doors:
            try:
                listening = await door.start(host, port, tls)
            except OSError as error:
                raise refuse(flag, f"{host}:{port}", f"nothing can listen there: {error.strerror or error}") from None
            stack.callback(listening.close)
            say(name + host_port(*listening.sockets[0].getsockname()[:2]))
        await end.wait()


def main(arguments: list[str] | None = None) -> None:
    """Run the command. Raise :class:`UsageError`."""
    parser = ArgumentParser(
        prog="python -m megatron_lossy coordinator",
        description="Serve the store where islands agree on who is there. Only holders of the key file are answered.",
    )
    parser.add_argument("--bind", default=f"[::]:{PORT}", metavar="ADDR:PORT", help="default %(default)s")
    parser.add_argument("--key-file", required=True, metavar="FILE", help="the secret that all islands have, too")
    journal = "its memory; default %(default)s"
    parser.add_argument("--journal", default="coordinator.journal", metavar="FILE", help=journal)
    page = "a page and /metrics, which anybody can read there; none: neither; default %(default)s"
    parser.add_argument("--page", default=f"127.0.0.1:{PORT + 1}", metavar="ADDR:PORT", help=page)
    options = parser.parse_args(arguments)
    key = read_key(options.key_file, "--key-file")
    door = None if options.page == "none" else split_address(options.page, "--page")
    bind = split_address(options.bind, "--bind")
    asyncio.run(serve(bind, key, Path(options.journal), door, lambda line: print(line, flush=True)))


_COLUMNS = ("run", "slot", "host", "role", "iteration", "lag", "loss", "lost", "silent", "last event")
#: A metric of each island: its name, its help, and its value, by the last beat and the seconds since then.
_METRICS: tuple[tuple[str, str, Callable[[Beat, float], float]], ...] = (
    ("iteration", "iterations that it has made", lambda beat, silent: beat.iteration),
    ("lag", "iterations behind the run", lambda beat, silent: beat.lag),
    ("loss", "training loss", lambda beat, silent: beat.loss),
    ("lost_ratio", "share of the messages of members that did not arrive", lambda beat, silent: beat.lost),
    ("sends", "1 if the others average its weights", lambda beat, silent: beat.role == "sends"),
    ("silent_seconds", "seconds since its last beat", lambda beat, silent: silent),
)
_COUNTERS = {
    "accepted": "connections of anybody",
    "authenticated": "connections with the key file",
    "broken": "connections that ended within a request",
    "malformed": "requests that had no answer",
}


class Watcher:
    """Notes what is written, and answers for the page. ``clock``: seconds. ``counters``: numbers of the server, by name."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._beats: dict[tuple[str, int], tuple[Beat, float]] = {}
        self._hosts: dict[tuple[str, int], str] = {}
        self._entries: dict[str, Entry] = {}
        self.counters: Callable[[], Mapping[str, int]] = dict

    def note(self, key: bytes, value: bytes) -> None:
        """Note a write. Other keys, and values that are no messages, are skipped."""
        run, _, rest = key.decode(errors="replace").partition("/now/")
        kind, _, slot = rest.partition("/")
        text = value.decode(errors="replace")
        if kind == "beat" and slot.isdecimal() and (beat := read(Beat, text)):
            self._beats[run, int(slot)] = beat, self._clock()
        elif kind == "slot" and slot.isdecimal() and (holder := read(Slot, text)):
            self._hosts[run, int(slot)] = holder.host
        elif kind == "epoch" and (entry := read(Entry, text)):
            self._entries[run] = entry

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, str, bytes]:
        """Return the route of the page's server: ``/`` and ``/metrics``."""
        if method != "GET" or path not in ("/", "/metrics"):
            return 404, "text/plain", b"there is / and /metrics\n"
        if path == "/":
            return 200, "text/html; charset=utf-8", self._page().encode()
        return 200, "text/plain; version=0.0.4; charset=utf-8", self._metrics().encode()

    def _islands(self) -> list[tuple[str, int, str, Beat, float]]:
        """Return run, slot, host and last beat of each island, and the seconds since then."""
        now, host_of = self._clock(), self._hosts.get
        found = sorted(self._beats.items())
        return [(*key, host_of(key, ""), beat, max(0.0, now - at)) for key, (beat, at) in found]

    def _page(self) -> str:
        rows = []
        for run, slot, host, beat, silent in self._islands():
            cells = (run, slot, host, beat.role, beat.iteration, beat.lag, f"{beat.loss:.4g}", f"{beat.lost:.1%}")
            rows.append((*cells, f"{silent:.0f} s", beat.event))
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
        lines, islands = list[str](), self._islands()
        for name, what, value in _METRICS:
            _declare(lines, f"island_{name}", "gauge", what)
            for run, slot, host, beat, silent in islands:
                labels = f'run="{_label(run)}",slot="{slot}",host="{_label(host)}"'
                lines.append(f"megatron_lossy_island_{name}{{{labels}}} {float(value(beat, silent))!r}")
        for name, what in (("epoch", "number of the last epoch"), ("members", "its members")):
            _declare(lines, name, "gauge", what)
            for run, entry in sorted(self._entries.items()):
                number = entry.number if name == "epoch" else len(entry.members)
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
