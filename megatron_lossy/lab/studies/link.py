"""``python -m megatron_lossy.lab link``: the method that fits a link between sites, with flags (docs/choosing.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...base.errors import ArgumentParser, refuse
from ...mechanisms.islands.flags import SYNC_LANES
from ..theory import bytes_sent, gradient_bytes, gradient_seconds, parts

#: Gradients are chosen if they make an iteration at most this much longer: the cost of islands is known for tiny
#: models only.
LONGER = 1 / 3
#: Up to this round trip, in seconds, a link looks like the network of a site.
INSIDE = 1e-3
_BYTES = {"fp32": 4, "bf16": 2}
#: Of a value that crosses between islands; int8 with its share of a scale.
_SYNC_BYTES = _BYTES | {"int8": 1 + 2 / 128}


@dataclass(frozen=True)
class Site:
    """A link between two sites, the training over it, and the time of a step without it."""

    mbit: float
    round_trip_ms: float
    loss: float
    parameters: float
    step: float
    ranks: int = 1
    weights: str = "bf16"
    islands: int = 2
    sync: str = "bf16"
    longer: float = LONGER

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.mbit * 1e6 / 8

    @property
    def crossing(self) -> float:
        """Bytes of gradients and weights each way in an iteration."""
        return gradient_bytes(self.parameters, self.ranks, _BYTES[self.weights])

    @property
    def gradients(self) -> float:
        """Seconds that gradients and weights add to an iteration."""
        return gradient_seconds(self.crossing, self.rate, self.round_trip_ms / 1e3)

    @property
    def takes_gradients(self) -> bool:
        """Whether the link has time for gradients in each iteration."""
        return self.gradients <= self.longer * self.step

    @property
    def inside(self) -> bool:
        """Whether this is a network within a site, not a wide-area link."""
        return not self.loss and self.round_trip_ms / 1e3 <= INSIDE

    @property
    def parts(self) -> tuple[int, int]:
        """(n, delay): islands average one parameter in n, ``delay`` iterations late."""
        return parts(
            self.parameters, self.rate, self.round_trip_ms / 1e3, self.step, self.islands, _SYNC_BYTES[self.sync]
        )

    @property
    def averaged(self) -> float:
        """Bytes that an island sends in an iteration."""
        return bytes_sent(1, self.islands, _SYNC_BYTES[self.sync]) * self.parameters / self.parts[0]

    @property
    def interval(self) -> int:
        """Iterations from one exchange to the next, so that none waits for a lane."""
        under_way = self.averaged / self.rate + self.round_trip_ms / 1e3
        return max(1, math.ceil(under_way / (SYNC_LANES * self.step) - 1e-9))

    @property
    def flags(self) -> list[str]:
        """The flags to set."""
        transport = [] if self.inside else ["--transport udp"]
        if self.takes_gradients:
            return transport or ["--transport torch"]
        n, delay = self.parts
        flags = [f"--islands {self.islands}", "--sync-method parameters"]
        if n > 1:
            flags += [f"--sync-fraction {fraction(n)}", "--sync-block 128"]
        flags.append(f"--sync-delay {delay}")
        if self.interval > 1:
            flags.append(f"--sync-interval {self.interval}")
        if delay >= n:
            flags.append("--delay-correction smith")
        return [*flags, *([f"--sync-dtype {self.sync}"] if self.sync != "fp32" else []), *transport]


def fraction(n: int) -> str:
    """The ``--sync-fraction`` of one part in ``n``: at least three digits, rounded up, as the flag's own parts are."""
    for digits in range(2, 16):
        scale = 10 ** (digits + math.ceil(math.log10(n)))
        share = math.ceil(scale / n) / scale
        if math.ceil(1 / share - 1e-9) == n:
            break
    return f"{share:.15g}"


def main(arguments: Sequence[str]) -> None:
    """Print the traffic that the link of the command line can carry."""
    print("\n".join(report(read(arguments))))


