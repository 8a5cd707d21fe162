"""Reports on datagrams: metrics, a line for each problem that a user can mend, and a table at the end of a run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch.distributed as dist

from ...run.monitor.observer import Look, Observer
from ...run.monitor.window import Window
from .process import engine_counters

logger = logging.getLogger(__name__)

#: Counters that become metrics, by the name of the column.
_COLUMNS = {
    "sent": "sent",
    "received": "received",
    "units_lost": "lost",
    "late": "late",
    "duplicate": "duplicate",
    "early_dropped": "early_dropped",
    "refused": "refused",
    "overflow": "socket_overflow",
    "too_big": "too_big",
    "send_failed": "send_failed",
    "unreachable": "unreachable",
    "narrowed": "narrowed",
    "sent_again": "resent",
    "put_together": "repaired",
}
_EVERY = 10  # iterations between looks at the counters
_PERSISTS = 100  # iterations of much loss that are worth a line
_MUCH = 0.2
_OVERFLOW = 0.001


def totals(peers: Sequence[Mapping[str, int]], engine: Mapping[str, int]) -> Counter[str]:
    """The columns of one process, from the counters of its peers and of its socket."""
    found: Counter[str] = Counter()
    for peer in peers:
        found.update(peer)
    found["refused"] = found["malformed"] + found["bad_tag"] + engine["malformed"] + engine["foreign"]
    for name in (
        "socket_overflow",
        "too_big",
        "send_failed",
        "unreachable",
        "narrowed",
    ):
        found[name] = engine[name]
    return Counter({column: found[name] for column, name in _COLUMNS.items()}) + Counter(bad_tag=found["bad_tag"])


def advice(now: Mapping[str, int], much_loss_since: int) -> dict[str, str]:
    """Lines of advice, by the name of the reason. ``much_loss_since``: iterations in a row with much loss."""
    result = {}
    if now["overflow"] > _OVERFLOW * max(now["received"], 1):
        result["overflow"] = (
            f"{now['overflow']} datagrams were lost in this host's own receive buffer: raise net.core.rmem_max "
            "(docs/wan.md), or give the process's network thread a core"
        )
    if now["early_dropped"]:
        result["early"] = (
            f"{now['early_dropped']} datagrams came before this rank asked for them and did not fit --udp-memory: raise it"
        )
    if now["too_big"]:
        result["too big"] = (
            f"{now['too_big']} datagrams were larger than the MTU of this host's interface and were not sent: lower "
            "--packet-bytes"
        )
    if now["narrowed"]:
        result["narrowed"] = (
            "no full datagram comes from a rank any more, and shorter ones do: the MTU of a path has fallen, and its units are lost; "
            "lower --packet-bytes"
        )
    if now["send_failed"]:
        result["send"] = f"{now['send_failed']} datagrams could not be sent: look at this host's routes and firewall"
    if now["bad_tag"]:
        result["tag"] = (
            f"{now['bad_tag']} datagrams failed authentication and were dropped: somebody else sends to this port, or "
            "something on the way changes them"
        )
    if much_loss_since >= _PERSISTS:
        result["loss"] = (
            f"more than {100 * _MUCH:.0f} % of units were lost in each of {_PERSISTS} iterations: lower --udp-rate, or "
            "look at the network"
        )
    return result


class Carrier(Protocol):
    """An end of a link that sends datagrams: its name, and its rank on that link."""

    name: str
    rank: int

    def counters(self) -> dict[int, dict[str, int]]: ...

    def rates(self) -> dict[int, dict[str, float]]: ...


class DatagramMonitor(Observer):
    """Counts datagrams over all ranks. ``transports``: returns those of this process, once there are any.

    ``rank``: the number of this process, if it is not its rank: every island has a rank 0.
    """

    def __init__(self, transports: Callable[[], Sequence[Carrier]], rank: int | None = None) -> None:
        self._transports = transports
        self._called = rank
        self._window = Window(list(_COLUMNS))
        self._counted: Counter[str] = Counter()
        self._said: set[str] = set()
        self._units: Counter[str] = Counter()  # of this iteration
        self._much = 0

    def _now(self) -> Counter[str]:
        peers = [peer for one in self._transports() for peer in one.counters().values()]
        return totals(peers, engine_counters())

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
        for reason, line in advice(self._now(), self._much).items():
            if reason not in self._said:
                self._said.add(reason)
                logger.warning("rank %d: %s (said once)", self._rank(), line)

    def metrics(self) -> dict[str, float]:
        now = self._now()
        self._window.add(**{column: now[column] - self._counted[column] for column in _COLUMNS})
        self._counted = now
        return {f"udp {column.replace('_', ' ')}": value for column, value in self._window.close().items()}

    def close(self) -> None:
        for line in summary(self._transports(), self._rank()):
            print(line, flush=True)

    def _rank(self) -> int:
        if self._called is not None:
            return self._called
        return dist.get_rank() if dist.is_initialized() else 0


def summary(transports: Sequence[Carrier], rank: int) -> list[str]:
    """Lines with the totals of this rank; on the first rank also a line for each peer of each stream."""
    lines, total = [], Counter()
    for transport in transports:
        rates = transport.rates()
        for peer, counts in transport.counters().items():
            total.update(counts)
            network = f"{rates[peer]['rate'] / 1e6:.1f} MB/s, round trip {1e3 * rates[peer]['rtt_min']:.1f} ms"
            lines.append(f"udp, {transport.name}, ranks {transport.rank} and {peer}: {_words(counts)}; {network}")
    if not total:
        return []
    return [*(lines if rank == 0 else []), f"udp, rank {rank}, all: {_words(total)}"]


def _words(counts: Mapping[str, int]) -> str:
    names = ("sent", "received", "lost", "late", "duplicate", "early_dropped", "malformed", "bad_tag")
    return ", ".join(f"{name.replace('_', ' ')} {counts[name]:,}" for name in names)
