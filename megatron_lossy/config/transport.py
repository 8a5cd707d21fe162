"""Flags of the transport of exchanges (docs/transport.md). :class:`.config.LossyConfig` inherits them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Any

from ..base.errors import refuse
from ..base.flags import check_choice, check_code, flag, refuse_unused
from ..base.section import Flags
from .core import PHASES

#: Payload of a datagram: with 28 bytes of header, 16 of authentication and 48 of UDP and IPv6, 1,500 bytes.
UDP_PACKET_BYTES = 1408
#: The least and the most of ``--packet-bytes auto``: of an MTU of 576 bytes, and of jumbo frames of 9,000.
UDP_PACKETS = 448, 8896
#: The least payload that holds a part of a report of lost packets.
UDP_REPORT_BYTES = 16
#: Windows that page-locked memory has room for: the network must not wait for a copy.
UDP_WINDOWS = 4
#: Copies of a packet: more of them cost more than they save.
UDP_MOST_COPIES = 4
#: The transports, and those over which units are really lost.
TRANSPORTS = ("torch", "pieces", "udp", "stream")
OBSERVED = ("udp", "stream")
#: The flags that hold for datagrams and for streams.
_BOTH = ("interface", "port", "rate", "deadline", "memory", "key_file", "peer_timeout")


@dataclass(frozen=True)
class TransportFlags(Flags):
    """Flags of the transport of exchanges. Raises :class:`UsageError` for a value that is not allowed."""

    triggers = ("packet_bytes",)

    transport: str = flag(
        "torch",
        "how the exchanges cross: Megatron's collectives, minus what a channel draws; pieces, the same over an all-to-all, "
        "summed by the owner in the order of ranks; udp, datagrams that may really be lost; or stream, TCP with a deadline, after "
        "which what has not come is lost (docs/transport.md); with --islands and --sites udp and stream are between these alone",
        choices=TRANSPORTS,
        group="transport",
        basic=True,
    )
    udp_interface: str | None = flag(
        None,
        "udp, stream: network interface to send from; default the one that reaches MASTER_ADDR",
        metavar="NAME",
        incidental=True,
    )
    udp_port: int = flag(
        0,
        "udp, stream: port of local rank 0, the next are the others'; 0 takes free ones",
        metavar="BASE",
        incidental=True,
    )
    udp_rate: tuple[str, ...] = flag(
        ("shared",),
        "udp: how a rate is found: shared, next to other traffic, which keeps its share; shared:K, what goes "
        "from a process to another one leaves to others what K TCP flows would; dedicated, on a link of one's own; or "
        "fixed, not at all (closed networks only); and the most a process sends, with --sites all of a site together, "
        "for example 10gbit or 300mbit; default the speed of the interface, shared by the ranks of this host, else 1gbit; "
        "stream: the kernel's congestion control, for example bbr or cubic; default the host's",
        metavar="[shared[:K]|dedicated|fixed] [RATE] | NAME",
        incidental=True,
    )
    udp_deadline: str | None = flag(
        None,
        "udp, stream: also end an exchange so many milliseconds after this rank asked for it, whatever is missing; off, the default of "
        "udp; or auto, that of stream: of udp 1.2 times the 95th percentile of the last 100; of stream 1.2 times the median of the last 32, "
        "while packets are missing, and no more than 1 - SHARE of all units (0.01) is lost",
        metavar="{off,auto[:SHARE],MS}",
    )
    udp_memory: int = flag(
        2**28,
        "udp, stream: bytes of a process for what arrives before it is asked for; and as many of page-locked memory, on an "
        "accelerator, through which larger exchanges cross in windows",
        metavar="BYTES",
        incidental=True,
    )
    udp_key_file: str | None = flag(
        None,
        "udp, stream: file with a secret that all ranks share; without it a reader of torch's store could forge messages; none, for "
        "closed networks: messages are neither encrypted nor authenticated",
        metavar="{FILE,none}",
        incidental=True,
    )
    udp_fec: tuple[str, ...] = flag(
        ("auto",),
        "udp: copies of packets of high priority, behind the message: C for every B of them; or auto, as many as the loss of the "
        "other packets needs, up to PERCENT of the bytes of a message, by default 2.5",
        metavar="auto [PERCENT] | B C",
        incidental=True,
    )
    packet_copies: tuple[int, ...] = flag(
        (1,),
        "how often each packet of gradients and parameters is sent, all of a message and then all again, for loss that is no "
        "congestion: 1 to 4; one value for both phases, or two: gradients, parameters; a drawn packet is lost if all its copies are",
        metavar="C",
    )
    udp_peer_timeout: float = flag(
        30.0,
        "udp: seconds without a datagram after which a rank counts as gone; stream: the most for a connection, and ten times as long as "
        "a silent rank is waited for",
        metavar="S",
        incidental=True,
    )

    def resolve(self: Any) -> None:
        if isinstance(self.udp_rate, str):
            object.__setattr__(self, "udp_rate", tuple(self.udp_rate.split()))
        if self.loss_unit is None:
            object.__setattr__(self, "loss_unit", "packet" if self.observed else "shard")
        if self.packet_bytes is None:
            object.__setattr__(self, "packet_bytes", UDP_PACKET_BYTES if self.transport == "udp" else 4096)

    @property
    def observed(self) -> bool:
        """Whether the network loses units, and what arrived is known only after an exchange."""
        return self.transport in OBSERVED

    def draws(self) -> bool:
        return self.transport != "torch"

    def check(self: Any) -> None:
        check_choice(self, "transport")
        within = all(1 <= copies <= UDP_MOST_COPIES for copies in self.packet_copies)
        if len(self.packet_copies) not in (1, 2) or not within:
            allowed = f"must be one or two numbers in [1, {UDP_MOST_COPIES}]: of gradients, of parameters"
            raise refuse("--packet-copies", " ".join(map(str, self.packet_copies)), allowed)
        if self.transport != "udp" and self.packet_bytes == "auto":
            why = "needs --transport udp; with others, as in a replay of its log, give the number"
            raise refuse("--packet-bytes", "auto", why)
        used = {self.transport, "stream" if self.streams() else self.transport}
        for own in fields(TransportFlags):
            needed = OBSERVED if own.name.removeprefix("udp_") in _BOTH else ("udp",)
            if own.name not in ("transport", "packet_copies") and used.isdisjoint(needed):
                refuse_unused(self, own.name, f"needs --transport {' or '.join(needed)}")
        if not used.isdisjoint(OBSERVED):
            deadline = self.udp_deadline_seconds
            if not 0 <= self.udp_port <= 65535:
                raise refuse("--udp-port", self.udp_port, "must be in [0, 65535]")
            if isinstance(deadline, float) and not 0 < deadline < math.inf:
                raise refuse("--udp-deadline", self.udp_deadline, "must be off, auto or milliseconds above 0")
            if self.udp_memory < 2**16:
                raise refuse("--udp-memory", self.udp_memory, "must be at least 2^16")
            if not 1 <= self.udp_peer_timeout < math.inf:
                raise refuse("--udp-peer-timeout", self.udp_peer_timeout, "must be seconds of at least 1")
        if "udp" in used:
            if self.udp_rate_rule[0] == "fixed" and self.udp_bytes_per_second is None:
                raise refuse("--udp-rate", "fixed", "needs a rate, such as fixed 300mbit")
            _ = self.udp_bytes_per_second, self.udp_fec_code, self.udp_fec_budget
        if "stream" in used:
            if not 0.5 <= self.deadline_share <= 1:  # NaN fails too
                raise refuse("--udp-deadline", self.udp_deadline, "SHARE must be in [0.5, 1]")
            _ = self.stream_congestion
            if max(self.packet_copies) > 1:
                copies = " ".join(map(str, self.packet_copies))
                raise refuse("--packet-copies", copies, "cannot go with --transport stream: TCP sends again")

    def copies(self, phase: str) -> int:
        """Return the number of times that each unit of ``phase`` is sent."""
        if phase not in PHASES:
            return 1
        return self.packet_copies[0] if phase == PHASES[0] else self.packet_copies[-1]

    def notes(self) -> list[str]:
        if max(self.packet_copies) == 1:
            return []
        return [f"packets sent {self.copies(PHASES[0])} (gradients) and {self.copies(PHASES[1])} times (parameters)"]

    def idle(self: Any) -> dict[str, tuple[bool, set[str]]]:
        return {"nothing is lost": (any(self.loses(phase) for phase in PHASES), {"packet_copies"})}

    @property
    def udp_cipher(self) -> str:
        """The cipher of messages, "aes-128-gcm" or "none"."""
        return "none" if self.udp_key_file == "none" else "aes-128-gcm"

    def _udp_rate_words(self) -> tuple[str, str | None]:
        """Return the rule and the rate of ``--udp-rate``. Raise :class:`UsageError`."""
        words = list(self.udp_rate)
        rule = words.pop(0) if words and not words[0][:1].isdigit() else "shared"
        rate = words.pop(0) if words else None
        if words:
            raise refuse("--udp-rate", " ".join(self.udp_rate), "must be a rule, a rate, or a rule and a rate")
        return rule, rate

    @property
    def udp_rate_rule(self) -> tuple[str, int]:
        """The rule of ``--udp-rate``, and K. Raises :class:`UsageError`."""
        rule, _ = self._udp_rate_words()
        name, colon, flows = rule.partition(":")
        if name not in ("shared", "dedicated", "fixed") or (colon and name != "shared"):
            raise refuse("--udp-rate", rule, "must be shared, shared:K, dedicated or fixed, and a rate such as 10gbit")
        if colon and not (flows.isdecimal() and 1 <= int(flows) <= 1000):
            raise refuse("--udp-rate", rule, "K must be in [1, 1000]")
        return name, int(flows or 1)

    @property
    def stream_congestion(self) -> str | None:
        """The congestion control of streams; ``None``: the host's. Raises :class:`UsageError`."""
        if len(self.udp_rate) != 1 or self.udp_rate[0][:1].isdigit():
            why = "must be one word with --transport stream: a congestion control of the kernel, such as bbr or cubic"
            raise refuse("--udp-rate", " ".join(self.udp_rate), why)
        return None if self.udp_rate == ("shared",) else self.udp_rate[0]

    @property
    def udp_fec_code(self) -> tuple[int, int] | None:
        """``--udp-fec``: B and C; ``None``: auto. Raises :class:`UsageError`."""
        if self.udp_fec[0] == "auto":
            return None
        text = " ".join(map(str, self.udp_fec))
        try:
            block, copies = (int(number) for number in self.udp_fec)
        except ValueError:
            raise refuse("--udp-fec", text, "must be auto, auto PERCENT, or B C") from None
        check_code("--udp-fec", block, copies, least=0, copies=True)
        return block, copies

    @property
    def udp_fec_budget(self) -> float:
        """The most copies of ``--udp-fec auto``, in percent of a message. Raises :class:`UsageError`."""
        if self.udp_fec[0] != "auto" or len(self.udp_fec) == 1:
            return 2.5
        try:
            (percent,) = map(float, self.udp_fec[1:])
            if not 0 <= percent <= 100:
                raise ValueError
        except ValueError:
            text = " ".join(map(str, self.udp_fec))
            raise refuse("--udp-fec", text, "must be auto and at most one number, percent in [0, 100]") from None
        return percent

    @property
    def packet_range(self: Any) -> tuple[int, int]:
        """The least and the most that ``--packet-bytes`` is or may become."""
        return UDP_PACKETS if self.packet_bytes == "auto" else (self.packet_bytes, self.packet_bytes)

    @property
    def udp_bytes_per_second(self) -> float | None:
        """The rate of ``--udp-rate``. Raises :class:`UsageError`."""
        _, text = self._udp_rate_words()
        if text is None:
            return None
        found = re.fullmatch(r"([\d.]+)([kmg])bit", text.lower())
        try:
            rate = float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]] / 8 if found else 0.0
        except ValueError:
            rate = 0.0
        if not rate > 0:
            raise refuse("--udp-rate", text, "must be a number above 0 with kbit, mbit or gbit, such as 10gbit")
        return rate

    @property
    def udp_deadline_seconds(self) -> float | str | None:
        """``--udp-deadline``: ``None``, "auto" or seconds. Raises :class:`UsageError`."""
        given = self.udp_deadline or ("auto" if self.transport == "stream" else "off")
        if given in ("off", "auto") or (self.transport == "stream" and given.startswith("auto:")):
            return None if given == "off" else "auto"
        try:
            return float(given) / 1000
        except ValueError:
            raise refuse("--udp-deadline", given, "must be off, auto or milliseconds above 0") from None

    @property
    def deadline_share(self) -> float:
        """SHARE of ``--udp-deadline auto:SHARE``. Raises :class:`UsageError`."""
        try:
            return float((self.udp_deadline or "").partition(":")[2] or 0.99)
        except ValueError:
            raise refuse("--udp-deadline", self.udp_deadline, "SHARE must be in [0.5, 1]") from None
