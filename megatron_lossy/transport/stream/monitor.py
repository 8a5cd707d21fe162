"""Reports on streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ..ends import end_counters
from ..monitor import NetworkMonitor

#: Iterations of much loss that are worth a line.
_PERSISTS = 100
#: Counters, by the name of the column.
_COLUMNS = {
    "sent": "sent",
    "received": "received",
    "units_lost": "lost",
    "late": "late",
    "early_dropped": "early_dropped",
}
_COLUMNS |= {"sent_bytes": "sent_bytes", "broken": "broken", "late_us": "late_us"}


class StreamMonitor(NetworkMonitor):
    """Counts units, bytes and connections."""

    network = "stream"
    columns = (*_COLUMNS, "refused")
    table = ("sent", "received", "lost", "late", "early_dropped", "broken", "malformed")

    def totals(self, peers: Sequence[Mapping[str, int]]) -> Counter[str]:
        found: Counter[str] = Counter()
        for peer in peers:
            found.update(peer)
        columns = Counter({column: found[name] for column, name in _COLUMNS.items()})
        return columns + Counter(refused=found["malformed"] + end_counters()["strangers"])

    def metrics(self) -> dict[str, float]:
        found = super().metrics()
        received, late = found["stream received"], found["stream late"]
        found["stream arrived"] = received / max(received + found["stream units lost"], 1.0)
        found["stream late by"] = found.pop("stream late us") / max(late, 1.0) / 1e3
        return found

    def advice(self, now: Mapping[str, int], much_loss_since: int) -> dict[str, str]:
        result = {}
        if now["early_dropped"]:
            lost = f"{now['early_dropped']} units came before this rank asked for them and did not fit --udp-memory"
            result["early"] = f"{lost}: raise it"
        if much_loss_since >= _PERSISTS:
            result["loss"] = (
                f"many units were lost in each of {_PERSISTS} iterations: raise --udp-deadline, or look at the network"
            )
        return result
