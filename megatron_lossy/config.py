"""The one source of every loss flag: its name, default, help, allowed values.

:mod:`.flags` makes the argparse group and the table in ``docs/flags.md`` of :class:`LossyConfig`. The semantics of each
flag are in ``docs/semantics.md``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config_errors import ErrorFlags
from .config_islands import SYNC_PHASES, IslandFlags
from .config_sync import SyncFlags
from .errors import UsageError, refuse
from .flags import as_text, check_choice, flag, flag_name
from .registry import CHANNELS, GRAD_RECOVERIES

PHASES = ("grad", "param")
#: Messages between pipeline stages: forward, and backward.
BOUNDARY_PHASES = ("act", "act-grad")
_OF_RECOVERY = ("act_high_depth", "act_fec_high", "act_fec_low", "act_residual_high", "act_residual_low")
#: Payload of a datagram: with 28 bytes of header, 16 of authentication and 48 of UDP and IPv6, 1,500 bytes.
UDP_PACKET_BYTES = 1408
#: The least payload that holds a part of a report of what did not arrive.
UDP_REPORT_BYTES = 16


def given(config: Any) -> dict[str, Any]:
    """The settings of ``config`` that differ from the defaults, those that depend on others worked out.

    With them, and no others, the same configuration is made again.
    """
    defaults = {f.name: f.default for f in dataclasses.fields(config)}
    if not isinstance(config, LossyConfig):
        return {name: value for name, default in defaults.items() if (value := getattr(config, name)) != default}
    alone = vars(LossyConfig())
    return {
        name: value
        for name, default in defaults.items()
        if (value := getattr(config, name)) != alone[name] or (default is None and _depends(config, name))
    }


def _depends(config: LossyConfig, name: str) -> bool:
    """Whether ``name`` would have another value in ``config`` if it had not been given."""
    if getattr(config, name) is None:
        return False
    others: dict[str, Any] = {name: None}
    try:
        return getattr(dataclasses.replace(config, **others), name) != getattr(config, name)
    except UsageError:
        return True


@dataclass(frozen=True)
class Schedule:
    """Loss rates over iterations: ``starts[k]`` is the first iteration (from 0) with rate ``rates[k]``."""

    starts: tuple[int, ...]
    rates: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read ``ITERATION:RATE,ITERATION:RATE,…``. Raises :class:`UsageError`."""
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

    def rate(self, step: int) -> float:
        """The loss rate of iteration ``step`` (counted from 0)."""
        current = self.rates[0]
        for start, rate in zip(self.starts, self.rates):
            if start > step:
                break
            current = rate
        return current


