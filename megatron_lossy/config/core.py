"""Flags of the core: what is lost, recovery, evaluation, checkpoints, drift, the delivery log (docs/semantics.md)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ..base.errors import refuse
from ..base.flags import check_choice, flag, flag_name, in_unit_interval, number_or_auto
from ..base.registry import CHANNELS, GRAD_RECOVERIES, MECHANISMS
from ..base.section import Flags

Value = TypeVar("Value")

#: Exchanges of data parallelism.
PHASES = ("grad", "param")


def _numbers() -> dict[str, int]:
    """Return the number of every phase. A mechanism of another package whose phases others have is left out."""
    numbers = {"grad": 0, "param": 1}
    for mechanism in MECHANISMS.all():
        taken = [
            f"the phase {phase!r} with number {number}"
            for phase, number in mechanism.phases.items()
            if phase in numbers or number in numbers.values()
        ]
        if taken:
            known = ", ".join(f"{phase} {number}" for phase, number in numbers.items())
            MECHANISMS.drop(mechanism, f"{' and '.join(taken)} is taken: there are {known}")
        else:
            numbers |= mechanism.phases
    return numbers


#: The number of every phase in the key of random draws.
NUMBERS = _numbers()


def value_of(values: Sequence[Value], phase: str, exchanges: Sequence[str] = PHASES) -> Value:
    """Return the value for ``phase`` of a flag that takes one for all ``exchanges``, or two, or one for each.

    Of two, the first is that of every other exchange from the first on. Raise ``ValueError`` for another phase.
    """
    return values[list(exchanges).index(phase) % len(values)]


def split_model(model: str) -> tuple[str, str | None]:
    """Return the channel that a value of ``--loss-model`` names, and what follows a colon."""
    name, colon, argument = model.partition(":")
    return name, argument if colon else None


@dataclass(frozen=True)
class Schedule:
    """Loss rates over iterations: ``starts[k]`` is the first iteration (from 0) with rate ``rates[k]``."""

    starts: tuple[int, ...]
    rates: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read ``ITERATION:RATE,ITERATION:RATE,…``. Raise :class:`UsageError`."""
        allowed = "must read ITERATION:RATE,… with iterations rising from 0 and rates in [0, 1)"
        try:
            pairs = [item.split(":") for item in text.split(",")]
            starts = tuple(int(start) for start, _ in pairs)
            rates = tuple(float(rate) for _, rate in pairs)
        except ValueError:
            raise refuse("--loss-schedule", text, allowed) from None
        rising = all(a < b for a, b in itertools.pairwise(starts))
        if not starts or starts[0] != 0 or not rising or not all(0 <= rate < 1 for rate in rates):
            raise refuse("--loss-schedule", text, allowed)
        return cls(starts, rates)


@dataclass(frozen=True)
class PhaseLoss:
    """The losses of one phase, after every flag has been read: the settings of its channel.

    ``model``: the channel's name. ``schedule``: the loss rate over iterations (constant for a plain rate).
    ``lossless``: nothing can ever be lost. ``burst``: mean length of bursts; ``transitions``: the four
    Gilbert-Elliott parameters (at most one of the two is set). ``matrix`` and ``trace``: files.
    """

    model: str
    schedule: Schedule
    lossless: bool = False
    burst: float | None = None
    transitions: tuple[float, float, float, float] | None = None
    matrix: Path | None = None
    trace: Path | None = None

    @property
    def sets_rate(self) -> bool:
        """Whether the channel has rates of its own, so that no schedule matters."""
        return self.transitions is not None or self.matrix is not None or self.trace is not None


