"""The rows of the benchmark: over which link what is exchanged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.lab import Link
from megatron_lossy.base.errors import refuse

RTTS, LOSSES, MEGABYTES = (0.0, 20.0, 100.0), (0.0, 0.001, 0.01, 0.05, 0.1, 0.2), (4.0, 40.0)


@dataclass(frozen=True)
class Row:
    """A link, the same in both directions, and the megabytes (10^6 bytes) that a rank sends over it in an exchange.

    ``rtt`` in ms, ``rate`` in Mbit/s, ``queue`` in ms of that rate. ``wire``: no emulated link but a pair of veth
    devices; without ``offload`` these send packets of the MTU (:class:`Lab`). With ``ranks`` of more than 2 half of
    them are on each node.
    """

    part: str
    rtt: float
    loss: float
    megabytes: float
    burst: float | None = None
    rate: float | None = None
    queue: float = math.inf
    reorder: float = 0.0
    duplicate: float = 0.0
    wire: bool = False
    offload: bool = True
    ranks: int = 2

    @property
    def shard(self) -> int:
        """Elements of a shard in float32: a rank sends one to each of the others."""
        return round(1e6 * self.megabytes / 4 / (self.ranks - 1))

    @property
    def setting(self) -> tuple[object, ...]:
        """Return the settings of the connections: rows with equal ones are measured over the same connections."""
        return self.wire, self.offload, self.ranks, self.rtt, self.rate, self.queue

    @property
    def ideal(self) -> float | None:
        """Milliseconds that the bytes take at the rate of the link, without headers; ``None`` without a rate."""
        return None if self.rate is None else self.rtt / 2 + 8e3 * self.megabytes / self.rate

    def link(self, loss: bool = True) -> Link:
        """Return the emulated link; without ``loss`` it only drops packets that overflow its queue."""
        rate = None if self.rate is None else 1e6 * self.rate
        queue = math.inf if rate is None else self.queue / 1000 * rate / 8
        if not loss:  # in peace, to connect
            return Link(self.rtt / 2000)
        return Link(self.rtt / 2000, self.loss, self.burst, rate, queue, reorder=self.reorder, duplicate=self.duplicate)

    def __str__(self) -> str:
        words = [f"{self.megabytes:g} MB", "wire" if self.wire else f"{self.rtt:g} ms"]
        if not self.offload:
            words.append("no offload")
        if self.ranks > 2:
            words.append(f"{self.ranks} ranks")
        if self.rate is not None:
            words.append(f"{self.rate:g} Mbit/s, queue {self.queue:g} ms")
        words.append(f"{100 * self.loss:g} %")
        if self.burst is not None:
            words.append(f"in bursts of {self.burst:g}")
        if self.reorder:
            words.append(f"{100 * self.reorder:g} % late by 5 ms")
        if self.duplicate:
            words.append(f"{100 * self.duplicate:g} % twice")
        return ", ".join(words)


def _grid(rtts: Sequence[float], losses: Sequence[float], megabytes: Sequence[float]) -> list[Row]:
    return [Row("grid", rtt, loss, size) for rtt in rtts for size in megabytes for loss in losses]


#: The rows by part, in the order in which they are measured: harder ones after easier ones.
PARTS: dict[str, list[Row]] = {
    "wire": [
        Row("wire", 0, 0, size, wire=True, offload=offload, ranks=ranks)
        for offload in (True, False)
        for ranks, size in ((2, 4), (2, 40), (8, 40))
    ],
    "grid": _grid(RTTS, LOSSES, MEGABYTES),
    "bursts": [Row("bursts", 20, loss, 4, burst=8) for loss in (0.01, 0.1)],
    # Queues of 0.1 and of 1 bandwidth-delay product.
    "rate": [
        Row("rate", 20, loss, 4, rate=rate, queue=queue)
        for rate in (100, 1000)
        for queue in (2, 20)
        for loss in (0, 0.01)
    ],
    "queue": [Row("queue", 20, loss, 4, rate=400, queue=5) for loss in (0, 0.01, 0.1)],
    "disorder": [Row("disorder", 20, 0, 4, reorder=0.01, duplicate=0.01)],
}
QUICK = _grid((20.0,), (0.0, 0.01, 0.1), (4.0,))


def choose(
    parts: Sequence[str],
    rtts: Sequence[float] | None,
    losses: Sequence[float] | None,
    megabytes: Sequence[float] | None,
    quick: bool,
) -> list[Row]:
    """Return the rows of ``parts`` with the given values, in the grid any; ``None``: their own. Raise UsageError."""
    rows = list(QUICK) if quick else []
    for part in () if quick else parts:
        if part == "grid":
            rows += _grid(rtts or RTTS, losses or LOSSES, megabytes or MEGABYTES)
        else:
            rows += PARTS.get(part, [])
    wanted = [
        row
        for row in rows
        if (not rtts or row.rtt in rtts)
        and (not losses or row.loss in losses)
        and (not megabytes or row.megabytes in megabytes)
    ]
    if rows and not wanted:
        raise refuse("--parts", " ".join(parts), "no row has these --rtt, --loss and --megabytes")
    for row in wanted:
        row.link()  # refuses impossible links
        if not row.shard > 0:
            raise refuse("--megabytes", row.megabytes, "must be above 0")
    return wanted