@dataclass(frozen=True)
class PhaseLoss:
    """How one phase loses data, after every flag has been read: what its channel is made of.

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


@dataclass(frozen=True)
class LossyConfig(ErrorFlags, SyncFlags, IslandFlags):
    """Every loss flag. Raises :class:`UsageError` where a value is not allowed."""

    p_grad: float = flag(0.0, "mean loss rate of the gradient reduce-scatter, in [0, 1)", metavar="P")
    p_param: float = flag(0.0, "mean loss rate of the parameter all-gather, in [0, 1)", metavar="P")
    loss_model: tuple[str, ...] = flag(
        ("bernoulli",),
        "who loses what: independent losses, bursts, a rate per link, or a recorded trace; "
        "one value for both phases, or two: gradients, parameters",
        type=str,
        nargs="+",
        choices=CHANNELS,
    )
    ge_mean_burst: tuple[float, ...] = flag(
        (4.0,),
        "gilbert-elliott: mean number of consecutive units lost on a link (at least 1; everything is lost in "
        "the bad state, nothing in the good one); one value for both phases, or two",
        type=float,
        nargs="+",
        metavar="UNITS",
    )
    ge_grad: tuple[float, ...] | None = flag(
        None,
        "gilbert-elliott, gradients: the four parameters P(good to bad), P(bad to good), loss when good, loss "
        "when bad; replaces --p-grad and --ge-mean-burst",
        type=float,
        nargs=4,
        metavar=("PGB", "PBG", "LG", "LB"),
    )
    ge_param: tuple[float, ...] | None = flag(
        None,
        "gilbert-elliott, parameters: as --ge-grad; replaces --p-param",
        type=float,
        nargs=4,
        metavar=("PGB", "PBG", "LG", "LB"),
    )
    link_rates_grad: str | None = flag(
        None,
        "per-link, gradients: file with an N x N matrix of loss rates, row = source, column = destination "
        "(.npy, or text with blanks or commas); replaces --p-grad",
        metavar="FILE",
    )
    link_rates_param: str | None = flag(
        None, "per-link, parameters: as --link-rates-grad; replaces --p-param", metavar="FILE"
    )
    trace: str | None = flag(
        None,
        "trace: recorded deliveries to replay: a folder that --delivery-log wrote, or an .npz file (docs/semantics.md)",
        metavar="PATH",
    )
    loss_schedule: tuple[str, ...] | None = flag(
        None,
        "loss rate over iterations, for example 0:0,1000:0.1,3000:0.2 (bernoulli and gilbert-elliott; replaces "
        "--p-grad and --p-param); one value for both phases, or two",
        nargs="+",
        metavar="ITERATION:RATE,…",
    )
    loss_correlation: str = flag(
        "independent",
        "independent: every link by itself; source: all receivers of one sender lose together",
        choices=("independent", "source"),
    )
    lossy_links: str = flag(
        "all",
        "all, or inter-node: links between ranks of one node are reliable",
        choices=("all", "inter-node"),
    )
    ranks_per_node: int = flag(
        0,
        "inter-node: consecutive global ranks on one node; 0 finds nodes by host name",
        metavar="N",
    )
    loss_unit: str = flag(
        None,
        "what is lost as a whole: the shard of an iteration over all buckets (the default), the shard of a bucket, or a "
        "packet (the only unit of --transport udp, where it is a datagram)",
        choices=("shard", "bucket", "packet"),
    )
    packet_bytes: int = flag(
        None,
        "packet: payload bytes of a packet, in the dtype that crosses the wire; default 4096, with --transport udp 1408",
        type=int,
        metavar="BYTES",
    )
    grad_recovery: str = flag(
        "renormalize",
        "what the owner does about missing gradients: mean of what arrived; that with its own shard weighted 1/N; "
        "the last gradient received from that sender; zeros; or zeros, with what was lost added to what its sender sends "
        "next (docs/smart.md)",
        choices=GRAD_RECOVERIES,
    )
    grad_priority: str = flag(
        None,
        "packets of gradients that are delivered whatever is lost: those of the largest mean of absolute values; those whose "
        "mean is above a quantile of single values (the literal rule of SMART); default none, with error-feedback packet-mean",
        choices=("none", "packet-mean", "element-quantile"),
    )
    grad_priority_fraction: float = flag(0.01, "packet-mean: share of the packets, in [0, 1]", metavar="K")
    grad_priority_scope: str = flag(
        "bucket",
        "what the share is of: all that a rank sends of a bucket, or what it sends of it to each destination",
        choices=("bucket", "destination"),
    )
    grad_priority_sample: int = flag(
        1000, "element-quantile: values that the quantile is taken from, at least 100", metavar="VALUES"
    )
    grad_residual_bound: float = flag(
        1.0,
        "if more than this share of the other packets of a bucket for one destination is lost, all of them are delivered; in "
        "[0, 1]",
        metavar="SHARE",
    )
    param_send: str = flag(
        "plain",
        "what an owner sends: its weights; or its weights with a lead, so that replicas are not late on average "
        "(docs/lag.md)",
        choices=("plain", "compensated"),
    )
    param_lag: str = flag(
        "auto",
        "compensated: the lead, C0 or C0,R, as E = C0 (W - W before) + R (E before); auto takes it from the loss rates, or "
        "from what receivers count where these are not known",
        metavar="{auto,C0,C0,R}",
    )
    param_priority: str = flag(
        "none",
        "packets of parameters that are delivered whatever is lost: those that have changed most since they were last "
        "delivered so, by the mean of absolute values; over UDP and with virtual workers (docs/smart.md)",
        choices=("none", "change"),
    )
    param_priority_fraction: float = flag(
        0.01, "--param-priority: share of the packets that an owner sends of a bucket, in [0, 1]", metavar="K"
    )
    lossy_self: bool = flag(False, "a worker's own gradient shard can be lost too (the paper's literal formula)")
    p_act: float = flag(
        0.0,
        "mean loss rate of activations between pipeline stages, in [0, 1): independent losses of packets, whatever "
        "--loss-model says (docs/boundaries.md)",
        metavar="P",
    )
    p_act_grad: float = flag(
        0.0, "mean loss rate of gradients of activations between pipeline stages, in [0, 1)", metavar="P"
    )
    act_transport: str = flag(
        "torch",
        "how messages between pipeline stages cross: as Megatron sends them, minus what --p-act draws; or udp, as datagrams "
        "that may really be lost, with --transport udp (docs/boundaries.md)",
        choices=("torch", "udp"),
    )
    act_packet_bytes: int = flag(
        None,
        "payload bytes of a packet between pipeline stages; default 4096, with --act-transport udp that of --packet-bytes",
        type=int,
        metavar="BYTES",
    )
    act_high_depth: float = flag(
        0.5,
        "boundaries after at most this share of the layers count as high, the others as low; in [0, 1]",
        metavar="SHARE",
    )
    act_fec_high: tuple[int, ...] = flag(
        (100, 34),
        "high boundaries: C packets of XOR parity for each B of a message",
        type=int,
        nargs=2,
        metavar=("B", "C"),
    )
    act_fec_low: tuple[int, ...] = flag(
        (100, 10), "low boundaries: as --act-fec-high", type=int, nargs=2, metavar=("B", "C")
    )
    act_residual_high: float = flag(
        0.01,
        "high boundaries: if more than this share of a message is lost after the parity, it is sent again and nothing of it "
        "is lost; in [0, 1)",
        metavar="SHARE",
    )
    act_residual_low: float = flag(0.02, "low boundaries: as --act-residual-high", metavar="SHARE")
    act_zero_fill_gradient: str = flag(
        "masked",
        "gradient of activations that were lost and became zeros: zeros too, which is exact; or as it is",
        choices=("masked", "straight-through"),
    )
    act_retransmit: str = flag(
        "on", "off: no parity and nothing is sent again, so that all that is lost becomes zeros", choices=("on", "off")
    )
    act_loss_in_eval: bool = flag(False, "activations are lost in forward passes without gradients, too")
    virtual_boundaries: tuple[int, ...] | None = flag(
        None,
        "with one pipeline stage: lose at the boundaries that stages would have after these decoder layers, counted from 1",
        type=int,
        nargs="+",
        metavar="LAYER",
    )
    transport: str = flag(
        "torch",
        "how the exchanges cross: Megatron's collectives, minus what a channel draws; pieces, the same over an all-to-all, "
        "summed by the owner in the order of ranks; or udp, datagrams that may really be lost (docs/transport.md)",
        choices=("torch", "pieces", "udp"),
    )
    loss_seed: int = flag(1234, "seed of all loss draws, 0 to 2^64 - 1", metavar="SEED")
    eval_weights: str = flag(
        None,
        "evaluate each worker's own, possibly stale, replica; the owners' weights; their mean over islands (consensus); or "
        "replicas and one of these on the same batches (both); default replica, with islands consensus",
        choices=("replica", "owner", "consensus", "both"),
    )
    save_replicas: bool = flag(
        False,
        "checkpoints also hold the stale units and what --grad-recovery keeps, so that a resumed run continues bit "
        "for bit",
    )
    drift_interval: int = flag(
        0,
        "iterations between measurements of how far replicas are apart (docs/monitors.md); 0 never measures",
        metavar="N",
        incidental=True,
    )

    delivery_log: str | None = flag(
        None,
        "folder for a record of every loss decision, in Parquet (docs/delivery_log.md); --trace replays it",
        metavar="FOLDER",
        incidental=True,
    )
    delivery_log_bitmaps: bool = flag(
        False,
        "packet: record which packets arrived, where the seed and a digest would be enough to replay them",
        incidental=True,
    )
    delivery_log_chunk: int = flag(
        1000,
        "iterations after which a file of the delivery log is closed; a killed run loses at most these",
        metavar="N",
        incidental=True,
    )

    udp_interface: str | None = flag(
        None,
        "udp: network interface to send from; default the one that reaches MASTER_ADDR",
        metavar="NAME",
        incidental=True,
    )
    udp_port: int = flag(
        0, "udp: port of local rank 0, the next ones for the others; 0 takes free ones", metavar="BASE", incidental=True
    )
    udp_rate: str | None = flag(
        None,
        "udp: the most a process sends, for example 10gbit or 300mbit; default the speed of the interface, shared by the "
        "ranks of this host, else 1gbit",
        metavar="RATE",
        incidental=True,
    )
    udp_rate_control: str = flag(
        "delay",
        "udp: find the rate by delay and delivery rate, or send at --udp-rate whatever happens (closed networks only)",
        choices=("delay", "fixed"),
        incidental=True,
    )
    udp_deadline: str = flag(
        "off",
        "udp: also end an exchange so many milliseconds after this rank asked for it, whatever is missing; auto: 1.2 "
        "times the 95th percentile of the last 100",
        metavar="{off,auto,MS}",
    )
    udp_reorder: float | None = flag(
        None,
        "udp: milliseconds to wait for overtaken datagrams after the end of a message; default an eighth of the round trip, at "
        "least 1",
        type=float,
        metavar="MS",
        incidental=True,
    )
    udp_eager_bytes: int = flag(
        2**22,
        "udp: bytes of an exchange sent to a rank before it says that it is ready",
        metavar="BYTES",
        incidental=True,
    )
    udp_memory: int = flag(
        2**28, "udp: bytes for what arrives before it is asked for, per process", metavar="BYTES", incidental=True
    )
    udp_cipher: str = flag(
        "aes-128-gcm",
        "udp: how datagrams are encrypted and authenticated; none for closed networks",
        choices=("aes-128-gcm", "none"),
        incidental=True,
    )
    udp_key_file: str | None = flag(
        None,
        "udp: file with a secret that all ranks share; without it whoever reads torch's store could forge datagrams",
        metavar="FILE",
        incidental=True,
    )
    udp_fec: tuple[str, ...] = flag(
        ("auto",),
        "udp: parity for packets of high priority: C packets for every B of them, which are copies if C is larger; or auto, as "
        "much as the loss asks for",
        type=str,
        nargs="+",
        metavar="auto | B C",
        incidental=True,
    )
    udp_fec_budget: float = flag(
        2.5,
        "udp: most parity that --udp-fec auto adds, in percent of the bytes of a message",
        metavar="PERCENT",
        incidental=True,
    )
    udp_peer_timeout: float = flag(
        30.0, "udp: seconds without a datagram after which a rank counts as gone", metavar="S", incidental=True
    )

    def __post_init__(self) -> None:
        self._check_islands()
        if self.eval_weights is None:
            object.__setattr__(self, "eval_weights", "consensus" if self.averages else "replica")
        for name in ("p_grad", "p_param", "p_act", "p_act_grad", "p_sync"):
            _in_unit_interval(flag_name(LossyConfig, name), getattr(self, name))
        for name in (
            "loss_correlation", "lossy_links", "grad_recovery", "grad_priority_scope", "param_send", "param_priority", "transport",
            "eval_weights", "act_zero_fill_gradient", "act_retransmit", "act_transport",
        ):  # fmt: skip
            check_choice(self, name)
        for name in ("loss_model", "ge_mean_burst", "loss_schedule"):
            values = getattr(self, name)
            if values is not None and len(values) not in ((1, 2, 4) if self.averages else (1, 2)):
                more = ", or four: these, and the two exchanges between islands" if self.averages else ""
                raise refuse(
                    flag_name(LossyConfig, name),
                    " ".join(map(str, values)),
                    f"takes one value for both phases, or two: gradients, parameters{more}",
                )
        check_choice(self, "loss_model")
        for burst in self.ge_mean_burst:
            if not (math.isfinite(burst) and burst >= 1):
                raise refuse("--ge-mean-burst", burst, "must be a finite number of units of at least 1")
        self._resolve()
        if self.packet_bytes < 1:
            raise refuse("--packet-bytes", self.packet_bytes, "must be at least 1")
        if self.delivery_log_bitmaps and self.delivery_log is None:
            raise refuse("--delivery-log-bitmaps", "on", "needs --delivery-log FOLDER")
        if self.delivery_log_chunk < 1:
            raise refuse("--delivery-log-chunk", self.delivery_log_chunk, "must be at least 1")
        if self.ranks_per_node < 0:
            raise refuse("--ranks-per-node", self.ranks_per_node, "must be at least 0")
        if self.drift_interval < 0:
            raise refuse("--drift-interval", self.drift_interval, "must be at least 0")
        if not 0 <= self.loss_seed < 2**64:
            raise refuse("--loss-seed", self.loss_seed, "must be in [0, 2^64 - 1]")
        if self.lead is not None and self.param_send == "plain":
            raise refuse("--param-lag", self.param_lag, "needs --param-send compensated")
        self._check_priority()
        self._check_param_priority()
        self._check_boundaries()
        self._check_udp()
        self.check_errors()
        self.check_sync()
        GRAD_RECOVERIES.load(self.grad_recovery).check(self)
        for phase in PHASES + SYNC_PHASES:
            self.phase(phase)
        self._check_with_islands()
        self._check_replicas()

    def _resolve(self) -> None:
        """Give the units of loss their defaults, which depend on the transport."""
        udp = self.transport == "udp"
        if self.loss_unit is None:
            object.__setattr__(self, "loss_unit", "packet" if udp else "shard")
        if self.packet_bytes is None:
            object.__setattr__(self, "packet_bytes", UDP_PACKET_BYTES if udp else 4096)
        if self.act_packet_bytes is None:
            object.__setattr__(self, "act_packet_bytes", self.packet_bytes if self.act_transport == "udp" else 4096)
        check_choice(self, "loss_unit")
        if self.grad_priority is None:
            feeds_back = self.grad_recovery == "error-feedback"
            object.__setattr__(self, "grad_priority", "packet-mean" if feeds_back else "none")
        check_choice(self, "grad_priority")
        if udp and self.loss_unit != "packet":
            raise refuse("--loss-unit", self.loss_unit, "must be packet with --transport udp, which loses datagrams")
        if udp and self.lossy_self:
            raise refuse("--lossy-self", "with --transport udp", "cannot be: the own shard never crosses the network")

    @property
    def at_sender(self) -> bool:
        """Whether senders decide what becomes of their lost gradients."""
        return self.grad_priority != "none" or self.grad_recovery == "error-feedback"

    def _check_priority(self) -> None:
        for name in ("grad_priority_fraction", "grad_residual_bound"):
            if not 0 <= getattr(self, name) <= 1:
                raise refuse(flag_name(LossyConfig, name), getattr(self, name), "must be in [0, 1]")
        if self.grad_priority_sample < 100:
            raise refuse("--grad-priority-sample", self.grad_priority_sample, "must be at least 100")
        if self.grad_priority != "none":
            if self.loss_unit != "packet":
                why = "" if self.grad_recovery != "error-feedback" else ", or --grad-priority none"
                raise refuse("--grad-priority", self.grad_priority, f"needs --loss-unit packet{why}")
            if self.grad_recovery == "previous":
                raise refuse(
                    "--grad-priority",
                    f"{self.grad_priority} with --grad-recovery previous",
                    "cannot be: what a packet is replaced with would depend on what it was; use error-feedback or zero",
                )
        if self.at_sender and self.transport == "udp":
            self._check_reports()
        needs = {"grad_residual_bound": self.at_sender} | dict.fromkeys(
            ("grad_priority_fraction", "grad_priority_scope", "grad_priority_sample"), self.grad_priority != "none"
        )
        for name, allowed in needs.items():
            value = getattr(self, name)
            if not allowed and value != LossyConfig.__dataclass_fields__[name].default:
                raise refuse(flag_name(LossyConfig, name), value, "needs --grad-priority")

    def _check_reports(self) -> None:
        """Over a network senders are told what did not arrive there; nobody tells them of anything else."""
        if not self.phase("grad").lossless:
            why = "cannot be: what a channel draws beside the network nobody reports to its sender; omit the loss rate"
            raise refuse(
                "--transport", "udp with gradients lost by drawing, and --grad-priority or error-feedback", why
            )
        if self.grad_residual_bound != 1:
            raise refuse("--grad-residual-bound", self.grad_residual_bound, "cannot be with --transport udp")
        self._check_report_bytes("--grad-priority")

    def _check_report_bytes(self, flag: str) -> None:
        if self.packet_bytes < UDP_REPORT_BYTES:
            why = f"must be at least {UDP_REPORT_BYTES} with {flag} over UDP"
            raise refuse("--packet-bytes", self.packet_bytes, why)

    def _check_param_priority(self) -> None:
        name, fraction = "--param-priority", self.param_priority_fraction
        if not 0 <= fraction <= 1:
            raise refuse(f"{name}-fraction", fraction, "must be in [0, 1]")
        if self.param_priority == "none":
            if fraction != LossyConfig.__dataclass_fields__["param_priority_fraction"].default:
                raise refuse(f"{name}-fraction", fraction, f"needs {name} change")
            return
        if self.loss_unit != "packet":
            raise refuse(name, self.param_priority, "needs --loss-unit packet")
        if self.param_send != "plain":
            why = "cannot be: a packet that always arrives is not late, and a lead would put it ahead"
            raise refuse(name, f"{self.param_priority} with --param-send {self.param_send}", why)
        if self.transport == "udp":
            if not self.phase("param").lossless:
                why = "cannot be: what a channel draws beside the network nobody sends again; omit the loss rate"
                raise refuse(name, f"{self.param_priority} over UDP with parameters lost by drawing", why)
            self._check_report_bytes(name)

    def _check_boundaries(self) -> None:
        if not 0 <= self.act_high_depth <= 1:
            raise refuse("--act-high-depth", self.act_high_depth, "must be in [0, 1]")
        for name in ("act_residual_high", "act_residual_low"):
            _in_unit_interval(flag_name(LossyConfig, name), getattr(self, name))
        if self.act_packet_bytes < 1:
            raise refuse("--act-packet-bytes", self.act_packet_bytes, "must be at least 1")
        for name in ("act_fec_high", "act_fec_low"):
            check_code(flag_name(LossyConfig, name), *getattr(self, name))
        layers = self.virtual_boundaries
        if layers is not None and (not layers or min(layers) < 1 or len(set(layers)) < len(layers)):
            raise refuse("--virtual-boundaries", " ".join(map(str, layers)), "must be different layers, from 1 on")
        if layers and self.lossy_links == "inter-node":
            raise refuse(
                "--virtual-boundaries", " ".join(map(str, layers)), "cannot be on a node: --lossy-links inter-node"
            )
        if self.act_transport == "udp":
            self._check_act_transport()
        for name in _OF_RECOVERY if self.act_retransmit == "off" else ():
            value = getattr(self, name)
            if value != LossyConfig.__dataclass_fields__[name].default:
                raise refuse(flag_name(LossyConfig, name), as_text(value), "does nothing with --act-retransmit off")

    def _check_replicas(self) -> None:
        """Parameters can be lost only where they are gathered, and replicas differ only where they are not."""
        if self.phase("param").lossless:
            return
        needs = (
            "needs replicas that each update everything; parameters that are lost belong to the distributed optimizer"
        )
        if self.synchronises:
            raise refuse("--param-sync-interval", self.param_sync_interval, needs)
        if self.replica_check != "none":
            raise refuse("--replica-check", self.replica_check, needs)
        if self.errs and self.grad_error != "trace" and self.grad_error_at == "broadcast":
            raise refuse("--grad-error-at", "broadcast", needs)

    def _check_act_transport(self) -> None:
        if self.transport != "udp":
            raise refuse("--act-transport", "udp", "needs --transport udp")
        if self.virtual_boundaries is not None:
            raise refuse("--act-transport", "udp", "needs real stages: --virtual-boundaries are in one process")
        if self.packet_bytes < UDP_REPORT_BYTES:
            raise refuse(
                "--packet-bytes", self.packet_bytes, f"must be at least {UDP_REPORT_BYTES} with --act-transport udp"
            )
        if self.act_packet_bytes > self.packet_bytes:
            why = (
                f"must be at most --packet-bytes ({self.packet_bytes}) with --act-transport udp, where it is a datagram"
            )
            raise refuse("--act-packet-bytes", self.act_packet_bytes, why)

    def _check_udp(self) -> None:
        for name in ("udp_rate_control", "udp_cipher"):
            check_choice(self, name)
        if self.transport != "udp":
            for field_ in dataclasses.fields(self):
                if field_.name.startswith("udp_") and getattr(self, field_.name) != field_.default:
                    value = getattr(self, field_.name)
                    raise refuse(flag_name(LossyConfig, field_.name), value, "needs --transport udp")
            return
        rate, deadline = self.udp_bytes_per_second, self.udp_deadline_seconds
        if self.udp_rate_control == "fixed" and rate is None:
            raise refuse("--udp-rate-control", "fixed", "needs --udp-rate")
        if not 0 <= self.udp_port <= 65535:
            raise refuse("--udp-port", self.udp_port, "must be in [0, 65535]")
        if isinstance(deadline, float) and not 0 < deadline < math.inf:
            raise refuse("--udp-deadline", self.udp_deadline, "must be off, auto or milliseconds above 0")
        if self.udp_reorder is not None and not 0 <= self.udp_reorder < math.inf:
            raise refuse("--udp-reorder", self.udp_reorder, "must be milliseconds of at least 0")
        if self.udp_eager_bytes < 0:
            raise refuse("--udp-eager-bytes", self.udp_eager_bytes, "must be at least 0")
        if self.udp_memory < max(2**20, self.udp_eager_bytes):
            raise refuse("--udp-memory", self.udp_memory, "must be at least 2^20 and --udp-eager-bytes")
        _ = self.udp_fec_code
        if not 0 <= self.udp_fec_budget <= 100:
            raise refuse("--udp-fec-budget", self.udp_fec_budget, "must be percent in [0, 100]")
        if not 1 <= self.udp_peer_timeout < math.inf:
            raise refuse("--udp-peer-timeout", self.udp_peer_timeout, "must be seconds of at least 1")

    @property
    def udp_fec_code(self) -> tuple[int, int] | None:
        """``--udp-fec``: B and C; ``None``: auto. Raises :class:`UsageError`."""
        if tuple(self.udp_fec) == ("auto",):
            return None
        text = " ".join(map(str, self.udp_fec))
        try:
            block, parity = (int(number) for number in self.udp_fec)
        except ValueError:
            raise refuse("--udp-fec", text, "must be auto, or B C") from None
        check_code("--udp-fec", block, parity, least=0, copies=True)
        return block, parity

    @property
    def udp_bytes_per_second(self) -> float | None:
        """``--udp-rate``. Raises :class:`UsageError`."""
        if self.udp_rate is None:
            return None
        found = re.fullmatch(r"([\d.]+)([kmg])bit", self.udp_rate.lower())
        try:
            rate = float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]] / 8 if found else 0.0
        except ValueError:
            rate = 0.0
        if not rate > 0:
            raise refuse(
                "--udp-rate", self.udp_rate, "must be a number above 0 with kbit, mbit or gbit, such as 10gbit"
            )
        return rate

    @property
    def udp_deadline_seconds(self) -> float | str | None:
        """``--udp-deadline``: ``None``, "auto" or seconds. Raises :class:`UsageError`."""
        if self.udp_deadline in ("off", "auto"):
            return None if self.udp_deadline == "off" else "auto"
        try:
            return float(self.udp_deadline) / 1000
        except ValueError:
            raise refuse("--udp-deadline", self.udp_deadline, "must be off, auto or milliseconds above 0") from None

    def _check_with_islands(self) -> None:
        """Raise :class:`UsageError` for what is not built for islands, or would mean something else there."""
        if not self.averages:
            return
        refused = {
            "param_send": "plain",
            "drift_interval": 0,
            "p_act": 0.0,
            "p_act_grad": 0.0,
            "lossy_links": "all",
            "grad_error": "none",
            "param_sync_interval": 0,
            "replica_check": "none",
            "allow_divergence": False,
        }
        for name, only in refused.items():
            if getattr(self, name) != only:
                raise refuse(flag_name(LossyConfig, name), getattr(self, name), "cannot be combined with --islands")
        if self.eval_weights == "owner":
            raise refuse(
                "--eval-weights", "owner", "every island has owners; with --islands choose consensus or replica"
            )
        if self.island_speeds is not None:
            for name in ("delivery_log", "trace"):
                if getattr(self, name) is not None:
                    why = "cannot be combined with --island-speeds: islands would be in different iterations"
                    raise refuse(flag_name(LossyConfig, name), getattr(self, name), why)

    def rate(self, phase: str) -> float:
        """The mean loss rate that the flags give to ``phase``, unless something replaces it."""
        return {"grad": self.p_grad, "param": self.p_param}.get(phase, self.p_sync)

    @staticmethod
    def rate_flag(phase: str) -> str:
        """The flag of :meth:`rate`."""
        return f"--p-{phase}" if phase in PHASES else "--p-sync"

    def phase(self, phase: str) -> PhaseLoss:
        """How ``phase`` loses data: "grad", "param", or one of those between islands. Raises :class:`UsageError`."""
        if phase in SYNC_PHASES and not self.averages:
            return PhaseLoss("bernoulli", Schedule((0,), (0.0,)), lossless=True)
        return CHANNELS.load(self.of_phase("loss_model", phase)).plan(self, phase)

    def of_phase(self, name: str, phase: str) -> Any:
        """The value for ``phase`` of a flag that takes one for all phases, or two, or four; ``None`` if it is not set.

        Of two, the first is also that of what islands send to owners, the second of what these send back.
        """
        values = getattr(self, name)
        return values and values[(PHASES + SYNC_PHASES).index(phase) % len(values)]

    @property
    def lead(self) -> tuple[float, float] | None:
        """C0 and R of ``--param-lag``, or ``None`` for ``auto``. Raises :class:`UsageError`."""
        if self.param_lag == "auto":
            return None
        try:
            c, r = [float(number) for number in (*self.param_lag.split(","), "0")[:2]]
            if self.param_lag.count(",") > 1 or not (0 <= c < math.inf and 0 <= r < 1):
                raise ValueError
        except ValueError:
            allowed = "must be auto, C0 or C0,R, with C0 finite and at least 0, and R in [0, 1)"
            raise refuse("--param-lag", self.param_lag, allowed) from None
        return c, r

    @property
    def lossless(self) -> bool:
        """True if no flag can change any exchange, so that training must be exactly Megatron's."""
        untouched = all(self.untouched(phase) for phase in PHASES)
        return untouched and not self.loses_at_boundaries and not self.averages

    @property
    def draws(self) -> bool:
        """Whether losses are drawn, or a network has its own: whether ``loss_seed`` can matter, or a repetition."""
        drawn = any(not self.phase(phase).lossless for phase in PHASES + SYNC_PHASES)
        return drawn or self.loses_at_boundaries or self.transport != "torch"

    @property
    def inert(self) -> bool:
        """True if nothing at all is done: no loss, no error, no check and no averaging."""
        return self.lossless and not self.errs and not self.synchronises and self.replica_check == "none"

    def all_reduced(self) -> LossyConfig:
        """The flags of both halves of an all-reduce, which loses ``--p-grad`` twice, without those of replicas."""
        reset: dict[str, Any] = {f.name: f.default for cls in (ErrorFlags, SyncFlags) for f in dataclasses.fields(cls)}
        grad: dict[str, Any] = {
            "p_param": self.p_grad,
            "ge_param": self.ge_grad,
            "link_rates_param": self.link_rates_grad,
            "loss_model": self.loss_model[:1],
            "ge_mean_burst": self.ge_mean_burst[:1],
            "loss_schedule": None if self.loss_schedule is None else self.loss_schedule[:1],
        }
        return dataclasses.replace(self, **reset, **grad)

    @property
    def replicates(self) -> bool:
        """True if something is asked for that needs full replicas: each rank with all of the optimizer."""
        apart = self.errs and self.grad_error != "trace" and self.grad_error_at == "broadcast"
        return apart or self.synchronises or self.replica_check != "none" or self.allow_divergence

    @property
    def loses_at_boundaries(self) -> bool:
        """Whether messages between pipeline stages can lose anything."""
        return self.act_transport == "udp" or any(map(self.boundary_rate, BOUNDARY_PHASES))

    def boundary_rate(self, phase: str) -> float:
        """The loss rate of ``phase`` ("act" or "act-grad")."""
        return {"act": self.p_act, "act-grad": self.p_act_grad}[phase]

    def untouched(self, phase: str) -> bool:
        """Whether the exchanges of ``phase`` are Megatron's own: nothing is lost, and nothing else carries them."""
        return self.transport == "torch" and self.phase(phase).lossless

    def label(self, phase: str) -> str:
        """What the losses of ``phase`` are called: a rate in percent, or what replaces a rate."""
        return CHANNELS.load(self.of_phase("loss_model", phase)).label(dataclasses.asdict(self), phase)

    def describe(self) -> str:
        """What is lost, and what is done about it."""
        idle = self.param_send != "plain" and self.transport != "udp" and self.phase("param").lossless
        unused = [f"--param-send {self.param_send} does nothing, since no parameter is lost"] if idle else []
        unused = [*filter(None, (self.describe_errors(), self.describe_sync())), *unused]
        if self.lossless:
            return "; ".join(["none, the exchanges are Megatron's own", *unused])
        if all(self.untouched(phase) for phase in PHASES):
            boundaries = [self._describe_boundaries()] if self.loses_at_boundaries else []
            parts = [*boundaries, *self._describe_islands(), f"seed {self.loss_seed}", "simulated", *unused]
            return "; ".join(parts)
        models = dict.fromkeys(self.of_phase("loss_model", phase) for phase in PHASES)
        drawn = [
            f"gradients {self.label('grad')}, parameters {self.label('param')}",
            f"{' and '.join(models)}, seed {self.loss_seed}",
        ]
        if self.transport == "udp":
            nothing = all(self.phase(phase).lossless for phase in PHASES)
            drawn = ["what the network loses", *([] if nothing else ["and", *drawn])]
        parts = [
            *drawn,
            f"unit {self.loss_unit}" + (f" of {self.packet_bytes} bytes" if self.loss_unit == "packet" else ""),
            f"recovery {self.grad_recovery}",
        ]
        if self.grad_priority != "none":
            parts.append(
                f"priority {self.grad_priority} {self.grad_priority_fraction:g} of a {self.grad_priority_scope}"
            )
        if self.param_priority != "none":
            parts.append(f"priority of parameters by {self.param_priority} {self.param_priority_fraction:g}")
        if self.param_send != "plain" and not idle:
            parts.append(f"parameters sent {self.param_send}, lag {self.param_lag}")
        if self.loss_correlation != "independent":
            parts.append(f"correlated by {self.loss_correlation}")
        if self.lossy_links != "all":
            parts.append(f"{self.lossy_links} links only")
        if self.loses_at_boundaries:
            parts.append(self._describe_boundaries())
        parts += self._describe_islands()
        crossing = {"torch": "simulated", "pieces": "simulated, in pieces", "udp": f"over UDP, {self.udp_cipher}"}[
            self.transport
        ]
        return "; ".join([*parts, crossing, *unused])

    def _describe_islands(self) -> list[str]:
        if not self.averages:
            return []
        if self.sync_method == "none":
            return [f"{self.islands} islands that exchange nothing"]
        what = f"{self.islands} islands, {self.sync_method}, {100 * self.sync_fraction:g} % of them"
        when = f"every {self.sync_interval} iterations, used after {self.sync_delay}"
        return [f"{what} {when}, lost {self.label(SYNC_PHASES[0])}"]

    def _describe_boundaries(self) -> str:
        rates = f"activations {100 * self.p_act:g} %, their gradients {100 * self.p_act_grad:g} %"
        if self.act_transport == "udp":
            drawn = any(map(self.boundary_rate, BOUNDARY_PHASES))
            rates = "activations and their gradients over UDP" + (f" and, drawn, {rates}" if drawn else "")
        recovery = "without parity"
        if self.act_retransmit == "on":
            kinds = ((self.act_fec_high, self.act_residual_high), (self.act_fec_low, self.act_residual_low))
            recovery = "parity " + " and ".join(f"{as_text(code)} up to {bound:g}" for code, bound in kinds)
        where = "" if self.virtual_boundaries is None else f" after layers {as_text(self.virtual_boundaries)}"
        return f"{rates}{where}, {recovery}"


def check_code(flag: str, block: int, parity: int, least: int = 1, copies: bool = False) -> None:
    """Raise :class:`UsageError` for blocks of ``block`` packets with ``parity`` of parity that no code has.

    ``copies``: there may be more parity than packets.
    """
    if not (least <= parity <= (255 if copies else min(block, 255)) and 1 <= block < 2**16):
        most = "" if copies else " <= B"
        raise refuse(flag, f"{block} {parity}", f"needs {least} <= C{most}, C at most 255 and B in [1, 65535]")


def _in_unit_interval(flag: str, value: float) -> None:
    if not 0 <= value < 1:  # NaN fails too
        raise refuse(flag, value, "must be in [0, 1)")