@dataclass(frozen=True)
class CoreFlags(Flags):
    """Flags of losses that are drawn, and of the records of a run. Raises :class:`UsageError` for a value not allowed."""

    triggers = None
    rates: ClassVar[Mapping[str, str]] = {"grad": "p_grad", "param": "p_param"}

    p_grad: float = flag(
        0.0, "mean loss rate of gradient reduce-scatters, in [0, 1)", metavar="P", group="what is lost", basic=True
    )
    p_param: float = flag(0.0, "mean loss rate of parameter all-gathers, in [0, 1)", metavar="P", basic=True)
    loss_model: tuple[str, ...] = flag(
        ("bernoulli",),
        "model of losses, bernoulli, gilbert-elliott, per-link or trace; gilbert-elliott:B: bursts of B units on average (4 without "
        "B), everything lost in the bad state and nothing in the good one; gilbert-elliott:PGB,PBG,LG,LB: P(good to bad), P(bad "
        "to good), loss when good, loss when bad, in the place of a rate; per-link:FILE: a rate per link, from an N x N matrix, "
        "row = source, column = destination (.npy, or text with blanks or commas); one value for both phases, or two: gradients, "
        "parameters; with exchanges of other kinds also one for each: those between islands come next, to owners and back",
        metavar="MODEL",
        basic=True,
    )
    trace: str | None = flag(
        None,
        "trace: recorded deliveries to replay: a folder that --delivery-log wrote, or an .npz file (docs/semantics.md)",
        metavar="PATH",
        basic=True,
    )
    loss_schedule: tuple[str, ...] | None = flag(
        None,
        "loss rate over iterations, for example 0:0,1000:0.1,3000:0.2 (bernoulli and gilbert-elliott; replaces "
        "--p-grad and --p-param); one value for both phases, or two",
        metavar="ITERATION:RATE,…",
    )
    loss_correlation: str = flag(
        "independent",
        "independent: every link by itself; source: all receivers of one sender lose together",
        choices=("independent", "source"),
    )
    lossy_links: str = flag(
        "all",
        "all; or inter-node: links between ranks of one node, of the same host name or of N consecutive global ranks, are "
        "reliable",
        metavar="{all,inter-node[:N]}",
    )
    sites: int | None = flag(
        None,
        "the launched ranks, in order, are M equal blocks; losses are between blocks only (docs/sites.md)",
        metavar="M",
    )
    loss_unit: str = flag(
        None,
        "what is lost as a whole: the shard of an iteration over all buckets (the default), the shard of a bucket, or a "
        "packet (the only unit of --transport udp and stream; of udp it is a datagram)",
        choices=("shard", "bucket", "packet"),
        basic=True,
    )
    #: A number, or "auto" until ranks have agreed on one (:func:`megatron_lossy.transport.settled`).
    packet_bytes: int | str = flag(
        None,
        "packet: payload bytes of a packet, in the dtype that crosses the wire; default 4096, with --transport udp 1408; auto "
        "(udp): the most that the paths between all hosts carry, up to 8896, found before the run",
        type=number_or_auto,
        metavar="{BYTES,auto}",
        basic=True,
    )
    loss_seed: int = flag(1234, "seed of all loss draws, 0 to 2^64 - 1", metavar="SEED", basic=True)
    eval_weights: str = flag(
        None,
        "which weights are evaluated: each worker's own, possibly stale, replica; the owners'; their mean over islands "
        "(consensus); or replicas and one of these on the same batches (both); default replica, with islands consensus",
        choices=("replica", "owner", "consensus", "both"),
        group="evaluation, checkpoints, drift",
        basic=True,
    )
    save_replicas: bool = flag(
        False,
        "checkpoints also hold stale units, and what --grad-recovery keeps; a resumed run continues bit for bit",
        basic=True,
    )
    drift_interval: int = flag(
        0,
        "iterations between measurements of how far replicas are apart (docs/monitors.md); 0 never measures",
        incidental=True,
    )
    metrics_port: int | None = flag(
        None,
        "serve the values of each record to Prometheus at this port of the host whose rank writes them; of several islands each at "
        "the next port (docs/metrics.md)",
        metavar="PORT",
        incidental=True,
    )

    delivery_log: str | None = flag(
        None,
        "folder for a record of every loss decision, in Parquet (docs/delivery_log.md); --trace replays it",
        metavar="FOLDER",
        incidental=True,
        group="delivery log",
        basic=True,
    )

    def exchanges(self) -> tuple[str, ...]:
        return PHASES

    def check(self) -> None:
        for name in ("p_grad", "p_param"):
            in_unit_interval(flag_name(CoreFlags, name), getattr(self, name))
        for name in ("loss_correlation", "eval_weights", "loss_unit"):
            check_choice(self, name)
        for model in self.loss_model:
            if split_model(model)[0] not in CHANNELS:
                raise refuse("--loss-model", model, "must be one of " + ", ".join(CHANNELS))
        _ = self.ranks_of_node
        if self.sites is not None and self.sites < 2:
            raise refuse("--sites", self.sites, "must be at least 2: within one site nothing is lost")
        if self.packet_bytes != "auto" and not (isinstance(self.packet_bytes, int) and self.packet_bytes >= 1):
            raise refuse("--packet-bytes", self.packet_bytes, "must be auto or at least 1")
        if self.drift_interval < 0:
            raise refuse("--drift-interval", self.drift_interval, "must be at least 0")
        if self.metrics_port is not None and not 0 < self.metrics_port < 2**16:
            raise refuse("--metrics-port", self.metrics_port, "must be in [1, 65535]")
        if not 0 <= self.loss_seed < 2**64:
            raise refuse("--loss-seed", self.loss_seed, "must be in [0, 2^64 - 1]")

    @property
    def ranks_of_node(self) -> int | None:
        """Ranks of a node with ``--lossy-links inter-node``, 0 to find nodes by host name; ``None`` with all links.

        Raises :class:`UsageError`.
        """
        if self.lossy_links == "all":
            return None
        kind, colon, number = self.lossy_links.partition(":")
        if kind != "inter-node" or (colon and not (number.isdecimal() and int(number))):
            why = "must be all, inter-node or inter-node:N, with N at least 1"
            raise refuse("--lossy-links", self.lossy_links, why)
        return int(number) if colon else 0

    def members(self, ranks: int) -> int:
        """Return the members of an exchange of ``ranks`` data-parallel ranks that can lose data: sites, if any."""
        return ranks if self.sites is None else self.sites

    def notes(self: Any) -> list[str]:
        parts = [] if self.sites is None else [f"between {self.sites} sites only"]
        if self.loss_correlation != "independent":
            parts.append(f"correlated by {self.loss_correlation}")
        if self.lossy_links != "all":
            parts.append("inter-node links only")
        if self.loses("grad"):
            parts.append(f"recovery {self.grad_recovery}")
        return parts


@dataclass(frozen=True)
class RecoveryFlags(Flags):
    """Flags of recovery by owners. Raises :class:`UsageError` for a value not allowed."""

    grad_recovery: str = flag(
        "renormalize",
        "what the owner does about missing gradients: mean of what arrived; that with its own shard weighted 1/N; "
        "the last gradient received from that sender; zeros; or zeros, with what was lost added to what its sender sends "
        "next (docs/smart.md)",
        choices=GRAD_RECOVERIES,
        group="recovery",
        basic=True,
    )
    lossy_self: bool = flag(False, "a worker's own gradient shard can be lost too (the paper's literal formula)")

    @property
    def feeds_back(self) -> bool:
        """Whether senders keep their losses, and send them again."""
        known = self.grad_recovery in GRAD_RECOVERIES  # it may not be checked yet
        return known and GRAD_RECOVERIES.load(self.grad_recovery).feeds_back

    def check(self) -> None:
        check_choice(self, "grad_recovery")

    def idle(self: Any) -> dict[str, tuple[bool, set[str]]]:
        return {"no gradient is lost": (self.loses("grad"), {"grad_recovery", "lossy_self"})}
