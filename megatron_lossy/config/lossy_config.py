"""All loss flags in one object.

:mod:`megatron_lossy.flags` makes the argparse group and the table in ``docs/flags.md`` from :class:`LossyConfig`.
``docs/semantics.md`` has the semantics of each flag.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError, refuse
from ..flags import as_flag, as_text, check_choice, flag, flag_name, in_unit_interval, refuse_unused
from ..mechanisms.async_pipeline.flags import PipelineFlags
from ..mechanisms.boundaries.flags import BoundaryFlags
from ..mechanisms.islands.flags import SYNC_PHASES, IslandFlags
from ..mechanisms.replicas.flags import SyncFlags
from ..registry import CHANNELS, GRAD_RECOVERIES
from .errors import ErrorFlags
from .phases import PHASES, PhaseLoss, Schedule
from .recovery import RecoveryFlags
from .refusal import check_refusals
from .transport import UDP_PACKET_BYTES, TransportFlags


def given(config: Any) -> dict[str, Any]:
    """The settings of ``config`` that differ from the defaults. Defaults that depend on other flags are worked out.

    These settings alone make the same configuration again.
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
class LossyConfig(PipelineFlags, IslandFlags, SyncFlags, ErrorFlags, TransportFlags, BoundaryFlags, RecoveryFlags):
    """Every loss flag. Raises :class:`UsageError` where a value is not allowed."""

    p_grad: float = flag(
        0.0, "mean loss rate of the gradient reduce-scatter, in [0, 1)", metavar="P", group="what is lost", basic=True
    )
    p_param: float = flag(0.0, "mean loss rate of the parameter all-gather, in [0, 1)", metavar="P", basic=True)
    loss_model: tuple[str, ...] = flag(
        ("bernoulli",),
        "who loses what: independent losses, bursts, a rate per link, or a recorded trace; "
        "one value for both phases, or two: gradients, parameters; with --islands also four: then what goes to owners of means, "
        "and means",
        type=str,
        nargs="+",
        choices=CHANNELS,
        basic=True,
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
        basic=True,
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
        basic=True,
    )
    packet_bytes: int = flag(
        None,
        "packet: payload bytes of a packet, in the dtype that crosses the wire; default 4096, with --transport udp 1408",
        type=int,
        metavar="BYTES",
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
        "checkpoints also hold the stale units and what --grad-recovery keeps, so that a resumed run continues bit "
        "for bit",
        basic=True,
    )
    drift_interval: int = flag(
        0,
        "iterations between measurements of how far replicas are apart (docs/monitors.md); 0 never measures",
        metavar="N",
        incidental=True,
        basic=True,
    )

    delivery_log: str | None = flag(
        None,
        "folder for a record of every loss decision, in Parquet (docs/delivery_log.md); --trace replays it",
        metavar="FOLDER",
        incidental=True,
        group="delivery log",
        basic=True,
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

    def __post_init__(self) -> None:
        self._check_islands()
        self._check_pipeline()
        if self.eval_weights is None:
            object.__setattr__(self, "eval_weights", "consensus" if self.averages else "replica")
        for name in ("p_grad", "p_param", "p_sync"):
            in_unit_interval(flag_name(LossyConfig, name), getattr(self, name))
        for name in ("loss_correlation", "lossy_links", "eval_weights"):
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
        self._check_unused()
        self.check_recovery()
        self.check_boundaries()
        self.check_transport()
        self.check_errors()
        self.check_sync()
        GRAD_RECOVERIES.load(self.grad_recovery).check(self)
        for phase in PHASES + SYNC_PHASES:
            self.phase(phase)
        check_refusals(self)

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
        self.resolve_recovery()

    def _check_unused(self) -> None:
        """Raise :class:`UsageError` for a flag that has no effect with the others at any loss rate.

        Flags without effect at rate 0 or with another unit are allowed, so that sweeps can vary rates and units;
        :meth:`describe` names them.
        """
        needs = {
            "ge_mean_burst": ("loss_model", "gilbert-elliott" in self.loss_model, "gilbert-elliott"),
            "ranks_per_node": ("lossy_links", self.lossy_links == "inter-node", "inter-node"),
        }
        for name, (other, used, value) in needs.items():
            if not used:
                why = f"needs {flag_name(LossyConfig, other)} {value}, not {as_text(getattr(self, other))}"
                refuse_unused(self, name, why)

    def rate(self, phase: str) -> float:
        """The mean loss rate that the flags give to ``phase``, unless something replaces it."""
        return {"grad": self.p_grad, "param": self.p_param}.get(phase, self.p_sync)

    @staticmethod
    def rate_flag(phase: str) -> str:
        """The flag of :meth:`rate`."""
        return f"--p-{phase}" if phase in PHASES else "--p-sync"

    def phase(self, phase: str) -> PhaseLoss:
        """The losses of ``phase``: "grad", "param", or one of those between islands. Raises :class:`UsageError`."""
        if phase in SYNC_PHASES and not self.averages:
            return PhaseLoss("bernoulli", Schedule((0,), (0.0,)), lossless=True)
        return CHANNELS.load(self.of_phase("loss_model", phase)).plan(self, phase)

    def of_phase(self, name: str, phase: str) -> Any:
        """The value for ``phase`` of a flag that takes one for all phases, or two, or four; ``None`` if it is not set.

        With two values, the first also sets ``sync-reduce``, the second ``sync-gather``.
        """
        values = getattr(self, name)
        return values and values[(PHASES + SYNC_PHASES).index(phase) % len(values)]

    @property
    def lossless(self) -> bool:
        """True if no flag can change any exchange or delay a stage, so that training must be exactly Megatron's."""
        untouched = all(self.untouched(phase) for phase in PHASES)
        return untouched and not self.loses_at_boundaries and not self.averages and not self.async_pipeline

    @property
    def draws(self) -> bool:
        """Whether losses are drawn, or happen in a network, so that ``loss_seed`` or a repetition can matter."""
        return self._draws_exchanges or self.loses_at_boundaries or self.transport != "torch"

    @property
    def _draws_exchanges(self) -> bool:
        return any(not self.phase(phase).lossless for phase in PHASES + SYNC_PHASES)

    @property
    def sync_lossless(self) -> bool:
        """Whether exchanges between islands can lose nothing."""
        return self.transport != "udp" and all(self.phase(phase).lossless for phase in SYNC_PHASES)

    @property
    def inert(self) -> bool:
        """True if nothing at all is done: no loss, no error, no check and no averaging."""
        return self.lossless and not self.errs and not self.synchronises and self.replica_check == "none"

    def all_reduced(self) -> LossyConfig:
        """The flags of both halves of an all-reduce, each with the losses of ``--p-grad``.

        Flags of errors and of full replicas have their defaults.
        """
        reset: dict[str, Any] = {f.name: f.default for cls in (ErrorFlags, SyncFlags) for f in dataclasses.fields(cls)}
        bursts = self.loss_model[0] == "gilbert-elliott"
        grad: dict[str, Any] = {
            "p_param": self.p_grad,
            "ge_param": self.ge_grad,
            "link_rates_param": self.link_rates_grad,
            "loss_model": self.loss_model[:1],
            "ge_mean_burst": self.ge_mean_burst[:1] if bursts else LossyConfig.ge_mean_burst,
            "loss_schedule": None if self.loss_schedule is None else self.loss_schedule[:1],
        }
        return dataclasses.replace(self, **reset, **grad)

    @property
    def errs_apart(self) -> bool:
        """Whether each rank has errors of its own."""
        return self.errs and self.grad_error_at == "broadcast"

    @property
    def replicates(self) -> bool:
        """True if something is asked for that needs full replicas: each rank with all of the optimizer."""
        return self.errs_apart or self.synchronises or self.replica_check != "none" or self.allow_divergence

    @property
    def drives_apart(self) -> bool:
        """Whether full replicas can receive different gradients: each has errors of its own, or some lose gradients."""
        return self.errs_apart or not self.untouched("grad")

    def untouched(self, phase: str) -> bool:
        """Whether the exchanges of ``phase`` are Megatron's own: nothing is lost, and nothing else carries them."""
        return self.transport == "torch" and self.phase(phase).lossless

    def _loses(self, phase: str) -> bool:
        """Whether anything of ``phase`` can be lost, by drawing or by a network."""
        return self.transport == "udp" or not self.phase(phase).lossless

    def label(self, phase: str) -> str:
        """A name for the losses of ``phase``: a rate in percent, or the setting that replaces a rate."""
        return CHANNELS.load(self.of_phase("loss_model", phase)).label(dataclasses.asdict(self), phase)

    def describe(self) -> str:
        """Losses and their recovery, in words."""
        unused = [*filter(None, (self.describe_errors(), self.describe_sync())), *self._describe_idle()]
        if self.lossless:
            return "; ".join(["none, the exchanges are Megatron's own", *unused])
        if all(self.untouched(phase) for phase in PHASES):
            boundaries = [self.describe_boundaries()] if self.loses_at_boundaries else []
            drawn = [f"seed {self.loss_seed}", "simulated"] if self.loses_at_boundaries or self.averages else []
            parts = [*self._describe_pipeline(), *boundaries, *self._describe_islands(), *drawn, *unused]
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
        ]
        loses = {phase: self._loses(phase) for phase in PHASES}
        if loses["grad"]:
            parts.append(f"recovery {self.grad_recovery}")
        if self.grad_priority != "none" and loses["grad"]:
            parts.append(
                f"priority {self.grad_priority} {self.grad_priority_fraction:g} of a {self.grad_priority_scope}"
            )
        if self.param_priority != "none" and loses["param"]:
            parts.append(f"priority of parameters by {self.param_priority} {self.param_priority_fraction:g}")
        if self.param_send != "plain" and loses["param"]:
            parts.append(f"parameters sent {self.param_send}, lag {self.param_lag}")
        if self.loss_correlation != "independent":
            parts.append(f"correlated by {self.loss_correlation}")
        if self.lossy_links != "all":
            parts.append(f"{self.lossy_links} links only")
        if self.loses_at_boundaries:
            parts.append(self.describe_boundaries())
        parts += self._describe_pipeline() + self._describe_islands()
        crossing = {"torch": "simulated", "pieces": "simulated, in pieces", "udp": f"over UDP, {self.udp_cipher}"}[
            self.transport
        ]
        return "; ".join([*parts, crossing, *unused])

    def _describe_idle(self) -> list[str]:
        """Sentences about given flags without effect: their subject is not lost, or is lost in other units."""
        of_boundaries = {f.name for f in dataclasses.fields(BoundaryFlags)} - {"p_act", "p_act_grad", "act_transport"}
        about = {
            "no gradient is lost": (self._loses("grad"), {"grad_recovery", "grad_priority", "lossy_self"}),
            "no parameter is lost": (self._loses("param"), {"param_send", "param_priority"}),
            "nothing between stages is lost": (self.loses_at_boundaries, of_boundaries),
            "no packet has priority": (
                self.transport != "udp" or self.at_sender or self.param_priority != "none",
                {"udp_fec", "udp_fec_budget"},
            ),
            "no losses are drawn": (self._draws_exchanges, {"loss_correlation"}),
            f"the unit of loss is a {self.loss_unit}": (self.loss_unit == "packet", {"packet_bytes"}),
        }
        settings = given(self)
        result = []
        for why, (used, names) in about.items():
            idle = [] if used else [name for name in settings if name in names]
            if idle:
                flags = [as_flag(LossyConfig, name, settings[name]) for name in idle]
                result.append(f"{' and '.join(flags)} {'does' if len(idle) == 1 else 'do'} nothing, since {why}")
        return result

    def _describe_islands(self) -> list[str]:
        if not self.averages:
            return []
        if self.sync_method == "none":
            return [f"{self.islands} islands that exchange nothing"]
        what = f"{self.islands} islands, {self.sync_method}, {100 * self.share:.3g} % of them"
        correction = f" ({self.delay_correction})" if self.sync_method == "parameters" and self.sync_delay else ""
        when = f"every {self.sync_interval} iterations, used after {self.sync_delay}{correction}"
        lost = f"lost {self.label(SYNC_PHASES[0])}"
        if self.transport == "udp":
            drawn = not all(self.phase(phase).lossless for phase in SYNC_PHASES)
            lost = f"{lost} and what the network loses" if drawn else "lost what the network loses"
        return [f"{what} {when}, {lost}"]

    def _describe_pipeline(self) -> list[str]:
        if not self.async_pipeline:
            return []
        stages = "" if self.virtual_stages is None else f" of {self.virtual_stages} virtual stages"
        return [f"asynchronous pipeline{stages}"]
