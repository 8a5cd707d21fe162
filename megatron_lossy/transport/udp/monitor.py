"""Reports on datagrams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ..ends import end_counters
from ..monitor import NetworkMonitor

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


class DatagramMonitor(NetworkMonitor):
    """Counts datagrams."""

    network = "udp"
    columns = tuple(_COLUMNS)
    table = ("sent", "received", "lost", "late", "duplicate", "early_dropped", "malformed", "bad_tag")

    def totals(self, peers: Sequence[Mapping[str, int]]) -> Counter[str]:
        return totals(peers, end_counters())

    def advice(self, now: Mapping[str, int], much_loss_since: int) -> dict[str, str]:
        return advice(now, much_loss_since)