def read(arguments: Sequence[str]) -> Site:
    """The site of a command line. Raises :class:`UsageError`."""
    parser = ArgumentParser(
        "python -m megatron_lossy.lab link",
        description="Which method fits a link between sites, and what to set (docs/choosing.md).",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--mbit", type=float, required=True, help="rate of the link each way, Mbit/s")
    add("--rtt", type=float, required=True, metavar="MS", dest="round_trip_ms", help="round trip, ms")
    add("--loss", type=float, default=0.0, metavar="P", help="share of packets lost; default 0")
    add("--parameters", type=float, required=True, metavar="N", help="of the model, for example 7e9")
    add("--step", type=float, required=True, metavar="S", help="seconds of an iteration without the link")
    ranks = "data-parallel ranks of a site; default 1"
    add("--ranks-per-site", type=int, default=1, metavar="D", dest="ranks", help=ranks)
    add("--weights", choices=tuple(_BYTES), default="bf16", help="dtype of the model; default bf16")
    add("--islands", type=int, default=2, metavar="M", help="sites that would be islands; default 2")
    sync = "what islands send; default bf16"
    add("--sync-dtype", choices=tuple(_SYNC_BYTES), default="bf16", dest="sync", help=sync)
    longer = "choose gradients if they make an iteration at most so much longer; default 1/3"
    add("--longer", type=float, default=LONGER, metavar="SHARE", help=longer)
    site = Site(**vars(parser.parse_args(arguments)))
    for flag, value in (("--mbit", site.mbit), ("--parameters", site.parameters), ("--step", site.step)):
        if not 0 < value < math.inf:
            raise refuse(flag, value, "must be above 0")
    for flag, value in (("--rtt", site.round_trip_ms), ("--longer", site.longer)):
        if not 0 <= value < math.inf:
            raise refuse(flag, value, "must be at least 0")
    if not 0 <= site.loss < 1:
        raise refuse("--loss", site.loss, "must be in [0, 1)")
    for flag, value, least in (("--ranks-per-site", site.ranks, 1), ("--islands", site.islands, 2)):
        if value < least:
            raise refuse(flag, value, f"must be at least {least}")
    return site


def report(site: Site) -> list[str]:
    """Lines of text: the traffic of an iteration, its time, and the flags to set."""
    crossing = f"{amount(site.crossing)} each way in an iteration"
    lines = [f"gradients  {crossing}: at least {seconds(site.gradients)}, {of_steps(site.gradients / site.step)}"]
    n, delay = site.parts
    lines.append(
        f"islands    one parameter in {n} in each iteration, {delay} late: {amount(site.averaged)} each way, at least "
        f"{seconds(site.averaged / site.rate + site.round_trip_ms / 1e3)}, while training goes on for "
        f"{seconds(delay * site.step)}"
    )
    if site.interval > 1:
        lines.append(
            f"           {SYNC_LANES} exchanges cross at once: one in {site.interval} iterations, for which the link has time"
        )
    what = "gradients in each iteration" if site.takes_gradients else "islands"
    lines += [f"choose     {what}: {' '.join(site.flags)}"]
    if not site.takes_gradients and n > 100:
        lines.append("           less than 1 % of the parameters in an iteration: nobody has measured what that costs")
    return [*lines, "docs/choosing.md says what that costs, as far as it was measured"]


def amount(number: float) -> str:
    """A number of bytes in words."""
    unit, size = next((one for one in (("GB", 1e9), ("MB", 1e6)) if number >= one[1]), ("kB", 1e3))
    return f"{number / size:.3g} {unit}"


def seconds(time: float) -> str:
    """A time in words."""
    if time < 1:
        return f"{1e3 * time:.3g} ms"
    return f"{time:.3g} s" if time < 120 else f"{time / 60:.3g} min"


def of_steps(ratio: float) -> str:
    """A share of a step, or a number of steps, in words."""
    return f"{ratio:.2g} of the step" if ratio < 1 else f"{ratio:.3g} times the step"
