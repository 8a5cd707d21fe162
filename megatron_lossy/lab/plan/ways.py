"""The ways to train over a link, and the time of an iteration of each: closed forms and measured prices.

A way is a row of :data:`WAYS`, a transport a row of :data:`TRANSPORTS`. Their numbers come from ``measured.yaml``, which
names the record of each.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ...mechanisms.islands.flags import SYNC_LANES
from ..theory import bytes_sent, gradient_bytes, gradient_seconds, parts
from .link import Link

#: The share of a link that a plan leaves to others.
SPARE = 0.1
#: Bytes of a value that crosses; int8 with its share of a scale, 2 bytes for each block of 128.
BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 2 / 128}
#: Bytes of a datagram besides its payload: 28 of ours, 16 of the cipher and 28 of IP and UDP.
PACKET_MORE = 72
#: Bytes of payload in a packet of TCP, which has 52 more.
_SEGMENT = 1448
#: Bytes of a packet over those of its payload.
TRANSPORTS = {"udp": 1 + PACKET_MORE / 1408, **dict.fromkeys(("stream", "torch"), 1 + 52 / _SEGMENT)}
#: The share that a stream may lose at its deadline, by default.
_DEADLINE = 0.01


@dataclass(frozen=True)
class Way:
    """A way to train. ``method``: gradients, sites, islands, diloco or nothing. ``values``: the dtype that crosses.

    ``later``: iterations beyond the least delay of islands. ``every``: iterations between two exchanges of DiLoCo.
    ``rank``: order of its cost in validation loss, as far as that was measured.
    """

    method: str
    transport: str | None
    values: str = "raw"
    later: int = 0
    every: int = 1
    rank: int = 0


WAYS = (
    *(Way(method, "torch", rank=0) for method in ("gradients", "sites")),
    *(Way(method, over, rank=1) for over in ("stream", "udp") for method in ("gradients", "sites")),
    *(Way("sites", over, "int8", rank=2) for over in ("stream", "udp")),
    *(Way("islands", "udp", values, later, rank=3) for later in (0, 1) for values in ("fp32", "bf16", "int8")),
    *(Way("islands", over, values, rank=3) for over, values in (("stream", "int8"), ("torch", "bf16"))),
    *(Way("diloco", "udp", "fp32", every=h, rank=4) for h in (20, 100, 500)),
    Way("diloco", "torch", "fp32", every=100, rank=4),
    Way("nothing", None, rank=5),
)


@dataclass(frozen=True)
class Job:
    """The training. ``parameters`` and ``weight``: of the model, and bytes of a weight. ``step``: seconds of an iteration
    without the link: low, median, high. ``ranks``: of a site, of which ``data`` are data-parallel."""

    parameters: float
    weight: float
    step: tuple[float, float, float]
    sites: int
    ranks: int
    data: int


@dataclass(frozen=True)
class Prediction:
    """A way on a link. ``seconds``: of an iteration: low, median, high. ``hidden``: of an exchange, overlapped.

    ``sent``: bytes out of a site in an iteration, with headers. ``parts``: n of one parameter in n that islands exchange.
    ``delay``: iterations. ``interval``: iterations between two exchanges.
    """

    way: Way
    seconds: tuple[float, float, float]
    hidden: float
    sent: float
    parts: int = 1
    delay: int = 0
    interval: int = 1

    @property
    def name(self) -> str:
        """The way in words."""
        way = self.way
        share = "all" if self.parts == 1 else f"1/{self.parts}"
        detail = {
            "islands": f"{share}, {self.delay} late" + (f", every {self.interval}" if self.interval > 1 else ""),
            "diloco": f"every {self.interval}",
        }.get(way.method)
        return ", ".join(filter(None, (way.method, way.transport, detail, None if way.values == "raw" else way.values)))


@functools.cache
def measured() -> Mapping[str, Any]:
    """Return the content of ``measured.yaml``."""
    return yaml.safe_load(Path(__file__).with_name("measured.yaml").read_text(encoding="utf-8"))


def inside(link: Link) -> bool:
    """Return whether ``link`` looks like the network of a site: no loss, and a round trip of at most 1 ms."""
    return not link.loss and link.rtt <= 1e-3


def use(transport: str, link: Link) -> tuple[float, float] | None:
    """Return the least and the most share of ``link`` that ``transport`` takes; ``None`` if it has not been measured."""
    if transport != "udp" and inside(link):
        return None
    rows = measured()["use"][transport]["rows"]
    below = [row for row in rows if row["loss"] <= link.loss][-1:]
    above = [row for row in rows if row["loss"] >= link.loss][:1]
    near = below + above
    return (min(row["low"] for row in near), max(row["high"] for row in near)) if above else None


def trips_again(transport: str, link: Link, payload: float) -> float:
    """Return the round trips beyond the first that an exchange of ``payload`` bytes takes: TCP sends again until all is there."""
    packets = max(1.0, payload / _SEGMENT)
    if transport == "udp" or not link.loss:
        return 0.0
    return min(packets * link.loss, math.log(packets) / -math.log(link.loss))


def predict(way: Way, link: Link, job: Job) -> Prediction:
    """Return the time of an iteration of ``job`` over ``link``, and its bytes."""
    low, median, high = job.step
    if way.transport is None:
        return Prediction(way, job.step, 0.0, 0.0)
    least, most = use(way.transport, link) or (1 - SPARE, 1 - SPARE)
    header = TRANSPORTS[way.transport]
    # From the slowest to the fastest, as bytes of payload per second.
    rates = [link.rate * min(1 - SPARE, share) / header for share in (least, (least + most) / 2, most)]

    def trips(payload: float) -> list[float]:
        again = 1 + trips_again(way.transport, link, payload)
        return [again * trip for trip in (link.rtt + link.spread, link.rtt, link.rtt)]

    if way.method in ("gradients", "sites"):
        grad, weight = (BYTES["int8"],) * 2 if way.values == "int8" else (BYTES["fp32"], job.weight)
        payload = gradient_bytes(job.parameters, job.data if way.method == "gradients" else 1, weight, grad, job.sites)
        adds = [gradient_seconds(payload, rate, trip) for rate, trip in zip(rates, trips(payload / 2))]
        return Prediction(way, (low + adds[2], median + adds[1], high + adds[0]), 0.0, payload * header)
    whole = bytes_sent(1, job.sites, BYTES[way.values]) * job.parameters
    if way.method == "diloco":
        adds = [(whole / rate + trip) / way.every for rate, trip in zip(rates, trips(whole))]
        seconds = (low + adds[2], median + adds[1], high + adds[0])
        return Prediction(way, seconds, 0.0, whole * header / way.every, interval=way.every)
    n, delay = parts(job.parameters, rates[0], trips(whole)[0], low, job.sites, BYTES[way.values], later=way.later)
    payload = whole / n
    under_way = [payload / rate + trip for rate, trip in zip(rates, trips(whole))]
    interval = max(1, math.ceil(under_way[0] / (SYNC_LANES * low) - 1e-9))
    beside = measured()["beside"]["value"]
    seconds = (low, beside * median, beside * high)
    return Prediction(way, seconds, under_way[1], payload * header / interval, n, delay, interval)


def cost(found: Prediction, link: Link) -> tuple[str, bool]:
    """Return the cost in validation loss with its interval and its origin, in words; and whether ``found`` has it."""
    way = found.way
    kind = "gradients" if way.method == "sites" else way.method
    if way.transport == "stream":
        link = replace(link, loss=_DEADLINE)
    if kind == "gradients" and way.values == "raw" and (way.transport == "torch" or not link.loss):
        return "none: nothing is lost", True
    if kind == "gradients" and way.values != "raw":
        kind = "codes"
    rows = [row for row in measured()["costs"] if row["method"] == kind]
    nearest = min(rows, key=lambda row: _distance(row, found, link))
    how = {"islands": "{share:.0%}, {late} late, {values}, ", "diloco": "every {every}, ", "nothing": ""}
    details = how.get(kind, "{loss:.0%} lost, ")
    text = "{change:+.2f} % ({low:+.1f} to {high:+.1f}; {millions:.2g} M parameters, " + details + "{where})"
    return text.format(**nearest, millions=nearest["parameters"] / 1e6), _distance(nearest, found, link) < 0.1


def _distance(row: Mapping[str, Any], found: Prediction, link: Link) -> float:
    """Return the distance of a measured row from ``found``: in logarithms of shares and intervals."""
    if "share" in row:
        late = abs(math.log((1 + row["late"]) / (1 + found.delay)))
        values = 0.05 * (row["values"] != found.way.values)  # of rows as near as each other
        return abs(math.log(row["share"] * found.parts)) + late + math.log(found.interval) + values
    if "every" in row:
        return abs(math.log(row["every"] / found.interval))
    if "loss" not in row:
        return 0.0
    flat = 0.05 * (("sites" in row) != (found.way.method == "sites"))  # of rows as near as each other
    return flat + abs(math.log((row["loss"] + 1e-3) / (link.loss + 1e-3)))


def order(found: Prediction) -> tuple[float, ...]:
    """Return the place of a way, the nearest to training on one site first: islands by delay, then by share."""
    share = found.parts * found.interval
    return found.way.rank, found.delay, share, found.seconds[1], -BYTES.get(found.way.values, 4.0)
