"""``doctor --link HOST:PORT``: rate, round trip, losses, MTU and queue of a link, each way, into a file for ``plan``.

The other end runs ``doctor --serve PORT``, or both are ranks of a launcher. A TCP connection has the orders, and datagrams
measure. Each begins with 16 random bytes that only the TCP connection carried, and goes to and comes from the host of that
connection alone, so that a stranger at the port can neither disturb a measurement nor have datagrams sent to a third host.

A short train, as fast as this host can send, finds the rate each way: packets of a full link arrive at its rate. A longer one,
half as fast again as that, fills the queue of the link and no other. That takes half a second each way. Then small packets come back one by one, and take at most a twelfth of the link; both ends count them. Times are those of
the kernel at arrival.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import json
import secrets
import select
import socket
import statistics
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...base.errors import UsageError, refuse

#: Before what a datagram carries: session, kind, number, nanoseconds.
_HEAD = struct.Struct("!16scIQ")
_PROBE, _ECHO, _TRAIN, _SIZE = b"P", b"E", b"T", b"S"
_MTUS = (576, 1280, 1380, 1400, 1420, 1440, 1460, 1480, 1492, 1500, 3000, 4352, 8000, 8900, 9000)
_PROBE_BYTES, _TRAIN_BYTES, _MOST_PROBES = 64, 1200, 2000
#: Seconds: of a measurement, of a train, of one with ``--full``; of a peer that sends nothing, of a caller's first words.
_SECONDS, _BURST_SECONDS, _TRAIN_SECONDS, _FULL_SECONDS, _SILENCE, _FIRST_WORDS = 20.0, 0.1, 0.4, 8.0, 20.0, 3.0
#: Linux's numbers, which Python does not name: arrival times, packets that a full buffer dropped, and no fragments.
_SO_TIMESTAMPNS, _SO_RXQ_OVFL, _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE = 35, 40, 10, 3
_IP_UDP = 28


@dataclass
class Arrivals:
    """Datagrams that came from the other end. Times are nanoseconds, each of the clock of one end."""

    probes: list[int] = field(default_factory=list)
    echoes: list[tuple[int, int]] = field(default_factory=list)
    train: list[tuple[int, int, int]] = field(default_factory=list)
    dropped: int = 0
    longest: int = 0


class Peer:
    """This end of a measurement: a TCP connection for words and a socket for datagrams."""

    def __init__(self, control: socket.socket, datagrams: socket.socket, session: bytes, address: tuple | None) -> None:
        self.control, self.datagrams, self.session, self.address = control, datagrams, session, address
        self.host = control.getpeername()[0]
        self.arrivals, self.echoed, self._text, self._overflow = Arrivals(), 0, b"", 0
        for level, option, value in (
            (socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 23),
            (socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1),
            (socket.SOL_SOCKET, _SO_RXQ_OVFL, 1),
            (socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE),
        ):
            with contextlib.suppress(OSError):
                datagrams.setsockopt(level, option, value)
        datagrams.setblocking(False)

    def put(self, **words: Any) -> None:
        """Send a line."""
        self.control.sendall(json.dumps(words).encode() + b"\n")

    def get(self, seconds: float = _SILENCE) -> dict[str, Any]:
        """Return the next line, and take datagrams meanwhile. Raise :class:`OSError` for silence and ``ValueError`` for noise."""
        until = time.monotonic() + seconds
        while b"\n" not in self._text:
            if (left := until - time.monotonic()) <= 0:
                raise TimeoutError("sends nothing")
            if self.control in self.wait(left):
                more = self.control.recv(65536)
                if not more or len(self._text) > 65536:
                    raise ConnectionError("closed the connection")
                self._text += more
        line, _, self._text = self._text.partition(b"\n")
        if not isinstance(found := json.loads(line), dict):
            raise ValueError("no words")
        return found

    def wait(self, seconds: float) -> list:
        """Take datagrams until one has come, or a line, or the time has passed. Return the sockets that were readable."""
        ready = select.select([self.control, self.datagrams], [], [], max(0.0, seconds))[0]
        if self.datagrams in ready:
            with contextlib.suppress(BlockingIOError, ConnectionRefusedError):
                for _ in range(256):
                    self._take(*self.datagrams.recvmsg(9216, 128))
        return ready

    def rest(self, seconds: float) -> None:
        """Take datagrams for that long."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.wait(left)

    def _take(self, data: bytes, ancillary: list, flags: int, address: tuple) -> None:
        if len(data) < _HEAD.size or address[0] != self.host:
            return
        session, kind, number, sent = _HEAD.unpack_from(data)
        if not hmac.compare_digest(session, self.session):
            return
        got, found = time.time_ns(), self.arrivals
        for level, option, value in ancillary:
            if level == socket.SOL_SOCKET and option == _SO_TIMESTAMPNS:
                seconds, rest = struct.unpack("qq", value[:16])
                got = seconds * 10**9 + rest
            elif level == socket.SOL_SOCKET and option == _SO_RXQ_OVFL:
                overflow = struct.unpack("I", value[:4])[0]
                found.dropped += overflow - self._overflow
                self._overflow = overflow
        self.address = address
        if kind == _PROBE:
            found.probes.append(number)
            self.send(_ECHO, self.echoed, sent + time.time_ns() - got)
            self.echoed += 1
        elif kind == _ECHO:
            found.echoes.append((number, got - sent))
        elif kind == _TRAIN:
            found.train.append((sent, got, len(data) + _IP_UDP))
        elif kind == _SIZE:
            found.longest = max(found.longest, len(data) + _IP_UDP)

    def send(self, kind: bytes, number: int, sent: int, size: int = _PROBE_BYTES) -> None:
        """Send a datagram of ``size`` bytes, if this host lets it go."""
        with contextlib.suppress(OSError):
            self.datagrams.sendto(_HEAD.pack(self.session, kind, number, sent).ljust(size, b"."), self.address)

    def perform(self, do: str, **words: Any) -> dict[str, Any]:
        """Do what either end asks for: send a train or sizes, or report."""
        return {"train": self._train, "sizes": self._sizes, "report": self._report}[do](**words)

    def _train(self, seconds: float, mbit: float) -> dict[str, int]:
        """Send for that long at ``mbit``, of which 0 is as fast as this host can. Return the number of datagrams."""
        number, begins = 0, time.monotonic()
        each = _TRAIN_BYTES * 8e-6 / mbit if mbit > 0 else 0.0
        while (now := time.monotonic() - begins) < min(seconds, _FULL_SECONDS):
            if number * each > now:
                time.sleep(min(number * each - now, 1e-3))
                continue
            for _ in range(8):
                self.send(_TRAIN, number, time.time_ns(), _TRAIN_BYTES)
                number += 1
        return {"sent": number}

    def _sizes(self) -> dict[str, int]:
        """Send a few datagrams of each size that an MTU may have."""
        for mtu in _MTUS * 4:
            self.send(_SIZE, 0, 0, mtu - _IP_UDP)
        return {"sent": 0}

    def _report(self, sent: int) -> dict[str, Any]:
        """Return what came of ``sent`` datagrams of a train, probes or sizes, and forget it."""
        found, self.arrivals = self.arrivals, Arrivals()
        content: dict[str, Any] = {"longest": found.longest, "echoed": self.echoed}
        if len(found.train) > 1:
            left, got, sizes = zip(*found.train)
            seconds = max(1, got[-1] - got[0]) / 1e9
            arrived = (len(sizes) - 1 + found.dropped) * statistics.mean(sizes) * 8 / 1e6
            waits = [after - before for after, before in zip(got, left)]
            content |= {"mbit": arrived / seconds, "share": (len(sizes) + found.dropped) / max(1, sent)}
            content["queue_ms"] = (statistics.median(waits[len(waits) // 2 :]) - min(waits)) / 1e6
        return content | _lost(found.probes, sent)


def _lost(numbers: Sequence[int], sent: int) -> dict[str, float]:
    """Return the share of ``sent`` numbers from 0 that did not come, and how many in a row on average."""
    come = sorted({number for number in numbers if 0 <= number < sent})
    gaps = [after - before - 1 for before, after in zip([-1, *come], [*come, sent]) if after - before > 1]
    return {"loss": sum(gaps) / max(1, sent), "burst": sum(gaps) / len(gaps) if gaps else 1.0}


def measure(host: str, port: int, key: bytes, full: bool, patience: float) -> dict[str, Any]:
    """Measure the link to ``host``, where another doctor serves ``port``. Return the content of a file for ``plan``.

    ``patience``: seconds in which that doctor may begin. Raise :class:`UsageError`.
    """
    where = f"{host}:{port}"
    try:
        with contextlib.ExitStack() as stack:
            control = stack.enter_context(_connected(host, port, patience))
            datagrams = stack.enter_context(socket.socket(control.family, socket.SOCK_DGRAM))
            session = secrets.token_bytes(16)
            peer = Peer(control, datagrams, session, control.getpeername()[:2])
            nonce = bytes.fromhex(peer.get(_FIRST_WORDS * 2)["nonce"])
            peer.put(session=session.hex(), proof=_proof(key, nonce, session))
            peer.get(_FIRST_WORDS)
            return _measured(peer, where, full)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, UsageError):
            raise
        reason = error.strerror or str(error) if isinstance(error, OSError) else "is no doctor"
        how = f"start python -m megatron_lossy doctor --serve {port} there, with the same --key-file"
        raise refuse("--link", where, f"{reason}; {how}") from None


def _connected(host: str, port: int, patience: float) -> socket.socket:
    until = time.monotonic() + patience
    while True:
        try:
            return socket.create_connection((host, port), timeout=5)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def _proof(key: bytes, nonce: bytes, session: bytes) -> str:
    return hmac.new(key, nonce + session, hashlib.sha256).hexdigest()


def _measured(peer: Peer, where: str, full: bool) -> dict[str, Any]:
    until = time.monotonic() + _SECONDS - 1
    for number in range(40):
        peer.send(_PROBE, number, time.time_ns())
        peer.rest(0.05)
        if len(peer.arrivals.echoes) >= 5:
            break
    if not peer.arrivals.echoes:
        why = "the other doctor answers, but no datagram comes back; is UDP blocked on the way?"
        raise refuse("--link", where, why)
    quiet = 2 * statistics.median(took for _, took in peer.arrivals.echoes) / 1e9 + 0.2

    def asked(**words: Any) -> dict[str, Any]:
        peer.put(**words)
        return peer.get()

    def arrived(way: int, **words: Any) -> dict[str, Any]:
        """Return the report of one end about what the other sends."""
        send, receive = ((peer.perform, asked), (asked, peer.perform))[way]
        receive(do="report", sent=0)
        sent = send(**words)["sent"]
        peer.rest(quiet)
        return receive(do="report", sent=sent)

    trains = []
    for way in range(2):
        rate = arrived(way, do="train", seconds=_BURST_SECONDS, mbit=0).get("mbit", 0)
        trains.append(arrived(way, do="train", seconds=_FULL_SECONDS if full else _TRAIN_SECONDS, mbit=1.5 * rate))
    if not all("mbit" in train for train in trains):
        raise refuse("--link", where, "no train of datagrams came through; is UDP blocked on the way?")
    longest = [arrived(way, do="sizes")["longest"] for way in range(2)]
    rate = min(train["mbit"] for train in trains) * 1e6
    pause = max(1 / _MOST_PROBES, (_PROBE_BYTES + 48) * 8 / (rate / 12))
    before, begins, number = asked(do="report", sent=0)["echoed"], time.monotonic(), 0
    while (now := time.monotonic()) < max(until, begins + 2):
        while begins + number * pause <= now:
            peer.send(_PROBE, number, time.time_ns())
            number += 1
        peer.wait(begins + number * pause - time.monotonic())
    peer.rest(quiet)
    echoes, probed = peer.arrivals.echoes, asked(do="report", sent=number)
    peer.put(do="end")
    if not echoes:
        raise refuse("--link", where, "datagrams came back at first, and later none did")
    lost = probed, _lost([number - before for number, _ in echoes], probed["echoed"] - before)
    took = sorted(took / 1e6 for _, took in echoes)
    return {
        "link": where,
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "probes": number,
        "rtt_ms": round(statistics.median(took), 3),
        "rtt_least_ms": round(took[0], 3),
        "rtt_spread_ms": round(took[int(0.95 * len(took))] - took[int(0.05 * len(took))], 3),
        "there": _way(trains[0], longest[0], lost[0]),
        "back": _way(trains[1], longest[1], lost[1]),
    }


def _way(train: Mapping[str, float], longest: int, lost: Mapping[str, float]) -> dict[str, Any]:
    """Return one direction of a link. One that loses nothing of a train has room for more than this host can send."""
    full = train["share"] < 0.9 * (1 - lost["loss"])
    return {
        "mbit": round(train["mbit"] / (1 - lost["loss"]), 3),
        "mbit_is": "measured" if full else "at least: this host cannot send faster",
        "loss": round(lost["loss"], 6),
        "burst": round(lost["burst"], 2),
        "mtu": longest,
        "queue_ms": round(train["queue_ms"], 2) if full else None,
    }


def serve(port: int, key: bytes, log: Callable[[str], None]) -> None:
    """Serve one measurement on ``port``; ``log`` takes lines for a user. Raise :class:`UsageError`.

    Callers without the key, and those that send nothing or something else, are sent away, and the next one is served.
    """
    try:
        listener = socket.create_server(("", port), backlog=8)
    except OSError as error:
        raise refuse("--serve", port, f"cannot be listened on: {error.strerror}") from None
    with listener:
        log(f"waiting at port {port}, TCP and UDP, for python -m megatron_lossy doctor --link")
        while True:
            control, address = listener.accept()
            try:
                with control, socket.socket(control.family, socket.SOCK_DGRAM) as datagrams:
                    datagrams.bind(("", port))
                    if _served(control, datagrams, key):
                        log(f"{address[0]} has measured the link")
                        return
            except (OSError, ValueError, KeyError, TypeError) as error:
                log(f"{address[0]} was sent away: {str(error)[:100]}")


def _served(control: socket.socket, datagrams: socket.socket, key: bytes) -> bool:
    """Do what the caller asks for. Return whether it came to its end."""
    control.settimeout(_FIRST_WORDS)
    # The session is free until the caller has shown the key.
    peer, nonce = Peer(control, datagrams, secrets.token_bytes(16), None), secrets.token_bytes(16)
    peer.put(nonce=nonce.hex())
    words = peer.get(_FIRST_WORDS)
    session = bytes.fromhex(words["session"])
    if len(session) != 16 or not hmac.compare_digest(str(words["proof"]), _proof(key, nonce, session)):
        raise ValueError("has another key")
    peer.session = session
    peer.put(ready=True)
    until = time.monotonic() + 3 * _SECONDS + 4 * _FULL_SECONDS
    while time.monotonic() < until:
        words = peer.get(2 * _SECONDS)
        if words["do"] == "end":
            return True
        peer.put(**peer.perform(**words))
    return False
