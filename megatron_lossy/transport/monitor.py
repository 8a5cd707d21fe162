"""Reports on a network: metrics, a line for each problem that a user can mend, and a table at the end of a run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch.distributed as dist

from ..run.monitor.observer import Look, Observer
from ..run.monitor.window import Window
from .ends import end_counters

logger = logging.getLogger(__name__)

_EVERY = 10  # iterations between looks at the counters
_PERSISTS = 100  # iterations in a row of much loss that are worth a line
_MUCH = 0.2
_OVERFLOW = 0.001


class NetworkMonitor(Observer):
    """Counts messages over all ranks. ``transports``: returns the wires and links of this process, once there are any.

    ``rank``: the number of this process, if it is not its rank: every island has a rank 0.
    """

    #: The network in names; the counters that become metrics, by the name of the column; and those of the table.
    network: ClassVar[str]
    columns: ClassVar[Mapping[str, str]]
    table: ClassVar[Sequence[str]]
    #: By column, what is said once it is not 0: ``{}`` is its number.
    problems: ClassVar[Mapping[str, str]]
    much_loss: ClassVar[str]

    def __init__(self, transports: Callable[[], Sequence[Any]], rank: int | None = None) -> None:
        self._transports = transports
        self._called = rank
        self._window = Window(tuple(self.columns))
        self._counted: Counter[str] = Counter()
        self._said: set[str] = set()
        self._units: Counter[str] = Counter()  # of this iteration
        self._much = 0

    @classmethod
    def totals(cls, peers: Iterable[Mapping[str, int]], ends: Mapping[str, int]) -> Counter[str]:
        """Return the columns of one process, from the counters of its peers, and of its sockets."""
        found: Counter[str] = Counter()
        for counters in (*peers, ends):
            found.update(counters)
        found["refused"] = sum(found[name] for name in ("malformed", "bad_tag", "foreign", "strangers"))
        columns = Counter({column: found[name] for column, name in cls.columns.items()})
        return columns + Counter(bad_tag=found["bad_tag"])

    @classmethod
    def advice(cls, now: Mapping[str, int], much_loss_since: int) -> dict[str, str]:
        """Return lines of advice, by the name of the reason. ``much_loss_since``: iterations in a row of much loss."""
        least = {"overflow": _OVERFLOW * max(now["received"], 1)}
        result = {name: line.format(now[name]) for name, line in cls.problems.items() if now[name] > least.get(name, 0)}
        if much_loss_since >= _PERSISTS:
            much = f"more than {100 * _MUCH:.0f} % of units were lost in each of {_PERSISTS} iterations"
            result["loss"] = f"{much}: {cls.much_loss}, or look at the network"
        return result

    def _now(self) -> Counter[str]:
        peers = [peer for transport in self._transports() for peer in transport.counters().values()]
        return self.totals(peers, end_counters())

    def observe(self, delivery) -> None:
        arrived = delivery.arrived[delivery.crossing]
        self._units["all"] += arrived.size
        self._units["arrived"] += int(arrived.sum())

    def finish_iteration(self, iteration: int, successful: bool, look: Look) -> None:
        lost = self._units["all"] - self._units["arrived"]
        self._much = self._much + 1 if lost > _MUCH * max(self._units["all"], 1) else 0
        self._units.clear()
        if iteration % _EVERY:
            return
        for reason, line in self.advice(self._now(), self._much).items():
            if reason not in self._said:
                self._said.add(reason)
                logger.warning("rank %d: %s (said once)", self._rank(), line)

    def metrics(self) -> dict[str, float]:
        now = self._now()
        self._window.add(**{column: now[column] - self._counted[column] for column in self.columns})
        self._counted = now
        return {f"{self.network} {column.replace('_', ' ')}": value for column, value in self._window.close().items()}

    def close(self) -> None:
        for line in self.summary():
            print(line, flush=True)

    def _rank(self) -> int:
        if self._called is not None:
            return self._called
        return dist.get_rank() if dist.is_initialized() else 0

    def summary(self) -> list[str]:
        """Return lines with the totals of this rank; on the first rank also a line for each peer of each stream."""
        lines, total, rank = [], Counter(), self._rank()
        for transport in self._transports():
            rates = transport.rates()
            for peer, counts in transport.counters().items():
                total.update(counts)
                line = f"{self.network}, {transport.name}, ranks {transport.rank} and {peer}: {self._words(counts)}"
                if peer in rates:
                    line += f"; {rates[peer]['rate'] / 1e6:.1f} MB/s, round trip {1e3 * rates[peer]['rtt_min']:.1f} ms"
                lines.append(line)
        if not total:
            return []
        return [*(lines if rank == 0 else []), f"{self.network}, rank {rank}, all: {self._words(total)}"]

    def _words(self, counts: Mapping[str, int]) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {counts.get(name, 0):,}" for name in self.table)


#: Columns of both.
_UNITS = {
    "sent": "sent",
    "received": "received",
    "units_lost": "lost",
    "late": "late",
    "early_dropped": "early_dropped",
    "refused": "refused",
}
_EARLY = "{} %s came before this rank asked for them and did not fit --udp-memory: raise it"


class DatagramMonitor(NetworkMonitor):
    network = "udp"
    columns = _UNITS | {
        "duplicate": "duplicate",
        "overflow": "socket_overflow",
        "too_big": "too_big",
        "send_failed": "send_failed",
        "unreachable": "unreachable",
        "sent_again": "resent",
    }
    table = ("sent", "received", "lost", "late", "duplicate", "early_dropped", "malformed", "bad_tag")
    problems: ClassVar = {
        "overflow": "{} datagrams were lost in this host's own receive buffer: raise net.core.rmem_max (docs/wan.md), or give the "
        "process's network thread a core",
        "early_dropped": _EARLY % "datagrams",
        "too_big": "{} datagrams were larger than the MTU of this host's interface and were not sent: lower --packet-bytes",
        "send_failed": "{} datagrams could not be sent: look at this host's routes and firewall",
        "bad_tag": "{} datagrams failed authentication and were dropped: somebody else sends to this port, or something on the way "
        "changes them",
    }
    much_loss = "lower --udp-rate"


class StreamMonitor(NetworkMonitor):
    network = "stream"
    columns = _UNITS | {"sent_bytes": "sent_bytes", "broken": "broken", "late_us": "late_us"}
    table = ("sent", "received", "lost", "late", "early_dropped", "broken", "malformed")
    problems: ClassVar = {"early_dropped": _EARLY % "units"}
    much_loss = "raise --udp-deadline"

    def metrics(self) -> dict[str, float]:
        found = super().metrics()
        received, late = found["stream received"], found["stream late"]
        found["stream arrived"] = received / max(received + found["stream units lost"], 1.0)
        found["stream late by"] = found.pop("stream late us") / max(late, 1.0) / 1e3
        return found
